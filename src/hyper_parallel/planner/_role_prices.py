"""Prices of a split of devices among the roles of `stage: grpo`: seconds to sample, learn and of a step, and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from hyper_parallel.config import Recipe
from hyper_parallel.ir import (
    GenerateWorkload,
    MemoryTerm,
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
from hyper_parallel.planner._generation_layouts import strategies_of
from hyper_parallel.planner._rollout_price import RolloutPrice, rollout_prices
from hyper_parallel.planner.pricing import PricedStrategy
from hyper_parallel.planner.refinement import Outcome, find
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.strategy_space import Space
from hyper_parallel.units import format_seconds

KEPT: Final = 1024
"""Layouts of ranks that do both: more than there are degrees, so that all of them are priced."""
SHOWN: Final = 4
"""Runners-up of the chosen mode that are kept."""
ROUNDING: Final = 1e-6
"""Steps that differ by less, relatively, are equal: simulated times are whole nanoseconds."""


def rows_of(work: Workload) -> int | None:
    """Sequences of a step; None where they follow from the layout."""
    tokens = work.tokens_per_step
    return None if tokens is None else tokens // work.seq_len


@dataclass(frozen=True, slots=True)
class Learner:
    """A layout of the ranks that learn, priced."""

    strategy: Strategy
    workload: Workload
    step_s: float
    stages: tuple[Stage, ...]
    memory: tuple[MemoryTerm, ...]

    @classmethod
    def of(cls, p: PricedStrategy) -> Learner:
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
class Split:
    """A split with a layout of the ranks that learn, and what both roles take."""

    ranks: int
    tp: int
    sampling: RolloutPrice
    learn_s: float
    steps_s: dict[
        int, float
    ]  # of an optimizer step, by staleness; 0 also where the same ranks do both
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


class Roles:
    """Prices of the splits of some devices."""

    def __init__(self, recipe: Recipe, request: PlanRequest, devices: int) -> None:
        self.grpo, self.request, self.devices = recipe.grpo, request.beside(devices), devices
        seq_len, new = request.workload.seq_len, recipe.grpo.max_completion_length
        self.new_tokens = min(new, seq_len)
        self.prompt_len = max(1, seq_len - new)
        self._requests: dict[int, PlanRequest] = {}
        self._outcomes: dict[int, list[Outcome]] = {}
        self._sampled: dict[tuple[Strategy, int, int], RolloutPrice | str] = {}
        self._weights: dict[Strategy, dict[str, int] | str] = {}
        self._simulated: dict[tuple[object, ...], float] = {}

    def on(self, devices: int) -> PlanRequest:
        """The request for so many of the devices."""
        if devices not in self._requests:
            self._requests[devices] = replace(self.request, num_devices=devices)
        return self._requests[devices]

    @cached_property
    def capacity_bytes(self) -> float:
        """Memory of a rank while both roles are there."""
        return self.on(self.devices).machine.memory_bytes

    def learners(self, devices: int) -> list[Outcome]:
        """The fastest layouts in which so many devices learn, for each number of sequences in a microbatch."""
        if devices not in self._outcomes:
            found = (find(q) for q, _ in self._by_batch(devices))
            self._outcomes[devices] = [o for o in found if o.fits]
        return self._outcomes[devices]

    def colocated(self, least_s_per_token: Callable[[], float]) -> Iterator[Outcome]:
        """All layouts of all devices that may sample and learn in less, for each number of sequences in a microbatch.

        Args:
            least_s_per_token: Of the best step so far. What the fastest sampling leaves of it bounds learning, so those
                with the fastest sampling come first.
        """
        rows, batches = rows_of(self.request.workload), []
        for r, batch in self._by_batch(self.devices):
            sampled = [] if rows is None or batch is None else self._all(r, rows, batch)
            each = min((s.seconds for s in sampled), default=0.0)
            batches.append((each / (r.workload.tokens_per_step or 1), r))
        for each, r in sorted(batches, key=lambda b: b[0]):
            left = least_s_per_token() - each
            if left > 0 and (outcome := find(r, KEPT, left)).fits:
                yield outcome

    def _by_batch(self, devices: int) -> Iterator[tuple[PlanRequest, int | None]]:
        r = self.on(devices)
        sizes = Space(r).microbatches()
        for n in sizes:
            pinned = n is not None and len(sizes) > 1
            yield (replace(r, pins={**r.pins, "microbatch": n}) if pinned and n else r), n

    def splits(self) -> Iterator[tuple[int, int]]:
        """Ranks that only sample, and how many share a copy."""
        grpo, rows = self.grpo, rows_of(self.request.workload)
        given = grpo.rollout_ranks
        for ranks in range(self.devices) if given == "auto" else [given]:
            tps = self._tps if grpo.rollout_tp == "auto" and ranks else [grpo.copy_tp]
            for tp in tps if ranks else [1]:
                size = self.copy(tp).world_size if ranks else 1
                even = ranks % size == 0 and (rows is None or rows % max(1, ranks // tp) == 0)
                if even or grpo.rollout_tp != "auto" != given:
                    yield ranks, tp

    @cached_property
    def _tps(self) -> list[int]:
        """Degrees in which ranks can share a copy."""
        r, degrees = self.request, range(1, self.devices)
        return [t for t in degrees if r.refusal(self.copy(t)) is None]

    def copy(self, tp: int) -> Strategy:
        """The layout of a copy that only samples, with so many ranks of tensor parallelism."""
        return Strategy(tp_x=tp, dp_shard=self.grpo.rollout_dp_shard, ep=self.grpo.rollout_ep)

    def split(self, ranks: int, tp: int, learner: Learner) -> Split | str:
        """A split with a layout of the ranks that learn, or why it has no price."""
        work, grpo = learner.workload, self.grpo
        rows, batch = rows_of(work) or 1, work.microbatch or 1
        slots, shares = batch, ranks // tp
        request, strategy = self.on(learner.strategy.world_size), learner.strategy
        if ranks:
            copy = self.copy(tp)
            if ranks % copy.world_size or rows % shares:
                return "ranks that only sample do not share the completions evenly"
            slots = math.gcd(rows // shares, batch)
            request, strategy = self.on(ranks), replace(copy, dp_replicate=ranks // copy.world_size)
        sampling = self._sampling(request, strategy, rows, slots)
        if isinstance(sampling, str):
            return sampling
        by_samplers = ranks > 0 and grpo.reference_on_samplers
        passes = (grpo.beta > 0 and not by_samplers) + (grpo.importance_sampling == "mask")
        learn_s = grpo.num_iterations * learner.step_s + passes * learner.forward_s
        if ranks:
            learners = learner.strategy.world_size
            sample_s = sampling.seconds
            if by_samplers:  # as many products as where ranks that learn make the pass
                sample_s += learner.forward_s * learners / ranks
            sampling = replace(sampling, seconds=sample_s / self._pace(ranks))
            learn_s /= self._pace(learners)
        held = sampling.memory_bytes
        if not ranks:
            held = learner.states_bytes + sampling.beside_bytes
        elif by_samplers:
            held += int(sampling.weight_bytes * work.trained)
        allowed = grpo.max_staleness if ranks else 0
        each = {
            s: self._step_s(sampling.seconds, learn_s, ranks, s) / grpo.num_iterations
            for s in {0, allowed or 1}
        }
        tokens = work.tokens_per_step or 1
        return Split(ranks, tp, sampling, learn_s, each, allowed, held, tokens)

    def _sampling(
        self, request: PlanRequest, strategy: Strategy, rows: int, slots: int
    ) -> RolloutPrice | str:
        if request.model.family not in FAMILIES_READ:
            return f"it is not known whether the cache of the family `{request.model.family}` has slots"
        if self.grpo.exact_logprobs:
            return "sampling without a cache is not priced"
        s = strategy
        if s.tp_y > 1 or s.etp is not None:
            return "sampling is not priced with tensor parallelism on two axes"
        plain = Strategy(tp_x=s.tp_x, dp_replicate=s.dp_replicate, dp_shard=s.dp_shard, ep=s.ep)
        key = (plain, rows, slots)
        if key not in self._sampled:
            self._price(request, [plain], rows, slots)
        return self._sampled[key]

    def _all(self, request: PlanRequest, rows: int, slots: int) -> list[RolloutPrice]:
        """What sampling takes in all layouts of the devices."""
        devices = [s for s in strategies_of(request) if s.pp == 1 and rows % s.dp == 0]
        self._price(
            request, [s for s in devices if (s, rows, slots) not in self._sampled], rows, slots
        )
        found = (self._sampled[s, rows, slots] for s in devices)
        return [s for s in found if not isinstance(s, str)]

    def _price(
        self, request: PlanRequest, strategies: Sequence[Strategy], rows: int, slots: int
    ) -> None:
        dtype = request.workload.compute_dtype
        work = GenerateWorkload(rows, self.prompt_len, self.new_tokens, dtype)
        priced = rollout_prices(request, strategies, work, slots, self._weights)
        self._sampled |= {(s, rows, slots): p for s, p in zip(strategies, priced, strict=True)}

    def _step_s(self, sample_s: float, learn_s: float, ranks: int, staleness: int) -> float:
        """Steady seconds per step; both times are those of a role that works alone."""
        if not ranks:
            return sample_s + learn_s
        key = (sample_s, learn_s, ranks, staleness)
        if key not in self._simulated:
            roles = learners, samplers = self.devices - ranks, ranks
            learn_s, sample_s = learn_s * self._pace(learners), sample_s * self._pace(samplers)
            pace = self.on(self.devices).machine.paces(self.devices)
            many = roles if any(p != 1.0 for p in pace) else (1, 1)
            graph = role_tasks(sample_s, learn_s, staleness, 4 * (staleness + 2), many)
            self._simulated[key] = steady_step_s(on_shared_cores(graph, pace), staleness)
        return self._simulated[key]

    def _pace(self, ranks: int) -> float:
        """Speed of a rank while so many work, against all of them at work, for which everything is priced."""
        return (self.on(self.devices).machine.paces(self.devices) or [1.0] * ranks)[ranks - 1]

    def notes(self, split: Split) -> Iterator[str]:
        """What a reader should know of the prediction."""
        yield (
            f"sampling is priced for prompts of {self.prompt_len} tokens and completions of {self.new_tokens}, the "
            "most there can be: an upper bound"
        )
        what = ["rewards"] + ["environments"] * bool(self.grpo.environment)
        what += ["the files between the roles"] * bool(split.ranks)
        yield f"not in the predicted step: {', '.join(what)}"

    def plan_of(self, best: Split, found: Sequence[Split]) -> RolesPlan:
        """The roles of a split, with the best of each other mode, and some of its own."""
        every = [
            replace(split, staleness=staleness)
            for split in found
            for staleness in (split.steps_s if split.ranks else [0])
        ]
        options: dict[tuple[int, int, int], Split] = {}
        for split in sorted(every, key=lambda s: s.rank):
            options.setdefault((split.ranks, split.tp, split.staleness), split)
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


def _rejected(other: Split, best: Split) -> RejectedRoles:
    share = other.step_s / other.tokens / (best.step_s / best.tokens) - 1.0
    parts = f"sampling {format_seconds(other.sampling.seconds)}, learning {format_seconds(other.learn_s)}"
    if abs(share) < ROUNDING:
        reason = "as fast"
    elif share < 0:
        reason = f"faster by {-share:.1%}, with `grpo.max_staleness={other.staleness}`"
    else:
        reason = f"slower by {share:.1%}"
    return RejectedRoles(other.ranks, other.tp, other.staleness, other.step_s, f"{reason}: {parts}")
