"""Stub tensors for state that a planned device owns: a use raises an error instead of reading freed memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from hyper_parallel.errors import StepChanged

_ALLOWED: Final = frozenset(
    (
        "__get__", "__set__", "__delete__", "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex",
        "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "nelement", "numel", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage",
    )
)  # fmt: skip
"""Functions that read metadata of a tensor, not its values."""


class _StubMixin:
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            allowed = getattr(func, "__name__", "") in _ALLOWED
            if not allowed and any(map(_has_no_bytes, tree_leaves((args, kwargs)))):
                raise StepChanged(
                    "a planned device owns the bytes of this tensor",
                    where=f"`{getattr(func, '__name__', func)}`",
                    hint="use it inside `with device.materialized():`, or read a copy with `device.read_state(name)`",
                )
            out = func(*args, **(kwargs or {}))
            if _has_no_bytes(out):  # `.data` is the same without autograd
                make_stubs([out])
        return out


class TensorStub(_StubMixin, Tensor):
    """Tensor whose bytes a planned device owns."""


class ParameterStub(_StubMixin, Parameter):
    """Parameter whose bytes a planned device owns."""


_STUB_CLASSES: Final[dict[type, type]] = {Tensor: TensorStub, Parameter: ParameterStub}


def _has_no_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.untyped_storage().nbytes() and value.numel() > 0


def make_stubs(tensors: Iterable[Tensor]) -> list[tuple[Tensor, type]]:
    """Turn tensors without bytes into stubs, as torch itself does with uninitialised parameters.

    Returns:
        Each changed tensor, and its former class.
    """
    stubs = [(t, type(t)) for t in tensors if type(t) in _STUB_CLASSES and _has_no_bytes(t)]
    for tensor, cls in stubs:
        tensor.__class__ = _STUB_CLASSES[cls]  # type: ignore[assignment]
    return stubs


def aliases_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return other live tensors on the storages of `tensors`, such as a kept `weight.detach()`."""
    known = {id(tensor): tensor for tensor in tensors}
    uses = Counter(tensor.untyped_storage()._cdata for tensor in known.values())
    # The Python object of the storage counts as one use.
    shared = {key for key, n in uses.items() if torch._C._storage_Use_Count(key) > n + 1}
    if not shared:
        return []
    live_tensors = (t for t in gc.get_objects() if type(t) in _STUB_CLASSES and id(t) not in known)
    return [t for t in live_tensors if t.untyped_storage()._cdata in shared]
