"""Preparation of a plan's actions: every tensor is created at its address before the first step.

Each live range of a storage on the device has one address range in the arena. Its tensors are therefore the same in
every step, and an operator is a call on bound tensors. Address ranges own no memory and cannot be resized.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory.kernel_bytes import columns, in_pieces
from hyper_parallel.backends.torch.memory.operators import View
from hyper_parallel.backends.torch.memory.out_variants import Bound, out_variant
from hyper_parallel.ir import MemoryPlan

_RESULTS_WITH_GRADIENTS: Final = {"mkldnn_rnn_layer": 4}
"""Dict from operators that return tensors for backward if gradients are enabled, to the number of results then."""
StorageBytes = dict[int, torch.UntypedStorage]
"""Bytes by storage index."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operator at one position of the plan, with its tensors.

    Attributes:
        func: The operator overload.
        run: Function that runs the operator and writes results at their addresses, or returns them if `staged`.
        results: (storage, its address range) of every new result.
        staged: (flat output index, view, range) of every result that must be copied to its address.
        communicates: True for a collective, which `run` only begins; `run` then returns the work handle.
        guards: (flat output index, value) of outputs that were read as plain numbers.
        ignores_output: True if the return value is not used.
        dispatched: True if the operator reaches torch's dispatcher; an allocation does not.
    """

    func: Any
    run: Bound
    results: tuple[tuple[int, torch.UntypedStorage], ...]
    staged: tuple[tuple[int, View, torch.UntypedStorage], ...]
    communicates: bool
    guards: tuple[tuple[int, Any], ...]
    ignores_output: bool
    dispatched: bool


class Addresses:
    """Address ranges in the arena for the live ranges of a plan, and the actions bound to them.

    Attributes:
        at_start: Address ranges of the storages that are resident between steps.
        actions: For every action of the plan: the prepared operator, the range of a copy or of a release, or None.
    """

    def __init__(self, captured: Captured, plan: MemoryPlan, arena: torch.UntypedStorage) -> None:
        self._captured, self._plan, self._arena = captured, plan, arena
        self._offsets = {(e.storage, e.start): e.offset_bytes for e in plan.addresses}
        self._ranges: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._tensors: dict[tuple[View, int], torch.Tensor] = {}
        self._offsets_now: dict[int, int] = {}  # storage on the device -> offset in the arena
        for s, storage in enumerate(plan.program.storages):
            if storage.at_start and (not storage.persistent or plan.homes[s] == "device"):
                self._place(s, 0)
        self.at_start = {s: self._range(s) for s in self._offsets_now}
        self.actions = [self._action(position) for position in range(len(plan.actions))]
        self._tensors.clear()

    def _place(self, s: int, position: int) -> torch.UntypedStorage:
        self._offsets_now[s] = self._offsets[s, position]
        return self._range(s)

    def _range(self, s: int) -> torch.UntypedStorage:
        """Return the current address range of a storage in the arena; for a storage in host memory, its own bytes."""
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

    def _action(self, position: int) -> Prepared | torch.UntypedStorage | None:
        action = self._plan.actions[position]
        kind, s = action.kind, action.target
        if kind in ("run", "recompute"):
            return self._operator(s, position)
        if kind in ("prefetch", "store"):
            return self._range(s) if s in self._offsets_now else self._place(s, position)
        released = kind == "free" or (kind == "detach" and action.tier == "device")
        if released and s in self._offsets_now:
            return self._ranges[s, self._offsets_now.pop(s)]
        return None

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
