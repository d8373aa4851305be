"""The bytes that a step takes, counted while it runs: a recording without its program, at a fraction of the time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, EMPTY, tensors_in
from hyper_parallel.backends.torch.memory.storages import Entry, Storages


def shared_tensors(func: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Those among an operator's tensors that other ranks read or write."""
    if (
        func.namespace == "fsdp"
    ):  # the first tensor of its operators is the one that all ranks share
        return tensors[:1]
    return tensors if func.namespace in COMMUNICATION else []


@functools.cache
def _returns_input(func: Any) -> bool:
    """Whether an operator returns a view of what it is given, or what it has written into."""
    return any(returned.alias_info is not None for returned in func._schema.returns)


class StorageWatch:
    """Follows storages inside its context: those that `hold` is given, that operators make, and that are sent.

    Args:
        sample: Called after every operator with the bytes that live, and the most so far.
    """

    def __init__(self, *, sample: Callable[[int, int], None] | None = None) -> None:
        self._storages = Storages(alignment_bytes=1)
        self._mode = OperatorMode(self._operator)
        self._sample = sample

    def hold(self, tensor: Tensor) -> None:
        """Follow a tensor's storage from here on."""
        if self._storages.find(tensor) is None:
            self._storages.add(tensor, Entry("", 0, "activation"))

    @property
    def peak_bytes(self) -> int:
        """Most bytes that lived at the same time so far."""
        self._follow_resized(everywhere=True)
        return self._storages.peak_bytes

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not func.is_view:  # which neither needs nor takes bytes
            self._follow_resized()
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            for tensor in shared_tensors(func, tensors_in(args, kwargs)):
                self.hold(tensor)
        for tensor in tensors_in(out):
            if self._storages.find(tensor) is None:
                # What is first met as an operator's input was there before: FSDP may have refilled it.
                resizable = func is EMPTY or _returns_input(func)
                self._storages.add(tensor, Entry("", 0, "activation"), watch=resizable)
        if self._sample is not None:
            self._sample(self._storages.live_bytes, self._storages.peak_bytes)
        return out

    def _follow_resized(self, *, everywhere: bool = False) -> None:
        for key, entry, _ in self._storages.end_resized(everywhere=everywhere):
            self._storages.begin(key, replace(entry, at_start=False))
