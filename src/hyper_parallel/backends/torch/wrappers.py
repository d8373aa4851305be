"""Replacement of the forwards of single modules; classes and the source of models do not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import nn


def wrap(module: nn.Module, outer: Callable[..., Any]) -> None:
    """Replace `forward` of this module instance by a function that calls `outer(forward, *args, **kwargs)`.

    The signature stays that of `forward`. The wrapper that was installed last runs first.
    """
    inner = module.forward
    module.forward = update_wrapper(partial(outer, inner), inner, updated=())
