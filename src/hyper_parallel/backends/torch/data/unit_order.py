"""One order of FSDP's collectives on all ranks, whichever submodules each rank runs.

FSDP gathers a unit (a module with its own parameter group) when its forward begins and reduces its gradients when its
backward ends. A rank that skips a unit, or runs units in another order, would pair its collective with one of another
unit. Here every gather and every reduction is an event, and all ranks run one sequence of events:

* A first pass is negotiated. Before an event each rank says which event comes next for it, the lowest one is run by
  all, and ranks that do not need it take part with their shard and with gradients of zero.
* A negotiated pass in which all ranks said the same is learned. From then on nothing is exchanged: a rank fills in the
  learned events that it skips, and an event that the sequence does not have is refused before its collective.

Sequences that no rank can rely on (a unit that no rank ran, ranks that differ) stay negotiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.backends.torch.data._event_sequence import EventSequence, HostExchange
from hyper_parallel.errors import CollectiveMismatch

_POST_BACKWARD: Final = "POST_BACKWARD"
_PRE_BACKWARD: Final = "PRE_BACKWARD"


@dataclass(slots=True, eq=False)
class _Unit:
    """One FSDP parameter group.

    Attributes:
        number: Its position among the units, the root first.
        group: FSDP's own group.
        methods: The methods of the group that are wrapped, by name.
        running: Whether this rank is inside of the unit's forward or backward.
        partial: Parameters whose gradients are added up over microbatches and not over replicas yet.
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
        """Return the parameters that a backward pass gives gradients."""
        held = [p for p in self.group.fsdp_params if hasattr(p, "_unsharded_param")]
        return [p for p in held if p.unsharded_param.requires_grad]


