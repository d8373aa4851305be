"""Live and peak bytes of a running step, without recording its program, in a fraction of the time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, EMPTY, tensors_in
from hyper_parallel.backends.torch.memory.storages import Entry, Storages


def shared_tensors(func: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors of an operator that other ranks read or write."""
    # The first tensor of its operators is the one that all ranks share
    if func.namespace == "fsdp":
        return tensors[:1]
    return tensors if func.namespace in COMMUNICATION else []


@functools.cache
def _properties(func: Any) -> tuple[bool, bool, bool]:
    """Return whether an operator returns a view, belongs to ATen, and returns storages that may be resized."""
    # A storage first seen as an operator's input existed before: FSDP may have refilled it.
    returns_input = any(returned.alias_info is not None for returned in func._schema.returns)
    return func.is_view, func.namespace == "aten", func is EMPTY or returns_input


class StorageWatch(OperatorMode):
    """Context that tracks storages: tracked tensors, results of operators, and operands of collectives.

    Args:
        sample: Called after every operator with the live bytes and the peak so far.
    """

    def __init__(self, *, sample: Callable[[int, int], None] | None = None) -> None:
        super().__init__(self._operator)
        self._storages = Storages(alignment_bytes=1)
        self._sample = sample

    def track(self, tensor: Tensor) -> None:
        """Track a tensor's storage."""
        if self._storages.find(tensor) is None:
            self._storages.add(tensor, Entry("", 0, "activation"))

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes so far."""
        self._record_resizes(everywhere=True)
        return self._storages.peak_bytes

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_view, is_aten, resizable = _properties(func)
        if not is_view:  # a view neither reads nor allocates bytes
            self._record_resizes()
        out = func(*args, **kwargs)
        if not is_aten:
            for tensor in shared_tensors(func, tensors_in(args, kwargs)):
                self.track(tensor)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            if self._storages.find(tensor) is None:
                self._storages.add(tensor, Entry("", 0, "activation"), watch=resizable)
        if self._sample is not None:
            self._sample(self._storages.live_bytes, self._storages.peak_bytes)
        return out

    def _record_resizes(self, *, everywhere: bool = False) -> None:
        for key, entry, _ in self._storages.end_resized(everywhere=everywhere):
            self._storages.begin(key, replace(entry, at_start=False))
