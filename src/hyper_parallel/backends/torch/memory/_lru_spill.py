"""A step without a plan in less memory than it takes: what was used longest ago leaves the device between operators.

A step must run once before it can be planned, and then nothing is known yet. Inside this context every storage that an
operator touches is brought back before it runs; after it, the least recently used ones are copied to host memory and
emptied in place until the rest fits. Tensors keep their storages, so autograd, the optimizer and a recorder below see
the same step with the same bits. It is slow: every copy stops the device.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._operators import COMMUNICATION

_STAYS: Final = (*COMMUNICATION, "fsdp")
"""Namespaces whose storages others use behind the dispatcher: on other streams, or by resizing them."""


@dataclass(slots=True, eq=False)
class _Known:
    """A storage that was seen.

    Attributes:
        ref: The storage.
        num_bytes: Its bytes when it is on the device.
        used: When an operator last touched it.
        away: Its content in host memory; None: it is on the device.
        stays: It is never moved.
    """

    ref: weakref.ref[Any]
    num_bytes: int
    used: int = 0
    away: torch.UntypedStorage | None = None
    stays: bool = False


class LruSpillMode:
    """Keeps the storages that operators touch within a number of bytes, as far as single operators allow.

    Args:
        num_bytes: Bytes on the device.
        device: The device.

    Attributes:
        peak_bytes: Highest bytes of seen storages on the device.
        moved_bytes: Bytes that have left it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._mode = OperatorMode(self._operator)
        self._most, self._device = num_bytes, device
        self._known: dict[int, _Known] = {}
        self._live = self._clock = 0
        self.peak_bytes = self.moved_bytes = 0
        module: Any = torch.get_device_module(device)
        self._stream = lambda: module.current_stream(device)
        self._compute = self._stream()

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._clock += 1
        for tensor in tree_leaves((args, kwargs)):
            self._touch(tensor)
        out = func(*args, **kwargs)
        both = [self._touch(t) for t in tree_leaves((args, kwargs, out))]
        if func.namespace in _STAYS or self._stream() != self._compute:
            for known in both:
                if known is not None:
                    known.stays = True
        self._make_room()
        return out

    def _touch(self, tensor: Any) -> _Known | None:
        """Bring a tensor's storage back, and remember that it is used now."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        base = tensor.untyped_storage()
        if base.device.type != self._device.type:
            return None
        known = self._known.get(base._cdata)
        if known is None:
            known = self._add(base)
        elif known.away is not None:
            if base.nbytes() == 0:
                with _disable_current_modes():
                    base.resize_(known.num_bytes)
                    base.copy_(known.away)
            known.away = None
            self._grow(known.num_bytes)
        if base.nbytes() != known.num_bytes:  # its owner has resized it
            self._grow(base.nbytes() - known.num_bytes)
            known.num_bytes, known.stays = base.nbytes(), True
        known.used = self._clock
        return known

    def _add(self, base: torch.UntypedStorage) -> _Known:
        key = base._cdata

        def gone(_: Any) -> None:
            last = self._known.pop(key)
            if last.away is None:
                self._live -= last.num_bytes

        known = self._known[key] = _Known(weakref.ref(base, gone), base.nbytes())
        known.stays = not base.resizable()
        self._grow(known.num_bytes)
        return known

    def _grow(self, num_bytes: int) -> None:
        self._live += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _make_room(self) -> None:
        if self._live <= self._most:
            return
        movable = [
            k
            for k in self._known.values()
            if k.away is None and not k.stays and k.num_bytes and k.used < self._clock
        ]
        for known in sorted(movable, key=lambda k: k.used):
            if self._live <= self._most:
                return
            base = known.ref()
            if base is None or base.nbytes() != known.num_bytes:
                continue
            with _disable_current_modes():
                away = torch.UntypedStorage(known.num_bytes)
                away.copy_(base)
                base.resize_(0)
            known.away = away
            self._live -= known.num_bytes
            self.moved_bytes += known.num_bytes

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Bring everything back that still exists."""
        self._mode.__exit__(*error)
        for known in list(self._known.values()):
            base = known.ref()
            if base is not None and known.away is not None and base.nbytes() == 0:
                with _disable_current_modes():
                    base.resize_(known.num_bytes)
                    base.copy_(known.away)
            known.away = None


def within_device(device: torch.device) -> AbstractContextManager[Any]:
    """Around a step without a plan: on an accelerator storages share what is free, less a fifth for kernels."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return LruSpillMode(int(0.8 * (free + module.memory_reserved(device))), device)