class UnitOrder:
    """Run the collectives of FSDP's units in one order on all ranks.

    A pass forward is one call of the root module, a pass backward ends in FSDP's final callback. Event numbers grow
    in the usual order: forward with the unit, backward against it, gather before reduction; reductions at the end of
    backward come after all others, for units whose inputs need no gradients.

    Args:
        model: The root module.
        modules: Modules that FSDP manages, the root last.
        group: All ranks of the model.
        lone: Modules with collectives of their own inside, which no rank can skip alone.
        learns: Rely on sequences that ranks had in common; False: negotiate every pass.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        lone: Sequence[nn.Module],
        learns: bool,
    ) -> None:
        managed = set(modules)
        states = [fully_shard.state(m) for m in model.modules() if m in managed]
        groups = [g for s in states for g in groups_of(s)]
        self._units = [_Unit(i, g) for i, g in enumerate(groups)]
        self._model, self._root = model, self._units[0]
        self._exchange, self._learns = HostExchange(group), learns
        self._lone = {
            u.number for u in self._units
            if any(m in set(lone) for top in u.group.modules for m in top.modules())
        } - {0}  # fmt: skip
        self._sequences: dict[tuple[Any, ...], EventSequence] = {}
        self._forward: EventSequence | None = None
        self._backward: EventSequence | None = None
        self._passes = 0  # forward passes with gradients since the last backward pass
        self._final = False
        self._filled: list[Any] = []
        for unit in self._units:
            for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
                unit.methods[name] = getattr(unit.group, name)
                setattr(unit.group, name, _bind(getattr(self, f"_{name}"), unit))
        self._finish = states[0]._root_post_backward_final_callback
        for state in states:  # the one whose backward begins first ends the pass for all
            state._root_post_backward_final_callback = self._end_backward

    # Forward.

    def _pre_forward(self, unit: _Unit, module: Any, args: Any, kwargs: Any) -> Any:
        if unit is self._root and torch._C._current_graph_task_id() == -1:
            self._backward = None  # one that failed
            self._forward = self._sequence(
                ("forward", torch.is_grad_enabled(), self._model.training), self._covers_forward
            )
            for other in self._units:
                other.running = False
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
        return unit.methods["post_forward"](module, inputs, output)

    def _fill_forward(self, number: int) -> None:
        """Take part in the gather of a unit that this rank does not run now."""
        unit = self._units[number]
        if unit.group.is_unsharded:  # on every rank
            return
        self._check_fill(unit)
        unit.methods["pre_forward"](None, (), {})
        unit.methods["post_forward"](None, (), None)

    def _covers_forward(self, events: Sequence[int]) -> bool | None:
        if not self._learns or len({*events}) < len(self._units):
            return None
        return len(events) == len(self._units)

    # Backward.

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
        """Gather a unit for its backward, and begin the next gather where all ranks know which one it is."""
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
        """Reduce what is left, in one order on all ranks, then let FSDP end the pass."""
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
        """Take part in a gather or a reduction of a unit that this rank does not run now."""
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
            # No rank has ever run it, and FSDP would ask for gradients of parameters that were never gathered.
            group._training_state = type(group._training_state)[_POST_BACKWARD]
            return
        self._complete(unit)
        unit.methods["post_backward"]()

    def _covers_backward(self, events: Sequence[int]) -> bool | None:
        if not self._learns:
            return None
        gathers = [event for event in events if event < 2 * len(self._units) and event % 2 == 0]
        return len({*gathers}) == len(gathers) == len(self._units)

    # Gradients of parameters that this rank did not use.

    def _complete(self, unit: _Unit) -> None:
        """Give parameters without a gradient one of zeros where another rank has one.

        In a learned pass nobody asks: the zeros are negative ones, whose sum is negative only where no rank had a
        gradient.
        """
        if not unit.group.reduce_grads or self._backward is None:
            return
        params = unit.trained()
        known = self._backward.learned and unit.number not in self._backward.conditional
        used = params
        if not known:
            nobody = self._exchange.lowest([int(_gradient(p) is None) for p in params] or [0])
            if any(nobody):
                self._backward.conditional.add(unit.number)
            used = [p for p, unused in zip(params, nobody, strict=False) if not unused]
        either = {id(p) for p in (*used, *unit.partial)}
        used = [p for p in params if id(p) in either]
        for p in used:
            if _gradient(p) is not None:
                continue
            if known and p.sharded_param.grad is None:
                self._filled.append(p)
            with _disable_current_modes(), torch.no_grad():
                p.unsharded_param.grad = torch.full_like(p.unsharded_param, -0.0)
        _widen_partial(unit, used)
        # With replicas the sums of all microbatches but the last stay in one buffer, in the order of `used`.
        unit.partial = [] if unit.group.all_reduce_grads or not unit.group._is_hsdp else used

    def _drop_unused(self) -> None:
        """Leave no gradient where no rank had one."""
        filled, self._filled = [p for p in self._filled if p.sharded_param.grad is not None], []
        if not filled:
            return
        shards = [_local(p.sharded_param.grad) for p in filled]
        held = [(p, s) for p, s in zip(filled, shards, strict=True) if s.numel()]
        marks = [((s == 0) & s.signbit()).all() for _, s in held]
        unused = (
            dict(zip([p._param_fqn for p, _ in held], torch.stack(marks).tolist(), strict=True))
            if held
            else {}
        )
        for p in filled:
            # A rank without elements of a parameter goes by its neighbours in the model.
            name = p._param_fqn
            nearest = name if name in unused else max(unused, key=_common_with(name), default=None)
            if nearest is not None and unused[nearest]:
                p.sharded_param.grad = None

    # Both.

    def _sequence(
        self, key: tuple[Any, ...], covers: Callable[[Sequence[int]], bool | None]
    ) -> EventSequence:
        if key not in self._sequences:
            self._sequences[key] = EventSequence(self._exchange, len(self._sequences), covers)
        sequence = self._sequences[key]
        sequence.begin()
        return sequence

    def _check_fill(self, unit: _Unit) -> None:
        if unit.running:
            raise CollectiveMismatch(
                f"ranks run `{unit.name}` and modules inside of it in different orders",
                where=f"rank {dist.get_rank()}",
                hint="parallel.dp_shard=1 parallel.dp_replicate=1",
            )
        if unit.number in self._lone:
            raise CollectiveMismatch(
                f"this rank skips `{unit.name}`, whose experts exchange tokens with other ranks",
                where=f"rank {dist.get_rank()}",
                hint="parallel.ep=1",
            )

    def _refuse_new(self, unit: _Unit) -> NoReturn:
        raise CollectiveMismatch(
            f"this rank runs `{unit.name}` where no rank ran it in the steps before",
            where=f"rank {dist.get_rank()}",
            got="another order, or more calls, of modules than in the first steps",
            allowed="the order and the calls of the first steps, of which a rank may leave out any",
            hint="hp.parallelize(model, plan, one_order=False)",
        )


def order_units(
    model: nn.Module,
    modules: Sequence[nn.Module],
    group: dist.ProcessGroup | None,
    lone: Sequence[str],
    one_order: bool,
) -> None:
    """Let FSDP's collectives follow one order on all ranks; `UnitOrder` has the arguments."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1 or model not in modules or dist.get_backend(group) == "fake":
        return
    assert group is not None
    UnitOrder(model, modules, group, [model.get_submodule(name) for name in lone], one_order)


def groups_of(state: Any) -> list[Any]:
    """Return FSDP's parameter groups of a module's state."""
    # torch 2.11 has at most one group in a module
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [g for g in (state._fsdp_param_group,) if g is not None]


def _widen_partial(unit: _Unit, used: list[Any]) -> None:
    """Make room for more parameters in the buffer of gradients that are not added up over replicas yet."""
    partial: Tensor | None = unit.group._partial_reduce_output
    if partial is None or unit.partial == used:
        return
    unit.group._wait_for_post_backward()
    pieces = partial.split([p.padded_sharded_param_size.numel() for p in unit.partial])
    kept = {id(p): piece for p, piece in zip(unit.partial, pieces, strict=True)}
    unit.group._partial_reduce_output = torch.cat([
        kept.get(id(p), partial.new_full((p.padded_sharded_param_size.numel(),), -0.0)) for p in used
    ])  # fmt: skip


def _bind(method: Callable[..., Any], unit: _Unit) -> Callable[..., Any]:
    return lambda *args: method(unit, *args)


def _gradient(param: Any) -> Tensor | None:
    accumulated: Tensor | None = param.unsharded_accumulated_grad
    gradient: Tensor | None = param.unsharded_param.grad
    return gradient if accumulated is None else accumulated


def _common_with(name: str) -> Callable[[str], int]:
    """Return a function that counts the modules around a parameter that are around this one too."""
    mine = name.split(".")
    return lambda other: next(
        (i for i, (a, b) in enumerate(zip(mine, other.split("."), strict=False)) if a != b),
        len(mine),
    )


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)
