"""LRU eviction for code without a plan that exceeds device memory.

A step must run once before it can be planned, and an evaluation has no plan. Inside this context every operand of an
operator is made resident before the operator runs. To make room, the least-recently-used storages are copied to host
memory and emptied in place. Tensors keep their storages, so autograd, the optimizer and a recorder below see the same
step with the same bits. This is slow: every copy synchronises the device.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.backends.torch.memory._captured import as_view
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._result_bytes import ResultBytes
from hyper_parallel.backends.torch.memory._storage_resizes import StorageResizes
from hyper_parallel.backends.torch.memory._unseen import TakenMode
from hyper_parallel.backends.torch.memory.operators import (
    COMMUNICATION,
    EMPTY,
    TORCH,
    VIEWS,
    is_message,
    split_lists,
    tensors_in,
    without_work,
    written_leaves,
)

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
Content = torch.UntypedStorage | Callable[[], torch.UntypedStorage]
"""Bytes in host memory, or a function that reads them from a file."""


@dataclass(slots=True, eq=False)
class _Known:
    """State of a storage that an operator has used.

    Attributes:
        ref: The storage.
        num_bytes: Bytes of the storage while it is resident.
        used: Clock of the last operator that used it.
        here: True while the storage is on the device.
        copy: Content in host memory; None: never evicted.
        current: True if the copy equals the content of the storage.
        fixed: True if the storage must not move: its owner resizes it, its address is known elsewhere, or a message
            uses it.
        resized: True if its owner has resized it.
        blank: True if it was allocated by `empty` or outside of the context, so its owner may resize it.
        aside: True if another stream has used it.
    """

    ref: weakref.ref[Any]
    num_bytes: int
    used: int = 0
    here: bool = True
    copy: Content | None = None
    current: bool = False
    fixed: bool = False
    resized: bool = False
    blank: bool = False
    aside: bool = False


class LruSpillMode:
    """Context that evicts storages so that resident bytes stay within a limit, if single operators fit.

    Operators over lists with independent entries (`_fused_adamw_`, `_foreach_*`) are split when the lists do not fit.
    Collectives are waited for at once. The cost per operator depends on its own operands, not on the number of
    storages: resident storages are queued by their last use, and owners that resize a storage announce it.

    On a CPU, which only simulates a device, nothing moves any more once the limit is known to be insufficient.

    Args:
        num_bytes: Limit of resident bytes; None: no limit, nothing is moved.
        device: The device; a CPU simulates one.
        stays_away: Keep evicted storages in host memory at the end of the context, for the next context or a plan.

    Attributes:
        peak_bytes: Highest resident bytes inside the context.
        moved_bytes: Evicted bytes.
        least_bytes: Smallest sufficient limit: the peak of fixed storages and the operands and results of an operator.
        owned: Returns the tensors that their owner empties and refills in place.
    """

    def __init__(
        self, num_bytes: int | None, device: torch.device, *, stays_away: bool = False
    ) -> None:
        self._mode, self._taken = OperatorMode(self._operator), TakenMode(self._take)
        self._resizes = StorageResizes(self._announced)
        self._most, self._device, self._stays_away = num_bytes, device, stays_away
        self._known: dict[int, _Known] = {}
        # Storages on the device that may leave it, least recently used first.
        self._here: OrderedDict[int, _Known] = OrderedDict()
        self._results = ResultBytes()
        self._live = self._clock = self._fixed_bytes = 0
        self.peak_bytes = self.moved_bytes = self.least_bytes = 0
        self.owned: Callable[[], Iterable[torch.Tensor]] = tuple
        self._module: Any = torch.get_device_module(device)
        self._stream = lambda: self._module.current_stream(device)
        self._compute = self._stream()

    # -- state in other tiers ------------------------------------------------------------------

    def hold(self, base: torch.UntypedStorage, num_bytes: int, content: Content) -> None:
        """Track an empty storage whose content is in host memory or a file; writes reach that host memory."""
        known = self._add(base)
        known.num_bytes, known.here, known.copy, known.current = num_bytes, False, content, True
        self._here.pop(base._cdata, None)

    def take(self, base: torch.UntypedStorage) -> Content:
        """Stop tracking a storage and return its content: its current host copy, else the storage itself."""
        known = self._known.get(base._cdata)
        if known is None:
            return base
        self._forget(base._cdata, known)
        return known.copy if known.current and known.copy is not None else base

    def num_bytes(self, base: torch.UntypedStorage) -> int:
        """Return the size of a storage, resident or evicted."""
        known = self._known.get(base._cdata)
        return base.nbytes() if known is None or known.here else known.num_bytes

    def at_home(self, tensor: torch.Tensor, *, write: bool = False) -> torch.Tensor:
        """Return a view of a tensor on its content, on the device or in host memory; use outside of the context.

        Args:
            tensor: The tensor.
            write: The caller will write into the view.
        """
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is None or known.here:
            if known is not None and write:
                known.current = False
            return tensor.detach()
        assert known.copy is not None
        content = known.copy if isinstance(known.copy, torch.UntypedStorage) else known.copy()
        if write:
            known.copy = content
        return as_view(tensor, 0).on(content)

    def bring(self, tensor: torch.Tensor) -> None:
        """Make a tensor's storage resident, because code reads its bytes."""
        known = self._see(tensor)
        if known is not None and not known.here:
            self._clock += 1
            known.used = self._clock
            self._make_room(known.num_bytes)
            self._bring(known)

    def bring_back(self) -> None:
        """Make all live storages resident, and stop tracking them."""
        for known in list(self._known.values()):
            if not known.here:
                self._bring(known)
        for key, known in list(self._known.items()):
            self._forget(key, known)

    @property
    def emptied(self) -> list[weakref.ref[Any]]:
        """Live storages that are empty now because their owner has resized them."""
        every = list(self._known.values())
        for known in every:
            base = known.ref()
            if known.here and base is not None and base.nbytes() != known.num_bytes:
                self._resized(known, base.nbytes())
        return [known.ref for known in every if known.resized and not known.num_bytes]

    def require(self, num_bytes: int) -> None:
        """Raise `least_bytes` to the bytes that an operator needs at once."""
        self.least_bytes = max(self.least_bytes, num_bytes)

    # -- operators -----------------------------------------------------------------------------

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in VIEWS and self._is_here(args[0]):
            return func(*args, **kwargs)
        tensors = [t for t in tensors_in(args, kwargs) if self._is_mine(t)]
        new = {key: base.nbytes() for key, base in map(_keyed, tensors) if key not in self._known}
        if new:  # allocated outside of the context, such as a batch
            self._make_room(sum(new.values()))
        given = {id(k): k for t in tensors if (k := self._see(t)) is not None}
        for key in new:
            self._known[key].blank = True
        if self._most is not None:
            made = self._results.of(func, args, kwargs)
            operands = sum(known.num_bytes for known in given.values() if not known.fixed)
            if (needed := self._fixed_bytes + operands + (made or 0)) > self._most:
                parts = split_lists(func, args, kwargs, 0)
                if len(parts) > 1:
                    outs = [self._operator(func, *part) for part in parts]
                    return None if outs[0] is None else [t for out in outs for t in out]
            self._clock += 1
            for known in given.values():
                known.used = self._clock
            away = sum(known.num_bytes for known in given.values() if not known.here)
            self.require(needed)
            self._make_room(self._most if made is None else away + made)
        for known in given.values():
            self._bring(known)
        out = func(*args, **kwargs)
        written = written_leaves(func, args, kwargs)
        if func.namespace not in TORCH:  # its schema may be incomplete
            written = tensors_in(args, kwargs)
        if func.namespace == "c10d" and not is_message(func):
            out = without_work(out)
        elif func.namespace in COMMUNICATION and func._opname != "wait_tensor":
            for tensor in tensors_in(out):
                torch.ops._c10d_functional.wait_tensor.default(tensor)
        for tensor in written:
            if (known := self._see(tensor)) is not None:
                known.current = False
        both = {**given, **{id(k): k for t in tensors_in(out) if (k := self._see(t)) is not None}}
        for known in both.values():
            known.used = self._clock
            known.blank |= func is EMPTY
            known.aside |= self._stream() != self._compute
            if is_message(func):
                self._fix(known)
        self._make_room(0)
        return out

    def _take(self, tensor: torch.Tensor, values: bool) -> None:
        """Make a tensor resident for Python code that reads its values or its address."""
        self.bring(tensor)
        if (known := self._see(tensor)) is not None and not values:
            known.current = False
            self._fix(known)

    # -- storages ------------------------------------------------------------------------------

    def _is_mine(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in _PLAIN and tensor.device.type == self._device.type

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage is known, on the device and not empty."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and known.here and bool(known.num_bytes)

    def _see(self, tensor: torch.Tensor) -> _Known | None:
        """Return the record of a tensor's storage, and mark it as most recently used."""
        if not self._is_mine(tensor):
            return None
        base = tensor.untyped_storage()
        known = self._known.get(base._cdata) or self._add(base)
        size = base.nbytes()
        if size != (known.num_bytes if known.here else 0):
            self._resized(known, size)
        if base._cdata in self._here:
            self._here.move_to_end(base._cdata)
        return known

    def _add(self, base: torch.UntypedStorage) -> _Known:
        key = base._cdata
        known = _Known(weakref.ref(base, lambda _: self._forget(key, known)), base.nbytes())
        self._known[key] = self._here[key] = known
        self._grow(known.num_bytes)
        if not base.resizable():
            self._fix(known)
        return known

    def _forget(self, key: int, known: _Known) -> None:
        if self._known.get(key) is known:
            del self._known[key]
            self._here.pop(key, None)
            self._live -= known.num_bytes if known.here else 0
            self._fixed_bytes -= known.num_bytes if known.fixed else 0

    def _fix(self, known: _Known) -> None:
        """Pin a resident storage to the device."""
        if known.fixed or (base := known.ref()) is None:
            return
        known.fixed = True
        self._fixed_bytes += known.num_bytes
        self._here.pop(base._cdata, None)

    def _announced(self, base: torch.UntypedStorage, num_bytes: int) -> None:
        """Make room for a storage that is about to be resized by its owner."""
        known = self._known.get(base._cdata)
        if known is None or num_bytes == (known.num_bytes if known.here else 0):
            return
        self._clock += 1  # no operator runs, so operands of the last one may be evicted
        known.used = self._clock
        self._resized(known, num_bytes, grown=False)
        self._make_room(0)
        self._grow(0)

    def _resized(self, known: _Known, num_bytes: int, *, grown: bool = True) -> None:
        """Update the record of a storage that its owner has resized."""
        self._fix(known)
        self._fixed_bytes += num_bytes - known.num_bytes
        self._live += num_bytes - (known.num_bytes if known.here else 0)
        known.num_bytes, known.here, known.current, known.resized = num_bytes, True, False, True
        self.require(self._fixed_bytes)
        if grown:
            self._grow(0)

    def _grow(self, num_bytes: int) -> None:
        self._live += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _bring(self, known: _Known) -> None:
        base = known.ref()
        if known.here or base is None:
            return
        assert known.copy is not None
        self._settle(known)
        with _disable_current_modes():
            content = known.copy if isinstance(known.copy, torch.UntypedStorage) else known.copy()
            known.here = True  # before the resize, which is not its owner's
            base.resize_(known.num_bytes)
            base.copy_(content)
        self._here[base._cdata] = known
        self._grow(known.num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Evict least-recently-used storages until `num_bytes` fit."""
        if self._most is None or (self._device.type == "cpu" and self.least_bytes > self._most):
            return
        most, owned = self._most - num_bytes, None
        while self._live > most and self._here:
            key, known = next(iter(self._here.items()))
            base = known.ref()
            if known.used == self._clock:
                return  # the running operator uses it, and all behind it
            if base is None or not known.num_bytes:
                del self._here[key]
            elif base.nbytes() != known.num_bytes:
                self._resized(known, base.nbytes())
            elif known.blank:
                known.blank = False
                if owned is None:
                    owned = {_keyed(tensor)[0] for tensor in self.owned()}
                if key in owned:
                    self._fix(known)
            else:
                self._evict(key, known, base)

    def _evict(self, key: int, known: _Known, base: torch.UntypedStorage) -> None:
        """Copy a storage to host memory, unless there is a current copy, and empty it."""
        self._settle(known)
        with _disable_current_modes():
            if not known.current:
                if not isinstance(known.copy, torch.UntypedStorage):
                    known.copy = torch.UntypedStorage(known.num_bytes)
                known.copy.copy_(base)
                known.current = True
            known.here = False  # before the resize, which is not its owner's
            base.resize_(0)
        del self._here[key]
        self._live -= known.num_bytes
        self.moved_bytes += known.num_bytes

    def _settle(self, known: _Known) -> None:
        """Wait for pending work of other streams on a storage."""
        if self._device.type != "cpu" and (known.aside or self._stream() != self._compute):
            self._module.synchronize(self._device)

    def __enter__(self) -> Self:
        for known in list(self._known.values()):  # owners may have resized them meanwhile
            base = known.ref()
            if known.here and base is not None and base.nbytes() != known.num_bytes:
                self._resized(known, base.nbytes())
        self._resizes.__enter__()
        self._mode.__enter__()
        self._taken.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Make all live storages resident, unless evicted storages are kept offloaded."""
        self._taken.__exit__(*error)
        self._mode.__exit__(*error)
        self._resizes.__exit__(*error)
        if not self._stays_away:
            peak = self.peak_bytes
            self.bring_back()
            self.peak_bytes = peak


def _keyed(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage]:
    base = tensor.untyped_storage()
    return base._cdata, base
