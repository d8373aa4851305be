"""Binding of a plan's actions to calls without arguments, once per allocation of the arena.

The host issues thousands of actions per step. All constants of an action are therefore bound before the first step: the
operator and its tensors, the device buffer and the tier of a copy. Each live range of a storage on the device has one
address range in the arena, so its tensors are the same in every step. Address ranges own no memory and cannot be
resized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_map_only

from hyper_parallel.backends.torch.memory.first_step import size_error, value_error
from hyper_parallel.backends.torch.memory.kernel_bytes import columns, in_pieces
from hyper_parallel.backends.torch.memory.operators import View, wait_finished
from hyper_parallel.backends.torch.memory.out_variants import Bound, out_variant
from hyper_parallel.errors import StepChanged
from hyper_parallel.ir import COPIES

if TYPE_CHECKING:
    from hyper_parallel.backends.torch.memory.arena_state import ArenaState

_RESULTS_WITH_GRADIENTS: Final = {"mkldnn_rnn_layer": 4}
"""Operators that return extra tensors for backward if gradients are enabled, with their number of results then."""
Act = Callable[[], Any]
"""Call that executes one action of a plan."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operator at one position of the plan, with its tensors.

    Attributes:
        func: The operator overload.
        run: Function that runs the operator and writes results at their addresses, or returns them if `staged`.
        results: (storage, its address range) of every new result.
        staged: (flat output index, view, range) of every result that must be copied to its address.
        communicates: True for a collective or a message, which `run` only begins; `run` then returns its work handles.
        guards: (flat output index, value) of outputs that were read as plain numbers.
        ignores_output: True if the return value of `run` is not used.
        dispatched: True if `run` is expected to reach torch's dispatcher, which an allocation does not.
    """

    func: Any
    run: Bound
    results: tuple[tuple[int, torch.UntypedStorage], ...]
    staged: tuple[tuple[int, View, torch.UntypedStorage], ...]
    communicates: bool
    guards: tuple[tuple[int, Any], ...]
    ignores_output: bool
    dispatched: bool


class ActionBinder:
    """Factory of calls that execute the actions of a memory plan on the storages, streams and files of a state.

    Actions must be bound in the order of the plan, because an action may move a storage to another address.

    Attributes:
        at_start: Dict from storage that is on the device when a step begins to its address range.
    """

    def __init__(self, state: ArenaState, arena: torch.UntypedStorage) -> None:
        self._captured, self._plan, self._arena = state.captured, state.plan, arena
        self._enter, self._leave = state.mark_resident, state.release
        self._device, self._dram = state.storages["device"], state.storages["dram"]
        self._files, self._hardware, self._lanes = state.files, state.hardware, state.hardware.lanes
        # Storages that are in another tier than the device at some time.
        self._elsewhere = {a.target for a in self._plan.actions if a.kind in COPIES}
        self._elsewhere |= {s for s, home in enumerate(self._plan.homes) if home != "device"}
        self._in_flight: dict[int, Any] = {}  # operator index -> work handle of its collective
        self._offsets = {(e.storage, e.start): e.offset_bytes for e in self._plan.addresses}
        self._ranges: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._tensors: dict[tuple[View, int], torch.Tensor] = {}
        self._offsets_now: dict[int, int] = {}  # storage on the device -> offset in the arena
        for s, storage in enumerate(self._plan.program.storages):
            if storage.at_start and (not storage.persistent or self._plan.homes[s] == "device"):
                self._place(s, 0)
        self.at_start = {s: self._range(s) for s in self._offsets_now}

    def bind(self, position: int) -> Act:
        """Return a call that executes the action at a position of the plan."""
        action = self._plan.actions[position]
        s, kind = action.target, action.kind
        if kind in ("run", "recompute"):
            return partial(self._run, self._operator(s, position), s)
        if kind == "join":
            return partial(self._join, s)
        if kind == "wait":
            return partial(self._lanes.wait, s, action.tier)
        if kind in COPIES:
            size = self._plan.program.storages[s].num_bytes
            if kind in ("copy_in", "copy_out"):
                return partial(self._read if kind == "copy_in" else self._write, s, size)
            base = self._range(s) if s in self._offsets_now else self._place(s, position)
            return partial(self._prefetch if kind == "prefetch" else self._store, s, base, size)
        if kind == "detach" and action.tier != "device":
            return partial(self._dram.pop if action.tier == "dram" else self._files.drop, s)
        was_resident = self._offsets_now.pop(s, None) is not None
        if kind == "free" and (s in self._elsewhere or not was_resident):
            return partial(self._free, s)
        return partial(self._leave, s)

    def _place(self, s: int, position: int) -> torch.UntypedStorage:
        self._offsets_now[s] = self._offsets[s, position]
        return self._range(s)

    def _range(self, s: int) -> torch.UntypedStorage:
        """Return the current address range of a storage in the arena; for a storage in `on_host`, a host buffer."""
        key = s, self._offsets_now[s]
        if key not in self._ranges:
            size = self._plan.program.storages[s].num_bytes
            if s in self._captured.on_host:
                self._ranges[key] = torch.UntypedStorage(size)
            else:
                part = self._arena[key[1] : key[1] + size]
                assert isinstance(part, torch.UntypedStorage)
                self._ranges[key] = part
        return self._ranges[key]

    def _tensor(self, view: View) -> torch.Tensor:
        key = view, self._offsets_now[view.storage]
        if key not in self._tensors:
            self._tensors[key] = view.as_tensor(self._range(view.storage))
        return self._tensors[key]

    def _operator(self, index: int, position: int) -> Prepared:
        call, operator = self._captured.calls[index], self._plan.program.operators[index]
        results = tuple((s, self._place(s, position)) for s in operator.allocs)
        args, kwargs = tree_map_only(View, self._tensor, (call.args, call.kwargs))
        outs = [self._tensor(view) for _, view in call.results]
        bind = out_variant(call)
        staged: tuple[tuple[int, View, torch.UntypedStorage], ...] = ()
        if bind is not None:
            run = bind(args, kwargs, outs)
        elif pieces := columns(call):
            run = in_pieces(pieces, args, kwargs, outs[0])
        else:
            run = partial(getattr(call.func, "_op", call.func), *args, **kwargs)
            if (
                getattr(call.func, "_opname", "") in _RESULTS_WITH_GRADIENTS
                and len(call.results) == _RESULTS_WITH_GRADIENTS[call.func._opname]
            ):
                run = torch.enable_grad()(run)
            staged = tuple((i, view, self._range(view.storage)) for i, view in call.results)
        return Prepared(
            call.func,
            run,
            results,
            staged,
            bool(operator.group),
            call.guards,
            not (staged or operator.group or call.guards),
            isinstance(call.func, OpOverload) and "empty" not in call.func._opname,
        )

    def _run(self, ready: Prepared, index: int) -> None:
        for s, base in ready.results:
            self._enter(s, base)
        hardware = self._hardware
        self._lanes.position = None
        if ready.communicates:
            with hardware.in_library():
                self._in_flight[index] = ready.run()
            return
        num_before = hardware.num_operators
        out = ready.run()
        if num_before == hardware.num_operators and hardware.counts and ready.dispatched:
            raise StepChanged(
                f"the step did not run the planned operator `{ready.func}`",
                where=f"operator {index} of {self._plan.program.name}",
                hint="other code replaced the operator after the capture: capture and plan again",
            )
        if not ready.ignores_output:
            _copy_staged(ready, tree_flatten(out)[0])

    def _join(self, index: int) -> None:
        timed = self._hardware.timed
        begin = None if timed is None else timed.now()
        with self._hardware.in_library():
            wait_finished(self._in_flight.pop(index))
        if timed is not None:
            timed.record_join(index, begin)

    def _prefetch(self, s: int, target: torch.UntypedStorage, size: int) -> None:
        if s not in self._device:
            self._enter(s, target)
        move = partial(target.copy_, self._dram[s], non_blocking=True)
        self._lanes.start(s, "prefetch", move, size)

    def _store(self, s: int, source: torch.UntypedStorage, size: int) -> None:
        move = partial(self._in_dram(s, size).copy_, source, non_blocking=True)
        self._lanes.start(s, "store", move, size)

    def _read(self, s: int, size: int) -> None:
        move = partial(self._files.read, s, self._in_dram(s, size))
        self._lanes.start(s, "copy_in", move, size)

    def _write(self, s: int, size: int) -> None:
        self._files.reserve(s, size)
        self._lanes.start(s, "copy_out", partial(self._files.write, s, self._dram[s]), size)

    def _in_dram(self, s: int, size: int) -> torch.UntypedStorage:
        base = self._dram.get(s)
        if base is None:
            base = self._dram[s] = self._hardware.in_dram(size)
        return base

    def _free(self, s: int) -> None:
        if s in self._device:
            self._leave(s)
        self._dram.pop(s, None)
        if s in self._files:
            self._files.drop(s)


def _copy_staged(ready: Prepared, flat: list[Any]) -> None:
    for position, view, target in ready.staged:
        result = flat[position]
        base = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if base is None or base.nbytes() != target.nbytes() or result.shape != view.size:
            raise size_error(ready.func, None if base is None else tuple(result.shape), view.size)
        target.copy_(base)
    for position, value in ready.guards:
        if flat[position] != value:
            raise value_error(ready.func, flat[position], value)
