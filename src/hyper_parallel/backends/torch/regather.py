"""Gathered activations and weights that backward gathers a second time instead of saving them.

In a scope, a tensor that autograd would save and that shares the storage of a gathered tensor is replaced by a handle.
All handles of one gathered tensor share one copy: the first unpacked handle gathers it, the last one frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(slots=True)
class _Gathered:
    """A gathered tensor: function that gathers it, and number of handles that backward has not unpacked."""

    regather: Callable[[], Tensor]
    unread: int = 0
    copy: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Unpack a handle: return a view of the gathered copy; the last handle frees the copy."""
        if self.copy is None:
            with torch.no_grad():
                self.copy = self.regather()
        out = self.copy
        self.unread -= 1
        if self.unread <= 0:
            self.copy, self.unread = None, 0
        return out.as_strided(size, stride, offset)


@dataclass(slots=True)
class RegatherScope:
    """Scope of forward code in which gathered tensors are not saved; of nested scopes the innermost one applies."""

    _sources: dict[int, _Gathered] = field(default_factory=dict)

    def open(self) -> AbstractContextManager[Any]:
        """Return the context that intercepts the tensors that autograd saves."""
        return saved_tensors_hooks(self._pack, _unpack)

    @contextmanager
    def regather_in_backward(
        self, gathered: Tensor, regather: Callable[[], Tensor]
    ) -> Iterator[None]:
        """Do not save `gathered` and its views in this context; backward calls `regather` instead.

        Nothing may write to `gathered`. Backward calls `regather` without gradients, in the same order on every rank.
        """
        key = gathered.untyped_storage()._cdata
        self._sources[key] = _Gathered(regather)
        try:
            yield
        finally:
            del self._sources[key]

    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        source = self._sources.get(saved.untyped_storage()._cdata)
        if source is None:
            return saved
        source.unread += 1
        return partial(source.view, saved.size(), saved.stride(), saved.storage_offset())


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def regather_in_backward(
    scope: RegatherScope | None, gathered: Tensor, regather: Callable[[], Tensor]
) -> AbstractContextManager[None]:
    """Return `scope.regather_in_backward`, or without a scope a context in which tensors are saved."""
    return nullcontext() if scope is None else scope.regather_in_backward(gathered, regather)
