"""Tensors that backward gathers again instead of keeping them: gathered activations and gathered weights.

Inside a scope, a tensor that autograd would save and that shares the storage of a gathered one is replaced by a note of
how to gather it again. All notes of one gathered tensor share the copy that the first of them makes; it is dropped when
the last one has been read.
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
    """One gathered tensor: how to make it again, and how many notes of it backward has yet to read."""

    make: Callable[[], Tensor]
    unread: int = 0
    copy: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """What a note stands for; the last one that is read drops the copy."""
        if self.copy is None:
            with torch.no_grad():
                self.copy = self.make()
        out = self.copy
        self.unread -= 1
        if self.unread <= 0:
            self.copy, self.unread = None, 0
        return out.as_strided(size, stride, offset)


@dataclass(slots=True)
class RegatherScope:
    """Forward code whose gathered tensors may be gathered again; several may be nested, the innermost one counts."""

    _sources: dict[int, _Gathered] = field(default_factory=dict)

    def open(self) -> AbstractContextManager[Any]:
        """Watch what autograd saves."""
        return saved_tensors_hooks(self._pack, _unpack)

    @contextmanager
    def instead_of(self, gathered: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
        """Inside, `gathered`, which nothing else writes to, and its views are not saved.

        Backward calls `make` instead, without gradients, in the same order on every rank.
        """
        key = gathered.untyped_storage()._cdata
        self._sources[key] = _Gathered(make)
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


def instead_of(
    scope: RegatherScope | None, gathered: Tensor, make: Callable[[], Tensor]
) -> AbstractContextManager[None]:
    """`scope.instead_of`, or nothing without a scope: the tensor is saved as usual."""
    return nullcontext() if scope is None else scope.instead_of(gathered, make)
