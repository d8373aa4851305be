"""The roles of `stage: grpo`: seconds of a step that samples and learns, and how devices are split among both.

A step samples completions (the cost of generation, `cost._passes`) and learns from them (the cost of training, and a
forward for every pass beside it). With both a task graph of some steps, a lane per role, is simulated; its steady
seconds per step are what a split is chosen by. The space is small, and all of it is priced: every number of ranks that
only sample, every degree in which they share a copy, and of the ranks that learn every layout that the search of their
number keeps, one for each of their degrees. Imported by what plans `stage: grpo` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from hyper_parallel.config import Recipe
from hyper_parallel.errors import DoesNotFit, UnsupportedSharding
from hyper_parallel.ir import (
    GenerateWorkload,
    MemoryTerm,
    Plan,
    RejectedRoles,
    RolesPlan,
    Stage,
    Strategy,
    Workload,
    role_tasks,
    steady_step_s,
)
from hyper_parallel.model import FAMILIES_READ
from hyper_parallel.mpmd import on_shared_cores
from hyper_parallel.planner._plan import require, search, to_plan
from hyper_parallel.planner._price import PricedStrategy
from hyper_parallel.planner._refine import Outcome, find
from hyper_parallel.planner._request import LOCAL, PlanRequest
from hyper_parallel.planner._sampling import Sampling, sampling_of
from hyper_parallel.planner._space import Space, divisors
from hyper_parallel.topology import detect_local
from hyper_parallel.units import format_bytes, format_seconds

KEPT: Final = 1024
"""Layouts of the ranks that learn: more than there are degrees, so that all of them are priced."""
SHOWN: Final = 4
"""Runners-up of the chosen mode that are kept."""
ROUNDING: Final = 1e-6
"""Steps that differ by less, relatively, are equal: simulated times are whole nanoseconds."""


def with_roles(
    recipe: Recipe, request: PlanRequest, plan: Plan, where: Callable[[str], str]
) -> Plan:
    """The plan of given degrees, and the roles that the recipe names.

    Args:
        recipe: A recipe of `stage: grpo`.
        request: What the plan was made of.
        plan: The plan of the ranks that learn.
        where: Tells where the value of a key was set.

    Raises:
        DoesNotFit: HP401 when a rank that only samples has too little memory.
    """
    ranks, tp = recipe.grpo.sampling_ranks, recipe.grpo.copy_ranks
    roles = _Roles(recipe, request, plan.strategy.world_size + ranks)
    learner = _Learner(plan.strategy, plan.workload, plan.step_s, plan.stages, plan.memory)
    found = roles.split(ranks, tp, learner)
    if isinstance(found, str):
        return replace(plan, notes=(*plan.notes, f"the step is that of learning alone: {found}"))
    if ranks and not found.fits(roles.capacity_bytes):
        raise _too_big(roles, found, learner, where)
    return replace(
        plan, roles=roles.plan_of(found, [found]), notes=(*plan.notes, *roles.notes(found))
    )


def split_devices(recipe: Recipe, request: PlanRequest, where: Callable[[str], str]) -> Plan:
    """The plan of the split with the least seconds per step, and of the best layout for it.

    Args:
        recipe: A recipe of `stage: grpo` with `parallel: auto`.
        request: With `rollout_ranks: auto` its devices are those of both roles, else those that learn.
        where: Tells where the value of a key was set.

    Raises:
        NoLegalStrategy: HP302. DoesNotFit: HP401 for either role.
        UnsupportedSharding: HP205 for a split of a model whose sampling is not priced.
    """
    roles = _Roles(recipe, request, request.num_devices + recipe.grpo.sampling_ranks)
    splits = [*roles.splits()]
    found: list[tuple[_Split, Outcome, PricedStrategy]] = []
    large: list[tuple[_Split, PricedStrategy]] = []
    refused = "no split is legal"
    for ranks, tp in splits:
        for outcome in roles.learners(roles.devices - ranks):
            # Ranks that only sample do not depend on the layout of the others, of which the first learns fastest.
            for priced in outcome.ranked[:1] if ranks else outcome.ranked:
                split = roles.split(ranks, tp, _Learner.of(priced))
                if isinstance(split, str):
                    refused = split
                elif split.fits(roles.capacity_bytes):
                    found.append((split, outcome, priced))
                else:
                    large.append((split, priced))
    most = roles.devices - splits[0][0] if splits else roles.devices
    if not found:
        require(roles.on(most), find(roles.on(most)))
        if large:
            split, priced = min(large, key=lambda f: f[0].held_bytes)
            raise _too_big(roles, split, _Learner.of(priced), where)
        if len(splits) != 1:
            raise UnsupportedSharding(
                f"the devices cannot be split among the roles: {refused}",
                where=where("grpo.rollout_ranks"),
                got="rollout_ranks=auto",
                hint="grpo.rollout_ranks=0 grpo.rollout_tp=1",
            )
        plan = search(roles.on(most))
        return replace(plan, notes=(*plan.notes, f"the step is that of learning alone: {refused}"))
    best, outcome, priced = min(found, key=lambda f: f[0].rank)
    slower = [p for p in outcome.ranked if p.per_token_s >= priced.per_token_s and p is not priced]
    request = outcome.search.space.request
    plan = to_plan(request, replace(outcome, ranked=(priced, *slower)), "step-time")
    notes = [*roles.notes(best)]
    first = min(
        (o.ranked[0] for o in roles.learners(request.num_devices)), key=lambda p: p.per_token_s
    )
    if first.per_token_s < priced.per_token_s:
        notes.append(
            f"{first.strategy} with {first.workload.microbatch} sequences at a time learns faster, in "
            f"{format_seconds(first.step_s)}, but the step is not shorter"
        )
    if len(splits) > 1:
        fit = len({(s.ranks, s.tp) for s, *_ in found})
        notes.append(
            f"{roles.devices} devices for both roles: of {len(splits)} ways to split them {fit} are legal and fit, and "
            "were priced"
        )
    return replace(
        plan,
        roles=roles.plan_of(best, [split for split, *_ in found]),
        notes=(*plan.notes, *notes),
    )


@dataclass(frozen=True, slots=True)
class _Learner:
    """A layout of the ranks that learn, priced."""

    strategy: Strategy
    workload: Workload
    step_s: float
    stages: tuple[Stage, ...]
    memory: tuple[MemoryTerm, ...]

    @classmethod
    def of(cls, p: PricedStrategy) -> _Learner:
        return cls(p.strategy, p.workload, p.step_s, p.stages, p.memory)

    @property
    def forward_s(self) -> float:
        """Seconds of one forward of the step's sequences."""
        each = sum(stage.cost.forward_s + stage.cost.exposed_forward_s for stage in self.stages)
        return each * (self.workload.accumulation_steps or 1)

    @property
    def states_bytes(self) -> int:
        """What a rank holds between two steps."""
        return sum(t.bytes for t in self.memory if t.name in ("parameters", "optimizer states"))


