"""Bytes of an operator's results, inferred from the shapes of its arguments before it runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.memory.operators import tensors_in


class ResultBytes:
    """Bytes that operators will allocate; calls with the same shapes and numbers are computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, int | None] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the bytes of the storages that a call will allocate; None: its shapes do not determine them."""
        # `set_` puts a tensor on an existing storage, as when a file is read.
        set_bytes = sum(v.nbytes() for v in args if isinstance(v, torch.UntypedStorage))
        if func.namespace == "c10d" or not _allocates(func):
            return set_bytes
        key = func, _facts(args), _facts(kwargs)
        if key not in self._known:
            self._known[key] = _traced_bytes(func, args, kwargs)
        result_bytes = self._known[key]
        return None if result_bytes is None else result_bytes + set_bytes


@cache
def _allocates(func: Any) -> bool:
    """Return whether any result of an operator may have a storage of its own."""
    returns = func._schema.returns
    return any("Tensor" in str(r.type) and r.alias_info is None for r in returns)


def _facts(value: Any) -> Any:
    """Return a hashable value that is equal for arguments whose results have equal sizes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        return tuple(map(_facts, value))
    if isinstance(value, dict):
        return tuple((name, _facts(v)) for name, v in value.items())
    if isinstance(value, torch.UntypedStorage):
        return "storage"
    # The type of a number determines the dtype of a result. `str` of a storage would print every byte.
    return type(value), value if isinstance(value, (int, float)) else str(value)


def _traced_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Run a call on tensors without bytes and return the bytes that its new storages would have."""
    arguments: list[torch.Tensor] = []

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        size, stride = tensor.shape, tensor.stride()
        arguments.append(torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta"))
        return arguments[-1]

    with _disable_current_modes():
        try:
            meta_arguments = tree_map_only(torch.Tensor, shape, (args, kwargs))
            args, kwargs = tree_map_only(
                torch.device, lambda _: torch.device("meta"), meta_arguments
            )
            out = func(*args, **kwargs)
        except Exception:  # no meta kernel, or a size that depends on values
            return None
    bytes_by_storage = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(out)
    }
    return sum(bytes_by_storage.values()) - sum(
        bytes_by_storage.get(t.untyped_storage()._cdata, 0) for t in arguments
    )
