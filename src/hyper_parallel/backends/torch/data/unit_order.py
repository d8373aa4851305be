"""Common order of FSDP's collectives on all ranks, independent of the submodules that each rank runs.

A unit is a module with an FSDP parameter group of its own. FSDP gathers a unit before its forward and reduces its
gradients after its backward. If a rank skipped a unit, or ran units in another order, collectives of different units
would be matched. Therefore every gather and every reduction is an event, and all ranks run the same sequence of events:

* The first pass is negotiated. Before an event, each rank announces the number of its next event, and all ranks run the
  event with the lowest number. Ranks that do not need this event contribute their shard or zero gradients.
* If all ranks announced the same events, the sequence is learned, at once or after several such passes. Later passes
  need no negotiation: a rank takes part in learned events of units that it skips. An event that is not in the sequence
  raises HP622 before its collective.

Until a sequence is learned, every pass is negotiated. A forward sequence that lacks a unit is never learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.backends.torch.collectives import purpose
from hyper_parallel.backends.torch.traced_groups import TRACED
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import CollectiveMismatch
from hyper_parallel.ir import Purpose

_UNANIMOUS_PASSES: Final = 3
"""Number of consecutive passes in which all ranks announce the same events, before the sequence of the last one is
learned. Sequences that run every unit once are learned after one such pass."""


Lowest = Callable[[Sequence[int]], list[int]]
"""Function that returns the elementwise minimum of integers over all ranks."""


def _lowest(group: dist.ProcessGroup, values: Sequence[int]) -> list[int]:
    """Return the elementwise minimum over ranks; dispatch modes that record a step do not see this collective."""
    with _disable_current_modes(), torch.no_grad(), purpose(Purpose.UNIT_ORDER):
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group)
        return tensor.tolist()  # type: ignore[no-any-return]


class EventSequence:
    """Sequence of gathers and reductions in one kind of pass, negotiated between ranks until it is learned.

    `number` is the index of the sequence among those of the model, equal on all ranks. `covers` gets the events of a
    pass in which all ranks announced the same events. It returns True to learn them at once, False to learn them after
    `_UNANIMOUS_PASSES` such passes in a row, and None not to learn them.
    """

    DONE: Final = 1 << 40

    def __init__(self, lowest: Lowest, number: int, covers: Callable[[Sequence[int]], bool | None]) -> None:
        self._lowest, self._number, self._covers = lowest, number, covers
        self._events: list[int] = []
        self._next = 0
        self._unanimous = True
        self._equal_passes = 0
        self.learned = False
        self.conditional: set[int] = set()

    def begin(self) -> None:
        """Begin a pass from the first event of the sequence."""
        self._next, self._unanimous = 0, True
        if not self.learned:
            self._events = []

    def reach(self, event: int, fill: Callable[[int], None]) -> bool:
        """Take part in events of other ranks until `event` is the next one on all ranks.

        Return whether the rest of the sequence contains `event`, which is always the case during negotiation. `fill`
        runs this rank's part of one event that the rank itself does not need.
        """
        if not self.learned:
            while (agreed := self._agree(event)) != event:
                fill(agreed)
            return True
        try:
            position = self._events.index(event, self._next)
        except ValueError:
            return False
        self._fill_until(position, fill)
        self._next += 1
        return True

    def rest(self) -> list[int]:
        """Return the remaining events of a learned sequence; an empty list during negotiation."""
        return self._events[self._next :] if self.learned else []

    def finish(self, fill: Callable[[int], None]) -> None:
        """End a pass: take part in the remaining events of other ranks by calling `fill` for each."""
        if self.learned:
            self._fill_until(len(self._events), fill)
            return
        while (agreed := self._agree(self.DONE)) != self.DONE:
            fill(agreed)
        covered = self._covers(self._events)
        if not self._unanimous or covered is None:
            self._equal_passes = 0
            return
        self._equal_passes += 1
        self.learned = covered or self._equal_passes >= _UNANIMOUS_PASSES

    def _fill_until(self, position: int, fill: Callable[[int], None]) -> None:
        while self._next < position:
            self._next += 1
            fill(self._events[self._next - 1])

    def _agree(self, event: int) -> int:
        # The minimum of a negated value is the negated maximum.
        values = (event, -event, self._number, -self._number)
        lowest, highest, first, last = self._lowest(values)
        if first != -last:
            raise CollectiveMismatch(
                "at the same time, ranks run passes of different models, or some run a forward and others a backward",
                where=f"rank {dist.get_rank()}",
                hint="call the same forward and backward passes on all ranks, in the same order",
            )
        self._unanimous &= lowest == -highest
        if lowest != self.DONE:
            self._events.append(lowest)
        return lowest


_POST_BACKWARD: Final = "POST_BACKWARD"
_PRE_BACKWARD: Final = "PRE_BACKWARD"
_IDLE: Final = "IDLE"


@dataclass(slots=True, eq=False)
class _Unit:
    """Module with an FSDP parameter group of its own.

    Attributes:
        number: Index of the unit, 0 for the root.
        group: Parameter group of FSDP.
        methods: Original methods of the group that `UnitOrder` wraps, by name.
        running: True while this rank runs the unit's forward or backward.
        partial: Parameters with gradients accumulated over microbatches but not yet reduced over replicas.
    """

    number: int
    group: Any
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)
    running: bool = False
    partial: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.group._module_fqn or "the root module"

    @property
    def state(self) -> str:
        return str(self.group._training_state.name)

    def trained(self) -> list[Any]:
        """Return the parameters that FSDP has gathered at least once and that require gradients."""
        initialized = [p for p in self.group.fsdp_params if hasattr(p, "_unsharded_param")]
        return [p for p in initialized if p.unsharded_param.requires_grad]


class UnitOrder:
    """Wrapper of FSDP's parameter groups that runs their collectives in the same order on all ranks.

    A forward pass is one call of the root module; a backward pass ends in FSDP's final callback. Events are numbered in
    the usual order: ascending unit index in forward, descending in backward, gather before reduction. The last events
    of backward are the reductions of units whose inputs need no gradients.

    The `unskippable` modules run other collectives, so that no rank can skip them alone. If `learns` is False, every
    pass is negotiated.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        unskippable: Sequence[nn.Module],
        learns: bool,
    ) -> None:
        managed = set(modules)
        states = [fully_shard.state(m) for m in model.modules() if m in managed]
        groups = [g for s in states for g in groups_of(s)]
        self._units = [_Unit(i, g) for i, g in enumerate(groups)]
        self._model, self._root = model, self._units[0]
        self._lowest, self._learns = partial(_lowest, group), learns
        self._unskippable = {
            u.number for u in self._units[1:]
            if any(m in set(unskippable) for top in u.group.modules for m in top.modules())
        }  # fmt: skip
        self._sequences: dict[tuple[Any, ...], EventSequence] = {}
        self._forward: EventSequence | None = None
        self._backward: EventSequence | None = None
        self._passes = 0  # forward passes with gradients since the last backward pass
        self._final = False
        self._filled: list[Any] = []
        for unit in self._units:
            for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
                unit.methods[name] = getattr(unit.group, name)
                setattr(unit.group, name, partial(getattr(self, f"_{name}"), unit))
        self._finish = states[0]._root_post_backward_final_callback
        for state in states:  # FSDP runs the callback of the state whose backward begins first
            state._root_post_backward_final_callback = self._end_backward

    def _pre_forward(self, unit: _Unit, module: Any, args: Any, kwargs: Any) -> Any:
        if unit is self._root and torch._C._current_graph_task_id() == -1:
            self._backward = None  # left over from a failed backward
            self._forward = self._sequence(
                ("forward", torch.is_grad_enabled(), self._model.training), self._covers_forward
            )
            for u in self._units:
                u.running = False
        if self._forward is not None and (unit is self._root or not unit.group.is_unsharded):
            if not self._forward.reach(unit.number, self._fill_forward):
                self._refuse_new(unit)
            unit.running = True
        return unit.methods["pre_forward"](module, args, kwargs)

    def _post_forward(self, unit: _Unit, module: Any, inputs: Any, output: Any) -> Any:
        unit.running = False
        if unit is self._root and self._forward is not None:
            self._forward.finish(self._fill_forward)
            self._forward = None
            self._passes += torch.is_grad_enabled()
        if unit.state == _IDLE:
            # The other half-batch has run `post_forward`; a second run would free parameters kept until backward.
            return output
        return unit.methods["post_forward"](module, inputs, output)

    def _fill_forward(self, number: int) -> None:
        """Take part in the all-gather of unit `number`, which this rank does not run."""
        unit = self._units[number]
        if unit.group.is_unsharded:  # equal on all ranks
            return
        self._check_fill(unit)
        unit.methods["pre_forward"](None, (), {})
        unit.methods["post_forward"](None, (), None)

    def _covers_forward(self, events: Sequence[int]) -> bool | None:
        if not self._learns or len({*events}) < len(self._units):
            return None
        return len(events) == len(self._units)

    def _pre_backward(self, unit: _Unit, *_: Any) -> None:
        if unit.state == _PRE_BACKWARD:
            return
        if self._backward is None:
            trained = tuple(p.requires_grad for p in self._model.parameters())
            key = ("backward", self._passes, self._root.group.reduce_grads, hash(trained))
            self._backward = self._sequence(key, self._covers_backward)
        if not self._backward.reach(self._gather(unit), self._fill_backward):
            self._refuse_new(unit)
        unit.running = True
        self._unshard(unit, self._backward)

    def _unshard(self, unit: _Unit, sequence: EventSequence) -> None:
        """Gather a unit for its backward, and prefetch the next unit if the sequence is learned."""
        unit.methods["pre_backward"](False)
        bound = 2 * len(self._units)
        following = next((e for e in sequence.rest() if e < bound and e % 2 == 0), None)
        if following is not None:
            group = self._units[len(self._units) - 1 - following // 2].group
            group._prefetch_unshard(group, "backward")

    def _post_backward(self, unit: _Unit, *unused: Any) -> None:
        if self._backward is not None and not self._final:
            if not self._backward.reach(self._gather(unit) + 1, self._fill_backward):
                if self._last(unit) not in self._backward.rest():
                    self._refuse_new(unit)
                return
            unit.running = False
            self._complete(unit)
        unit.methods["post_backward"](*unused)

    def _end_backward(self) -> None:
        """Run the remaining reductions in the same order on all ranks, then FSDP's final callback."""
        if (sequence := self._backward) is not None:
            for unit in self._units:
                unit.running = False
            if not sequence.learned:
                for unit in reversed(self._units):
                    if unit.state != _POST_BACKWARD:
                        sequence.reach(self._last(unit), self._fill_backward)
                        self._reduce(unit)
            sequence.finish(self._fill_backward)
        self._final = True
        try:
            self._finish()
        finally:
            self._final = False
            self._backward, self._passes = None, 0
        self._drop_unused()

    def _gather(self, unit: _Unit) -> int:
        return 2 * (len(self._units) - 1 - unit.number)

    def _last(self, unit: _Unit) -> int:
        return 3 * len(self._units) - 1 - unit.number

    def _fill_backward(self, event: int) -> None:
        """Take part in an all-gather or a reduction of a unit whose backward this rank does not run."""
        count = len(self._units)
        if event >= 2 * count:
            self._reduce(self._units[3 * count - 1 - event])
            return
        unit = self._units[count - 1 - event // 2]
        self._check_fill(unit)
        if event % 2:
            self._reduce(unit)
        else:
            assert self._backward is not None
            self._unshard(unit, self._backward)

    def _reduce(self, unit: _Unit) -> None:
        group = unit.group
        if not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            # No rank has run this unit: FSDP would read gradients of parameters that were never gathered.
            group._training_state = type(group._training_state)[_POST_BACKWARD]
            return
        self._complete(unit)
        unit.methods["post_backward"]()

    def _covers_backward(self, events: Sequence[int]) -> bool | None:
        if not self._learns:
            return None
        gathers = [event for event in events if event < 2 * len(self._units) and event % 2 == 0]
        return len({*gathers}) == len(gathers) == len(self._units)

    def _complete(self, unit: _Unit) -> None:
        """Give each parameter without a gradient on this rank a gradient of -0.0, if another rank has a gradient.

        In a learned pass, every parameter without a gradient gets -0.0, except in `conditional` units: no other rank is
        asked. The reduced gradient is then -0.0 everywhere only if no rank had one, see `_drop_unused`.
        """
        if not unit.group.reduce_grads or self._backward is None:
            return
        params = unit.trained()
        known = self._backward.learned and unit.number not in self._backward.conditional
        used = params
        if not known:
            is_unused = self._lowest([int(gradient_of(p) is None) for p in params] or [0])
            if any(is_unused):
                self._backward.conditional.add(unit.number)
            used = [p for p, unused in zip(params, is_unused, strict=False) if not unused]
        used_or_partial = {id(p) for p in (*used, *unit.partial)}
        used = [p for p in params if id(p) in used_or_partial]
        for p in used:
            if gradient_of(p) is not None:
                continue
            if known and p.sharded_param.grad is None:
                self._filled.append(p)
            with _disable_current_modes(), torch.no_grad():
                p.unsharded_param.grad = torch.full_like(p.unsharded_param, -0.0)
        _widen_partial(unit, used)
        # With replicas, the sums of all microbatches but the last are kept in one buffer, in the order of `used`.
        unit.partial = [] if unit.group.all_reduce_grads or not unit.group._is_hsdp else used

    def _drop_unused(self) -> None:
        """Remove filled gradients that are -0.0 everywhere: no rank had a gradient, see `_complete`."""
        filled, self._filled = [p for p in self._filled if p.sharded_param.grad is not None], []
        if not filled:
            return
        shards = [local(p.sharded_param.grad) for p in filled]
        nonempty = [(p, s) for p, s in zip(filled, shards, strict=True) if s.numel()]
        marks = [((s == 0) & s.signbit()).all() for _, s in nonempty]
        names = [p._param_fqn for p, _ in nonempty]
        unused = dict(zip(names, torch.stack(marks).tolist(), strict=True)) if nonempty else {}
        for p in filled:
            # A rank without elements of a parameter decides by the parameter whose name has the longest common prefix.
            nearest = max(unused, key=partial(_common_length, p._param_fqn), default=None)
            if nearest is not None and unused[nearest]:
                p.sharded_param.grad = None

    def _sequence(self, key: tuple[Any, ...], covers: Callable[[Sequence[int]], bool | None]) -> EventSequence:
        if key not in self._sequences:
            self._sequences[key] = EventSequence(self._lowest, len(self._sequences), covers)
        sequence = self._sequences[key]
        sequence.begin()
        return sequence

    def _check_fill(self, unit: _Unit) -> None:
        if unit.running:
            raise CollectiveMismatch(
                f"ranks run `{unit.name}` and its submodules in different orders",
                where=f"rank {dist.get_rank()}",
                hint=f"call `{unit.name}` and its submodules in the same order on all ranks",
            )
        if unit.number in self._unskippable:
            raise CollectiveMismatch(
                f"this rank skips `{unit.name}`, whose experts exchange tokens with other ranks",
                where=f"rank {dist.get_rank()}",
                hint=f"call `{unit.name}` on every rank in every step, or train without ep",
            )

    def _refuse_new(self, unit: _Unit) -> NoReturn:
        raise CollectiveMismatch(
            f"this rank runs `{unit.name}` at a point where no rank ran it in earlier steps",
            where=f"rank {dist.get_rank()}",
            got="another order, or more calls, of modules than in the first steps",
            allowed="the module calls of the first steps, in the same order; a rank may skip some of them",
            hint="parallel.one_order=false in a recipe, or hp.parallelize(model, plan, one_order=False)",
        )


def order_units(
    model: nn.Module,
    modules: Sequence[nn.Module],
    group: dist.ProcessGroup | None,
    unskippable: Sequence[str],
    one_order: bool,
) -> None:
    """Create a `UnitOrder`; `one_order` is its argument `learns`.

    Do nothing on one rank, on simulated or traced ranks, or if FSDP does not manage the root module.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1 or model not in modules or dist.get_backend(group) in ("fake", TRACED):
        return
    assert group is not None
    UnitOrder(model, modules, group, [model.get_submodule(name) for name in unskippable], one_order)


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups in `state`, FSDP's state of a module."""
    # torch 2.11 has at most one group per module
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [g for g in (state._fsdp_param_group,) if g is not None]


def _widen_partial(unit: _Unit, used: list[Any]) -> None:
    """Extend a unit's buffer of gradients not yet reduced over replicas, so that it covers the parameters `used`."""
    partial: Tensor | None = unit.group._partial_reduce_output
    if partial is None or unit.partial == used:
        return
    unit.group._wait_for_post_backward()
    pieces = partial.split([p.padded_sharded_param_size.numel() for p in unit.partial])
    by_param = {id(p): piece for p, piece in zip(unit.partial, pieces, strict=True)}
    unit.group._partial_reduce_output = torch.cat([
        by_param.get(id(p), partial.new_full((p.padded_sharded_param_size.numel(),), -0.0)) for p in used
    ])  # fmt: skip


def gradient_of(param: Any) -> Tensor | None:
    """Return the gradient that FSDP will reduce for a gathered parameter; None without one."""
    accumulated: Tensor | None = param.unsharded_accumulated_grad
    gradient: Tensor | None = param.unsharded_param.grad
    return gradient if accumulated is None else accumulated


def _common_length(name: str, other: str) -> int:
    parts = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))
