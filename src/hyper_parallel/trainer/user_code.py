"""Import of classes and functions that a recipe names by dotted paths."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import NotImportable


def load_class(path: str, base: type, where: str) -> type:
    """Import and return the class at a dotted path; the current directory is added to the import path.

    Raises:
        NotImportable: HP109 when the class cannot be imported, or is not a subclass of `base`.
    """
    allowed = f"the dotted path of a subclass of {base.__module__}.{base.__qualname__}, such as `my_module.MyClass`"
    cls = _imported(path, where, allowed)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise NotImportable(
            f"`{path}` is not a subclass of `{base.__qualname__}`",
            where=where,
            got=path,
            allowed=allowed,
        )
    return cls


def load_function(path: str, where: str, known: Sequence[str] = ()) -> Callable[..., Any]:
    """Import and return the function at a dotted path; the current directory is added to the import path.

    `known` are the names of built-in functions, which the error lists.

    Raises:
        NotImportable: HP109 when the function cannot be imported, or is not callable.
    """
    allowed = ", ".join([*known, "the dotted path of a function or class, such as `my_module.my_function`"])
    function = _imported(path, where, allowed)
    if not callable(function):
        raise NotImportable(f"`{path}` is not callable", where=where, got=path, allowed=allowed)
    return function  # type: ignore[no-any-return]


def _imported(path: str, where: str, allowed: str) -> Any:
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # imports run user code
        got = f"{path}: {type(error).__name__}: {error}"
        raise NotImportable(f"`{path}` cannot be imported", where=where, got=got, allowed=allowed) from error
