"""Predicted time and memory of `stage: grpo`, for each split of the devices between sampling and learning.

A learner is a layout of the ranks that learn; its step is a training step plus forward passes. A sampler replica is a
group of ranks with a full model that only samples, priced as a layout for generation. A slot is the memory for one
completion at a time; ranks sample in rounds of one completion per slot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias

from hyper_parallel.config import Recipe
from hyper_parallel.ir import GenerateWorkload, Plan, RejectedRoles, RolesPlan, Strategy, role_tasks
from hyper_parallel.model import FAMILIES_READ
from hyper_parallel.mpmd import on_shared_cores
from hyper_parallel.planner._generation_layouts import GenerationLayout, GenerationPricer
from hyper_parallel.planner.pricing import PricedStrategy
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.planner.strategy_space import Space
from hyper_parallel.sim import steady_step_s
from hyper_parallel.units import format_seconds

Learner: TypeAlias = Plan | PricedStrategy
"""Layout of the ranks that learn, with its predicted time and memory."""
MAX_RUNNERS_UP: Final = 4
"""Maximum number of runners-up with the staleness and the placement (separate ranks or not) of the best split."""
ROUNDING: Final = 1e-6
"""Relative difference below which two step times count as equal: simulated times are whole nanoseconds."""


@dataclass(frozen=True, slots=True)
class Split:
    """Split of the devices between sampling and learning, with the predicted seconds and bytes of both roles."""

    ranks: int  # ranks that only sample; 0: all ranks both sample and learn
    tp: int  # tensor-parallel ranks of a sampler replica
    learner: Learner
    # seconds to sample one rollout while no rank learns, with the reference pass if samplers compute it
    sample_s: float
    learn_s: float  # seconds to learn from one rollout, with all extra forward passes, while no rank samples
    # dict from staleness (maximum age of the sampling weights, in rollouts) to seconds of an optimizer step
    steps_s: dict[int, float]
    staleness: int  # chosen staleness
    # bytes on a rank while it samples, optimizer states included if the rank also learns
    memory_bytes: int
    working_bytes: int  # part of `memory_bytes` for the KV cache and the forward passes

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step at the chosen staleness."""
        return self.steps_s[self.staleness]

    @property
    def per_token_s(self) -> float:
        """Seconds of an optimizer step divided by its tokens."""
        return self.step_s / (self.learner.workload.tokens_per_step or 1)

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Sort key, smallest for the best split: seconds per token rounded to `ROUNDING`, `ranks`, `tp`, `learn_s`."""
        digits = -math.floor(math.log10(self.per_token_s * ROUNDING))
        return round(self.per_token_s, digits), self.ranks, self.tp, self.learn_s


class Roles:
    """Predictor of time and memory for all splits of the devices between sampling and learning; caches results.

    Attributes:
        grpo: Section `grpo` of the recipe.
        request: Inputs of the planner, for all devices.
        devices: Number of devices of both roles together.
        rows: Number of sequences per step; None if `tokens_per_step` is not set.
        new_tokens: Maximum number of tokens of a completion.
        prompt_len: Maximum number of tokens of a prompt.
    """

    def __init__(self, recipe: Recipe, request: PlanRequest, devices: int) -> None:
        self.grpo, self.devices = recipe.grpo, devices
        self.request = replace(request.sharing_cores_with(devices), num_devices=devices)
        seq_len, tokens = request.workload.seq_len, request.workload.tokens_per_step
        self.rows = None if tokens is None else tokens // seq_len
        self.new_tokens = min(recipe.grpo.max_completion_length, seq_len)
        self.prompt_len = max(1, seq_len - recipe.grpo.max_completion_length)
        self._pricers: dict[int, GenerationPricer] = {}
        self._sampling: dict[tuple[Strategy, int, int], GenerationLayout | str] = {}

    @cached_property
    def capacity_bytes(self) -> int:
        """Bytes of memory that a rank may use."""
        return self.request.machine.memory_bytes

    @cached_property
    def _pace(self) -> tuple[float, ...]:
        """Speed of a rank while 1, 2, ... ranks run, relative to its speed while all run; () for separate cores."""
        return self.request.machine.paces(self.devices)

    def _speed(self, ranks: int) -> float:
        return self._pace[ranks - 1] if self._pace else 1.0

    def requests(self, devices: int) -> list[PlanRequest]:
        """Return one request per microbatch size, for learners on `devices` devices."""
        r = replace(self.request, num_devices=devices)
        if len(self._microbatches) == 1:
            return [r]
        return [replace(r, pins={**r.pins, "microbatch": n or 1}) for n in self._microbatches]

    @cached_property
    def _microbatches(self) -> Sequence[int | None]:
        """Microbatch sizes to try on any number of devices; None: derived from the other batch numbers."""
        return Space(self.request).microbatches()

    def colocated(self) -> list[tuple[float, PlanRequest]]:
        """Return (lower bound, request) for each microbatch size, for ranks that both sample and learn.

        The lower bound is the fastest sampling over all layouts, in seconds per token of an optimizer step. It is 0 if
        the tokens per step or the microbatch size are not set, or if no layout can be priced.
        """
        bounds, tokens = [], self.grpo.num_iterations * (self.request.workload.tokens_per_step or 1)
        for r, batch in zip(self.requests(self.devices), self._microbatches, strict=True):
            times = [0.0]
            if self.rows and batch:
                strategies = self._pricer(self.rows).candidates()
                usable = [s for s in strategies if s.pp == 1 and self.rows % s.dp == 0]
                priced = self._price(usable, self.rows, batch)
                times = [_rounds_s(p, self.rows, s) for s, p in priced if not isinstance(p, str)]
            bounds.append((min(times, default=0.0) / tokens, r))
        return bounds

    def splits(self) -> Iterator[tuple[int, int]]:
        """Yield (ranks that only sample, tensor-parallel ranks of a replica) per split; (0, 1): all ranks do both.

        Uneven splits are omitted, unless the recipe sets both `rollout_ranks` and `rollout_tp`.
        """
        grpo, rows = self.grpo, self.rows
        rollout_ranks, tps = grpo.rollout_ranks, [grpo.copy_tp]
        if grpo.rollout_tp == "auto" and rollout_ranks != 0:
            degrees, refusal = range(1, self.devices), self.request.refusal
            tps = [t for t in degrees if refusal(self.sampler_strategy(t)) is None]
        for ranks in range(self.devices) if rollout_ranks == "auto" else [rollout_ranks]:
            for tp in tps if ranks else [1]:
                size = self.sampler_strategy(tp).world_size if ranks else 1
                even = ranks % size == 0 and (rows is None or rows % max(1, ranks // tp) == 0)
                if even or grpo.rollout_tp != "auto" != rollout_ranks:
                    yield ranks, tp

    def sampler_strategy(self, tp: int) -> Strategy:
        """Return the strategy of one sampler replica with `tp` tensor-parallel ranks."""
        return Strategy(tp_x=tp, dp_shard=self.grpo.rollout_dp_shard, ep=self.grpo.rollout_ep)

    def split(self, ranks: int, tp: int, learner: Learner) -> Split | str:
        """Return the predictions for a split and a learner layout, or the reason why there is no prediction.

        `ranks` is the number of ranks that only sample, with `tp` tensor-parallel ranks per replica. If it is 0, the
        ranks of the learner also sample.
        """
        work, grpo, strategy = learner.workload, self.grpo, learner.strategy
        rows = (work.tokens_per_step or 0) // work.seq_len or 1
        slots, learners = work.microbatch or 1, strategy.world_size
        if ranks:
            copy, shares = self.sampler_strategy(tp), ranks // tp
            if ranks % copy.world_size or rows % shares:
                return "ranks that only sample do not share the completions evenly"
            slots = math.gcd(rows // shares, slots)
            strategy = replace(copy, dp_replicate=ranks // copy.world_size)
        if reason := self._unpriced(strategy):
            return reason
        axes = ("tp_x", "dp_replicate", "dp_shard", "ep")
        s = Strategy(**{name: getattr(strategy, name) for name in axes})
        ((_, price),) = self._price([s], rows, slots)
        if isinstance(price, str):
            return price
        # One forward pass over all sequences of a step.
        forward_s = sum(stage.cost.forward_s + stage.cost.exposed_forward_s for stage in learner.stages)
        forward_s *= work.accumulation_steps or 1
        by_samplers = ranks > 0 and grpo.reference_on_samplers
        passes = (grpo.beta > 0 and not by_samplers) + (grpo.importance_sampling == "mask")
        sample_s = _rounds_s(price, rows, s)
        learn_s = grpo.num_iterations * learner.step_s + passes * forward_s
        working, resident = price.memory_bytes - price.weight_bytes, price.weight_bytes
        if ranks:
            if by_samplers:  # the FLOPs of the reference pass do not depend on the role
                sample_s += forward_s * learners / ranks
                resident += int(price.weight_bytes * work.trained)
            sample_s /= self._speed(ranks)
            learn_s /= self._speed(learners)
        else:
            resident = sum(t.bytes for t in learner.memory if t.name in _STATES)
        allowed = grpo.max_staleness if ranks else 0
        each = {
            n: self._step_s(sample_s, learn_s, ranks, n) / grpo.num_iterations
            for n in ({0, allowed or 1} if ranks else {0})
        }
        memory = resident + working
        return Split(ranks, tp, learner, sample_s, learn_s, each, allowed, memory, working)

    def _unpriced(self, s: Strategy) -> str | None:
        """Return why sampling with a strategy cannot be predicted; None if it can. Legality is not checked."""
        if (family := self.request.model.family) not in FAMILIES_READ:
            return f"for the family `{family}`, it is not known whether several sequences can be decoded at a time"
        if self.grpo.exact_logprobs:
            return "sampling without a cache is not priced"
        if s.tp_y > 1:
            return "sampling is not priced with tensor parallelism on two axes"
        return None

    def _pricer(self, rows: int) -> GenerationPricer:
        """Return the predictor for `rows` completions of maximum length, from prompts of maximum length."""
        if rows not in self._pricers:
            dtype = self.request.workload.compute_dtype
            work = GenerateWorkload(rows, self.prompt_len, self.new_tokens, dtype)
            self._pricers[rows] = GenerationPricer(self.request, work)
        return self._pricers[rows]

    def _price(
        self, strategies: Sequence[Strategy], rows: int, slots: int
    ) -> list[tuple[Strategy, GenerationLayout | str]]:
        """Return each strategy with the predictions for sampling, or with the reason why there are none.

        A rollout has `rows` completions; a data-parallel rank samples `slots` of them at a time.
        """
        pricer, prices = self._pricer(rows), self._sampling
        new = [s for s in strategies if (s, rows, slots) not in prices]
        layouts = [pricer.layout(s) for s in new]
        legal = [x for x in layouts if not isinstance(x, str)]
        priced = iter(pricer.price(legal, slots) if legal else [])
        for s, x in zip(new, layouts, strict=True):
            prices[s, rows, slots] = x if isinstance(x, str) else next(priced)
        return [(s, prices[s, rows, slots]) for s in strategies]

    def _step_s(self, sample_s: float, learn_s: float, ranks: int, staleness: int) -> float:
        """Return the steady-state seconds to sample a rollout and learn from it; for separate ranks, by simulation.

        `sample_s` and `learn_s` are the seconds of each role while the ranks of the other role are idle.
        """
        if not ranks:
            return sample_s + learn_s
        learners, pace = self.devices - ranks, self._pace
        learn_s, sample_s = learn_s * self._speed(learners), sample_s * self._speed(ranks)
        many = (learners, ranks) if any(p != 1.0 for p in pace) else (1, 1)
        graph = role_tasks(sample_s, learn_s, staleness, 4 * (staleness + 2), many)
        return steady_step_s(on_shared_cores(graph, pace), staleness)

    def notes(self, split: Split) -> Iterator[str]:
        """Yield notes about the limits of the prediction for a split."""
        yield (
            f"sampling is priced for the longest prompts ({self.prompt_len} tokens) and completions "
            f"({self.new_tokens} tokens): an upper bound"
        )
        omitted = ["rewards"] + ["environments"] * bool(self.grpo.environment)
        omitted += ["file exchange between the roles"] * bool(split.ranks)
        yield f"not in the predicted step: {', '.join(omitted)}"


_STATES: Final = ("parameters", "optimizer states")
"""Memory terms of the bytes that a rank keeps between two steps."""


def _rounds_s(price: GenerationLayout, rows: int, s: Strategy) -> float:
    """Return the seconds to sample `rows` completions in rounds, in a layout with the strategy `s`."""
    rank_rows = -(-rows // s.dp)
    return -(-rank_rows // price.slots) * price.total_s


def roles_plan(best: Split, splits: Sequence[Split]) -> RolesPlan:
    """Return `Plan.roles` for the best split, with rejected splits.

    The mode of a split is its staleness and whether the roles share ranks. The rejected splits are up to
    `MAX_RUNNERS_UP` runners-up in the mode of the best split, and the best split of every other mode.
    """
    options: dict[tuple[int, int, int], Split] = {}
    candidates = (replace(split, staleness=n) for split in splits for n in split.steps_s)
    for o in sorted(candidates, key=lambda s: s.sort_key):
        options.setdefault((o.ranks, o.tp, o.staleness), o)
    del options[best.ranks, best.tp, best.staleness]
    chosen, shown = [], Counter[tuple[bool, int]]()
    for o in options.values():
        mode = (o.ranks > 0, o.staleness)
        if shown[mode] < (MAX_RUNNERS_UP if mode == (best.ranks > 0, best.staleness) else 1):
            chosen.append(_rejected(o, best))
            shown[mode] += 1
    return RolesPlan(
        best.ranks, best.tp, best.staleness, best.sample_s, best.learn_s, best.step_s,
        best.memory_bytes, tuple(chosen),
    )  # fmt: skip


def _rejected(other: Split, best: Split) -> RejectedRoles:
    share = other.per_token_s / best.per_token_s - 1.0
    parts = f"sampling {format_seconds(other.sample_s)}, learning {format_seconds(other.learn_s)}"
    if abs(share) < ROUNDING:
        reason = "as fast"
    elif share < 0:
        reason = f"faster by {-share:.1%}, with `grpo.max_staleness={other.staleness}`"
    else:
        reason = f"slower by {share:.1%}"
    return RejectedRoles(other.ranks, other.tp, other.staleness, other.step_s, f"{reason}: {parts}")
