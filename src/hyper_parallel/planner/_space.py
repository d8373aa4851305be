"""The space of strategies: which degrees and choices are legal, written down once, as tables of numbers.

A strategy is chosen level by level, so the space is a few tables instead of one product:

    mesh       pp, tp_x, tp_y, cp, the data-parallel ranks, sequences per microbatch
    blocks     shapes of attention and MLP, ep and etp, Ulysses ranks inside cp
    states     dp_replicate x dp_shard, what is sharded (zero), whether what exceeds the device is offloaded
    schedule   pipeline schedule and virtual stages
    order      axes outer to inner, as far as they cross different tiers

What is not legal is counted by reason when its level is made.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyper_parallel.cost import RECOMPUTE, SCHEDULES, SHAPES, Candidates
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.planner._orders import TENSOR_INNERMOST, distinct_orders
from hyper_parallel.planner._pins import PINNABLE, SearchLimits

MICROBATCHES: Final = (1, 2, 4, 8, 16)
MOST_CP: Final = 64
MOST_TP: Final = 64

Columns: TypeAlias = dict[str, NDArray[np.float64]]
"""Rows of a level as columns of equal length, named as in `cost.Candidates`."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model and a workload allow.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        widths: Widths that tensor parallelism cuts.
        hidden: Residual width.
        layers: Decoder layers.
        experts: Routed experts; 0 for a dense model.
        seq_len: Tokens of a sequence.
        offload: What exceeds the device may lie in host memory.
    """

    heads: int
    kv_heads: int
    widths: tuple[int, ...]
    hidden: int
    layers: int
    experts: int
    seq_len: int
    offload: bool

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, offload: bool = False) -> ModelLimits:
        """Read the rules off a model."""
        experts = max((b.mlp.num_experts for b in model.blocks if b.mlp), default=0)
        return cls(
            model.num_heads,
            model.num_kv_heads,
            model.intermediate_sizes,
            model.hidden_size,
            model.num_layers,
            experts,
            workload.seq_len,
            offload,
        )

    def kv_legal(self, ranks: int) -> bool:
        """Key and value heads divide over the ranks, or each is on several of them."""
        return self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0

    def whole_heads(self, ranks: int) -> bool:
        """Every rank has whole query heads; 2-D attention on x y ranks that have none scatters tokens instead."""
        return self.heads % ranks == 0 and self.kv_legal(ranks)

    def shapes(self, x: int, y: int) -> tuple[list[int], list[int]]:
        """Legal shapes of attention and MLP on x times y ranks, as indices into `cost.SHAPES`.

        1-D needs heads and widths to divide by x y; 2-D attention heads by x (see `whole_heads`) and the residual
        width by x and y, a 2-D MLP its widths by x; weight-moving attention heads by x, a weight-moving MLP widths by
        x y, and both the residual width by y.
        """
        h, one, two, moved = self.hidden, *(SHAPES.index(s) for s in ("1d", "2d", "weight"))
        attention, mlp = [], []
        if self.whole_heads(x * y):
            attention.append(one)
        if self.whole_heads(x) and h % y == 0:
            attention += [two] * (h % x == 0) + [moved]
        narrow = all(w % (x * y) == 0 for w in self.widths)
        if narrow:
            mlp.append(one)
        if h % x == 0 and h % y == 0:
            mlp += [two] * all(w % x == 0 for w in self.widths) + [moved] * narrow
        return sorted(attention), sorted(mlp)


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclass(slots=True)
class Space:
    """The levels of the space, made on demand.

    Attributes:
        rules: The model.
        workload: Sequence length and the batch numbers that are given.
        limits: Devices, pins and choices.
        refusal: Why this version cannot run a strategy, or None when it can; None: everything may be chosen.
        ruled_out: How many combinations were ruled out, by reason; grows as levels are made.
    """

    rules: ModelLimits
    workload: Workload
    limits: SearchLimits
    refusal: Callable[[Strategy], str | None] | None = None
    ruled_out: Counter[str] = field(default_factory=Counter)

    def meshes(self) -> Columns:
        """Level one: (pp, tp_x, tp_y, cp, dp, microbatch, accumulation), one row each."""
        table = np.array(list(self._meshes()), dtype=np.float64).reshape(-1, 5)
        parts = [self._batched(table, microbatch) for microbatch in self.microbatches()]
        rows = np.concatenate(parts) if parts else np.empty((0, 7))
        names = ("pp", "tp_x", "tp_y", "cp", "dp", "microbatch", "accumulation")
        return dict(zip(names, rows.T, strict=True))

    def _choices(self, axis: str, number: int) -> list[int]:
        return [d for d in divisors(number) if self.limits.allows(axis, d)]

    def _meshes(self) -> Iterator[tuple[int, ...]]:
        r, limits, out = self.rules, self.limits, self.ruled_out
        tokens, seq_len = self.workload.tokens_per_step, r.seq_len
        legal_1d = frozenset(limits.tp)
        for pp in self._choices("pp", limits.num_devices):
            if pp > r.layers:
                out["more pipeline stages than layers"] += 1
                continue
            for tp in self._choices("tp", limits.num_devices // pp):
                if tp > MOST_TP and "tp" not in limits.pins:
                    continue
                for y in self._choices("tp_y", tp):
                    x = tp // y
                    if not limits.allows("tp_x", x) or (x == 1 and y > 1):
                        continue
                    if y == 1 and x not in legal_1d:
                        out["tp does not divide heads or widths"] += 1
                        continue
                    if y > 1 and not all(r.shapes(x, y)):
                        out["tp_x and tp_y do not divide heads or widths"] += 1
                        continue
                    for cp in self._choices("cp", limits.num_devices // pp // tp):
                        if cp > MOST_CP and "cp" not in limits.pins:
                            continue
                        # Zigzag context parallelism cuts a sequence into 2 cp pieces, each is cut into tp. What does
                        # not divide is padded; the search leaves that to degrees that somebody asked for.
                        asked = cp > 1 and limits.pins.get("cp") == cp
                        if not asked and seq_len % (2 * cp * tp if cp > 1 else tp):
                            out["the sequence does not divide by cp and tp"] += 1
                            continue
                        dp = limits.num_devices // pp // tp // cp
                        if tokens is not None and tokens % (seq_len * dp):
                            out["tokens per step do not divide over the data-parallel ranks"] += 1
                            continue
                        if self._split_possible(dp):
                            yield pp, x, y, cp, dp

    def _split_possible(self, dp: int) -> bool:
        pins = self.limits.pins
        shard, replicas = pins.get("dp_shard"), pins.get("dp_replicate")
        if shard is not None and replicas is not None:
            return shard * replicas == dp
        return all(d is None or dp % d == 0 for d in (shard, replicas))

    def microbatches(self) -> tuple[int | None, ...]:
        """Sequences per microbatch; None where they follow from the other batch numbers."""
        if "microbatch" in self.limits.pins:
            return (self.limits.pins["microbatch"],)
        if self.workload.microbatch is not None:
            return (self.workload.microbatch,)
        if self.workload.tokens_per_step is None or self.workload.accumulation_steps is not None:
            return (None,)
        return MICROBATCHES

    def _batched(self, table: NDArray[np.float64], microbatch: int | None) -> NDArray[np.float64]:
        """Meshes with sequences per microbatch and microbatches per step, those that divide."""
        w = self.workload
        whole = np.ones(len(table))
        if w.tokens_per_step is None:
            micro = whole * (microbatch or w.microbatch or 1)
            steps = whole * (w.accumulation_steps or 1)
        else:
            sequences = w.tokens_per_step / w.seq_len / table[:, 4]
            if microbatch is None:
                steps = whole * (w.accumulation_steps or 1)
                micro = sequences / steps
            else:
                micro = whole * microbatch
                steps = sequences / micro
        divides = (micro == np.floor(micro)) & (steps == np.floor(steps)) & (micro >= 1)
        if w.microbatch and w.accumulation_steps:
            divides &= (micro == w.microbatch) & (steps == w.accumulation_steps)
        if (pinned := self.limits.pins.get("accumulation")) is not None:
            divides &= steps == pinned
        self._count("the batch does not divide", ~divides)
        enough = steps >= table[:, 0]
        self._count("fewer microbatches than pipeline stages", divides & ~enough)
        keep = divides & enough
        return np.column_stack([table[keep], micro[keep], steps[keep]])

    def _count(self, reason: str, mask: NDArray[np.bool_]) -> None:
        if number := int(mask.sum()):
            self.ruled_out[reason] += number

    def blocks(self, x: int, y: int, cp: int, dp: int) -> list[tuple[int, ...]]:
        """Level two of a mesh: (attention_shape, mlp_shape, ep, etp, cp_ulysses, attention_tokens, cp_gather).

        A ring of keys and values sends no more than gathering all of them, whose gradients are summed in float32, and
        may hide: all are gathered only where a pin says so.
        """
        r, pins, tp = self.rules, self.limits.pins, x * y
        names, plain = ("attention_shape", "mlp_shape"), SHAPES.index("2d")
        if y > 1:
            # Both blocks 1-D is tp_x = tp without a second axis: taken only when somebody asked for it.
            asked = all(name in pins for name in names)
            shapes = [s for s in itertools.product(*r.shapes(x, y)) if asked or s != (0, 0)]
            shapes = [s for s in shapes if all(map(self.limits.allows, names, s))]
            if self._tokens(x, y, cp) is None:
                shapes = [s for s in shapes if s[0] != plain]
        else:
            shapes = [(pins.get(names[0], plain), pins.get(names[1], plain))]
        on_tokens = self._tokens(x, y, cp) or 0
        gathered = int(pins.get("cp_kind") == PINNABLE["cp_kind"].values.index("all_gather"))
        local, local_kv = r.heads // tp, max(1, r.kv_heads // tp)
        ulysses = [
            u
            for u in divisors(cp)
            if local % u == 0
            and (local_kv % u == 0 or u % local_kv == 0)
            and self.limits.allows_ulysses(cp, u)
        ]
        experts = [(1, tp)]
        if r.experts:
            pinned = pins.get("ep")
            inner = math.gcd(r.experts, dp * cp * tp)
            degrees = [pinned] if pinned is not None else divisors(inner)
            runs = self.limits.executable
            widths_cut = not any(w % tp for w in r.widths)
            experts = [
                (ep, etp)
                for ep in degrees
                if inner % ep == 0 and (self.limits.ep is None or ep in self.limits.ep)
                for etp in sorted({1 if ep > 1 else tp} if runs else {1, tp})
                if (dp * cp * tp) % (ep * etp) == 0 and (etp == 1 or widths_cut)
                if self.limits.allows("etp", etp)
            ]
        elif pins.get("ep", 1) != 1 or pins.get("etp", tp) != tp:
            experts = []
        # With expert parallelism little of the feed-forward part is left for tp: it follows attention's shape.
        found = itertools.product(shapes, experts, ulysses)
        return [
            (*s, *e, u, on_tokens if s[0] == plain else 0, gathered)
            for s, e, u in found
            if e[0] == 1 or s[0] == s[1]
        ]

    def _tokens(self, x: int, y: int, cp: int) -> int | None:
        """Whether 2-D attention on x y ranks scatters tokens over y instead of heads; None where it can do neither.

        On tokens it sends at least as much, so it is taken where heads do not divide or a pin says so. The sequence
        cannot be cut by context parallelism as well.
        """
        pinned = self.limits.pins.get("attention_scatter")
        if pinned != 1 and self.rules.whole_heads(x * y):
            return 0
        return 1 if pinned != 0 and (cp == 1 or y == 1) else None

    def refusal_of(self, shard: int, cp: int, x: int, y: int, *block: int) -> str | None:
        """Why this version cannot run strategies with these degrees and a row of `blocks`; None when it can."""
        if self.refusal is None:
            return None
        attention, mlp, ep, _, ulysses, tokens, gathered = block
        row = Candidates.of_columns(
            dp_shard=shard, cp=cp, tp_x=x, tp_y=y, attention_shape=attention, mlp_shape=mlp, ep=ep, cp_ulysses=ulysses,
            attention_tokens=tokens, cp_gather=gathered,
        )  # fmt: skip
        return self.refusal(row.at(0, self.limits.base, Workload(self.workload.seq_len))[0])

    def states(self, dp: int, inner: int, fold: int) -> list[tuple[int, ...]]:
        """Level three: (dp_replicate, dp_shard, zero, offload); offload is 0 here, the search adds it.

        Args:
            dp: Data-parallel ranks.
            inner: cp x tp.
            fold: ep x etp, which must divide dp_shard x inner.
        """
        pins = self.limits.pins
        found: list[tuple[int, ...]] = []
        for shard in [pins["dp_shard"]] if "dp_shard" in pins else divisors(dp):
            if dp % shard or not self.limits.allows("dp_replicate", dp // shard):
                continue
            if (shard * inner) % fold:
                continue
            found += [(dp // shard, shard, zero, 0) for zero in self.zeros()]
        return found

    def zeros(self) -> list[int]:
        """What may be sharded: parameters, gradients, optimizer states or nothing."""
        pinned = self.limits.pins.get("zero")
        if pinned is not None:
            return [pinned]
        return [3, 2, 1] if self.limits.executable else [3, 2, 1, 0]

    def shards(self, zero: ArrayLike, rows: Columns) -> NDArray[np.bool_]:
        """Rows for which a `zero` is a choice of its own.

        The gradients of a single microbatch are reduced layer by layer: nothing is left for ZeRO-1 there. One rank
        shares nothing, so that ZeRO-0 is ZeRO-1. What runs has no ZeRO-1 in pipelines.
        """
        if "zero" in self.limits.pins:
            return np.full(len(rows["pp"]), True)
        once = (rows["accumulation"] == 1) | (self.limits.executable & (rows["pp"] > 1))
        alone = rows["dp_shard"] * rows["cp"] == 1
        kind = np.asarray(zero)
        own: NDArray[np.bool_] = ~((kind == 1) & once) & ~((kind == 0) & alone)
        return own

    def schedules(self, pp: int, microbatches: int) -> list[tuple[int, int]]:
        """Level four: (schedule, vpp)."""
        limits, name = self.limits, SCHEDULES.index
        if pp == 1:
            return [(name("1f1b"), 1)]
        found = [(name("1f1b"), 1), (name("gpipe"), 1), (name("zb-h1"), 1)]
        if 2 * pp <= self.rules.layers:
            found.append((name("zbv"), 2))
            if microbatches >= 2 * pp:
                found.append((name("dualpipev"), 2))
        if microbatches % pp == 0:
            stages = -(-self.rules.layers // pp)
            found += [
                (name("interleaved"), v)
                for v in divisors(stages)
                if v > 1 and v * pp <= self.rules.layers
            ]
        return [
            (s, v) for s, v in found if limits.allows("schedule", s) and limits.allows("vpp", v)
        ]

    def recomputes(self) -> list[int]:
        """Kinds of recomputation that may be chosen, as indices into `cost.RECOMPUTE`."""
        wanted = ("none", "full") if self.limits.executable else RECOMPUTE
        kinds = [RECOMPUTE.index(kind) for kind in wanted]
        return [kind for kind in kinds if self.limits.allows("recompute", kind)]

    def regathers(self) -> list[int]:
        """Whether gathered inputs may be gathered again in backward instead of kept; kept first, which is faster."""
        return [again for again in (0, 1) if self.limits.allows("gathered_inputs", again)]

    def orders(
        self, degrees: tuple[int, ...], tiers: tuple[int, ...], inner: bool = True
    ) -> list[tuple[int]]:
        """Level five: orders of the axes, as indices into `cost.ORDERS`, those that differ on the machine.

        Args:
            degrees: Degree of every axis of `ir.AXES`.
            tiers: Devices in the domains beyond which other links are used, inner to outer.
            inner: Orders with tensor parallelism innermost, which communicates most, else all the others.
        """
        pinned = 0 if self.limits.executable else None
        pinned = self.limits.pins.get("order", pinned)
        if pinned is not None:
            return [(pinned,)] if inner else []
        differ = distinct_orders(degrees, tiers)
        return [(i,) for i in differ if (i in TENSOR_INNERMOST) == inner]
