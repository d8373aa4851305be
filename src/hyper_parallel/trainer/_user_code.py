"""Classes that a recipe names by a dotted path."""

from __future__ import annotations

import importlib
import os
import sys

from hyper_parallel.errors import NotImportable


def load_class(path: str, base: type, where: str) -> type:
    """Import `module.Class`, from the current directory too, where a command does not look by itself.

    Args:
        path: The dotted path.
        base: What the class must derive from.
        where: Origin of the path, for errors.

    Raises:
        NotImportable: HP109 when there is no such class, or it derives from something else.
    """
    module, _, name = path.rpartition(".")
    wanted = (
        f"a subclass of {base.__module__}.{base.__qualname__} by its path, as `my_module.MyClass`"
    )
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # an import runs any code
        got = f"{path}: {type(error).__name__}: {error}"
        raise NotImportable(
            "there is no such class", where=where, got=got, allowed=wanted
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise NotImportable("this is no class of the kind", where=where, got=path, allowed=wanted)
    return found
