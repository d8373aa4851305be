"""Predicted time and memory of `stage: grpo`, for each split of the devices between sampling and learning.

Sampling is priced by the forward passes of `plan_generation`, with two differences. A rank samples its completions in
rounds of one completion per slot. Weights are stored in the parameter format, so every pass casts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from hyper_parallel.config import Recipe
from hyper_parallel.cost.generation_passes import pass_seconds
from hyper_parallel.ir import (
    GenerateWorkload,
    MemoryTerm,
    RejectedRoles,
    RolesPlan,
    Stage,
    Strategy,
    Workload,
    role_tasks,
)
from hyper_parallel.model import FAMILIES_READ
from hyper_parallel.mpmd import on_shared_cores
from hyper_parallel.planner._generation_layouts import (
    StagedLayout,
    cut_into_stages,
    layer_kinds_of,
    layout_candidates,
    local_bytes,
    pass_memory,
    pricing_case,
)
from hyper_parallel.planner.pricing import PricedStrategy
from hyper_parallel.planner.refinement import Outcome, find_best
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.strategy_space import Space
from hyper_parallel.sim import steady_step_s
from hyper_parallel.units import DTYPE_BYTES, format_seconds


@dataclass(frozen=True, slots=True)
class RolloutPrice:
    """Predicted seconds to sample the completions of one step, and bytes on a rank."""

    seconds: float
    weight_bytes: int
    working_bytes: int  # keys and values in the slots, and memory of a pass

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of a rank that only samples."""
        return self.weight_bytes + self.working_bytes


def rollout_prices(
    r: PlanRequest,
    strategies: Sequence[Strategy],
    work: GenerateWorkload,
    slots: int,
    cache: dict[Strategy, dict[str, int] | str],
) -> list[RolloutPrice | str]:
    """Return, for each strategy, the predicted time and memory of sampling, or the reason why there is no prediction.

    Args:
        r: Model, machine and formats.
        strategies: Degrees of dp_replicate, dp_shard, tp_x and ep.
        work: Completions of the step over all ranks, and their lengths.
        slots: Completions that a data-parallel rank samples at a time.
        cache: Results of `local_bytes` by the strategy of one replica; new results are added.
    """
    prices: dict[Strategy, RolloutPrice | str] = {}
    layouts = []
    for s in strategies:
        single_replica = replace(s, dp_replicate=1)
        if single_replica not in cache:
            cache[single_replica] = local_bytes(r, single_replica)
        sizes = cache[single_replica]
        if isinstance(sizes, str):
            prices[s] = sizes
        else:
            layouts.append(cut_into_stages(r, work, s, sizes))
    if layouts:
        priced = zip(layouts, _priced(r, layouts, work, slots), strict=True)
        prices |= {x.strategy: sampling for x, sampling in priced}
    return [prices[s] for s in strategies]


