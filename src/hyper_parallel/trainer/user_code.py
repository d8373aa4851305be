"""Classes and functions that a recipe names by a dotted path."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

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
    wanted = (
        f"a subclass of {base.__module__}.{base.__qualname__} by its path, as `my_module.MyClass`"
    )
    found = _imported(path, where, "class", wanted)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise NotImportable("this is no class of the kind", where=where, got=path, allowed=wanted)
    return found


def load_function(path: str, where: str, known: Sequence[str] = ()) -> Callable[..., Any]:
    """Import `module.function`.

    Args:
        path: The dotted path.
        where: Origin of the path, for errors.
        known: Names that need no path.

    Raises:
        NotImportable: HP109 when there is nothing of that name that can be called.
    """
    wanted = ", ".join([*known, "or a function by its path, as `my_module.my_function`"])
    found = _imported(path, where, "function", wanted)
    if not callable(found):
        raise NotImportable("this cannot be called", where=where, got=path, allowed=wanted)
    return found  # type: ignore[no-any-return]


def _imported(path: str, where: str, kind: str, wanted: str) -> Any:
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # an import runs any code
        got = f"{path}: {type(error).__name__}: {error}"
        raise NotImportable(
            f"there is no such {kind}", where=where, got=got, allowed=wanted
        ) from error
