"""LRU eviction for code without a memory plan that exceeds device memory.

A step must run once before it can be planned, and an evaluation has no plan. Inside this context every operand of an
operator is made resident before the operator runs. To make room, the least-recently-used storages are copied to host
memory and emptied in place. Tensors keep their storages, so autograd, the optimizer and a recorder below see the same
step with the same bits. This is slow, because the host waits for every copy.

FSDP also empties and refills the storages of gathered parameters in place, so FSDP is called their owner. These
storages are never evicted.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Self

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.memory._captured import as_view
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._untracked_effects import RawAccessMode
from hyper_parallel.backends.torch.memory.hardware import FILLED, allocatable_bytes
from hyper_parallel.backends.torch.memory.operators import (
    COMMUNICATION,
    EMPTY,
    TORCH,
    VIEWS,
    is_message,
    split_lists,
    without_work,
    written_leaves,
)
from hyper_parallel.backends.torch.tensor_trees import tensors_in


class StorageResizes:
    """Context that calls `announce` with the storage and its next size before every `UntypedStorage.resize_`.

    No dispatch mode intercepts a resize, such as those of FSDP's gathered parameters.
    """

    def __init__(self, announce: Callable[[torch.UntypedStorage, int], None]) -> None:
        self._announce = announce
        self._own: Any = None  # `resize_` in the class itself, not inherited; None if there is none

    def __enter__(self) -> Self:
        kind: Any = torch.UntypedStorage
        self._own, resize, announce = vars(kind).get("resize_"), kind.resize_, self._announce

        def resize_(base: torch.UntypedStorage, size: int) -> Any:
            announce(base, int(size))
            return resize(base, size)

        kind.resize_ = resize_
        return self

    def __exit__(self, *error: Any) -> None:
        kind: Any = torch.UntypedStorage
        if self._own is None:
            del kind.resize_
        else:
            kind.resize_ = self._own


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
Content = torch.UntypedStorage | Callable[[], torch.UntypedStorage]
"""Bytes in host memory, or a function that reads them from a file."""


def read_content(content: Content) -> torch.UntypedStorage:
    """Return bytes in host memory, read from a file if necessary."""
    return content if isinstance(content, torch.UntypedStorage) else content()


@dataclass(slots=True, eq=False)
class _Record:
    """State of a storage that an operator has used.

    Attributes:
        num_bytes: Bytes of the storage while it is resident.
        last_use: Clock of the last operator that used it.
        copy: Copy of the content in host memory or in a file; None: there is none.
        current: True if the copy equals the content of the storage.
        fixed: True if the storage must not move: it cannot be resized, its owner resizes it, its address is known
            elsewhere, or a message uses it.
        resized: True if its owner, FSDP, has resized it.
        owner_may_resize: True for a storage that `torch.empty` or code outside of the context has allocated, until
            eviction looks it up in `LruSpillMode.owned`.
        on_other_stream: True if another stream has used it.
    """

    ref: weakref.ref[Any]
    num_bytes: int
    last_use: int = 0
    resident: bool = True
    copy: Content | None = None
    current: bool = False
    fixed: bool = False
    resized: bool = False
    owner_may_resize: bool = False
    on_other_stream: bool = False


class LruSpillMode:
    """Context that evicts storages to keep resident bytes within a limit; an operator that alone exceeds it still runs.

    Operators over lists with independent entries (`_fused_adamw_`, `_foreach_*`) are split when the lists do not fit.
    Collectives are waited for immediately.

    A CPU only simulates a device. There, eviction stops as soon as an operator does not fit the limit.

    Args:
        num_bytes: Limit of resident bytes; None: no limit, so nothing is evicted.
        device: The device; a CPU simulates one.
        keep_offloaded: Keep evicted storages in host memory at the end of the context, for the next context or a plan.

    Attributes:
        peak_bytes: Peak of the resident bytes; storages that the end of the context makes resident do not count.
        moved_bytes: Evicted bytes, in total.
        least_bytes: Smallest limit known to be necessary: the largest sum of fixed storages, operands and results of an
            operator so far, or the bytes passed to `require`.
        owned: Function that returns the tensors that FSDP empties and refills in place.
    """

    def __init__(self, num_bytes: int | None, device: torch.device, *, keep_offloaded: bool = False) -> None:
        self._mode = OperatorMode(self._operator)
        self._raw_access = RawAccessMode(self._on_raw_access)
        self._resizes = StorageResizes(self._before_resize)
        self._limit, self._device, self._keep_offloaded = num_bytes, device, keep_offloaded
        self._records: dict[int, _Record] = {}
        # Storages on the device that may be evicted, least recently used first.
        self._lru: OrderedDict[int, _Record] = OrderedDict()
        # Bytes that a call allocates for its results, by the shapes and numeric arguments of the call.
        self._result_bytes: dict[Any, int | None] = {}
        self._live = self._clock = self._fixed_bytes = 0
        self.peak_bytes = self.moved_bytes = self.least_bytes = 0
        self.owned: Callable[[], Iterable[torch.Tensor]] = tuple
        self._module: Any = torch.get_device_module(device)
        self._stream = lambda: self._module.current_stream(device)
        self._compute = self._stream()

    # -- state in other tiers ------------------------------------------------------------------

    def track_offloaded(self, base: torch.UntypedStorage, num_bytes: int, content: Content) -> None:
        """Track `base` as an evicted storage: it is empty now, and `content` has its `num_bytes` bytes."""
        record = self._add(base)
        record.num_bytes = num_bytes
        record.resident = False
        record.copy = content
        record.current = True
        self._lru.pop(base._cdata, None)

    def pop_content(self, base: torch.UntypedStorage) -> Content:
        """Stop tracking a storage; return its up-to-date copy in host memory or in a file, else `base` itself."""
        record = self._records.get(base._cdata)
        if record is None:
            return base
        self._forget(base._cdata, record)
        return record.copy if record.current and record.copy is not None else base

    def num_bytes(self, base: torch.UntypedStorage) -> int:
        """Return the bytes that a storage has when resident, even if it is evicted and empty now."""
        record = self._records.get(base._cdata)
        return base.nbytes() if record is None or record.resident else record.num_bytes

    def on_current_tier(self, tensor: torch.Tensor, *, write: bool = False) -> torch.Tensor:
        """Return `tensor` with its current bytes, on the device or in host memory.

        Call this outside of the context only. With `write`, the caller may write into the result.
        """
        record = self._records.get(tensor.untyped_storage()._cdata)
        if record is None or record.resident:
            if record is not None and write:
                record.current = False
            return tensor.detach()
        assert record.copy is not None
        content = read_content(record.copy)
        if write:
            record.copy = content
        return as_view(tensor, 0).as_tensor(content)

    def make_resident(self, tensor: torch.Tensor) -> None:
        """Make a tensor's storage resident, because code reads its bytes."""
        record = self._record_use(tensor)
        if record is not None and not record.resident:
            self._clock += 1
            record.last_use = self._clock
            self._make_room(record.num_bytes)
            self._load(record)

    def restore_all(self) -> None:
        """Make all live storages resident, and stop tracking them."""
        for record in list(self._records.values()):
            if not record.resident:
                self._load(record)
        for key, record in list(self._records.items()):
            self._forget(key, record)

    @property
    def emptied_storages(self) -> list[weakref.ref[Any]]:
        """Weak references to the live storages that their owner, FSDP, has emptied."""
        self._update_sizes()
        records = list(self._records.values())
        return [record.ref for record in records if record.resized and not record.num_bytes]

    def _update_sizes(self) -> None:
        """Update the records of storages that their owners have resized outside of the context."""
        for record in list(self._records.values()):
            base = record.ref()
            if record.resident and base is not None and base.nbytes() != record.num_bytes:
                self._on_resize(record, base.nbytes())

    def require(self, num_bytes: int) -> None:
        """Raise `least_bytes` to at least `num_bytes`, the bytes that one operator needs."""
        self.least_bytes = max(self.least_bytes, num_bytes)

    # -- operators -----------------------------------------------------------------------------

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in VIEWS and self._is_resident(args[0]):
            return func(*args, **kwargs)
        tensors = [t for t in tensors_in(args, kwargs) if self._is_managed(t)]
        new = {key: base.nbytes() for key, base in map(_key_and_base, tensors) if key not in self._records}
        if new:  # storages allocated outside of the context, such as those of a batch
            self._make_room(sum(new.values()))
        records = {id(k): k for t in tensors if (k := self._record_use(t)) is not None}
        for key in new:
            self._records[key].owner_may_resize = True
        if self._limit is not None:
            result_bytes = self._bytes_of_results(func, args, kwargs)
            operands = sum(record.num_bytes for record in records.values() if not record.fixed)
            if (needed := self._fixed_bytes + operands + (result_bytes or 0)) > self._limit:
                parts = split_lists(func, args, kwargs, 0)
                if len(parts) > 1:
                    outs = [self._operator(func, *part) for part in parts]
                    return None if outs[0] is None else [t for out in outs for t in out]
            self._clock += 1
            for record in records.values():
                record.last_use = self._clock
            evicted_bytes = sum(record.num_bytes for record in records.values() if not record.resident)
            self.require(needed)
            self._make_room(self._limit if result_bytes is None else evicted_bytes + result_bytes)
        for record in records.values():
            self._load(record)
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
            if (record := self._record_use(tensor)) is not None:
                record.current = False
        used_records = {**records, **{id(k): k for t in tensors_in(out) if (k := self._record_use(t)) is not None}}
        for record in used_records.values():
            record.last_use = self._clock
            record.owner_may_resize |= func is EMPTY
            record.on_other_stream |= self._stream() != self._compute
            if is_message(func):
                self._fix(record)
        self._make_room(0)
        return out

    def _on_raw_access(self, tensor: torch.Tensor, values: bool) -> None:
        """Make a tensor resident before Python code reads its values or address.

        Once its address was read (`values` False), it is never evicted.
        """
        self.make_resident(tensor)
        if (record := self._record_use(tensor)) is not None and not values:
            record.current = False
            self._fix(record)

    def _bytes_of_results(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> int | None:
        """Return the bytes of the storages that a call will allocate; None if shapes do not determine them."""
        # `set_` puts a tensor on an existing storage, for example when a file is read.
        set_bytes = sum(v.nbytes() for v in args if isinstance(v, torch.UntypedStorage))
        if func.namespace == "c10d" or not _allocates(func):
            return set_bytes
        key = func, _facts(args), _facts(kwargs)
        if key not in self._result_bytes:
            self._result_bytes[key] = _traced_bytes(func, args, kwargs)
        result_bytes = self._result_bytes[key]
        return None if result_bytes is None else result_bytes + set_bytes

    # -- storages ------------------------------------------------------------------------------

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in _PLAIN and tensor.device.type == self._device.type

    def _is_resident(self, tensor: torch.Tensor) -> bool:
        record = self._records.get(tensor.untyped_storage()._cdata)
        return record is not None and record.resident and bool(record.num_bytes)

    def _record_use(self, tensor: torch.Tensor) -> _Record | None:
        """Mark a tensor's storage as most recently used and return its record; None for other devices and classes."""
        if not self._is_managed(tensor):
            return None
        base = tensor.untyped_storage()
        record = self._records.get(base._cdata) or self._add(base)
        size = base.nbytes()
        if size != (record.num_bytes if record.resident else 0):
            self._on_resize(record, size)
        if base._cdata in self._lru:
            self._lru.move_to_end(base._cdata)
        return record

    def _add(self, base: torch.UntypedStorage) -> _Record:
        key = base._cdata
        # The callback must not refer to `record`: in a cycle its copy would outlive it until the next collection.
        record = _Record(weakref.ref(base, partial(self._on_destroy, key)), base.nbytes())
        self._records[key] = self._lru[key] = record
        self._grow(record.num_bytes)
        if not base.resizable():
            self._fix(record)
        return record

    def _on_destroy(self, key: int, ref: weakref.ref[Any]) -> None:
        """Stop tracking a destroyed storage, unless a new storage has its key already."""
        record = self._records.get(key)
        if record is not None and record.ref is ref:
            self._forget(key, record)

    def _forget(self, key: int, record: _Record) -> None:
        if self._records.get(key) is record:
            del self._records[key]
            self._lru.pop(key, None)
            self._live -= record.num_bytes if record.resident else 0
            self._fixed_bytes -= record.num_bytes if record.fixed else 0

    def _fix(self, record: _Record) -> None:
        if record.fixed or (base := record.ref()) is None:
            return
        record.fixed = True
        self._fixed_bytes += record.num_bytes
        self._lru.pop(base._cdata, None)

    def _before_resize(self, base: torch.UntypedStorage, num_bytes: int) -> None:
        """Make room for a storage that is about to be resized by its owner."""
        record = self._records.get(base._cdata)
        if record is None or num_bytes == (record.num_bytes if record.resident else 0):
            return
        self._clock += 1  # no operator runs, so operands of the last one may be evicted
        record.last_use = self._clock
        self._on_resize(record, num_bytes, update_peak=False)
        self._make_room(0)
        self._grow(0)

    def _on_resize(self, record: _Record, num_bytes: int, *, update_peak: bool = True) -> None:
        self._fix(record)
        self._fixed_bytes += num_bytes - record.num_bytes
        self._live += num_bytes - (record.num_bytes if record.resident else 0)
        record.num_bytes = num_bytes
        record.resident = True
        record.current = False
        record.resized = True
        self.require(self._fixed_bytes)
        if update_peak:
            self._grow(0)

    def _grow(self, num_bytes: int) -> None:
        self._live += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _load(self, record: _Record) -> None:
        base = record.ref()
        if record.resident or base is None:
            return
        assert record.copy is not None
        self._wait_streams(record)
        with _disable_current_modes():
            content = read_content(record.copy)
            # Set first, so that the resize does not count as one by the owner.
            record.resident = True
            base.resize_(record.num_bytes)
            base.copy_(content)
        self._lru[base._cdata] = record
        self._grow(record.num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        if self._limit is None or (self._device.type == "cpu" and self.least_bytes > self._limit):
            return
        limit, owned = self._limit - num_bytes, None
        while self._live > limit and self._lru:
            key, record = next(iter(self._lru.items()))
            base = record.ref()
            if record.last_use == self._clock:
                return  # the running operator uses this storage and all later ones in the queue
            if base is None or not record.num_bytes:
                del self._lru[key]
            elif base.nbytes() != record.num_bytes:
                self._on_resize(record, base.nbytes())
            elif record.owner_may_resize:
                record.owner_may_resize = False
                if owned is None:
                    owned = {_key_and_base(tensor)[0] for tensor in self.owned()}
                if key in owned:
                    self._fix(record)
            else:
                self._evict(key, record, base)

    def _evict(self, key: int, record: _Record, base: torch.UntypedStorage) -> None:
        self._wait_streams(record)
        with _disable_current_modes():
            if not record.current:
                if not isinstance(record.copy, torch.UntypedStorage):
                    record.copy = torch.UntypedStorage(record.num_bytes)
                record.copy.copy_(base)
                record.current = True
            # Set first, so that the resize does not count as one by the owner.
            record.resident = False
            base.resize_(0)
        del self._lru[key]
        self._live -= record.num_bytes
        self.moved_bytes += record.num_bytes

    def _wait_streams(self, record: _Record) -> None:
        if self._device.type != "cpu" and (record.on_other_stream or self._stream() != self._compute):
            self._module.synchronize(self._device)

    def __enter__(self) -> Self:
        self._update_sizes()
        self._resizes.__enter__()
        self._mode.__enter__()
        self._raw_access.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._raw_access.__exit__(*error)
        self._mode.__exit__(*error)
        self._resizes.__exit__(*error)
        if not self._keep_offloaded:
            peak = self.peak_bytes
            self.restore_all()
            self.peak_bytes = peak


def _key_and_base(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage]:
    base = tensor.untyped_storage()
    return base._cdata, base


@cache
def _allocates(func: Any) -> bool:
    returns = func._schema.returns
    return any("Tensor" in str(r.type) and r.alias_info is None for r in returns)


def _facts(value: Any) -> Any:
    """Return a cache key of an argument: equal keys imply results of equal sizes."""
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
    """Return the bytes of the storages that a call would allocate, by a run on meta tensors; None if that fails."""
    arguments: list[torch.Tensor] = []

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        size, stride = tensor.shape, tensor.stride()
        arguments.append(torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta"))
        return arguments[-1]

    with _disable_current_modes():
        try:
            meta_arguments = tree_map_only(torch.Tensor, shape, (args, kwargs))
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), meta_arguments)
            out = func(*args, **kwargs)
        except Exception:  # no meta kernel, or a size that depends on values
            return None
    bytes_by_storage = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(out)}
    return sum(bytes_by_storage.values()) - sum(bytes_by_storage.get(t.untyped_storage()._cdata, 0) for t in arguments)


def spill_mode(
    device: torch.device,
    budget_bytes: int | None = None,
    *,
    keep_offloaded: bool = False,
    owned: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> LruSpillMode:
    """Return an LRU spill mode for a device; see `LruSpillMode` for `keep_offloaded` and `owned`.

    On a CPU the limit is `budget_bytes`; None: no limit. On an accelerator the limit is the fraction `FILLED` of the
    allocatable memory, or of `budget_bytes` if smaller.
    """
    if device.type != "cpu":
        free_bytes = allocatable_bytes(device)
        budget_bytes = int(FILLED * (free_bytes if budget_bytes is None else min(free_bytes, budget_bytes)))
    mode = LruSpillMode(budget_bytes, device, keep_offloaded=keep_offloaded)
    mode.owned = owned
    return mode


def within_device(
    device: torch.device, owned: Callable[[], Iterable[torch.Tensor]] = tuple
) -> AbstractContextManager[Any]:
    """Return a context for a step without a plan that evicts storages if the step does not fit an accelerator.

    The limit is that of `spill_mode` without a budget. The context has no effect on a CPU. See `LruSpillMode` for
    `owned`.
    """
    return nullcontext() if device.type == "cpu" else spill_mode(device, owned=owned)