def _priced(
    r: PlanRequest, layouts: Sequence[StagedLayout], work: GenerateWorkload, slots: int
) -> Iterator[RolloutPrice]:
    """Yield the predicted time and memory of sampling in each layout."""
    case, w, num_layouts = pricing_case(r, layouts, float(slots)), r.workload, len(layouts)
    prefill, decode = (
        sum((np.broadcast_to(v, num_layouts) for v in terms.values()), np.zeros(num_layouts))
        for terms in pass_seconds(case, [*layer_kinds_of(r)], work)
    )
    fixed, per_sequence, _ = pass_memory(r, work, layouts)
    passes = work.prompt_passes + work.new_tokens - 1
    stored_width, compute_width = DTYPE_BYTES[w.param_dtype], DTYPE_BYTES[w.compute_dtype]
    # Casts of the current and the next layer, embedding and head; `fixed` includes those of gathered weights.
    inside = 2.0 * (case.dense() + case.experts()) + case.ends(case.outside)
    casts = float(stored_width != compute_width)
    cast = compute_width * np.where(case.c.dp_shard > 1, 0.0, inside) * casts
    cast = np.broadcast_to(cast, num_layouts)
    for i, x in enumerate(layouts):
        weights = int(np.max(x.weights))
        moved_bytes = weights / stored_width * (stored_width + compute_width)
        cast_s = moved_bytes / r.machine.passing_bytes_s * casts
        round_s = prefill[i] + (work.new_tokens - 1) * decode[i] + passes * cast_s
        working = slots * int(np.max(x.cache)) + fixed[i] + slots * per_sequence[i] + cast[i]
        yield RolloutPrice(float(-(-x.needed // slots) * round_s), weights, int(working))


MAX_LAYOUTS: Final = 1024
"""Maximum number of learner layouts that a search returns if all ranks both sample and learn.

It exceeds the number of combinations of degrees, so all of them are priced.
"""
MAX_RUNNERS_UP: Final = 4
"""Maximum number of runners-up in the plan that share the kind of split and the staleness of the best one."""
ROUNDING: Final = 1e-6
"""Relative difference below which two step times count as equal: simulated times are whole nanoseconds."""


def rows_of(work: Workload) -> int | None:
    """Return the number of sequences of a step; None if it follows from the layout."""
    tokens = work.tokens_per_step
    return None if tokens is None else tokens // work.seq_len


@dataclass(frozen=True, slots=True)
class Learner:
    """Layout of the ranks that learn, with its predicted time and memory."""

    strategy: Strategy
    workload: Workload
    step_s: float
    stages: tuple[Stage, ...]
    memory: tuple[MemoryTerm, ...]

    @classmethod
    def of(cls, p: PricedStrategy) -> Learner:
        """Return the learner with the layout and the predictions of a priced strategy."""
        return cls(p.strategy, p.workload, p.step_s, p.stages, p.memory)

    @property
    def forward_s(self) -> float:
        """Seconds of one forward pass over all sequences of a step."""
        each = sum(stage.cost.forward_s + stage.cost.exposed_forward_s for stage in self.stages)
        return each * (self.workload.accumulation_steps or 1)

    @property
    def states_bytes(self) -> int:
        """Bytes that a rank keeps between two steps: parameters and optimizer states."""
        return sum(t.bytes for t in self.memory if t.name in ("parameters", "optimizer states"))


@dataclass(frozen=True, slots=True)
class Split:
    """Split of the devices between sampling and learning, with the predicted seconds and bytes of both roles.

    `ranks` devices only sample, in replicas of `tp` ranks each; with 0, all devices both sample and learn.
    """

    ranks: int
    tp: int
    sampling: RolloutPrice
    learn_s: float
    # Seconds of an optimizer step by staleness; devices with both roles have staleness 0
    steps_s: dict[int, float]
    staleness: int
    memory_bytes: int  # of a rank while it samples; learner states included if it also learns
    tokens: int

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step at the chosen staleness."""
        return self.steps_s[self.staleness]

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Sort key, best first: seconds per token, then `ranks`, `tp` and seconds of learning, the smaller first."""
        per_token = self.step_s / self.tokens
        digits = -math.floor(math.log10(per_token * ROUNDING))
        return round(per_token, digits), self.ranks, self.tp, self.learn_s

    def fits(self, capacity_bytes: float) -> bool:
        """Return whether the peak of a rank that samples is at most `capacity_bytes`."""
        return self.memory_bytes <= capacity_bytes


class Roles:
    """Predicted time and memory of every split of `devices` devices between sampling and learning, cached."""

    def __init__(self, recipe: Recipe, request: PlanRequest, devices: int) -> None:
        self.grpo = recipe.grpo
        self.request = request.sharing_cores_with(devices)
        self.devices = devices
        seq_len, new = request.workload.seq_len, recipe.grpo.max_completion_length
        self.new_tokens = min(new, seq_len)
        self.prompt_len = max(1, seq_len - new)
        self._requests: dict[int, PlanRequest] = {}
        self._outcomes: dict[int, list[Outcome]] = {}
        self._sampled: dict[tuple[Strategy, int, int], RolloutPrice | str] = {}
        self._weights: dict[Strategy, dict[str, int] | str] = {}
        self._simulated: dict[tuple[object, ...], float] = {}

    def for_devices(self, devices: int) -> PlanRequest:
        """Return the planning request for a subset of the devices, `devices` in number."""
        if devices not in self._requests:
            self._requests[devices] = replace(self.request, num_devices=devices)
        return self._requests[devices]

    @cached_property
    def capacity_bytes(self) -> float:
        """Usable memory of a rank in bytes, while all devices run."""
        return self.for_devices(self.devices).machine.memory_bytes

    def learners(self, devices: int) -> list[Outcome]:
        """Return the search results for learners on `devices` devices, one per microbatch size that fits."""
        if devices not in self._outcomes:
            outcomes = (find_best(q) for q, _ in self._by_batch(devices))
            self._outcomes[devices] = [o for o in outcomes if o.fits]
        return self._outcomes[devices]

    def colocated(self, least_s_per_token: Callable[[], float]) -> Iterator[Outcome]:
        """Yield search results for devices that both sample and learn, one per microbatch size.

        A result contains every layout that may beat the best step so far: its learning must take less than that step
        minus the fastest sampling. Microbatch sizes with the fastest sampling come first.

        Args:
            least_s_per_token: Function that returns the seconds per token of the best step so far.
        """
        rows, batches = rows_of(self.request.workload), []
        for r, batch in self._by_batch(self.devices):
            sampled = (
                [] if rows is None or batch is None else self._price_all_layouts(r, rows, batch)
            )
            each = min((s.seconds for s in sampled), default=0.0)
            batches.append((each / (r.workload.tokens_per_step or 1), r))
        for each, r in sorted(batches, key=lambda b: b[0]):
            remaining = least_s_per_token() - each
            if remaining > 0 and (outcome := find_best(r, MAX_LAYOUTS, remaining)).fits:
                yield outcome

    def _by_batch(self, devices: int) -> Iterator[tuple[PlanRequest, int | None]]:
        """Yield (request, microbatch size) for each size; None is a size that follows from the other batch numbers."""
        r = self.for_devices(devices)
        sizes = Space(r).microbatches()
        for n in sizes:
            pinned = n is not None and len(sizes) > 1
            yield (replace(r, pins={**r.pins, "microbatch": n}) if pinned and n else r), n

    def splits(self) -> Iterator[tuple[int, int]]:
        """Yield (ranks that only sample, tensor-parallel ranks of a sampler replica) for every split to price."""
        grpo, rows = self.grpo, rows_of(self.request.workload)
        rollout_ranks = grpo.rollout_ranks
        for ranks in range(self.devices) if rollout_ranks == "auto" else [rollout_ranks]:
            tps = self._tps if grpo.rollout_tp == "auto" and ranks else [grpo.copy_tp]
            for tp in tps if ranks else [1]:
                size = self.sampler_strategy(tp).world_size if ranks else 1
                even = ranks % size == 0 and (rows is None or rows % max(1, ranks // tp) == 0)
                if even or grpo.rollout_tp != "auto" != rollout_ranks:
                    yield ranks, tp

    @cached_property
    def _tps(self) -> list[int]:
        """Legal tensor-parallel degrees of a sampler replica."""
        r, degrees = self.request, range(1, self.devices)
        return [t for t in degrees if r.refusal(self.sampler_strategy(t)) is None]

    def sampler_strategy(self, tp: int) -> Strategy:
        """Return the strategy of one sampler replica with `tp` tensor-parallel ranks."""
        return Strategy(tp_x=tp, dp_shard=self.grpo.rollout_dp_shard, ep=self.grpo.rollout_ep)

    def split(self, ranks: int, tp: int, learner: Learner) -> Split | str:
        """Return the predicted split with the given learner layout, or the reason why there is no prediction.

        Args:
            ranks: Ranks that only sample; 0: the learner's ranks also sample.
            tp: Tensor-parallel ranks of a sampler replica.
            learner: Layout of the ranks that learn.
        """
        work, grpo = learner.workload, self.grpo
        rows, batch = rows_of(work) or 1, work.microbatch or 1
        slots, shares = batch, ranks // tp
        request, strategy = self.for_devices(learner.strategy.world_size), learner.strategy
        if ranks:
            copy = self.sampler_strategy(tp)
            if ranks % copy.world_size or rows % shares:
                return "ranks that only sample do not share the completions evenly"
            slots = math.gcd(rows // shares, batch)
            request = self.for_devices(ranks)
            strategy = replace(copy, dp_replicate=ranks // copy.world_size)
        sampling = self._sampling(request, strategy, rows, slots)
        if isinstance(sampling, str):
            return sampling
        by_samplers = ranks > 0 and grpo.reference_on_samplers
        passes = (grpo.beta > 0 and not by_samplers) + (grpo.importance_sampling == "mask")
        learn_s = grpo.num_iterations * learner.step_s + passes * learner.forward_s
        if ranks:
            learners = learner.strategy.world_size
            sample_s = sampling.seconds
            if by_samplers:  # the FLOPs of the reference pass do not depend on the role
                sample_s += learner.forward_s * learners / ranks
            sampling = replace(sampling, seconds=sample_s / self._relative_speed(ranks))
            learn_s /= self._relative_speed(learners)
        memory_bytes = sampling.memory_bytes
        if not ranks:
            memory_bytes = learner.states_bytes + sampling.working_bytes
        elif by_samplers:
            memory_bytes += int(sampling.weight_bytes * work.trained)
        allowed = grpo.max_staleness if ranks else 0
        each = {
            s: self._step_s(sampling.seconds, learn_s, ranks, s) / grpo.num_iterations
            for s in {0, allowed or 1}
        }
        tokens = work.tokens_per_step or 1
        return Split(ranks, tp, sampling, learn_s, each, allowed, memory_bytes, tokens)

    def _sampling(
        self, request: PlanRequest, strategy: Strategy, rows: int, slots: int
    ) -> RolloutPrice | str:
        """Return the predicted time and memory of sampling in one layout, or the reason why there is no prediction."""
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

    def _price_all_layouts(self, request: PlanRequest, rows: int, slots: int) -> list[RolloutPrice]:
        """Return the predicted time and memory of sampling, for every layout of the devices with a prediction."""
        devices = [s for s in layout_candidates(request) if s.pp == 1 and rows % s.dp == 0]
        self._price(
            request, [s for s in devices if (s, rows, slots) not in self._sampled], rows, slots
        )
        prices = (self._sampled[s, rows, slots] for s in devices)
        return [s for s in prices if not isinstance(s, str)]

    def _price(
        self, request: PlanRequest, strategies: Sequence[Strategy], rows: int, slots: int
    ) -> None:
        """Predict time and memory of sampling in the layouts `strategies`, and store the results in `_sampled`."""
        dtype = request.workload.compute_dtype
        work = GenerateWorkload(rows, self.prompt_len, self.new_tokens, dtype)
        priced = rollout_prices(request, strategies, work, slots, self._weights)
        self._sampled |= {(s, rows, slots): p for s, p in zip(strategies, priced, strict=True)}

    def _step_s(self, sample_s: float, learn_s: float, ranks: int, staleness: int) -> float:
        """Return the steady-state seconds per step of both roles.

        `sample_s` and `learn_s` are the seconds of each role while the ranks of the other role are idle.
        """
        if not ranks:
            return sample_s + learn_s
        key = (sample_s, learn_s, ranks, staleness)
        if key not in self._simulated:
            roles = learners, samplers = self.devices - ranks, ranks
            learn_s, sample_s = (
                learn_s * self._relative_speed(learners),
                sample_s * self._relative_speed(samplers),
            )
            pace = self.for_devices(self.devices).machine.paces(self.devices)
            many = roles if any(p != 1.0 for p in pace) else (1, 1)
            graph = role_tasks(sample_s, learn_s, staleness, 4 * (staleness + 2), many)
            self._simulated[key] = steady_step_s(on_shared_cores(graph, pace), staleness)
        return self._simulated[key]

    def _relative_speed(self, ranks: int) -> float:
        """Return the speed of a rank while `ranks` ranks run, relative to its speed while all ranks run."""
        return (self.for_devices(self.devices).machine.paces(self.devices) or [1.0] * ranks)[
            ranks - 1
        ]

    def notes(self, split: Split) -> Iterator[str]:
        """Yield notes about the limits of the prediction for a split."""
        yield (
            f"sampling is priced for the longest prompts ({self.prompt_len} tokens) and completions "
            f"({self.new_tokens} tokens): an upper bound"
        )
        omitted = ["rewards"] + ["environments"] * bool(self.grpo.environment)
        omitted += ["file exchange between the roles"] * bool(split.ranks)
        yield f"not in the predicted step: {', '.join(omitted)}"

    def plan_of(self, best: Split, splits: Sequence[Split]) -> RolesPlan:
        """Return the plan section of the best split, with the splits that lost.

        Splits are grouped by mode: their staleness, and whether the two roles share ranks. The plan lists the
        runners-up in the mode of the best split, and the best split of every other mode.
        """
        candidates = [
            replace(split, staleness=staleness)
            for split in splits
            for staleness in (split.steps_s if split.ranks else [0])
        ]
        options: dict[tuple[int, int, int], Split] = {}
        for split in sorted(candidates, key=lambda s: s.sort_key):
            options.setdefault((split.ranks, split.tp, split.staleness), split)
        chosen = (best.ranks, best.tp, best.staleness)
        alternatives = sorted(
            (o for key, o in options.items() if key != chosen), key=lambda o: o.sort_key
        )
        selected, modes, num_shown = [], set(), 0
        for o in alternatives:
            mode = (o.ranks > 0, o.staleness)
            own = mode == (best.ranks > 0, best.staleness)
            if (own and num_shown < MAX_RUNNERS_UP) or (not own and mode not in modes):
                selected.append(o)
                num_shown += own
                modes.add(mode)
        return RolesPlan(
            best.ranks, best.tp, best.staleness, best.sampling.seconds, best.learn_s, best.step_s,
            best.memory_bytes, tuple(_rejected(o, best) for o in selected),
        )  # fmt: skip


def _rejected(other: Split, best: Split) -> RejectedRoles:
    """Return the plan entry of a split that lost, with the reason."""
    share = other.step_s / other.tokens / (best.step_s / best.tokens) - 1.0
    parts = f"sampling {format_seconds(other.sampling.seconds)}, learning {format_seconds(other.learn_s)}"
    if abs(share) < ROUNDING:
        reason = "as fast"
    elif share < 0:
        reason = f"faster by {-share:.1%}, with `grpo.max_staleness={other.staleness}`"
    else:
        reason = f"slower by {share:.1%}"
    return RejectedRoles(other.ranks, other.tp, other.staleness, other.step_s, f"{reason}: {parts}")
