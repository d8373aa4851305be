"""Replacement of the forwards of single modules and of attributes; classes and the source of models do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from torch import nn


def wrap(module: nn.Module, outer: Callable[..., Any]) -> None:
    """Replace `forward` of this module instance by a function that calls `outer(forward, *args, **kwargs)`.

    The signature stays that of `forward`. The wrapper that was installed last runs first.
    """
    inner = module.forward
    module.forward = update_wrapper(partial(outer, inner), inner, updated=())


@contextmanager
def replace_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or object in this context."""
    originals = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
