"""Which storages a step empties and refills in place, as FSDP does with gathered parameters."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ResizeWatch(TorchDispatchMode):
    """Context around a plain step that remembers every storage the step filled, or found filled, and left empty.

    Attributes:
        empty: Storages that still exist when the context ends and hold no bytes. A recording of the next step takes
            their return as an allocation, not as state that was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.empty: list[weakref.ref[Any]] = []
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come here next
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if type(tensor) is torch.Tensor:
                base = tensor.untyped_storage()
                # One that is always empty belongs to a rank without rows of a tensor.
                if base.nbytes():
                    self._seen[base._cdata] = weakref.ref(base)
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.empty = [
            ref for ref in self._seen.values() if (base := ref()) is not None and not base.nbytes()
        ]
