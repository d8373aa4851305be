"""Actions of a plan as calls without arguments, bound once before the first step.

The host issues thousands of actions per step. Everything that is constant over steps is bound beforehand: the operator
and its tensors, the device buffer and the tier of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.backends.torch.memory.first_step import size_error, value_error
from hyper_parallel.backends.torch.memory.operators import wait_finished
from hyper_parallel.backends.torch.memory.prepared_plan import Prepared
from hyper_parallel.errors import StepChanged
from hyper_parallel.ir import COPIES, MemoryAction

if TYPE_CHECKING:
    from hyper_parallel.backends.torch.memory.arena_state import ArenaState

Act = Callable[[], Any]
"""Call that executes one action of a plan."""


class ActionBinder:
    """Factory of calls that execute the actions of a memory plan; its storages, streams and files must not change."""

    def __init__(self, state: ArenaState) -> None:
        self._plan, self._files = state.plan, state.files
        self._enter, self._leave = state.mark_resident, state.release
        self._device, self._dram = state.storages["device"], state.storages["dram"]
        self._hardware, self._lanes = state.hardware, state.hardware.lanes
        # Storages that are in another tier than the device at some time.
        self._elsewhere = {a.target for a in self._plan.actions if a.kind in COPIES}
        self._elsewhere |= {s for s, home in enumerate(self._plan.homes) if home != "device"}
        self._in_flight: dict[int, Any] = {}  # operator index -> work handle of its collective

    def bind(self, action: MemoryAction, ready: Prepared | torch.UntypedStorage | None) -> Act:
        """Return a call that executes one action; `ready` is its entry in `Addresses.actions`."""
        s, kind = action.target, action.kind
        if isinstance(ready, Prepared):
            return partial(self._run, ready, s)
        if kind == "join":
            return partial(self._join, s)
        if kind in ("prefetch", "store"):
            size = self._plan.program.storages[s].num_bytes
            return partial(self._prefetch if kind == "prefetch" else self._store, s, ready, size)
        if kind in ("copy_in", "copy_out"):
            size = self._plan.program.storages[s].num_bytes
            return partial(self._read if kind == "copy_in" else self._write, s, size)
        if kind == "wait":
            return partial(self._lanes.wait, s, action.tier)
        if kind == "free" and (ready is None or s in self._elsewhere):
            return partial(self._free, s)
        if kind == "free" or action.tier == "device":
            return partial(self._leave, s)
        return partial(self._dram.pop if action.tier == "dram" else self._files.drop, s)

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
    """Copy staged results to their addresses; raise HP512 if a size or a guarded value differs from the recording."""
    for position, view, target in ready.staged:
        result = flat[position]
        base = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if base is None or base.nbytes() != target.nbytes() or result.shape != view.size:
            raise size_error(ready.func, None if base is None else tuple(result.shape), view.size)
        target.copy_(base)
    for position, value in ready.guards:
        if flat[position] != value:
            raise value_error(ready.func, flat[position], value)