@dataclass(frozen=True, slots=True)
class _Split:
    """A split with a layout of the ranks that learn, and what both roles take."""

    ranks: int
    tp: int
    sampling: Sampling
    learn_s: float
    steps_s: dict[int, float]  # by staleness, 0 also where the same ranks do both
    staleness: int
    held_bytes: int  # by the states of a rank that learns too
    tokens: int

    @property
    def step_s(self) -> float:
        return self.steps_s[self.staleness]

    @property
    def rank(self) -> tuple[float, ...]:
        """The least is best: of equal seconds fewer ranks that only sample, smaller copies, less to learn."""
        per_token = self.step_s / self.tokens
        digits = -math.floor(math.log10(per_token * ROUNDING))
        return round(per_token, digits), self.ranks, self.tp, self.learn_s

    def fits(self, capacity_bytes: float) -> bool:
        return self.held_bytes <= capacity_bytes


class _Roles:
    """Prices of the splits of some devices."""

    def __init__(self, recipe: Recipe, request: PlanRequest, devices: int) -> None:
        self.grpo, self.request, self.devices = recipe.grpo, request, devices
        seq_len, new = request.workload.seq_len, recipe.grpo.max_completion_length
        self.new_tokens = min(new, seq_len)
        self.prompt_len = max(1, seq_len - new)
        self._requests: dict[int, PlanRequest] = {}
        self._outcomes: dict[int, list[Outcome]] = {}
        self._sampled: dict[tuple[object, ...], Sampling | str] = {}
        self._simulated: dict[tuple[object, ...], float] = {}

    def on(self, devices: int) -> PlanRequest:
        """The request for so many devices; ranks of this machine share its cores and memory."""
        if devices not in self._requests:
            r = self.request
            machine = r.supernode
            if machine.name == LOCAL and devices != r.num_devices:
                machine = detect_local(devices)
            self._requests[devices] = replace(r, num_devices=devices, supernode=machine)
        return self._requests[devices]

    @cached_property
    def capacity_bytes(self) -> float:
        """Memory of a rank while both roles are there."""
        return self.on(self.devices).machine.memory_bytes

    def learners(self, devices: int) -> list[Outcome]:
        """Layouts in which so many devices learn, for each number of sequences in a microbatch, the fastest first."""
        if devices not in self._outcomes:
            # Only ranks that sample too make a difference between layouts beside the seconds to learn.
            r, keep = self.on(devices), KEPT if devices == self.devices else 1
            sizes = Space(r).microbatches()
            pinned = [
                replace(r, pins={**r.pins, **({"microbatch": n} if len(sizes) > 1 and n else {})})
                for n in sizes
            ]
            self._outcomes[devices] = [o for q in pinned if (o := find(q, keep)).fits]
        return self._outcomes[devices]

    def splits(self) -> Iterator[tuple[int, int]]:
        """Ranks that only sample, and how many share a copy."""
        grpo, rows = self.grpo, self._rows(self.request.workload)
        given = grpo.rollout_ranks
        for ranks in range(self.devices) if given == "auto" else [given]:
            tps = self._tps if grpo.rollout_tp == "auto" and ranks else [grpo.copy_ranks]
            for tp in tps if ranks else [1]:
                even = ranks % tp == 0 and (rows is None or rows % max(1, ranks // tp) == 0)
                if even or grpo.rollout_tp != "auto" != given:
                    yield ranks, tp

    @cached_property
    def _tps(self) -> list[int]:
        """Degrees in which ranks can share a copy."""
        r, degrees = self.request, range(1, self.devices)
        return [t for t in degrees if r.refusal(Strategy(tp_x=t)) is None]

    @staticmethod
    def _rows(work: Workload) -> int | None:
        tokens = work.tokens_per_step
        return None if tokens is None else tokens // work.seq_len

    def split(self, ranks: int, tp: int, learner: _Learner) -> _Split | str:
        """A split with a layout of the ranks that learn, or why it has no price."""
        work, grpo = learner.workload, self.grpo
        rows, batch = self._rows(work) or 1, work.microbatch or 1
        slots, copies = batch, ranks // tp
        request, strategy = self.on(learner.strategy.world_size), learner.strategy
        if ranks:
            if ranks % tp or rows % copies:
                return "ranks that only sample do not share the completions evenly"
            slots, strategy = (
                math.gcd(rows // copies, batch),
                Strategy(tp_x=tp, dp_replicate=copies),
            )
            request = self.on(ranks)
        sampling = self._sampling(request, strategy, rows, slots)
        if isinstance(sampling, str):
            return sampling
        passes = (grpo.beta > 0) + (grpo.importance_sampling == "mask")
        learn_s = learner.step_s + passes * learner.forward_s
        held = sampling.memory_bytes
        if not ranks:
            held = learner.states_bytes + sampling.beside_bytes
        allowed = grpo.max_staleness if ranks else 0
        each = {s: self._step_s(sampling.seconds, learn_s, ranks, s) for s in {0, allowed or 1}}
        tokens = work.tokens_per_step or 1
        return _Split(ranks, tp, sampling, learn_s, each, allowed, held, tokens)

    def _sampling(
        self, request: PlanRequest, strategy: Strategy, rows: int, slots: int
    ) -> Sampling | str:
        if request.model.family not in FAMILIES_READ:
            return f"it is not known whether the cache of the family `{request.model.family}` has slots"
        s = strategy
        if s.tp_y > 1 or s.etp is not None:
            return "sampling is not priced with tensor parallelism on two axes"
        plain = Strategy(tp_x=s.tp_x, dp_replicate=s.dp_replicate, dp_shard=s.dp_shard, ep=s.ep)
        key = (request.num_devices, plain, rows, slots)
        if key not in self._sampled:
            work = GenerateWorkload(
                rows, self.prompt_len, self.new_tokens, request.workload.compute_dtype
            )
            # What is priced has as many devices as the strategy.
            self._sampled[key] = sampling_of(request, plain, work, slots)
        return self._sampled[key]

    def _step_s(self, sample_s: float, learn_s: float, ranks: int, staleness: int) -> float:
        """Steady seconds per step; both times are those of a role that works alone."""
        if not ranks:
            return sample_s + learn_s
        key = (sample_s, learn_s, ranks, staleness)
        if key not in self._simulated:
            roles = learners, samplers = self.devices - ranks, ranks
            machine = self.on(self.devices)
            pace = machine.machine.paces(self.devices)
            if machine.supernode.name == LOCAL and pace:
                # Of this machine the prices of so many ranks are known; a rank is slower when all work.
                learn_s, sample_s = learn_s * pace[learners - 1], sample_s * pace[samplers - 1]
            many = roles if any(p != 1.0 for p in pace) else (1, 1)
            graph = role_tasks(sample_s, learn_s, staleness, 4 * (staleness + 2), many)
            self._simulated[key] = steady_step_s(on_shared_cores(graph, pace))
        return self._simulated[key]

    def notes(self, split: _Split) -> Iterator[str]:
        """What a reader should know of the prediction."""
        yield (
            f"sampling is priced for prompts of {self.prompt_len} tokens and completions of {self.new_tokens}, the "
            "most there can be: an upper bound"
        )
        what = ["rewards"] + ["environments"] * bool(self.grpo.environment)
        what += ["the files between the roles"] * bool(split.ranks)
        yield f"not in the predicted step: {', '.join(what)}"

    def plan_of(self, best: _Split, found: Sequence[_Split]) -> RolesPlan:
        """The roles of a split, with the best of each other mode, and some of its own."""
        options: dict[tuple[int, int, int], _Split] = {}
        for split in sorted(found, key=lambda s: s.rank):
            for staleness in split.steps_s if split.ranks else [0]:
                options.setdefault(
                    (split.ranks, split.tp, staleness), replace(split, staleness=staleness)
                )
        chosen = (best.ranks, best.tp, best.staleness)
        others = sorted((o for key, o in options.items() if key != chosen), key=lambda o: o.rank)
        kept, modes, shown = [], set(), 0
        for o in others:
            mode = (o.ranks > 0, o.staleness)
            own = mode == (best.ranks > 0, best.staleness)
            if (own and shown < SHOWN) or (not own and mode not in modes):
                kept.append(o)
                shown += own
                modes.add(mode)
        return RolesPlan(
            best.ranks, best.tp, best.staleness, best.sampling.seconds, best.learn_s, best.step_s,
            best.held_bytes, tuple(_rejected(o, best) for o in kept),
        )  # fmt: skip


def _rejected(other: _Split, best: _Split) -> RejectedRoles:
    share = other.step_s / other.tokens / (best.step_s / best.tokens) - 1.0
    parts = f"sampling {format_seconds(other.sampling.seconds)}, learning {format_seconds(other.learn_s)}"
    if abs(share) < ROUNDING:
        reason = "as fast"
    elif share < 0:
        reason = f"faster by {-share:.1%}, with `grpo.max_staleness={other.staleness}`"
    else:
        reason = f"slower by {share:.1%}"
    return RejectedRoles(other.ranks, other.tp, other.staleness, other.step_s, f"{reason}: {parts}")


def _too_big(
    roles: _Roles, split: _Split, learner: _Learner, where: Callable[[str], str]
) -> DoesNotFit:
    """The error of ranks that have too little memory to sample, with a change that does."""
    held, capacity = split.held_bytes, roles.capacity_bytes
    hint = "a smaller model, or a machine with more memory"
    work, rows = learner.workload, _Roles._rows(learner.workload) or 1
    if split.ranks:
        for tp in range(split.tp + 1, split.ranks + 1):
            other = roles.split(split.ranks, tp, learner)
            if not isinstance(other, str) and other.fits(capacity):
                hint = f"grpo.rollout_tp={tp}"
                break
    if hint.startswith("a "):
        for batch in reversed([b for b in divisors(rows) if b < (work.microbatch or 1)]):
            fewer = replace(learner, workload=replace(work, microbatch=batch))
            other = roles.split(split.ranks, split.tp, fewer)
            if not isinstance(other, str) and other.fits(capacity):
                hint = f"training.microbatch={batch}"
                break
    s = split.sampling
    return DoesNotFit(
        f"{roles.request.model.name} does not fit on a rank that "
        + ("only samples" if split.ranks else "trains and samples"),
        where=where("grpo.rollout_ranks"),
        got=f"{format_bytes(held)}: {format_bytes(held - s.beside_bytes)} of weights"
        + ("" if split.ranks else " and optimizer states")
        + f", {format_bytes(s.beside_bytes)} of cache and a pass",
        allowed=f"up to {format_bytes(int(capacity))}",
        hint=hint,
    )
