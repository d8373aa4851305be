"""Tensor that stands for a result which is not complete yet; its shape and dtype are known."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hyper_parallel.errors import UnsupportedSharding

_ATTRIBUTES: Final = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad)
_METHODS: Final = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point)
_T = TypeVar("_T", bound="StandIn")


class StandIn(Tensor):
    """Placeholder for a tensor that is not computed yet; any use except of its metadata completes it first."""

    @classmethod
    def like(cls: type[_T], part: Tensor, shape: tuple[int, ...]) -> _T:
        """Return a placeholder of this shape, with dtype, device and `requires_grad` of `part`."""
        stand_in: _T = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        if part.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                stand_in.register_hook(_refuse_gradient)
        return stand_in

    def whole(self) -> Tensor:
        """Complete the tensor and return it; repeated calls return the same tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _METHODS or getattr(func, "__self__", None) in _ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = complete((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args, kwargs = complete((args, kwargs or {}))
        return func(*args, **kwargs)


def complete(value: Any) -> Any:
    """Return a nested value with the complete tensor in place of every `StandIn`."""
    return tree_map_only(StandIn, lambda stand_in: stand_in.whole(), value)


def _refuse_gradient(grad: Tensor) -> None:
    raise UnsupportedSharding(
        "a custom autograd function of the model reads a tensor in flight, which `overlap` does not support",
        where="overlap",
        hint="overlap=none",
    )
