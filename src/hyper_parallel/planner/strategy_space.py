"""Space of strategies: legal degrees and choices, as tables of numbers.

The search chooses a strategy level by level, so the space is several small tables instead of their product:

    mesh       pp, tp_x, tp_y, cp, the data-parallel ranks, sequences per microbatch, microbatches per step
    blocks     shapes of attention and MLP, ep and etp, kind of context parallelism
    states     dp_replicate x dp_shard, and the sharded states (zero)
    schedule   pipeline schedule and virtual stages
    order      axes outer to inner, one order per distinct placement on the tiers
    overlap    half-batches, and chunks of tokens

A row of a table is a combination of values; a column is one degree or choice, named as in `cost.Candidates`. A pin
fixes a column to a value.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import ORDERS, RECOMPUTE, SCHEDULES, SHAPES, Candidates
from hyper_parallel.errors import HyperParallelError, UnsupportedSharding
from hyper_parallel.ir import AXES, Overlap, Strategy, Workload
from hyper_parallel.planner.pins import AUTO_OVERLAP, OVERLAPS, PINNABLE
from hyper_parallel.planner.request import PlanRequest, unimplemented
from hyper_parallel.shard import check_overlap, legal_tp
from hyper_parallel.units import divisors

TENSOR_INNERMOST: Final = frozenset(i for i, order in enumerate(ORDERS) if {*order[-2:]} == {"tp_x", "tp_y"})
"""Indices into `cost.ORDERS` of orders with tensor parallelism, which communicates most, on the innermost axes."""


def distinct_orders(degrees: tuple[int, ...], tiers: tuple[int, ...]) -> list[int]:
    """Return one order of the mesh axes per equivalence class, as indices into `cost.ORDERS`.

    Two orders are equivalent if both place the same number of ranks of each axis in a domain of each tier. A domain is
    a set of devices connected by links of their own, such as a node. Orders with tensor parallelism innermost are
    preferred.

    Args:
        degrees: Degrees of the mesh axes, in the order of `ir.AXES`.
        tiers: Number of devices per domain of each tier, inner to outer.
    """
    indices, axes = _permutations(tuple(i for i, d in enumerate(degrees) if d > 1))
    ranks = np.array(degrees)[axes]
    stride = np.cumprod(ranks, axis=1) // ranks
    shares = np.ones((len(indices), len(degrees), len(tiers)), dtype=np.int64)
    rows = np.arange(len(indices))[:, None]
    for tier, devices in enumerate(tiers):
        shares[rows, axes, tier] = np.minimum(ranks, np.maximum(1, devices // stride))
    first: dict[bytes, int] = {}
    for index, share in zip(indices, shares, strict=True):
        first.setdefault(share.tobytes(), index)
    return list(first.values())


@lru_cache(maxsize=64)  # one for every set of axes
def _permutations(axes: tuple[int, ...]) -> tuple[tuple[int, ...], NDArray[np.intp]]:
    """Return (indices into `ORDERS`, permutations), with one order of the mesh axes per permutation of `axes`.

    `axes` are indices into `AXES`. The permutations have shape [orders, axes] and list `axes` inner to outer.
    """
    first: dict[tuple[int, ...], int] = {}
    for index in sorted(range(len(ORDERS)), key=lambda i: i not in TENSOR_INNERMOST):
        places = (AXES.index(axis) for axis in reversed(ORDERS[index]))
        first.setdefault(tuple(p for p in places if p in axes), index)
    return tuple(first.values()), np.array([*first], dtype=np.intp).reshape(len(first), len(axes))


BLOCKS: Final = (
    "attention_shape", "mlp_shape", "ep", "etp", "cp_ulysses", "attention_tokens", "cp_gather",
)  # fmt: skip
"""Columns of the result of `Space.blocks`."""
OVERLAP_KEY: Final = ("pp", "dp_shard", "cp", "tp_x", "tp_y", "ep", "zero", "microbatch")
"""Columns on which the legal overlaps depend."""
OVERLAP_COLUMNS: Final = ("halves", "ep_chunks", "tp_chunks")
"""Columns that together are one overlap."""
_ONE, _TWO, _MOVED = (SHAPES.index(shape) for shape in ("1d", "2d", "weight"))

Columns: TypeAlias = dict[str, NDArray[np.float64]]
"""Table of strategies: dict from name of a column, as in `cost.Candidates`, to its values; one row per strategy."""


class Space:
    """Tables of the strategy space for one request, built on demand.

    Attributes:
        request: Model, machine, workload and pins.
        ruled_out: Number of illegal combinations found so far, by reason.
        zeros: Allowed ZeRO stages, 3 first.
        recomputes: Allowed kinds of recomputation, as indices into `cost.RECOMPUTE`.
        regathers: Allowed values of column `regather`: 0 keeps gathered inputs for backward, 1 re-gathers them.
        offloads: Allowed values of column `offload`: 1 offloads bytes that exceed device memory.
        overlaps: Allowed overlaps inside of layers, the simplest first.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.ruled_out = request, Counter[str]()
        runs, model = request.executable, request.model

        def runnable(**choice: Any) -> bool:
            return not runs or not unimplemented(Strategy(**choice))

        zeros = [z for z in (3, 2, 1, 0) if runnable(dp_shard=2, zero=z)]
        self.zeros = self._allowed("zero", zeros)
        kinds = [i for i, kind in enumerate(RECOMPUTE) if runnable(recompute=kind)]
        self.recomputes = self._allowed("recompute", kinds)
        num_orders = len(ORDERS) if runnable(order=ORDERS[1]) else 1
        self._orders = self._allowed("order", range(num_orders))
        self._any_etp, self._zero_1_staged = runnable(etp=2), runnable(pp=2, dp_shard=2, zero=1)
        self.regathers = self._allowed("gathered_inputs", (0, 1))
        host = request.offload is not None and request.machine.host_bytes_s > 0
        self.offloads = self._allowed("offload", (0, 1)) if host else [0]
        self.overlaps = self._allowed_overlaps()
        legal = legal_tp(model.num_heads, model.num_kv_heads, *model.intermediate_sizes)
        # Dict from tp_x to the reason why this version cannot run it; None: it can.
        self._tp = {t: request.refusal(Strategy(tp_x=t)) if runs else None for t in legal}
        self._runs_with_ep = cache(lambda ep: request.refusal(Strategy(dp_shard=ep, ep=ep)) is None)
        self._refusals: dict[tuple[int, ...], str | None] = {}
        self._whole_stream = cache(self._holds_all_tokens)

    def _allowed(self, name: str, values: Sequence[int]) -> list[int]:
        return [value for value in values if self.request.allows(name, value)]

    def _allowed_overlaps(self) -> tuple[Overlap, ...]:
        """Return the overlaps that pin and request allow; without a pin, only the overlap of `request.base`."""
        pinned = self.request.pins.get("overlap")
        if pinned is None:
            return (self.request.base.overlap,)
        options = OVERLAPS if pinned == AUTO_OVERLAP else (OVERLAPS[pinned],)
        return tuple(o for o in options if self.request.may_overlap(o))

    def _divisors(self, axis: str, number: int) -> list[int]:
        return [d for d in divisors(number) if self.request.allows(axis, d)]

    def rule_out(self, reason: str, number: int = 1) -> bool:
        """Add `number` to the count of illegal combinations with this reason; return whether `number` is positive."""
        if number:
            self.ruled_out[reason] += number
        return number > 0

    def meshes(self) -> Columns:
        """Return the table `mesh`: columns pp, tp_x, tp_y, cp, dp, microbatch and accumulation."""
        table = np.array(list(self._meshes()), dtype=np.float64).reshape(-1, 5)
        rows = np.concatenate([self._batched(table, micro) for micro in self.microbatches()])
        names = ("pp", "tp_x", "tp_y", "cp", "dp", "microbatch", "accumulation")
        return dict(zip(names, rows.T, strict=True))

    def _meshes(self) -> Iterator[tuple[int, ...]]:
        r, rule_out = self.request, self.rule_out
        tokens, seq_len = r.workload.tokens_per_step, r.workload.seq_len * r.group_sequences
        unsplit = dict(r.model.unsplit)
        for pp in self._divisors("pp", r.num_devices):
            if rule_out("more pipeline stages than layers", pp > r.model.num_layers):
                continue
            if pp > 1 and "pp" in unsplit and rule_out(unsplit["pp"], True):
                continue
            runs = self.zeros_of(pp) and self.recomputes and self._orders
            if rule_out("this version does not run the pinned choices", not runs):
                continue
            for tp in self._divisors("tp", r.num_devices // pp):
                for y in self._divisors("tp_y", tp):
                    x = tp // y
                    if not r.allows("tp_x", x) or (x == 1 and y > 1):
                        continue
                    if (refusal := self._tp_refusal(x, y)) and rule_out(refusal):
                        continue
                    for cp in self._divisors("cp", r.num_devices // pp // tp):
                        if cp > 1 and "cp" in unsplit and rule_out(unsplit["cp"], True):
                            continue
                        dp = r.num_devices // pp // tp // cp
                        uneven = tokens is not None and tokens % (seq_len * dp) > 0
                        reason = "the data-parallel ranks do not divide the tokens per step"
                        if not rule_out(reason, uneven) and self._splits(dp):
                            yield pp, x, y, cp, dp

    def _tp_refusal(self, x: int, y: int) -> str | None:
        """Return why tp_x = `x` and tp_y = `y` are illegal or cannot run; None if they are legal and can."""
        if y == 1:
            return self._tp.get(x, "tp does not divide heads or widths")
        return None if all(self.shapes(x, y)) else "tp_x and tp_y do not divide heads or widths"

    def _splits(self, dp: int) -> list[tuple[int, int]]:
        return [(dp // s, s) for s in self._divisors("dp_shard", dp) if self.request.allows("dp_replicate", dp // s)]

    def microbatches(self) -> Sequence[int | None]:
        """Return the numbers of sequences per microbatch to try; None: derived from the other batch numbers."""
        w = self.request.workload
        microbatch = self.request.pins.get("microbatch", w.microbatch)
        if microbatch or w.tokens_per_step is None or w.accumulation_steps is not None:
            return [microbatch]
        return divisors(max(1, w.tokens_per_step // w.seq_len))

    def _batched(self, table: NDArray[np.float64], microbatch: int | None) -> NDArray[np.float64]:
        """Return `table` with columns microbatch and accumulation added.

        Rows are omitted if their data-parallel ranks cannot share the batch evenly or in whole groups of sequences, if
        a batch number differs from a set or pinned one, or if they have fewer microbatches than pipeline ranks.
        """
        w, ones = self.request.workload, np.ones(len(table))
        steps = ones * (w.accumulation_steps or self.request.pins.get("accumulation", 1))
        if w.tokens_per_step is None:
            micro = ones * (microbatch or 1)
        elif microbatch is None:
            micro = w.tokens_per_step / w.seq_len / table[:, 4] / steps
        else:
            micro = ones * microbatch
            steps = w.tokens_per_step / w.seq_len / table[:, 4] / micro
        divides = (micro == np.floor(micro)) & (steps == np.floor(steps)) & (micro >= 1)
        if w.microbatch and w.accumulation_steps:
            divides &= (micro == w.microbatch) & (steps == w.accumulation_steps)
        divides &= steps == self.request.pins.get("accumulation", steps)
        whole = micro * steps % self.request.group_sequences == 0
        enough = steps >= table[:, 0]
        self.rule_out("the batch is not divisible", int((~divides).sum()))
        self.rule_out("a data-parallel rank does not get whole groups of completions", int((divides & ~whole).sum()))
        self.rule_out("fewer microbatches than pipeline stages", int((divides & whole & ~enough).sum()))
        keep = divides & whole & enough
        return np.column_stack([table[keep], micro[keep], steps[keep]])

    def whole_heads(self, ranks: int) -> bool:
        """Return whether the attention heads can be sharded over `ranks` ranks without dividing a head.

        Otherwise 2-D attention scatters tokens instead of heads.
        """
        model = self.request.model
        kv_heads = model.num_kv_heads
        return model.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    def shapes(self, x: int, y: int) -> tuple[list[int], list[int]]:
        """Return the legal shapes (see `ir.BLOCK_SHAPES`) of attention and MLP, as indices into `cost.SHAPES`.

        Each shape requires divisible sizes (for heads see `whole_heads`):

        * 1-D attention: heads by x * y. 1-D MLP: MLP widths by x * y.
        * 2-D attention: heads by x, residual width by x and y. 2-D MLP: MLP widths by x, residual width by x and y.
        * Weight-moving attention: heads by x, residual width by y. Weight-moving MLP: MLP widths by x * y, residual
          width by x and y.
        """
        h, widths = self.request.model.hidden_size, self.request.model.intermediate_sizes
        by_x, by_y, narrow = h % x == 0, h % y == 0, all(w % (x * y) == 0 for w in widths)
        attention = {
            _ONE: self.whole_heads(x * y),
            _TWO: self.whole_heads(x) and by_x and by_y,
            _MOVED: self.whole_heads(x) and by_y,
        }
        mlp = {
            _ONE: narrow,
            _TWO: by_x and by_y and all(w % x == 0 for w in widths),
            _MOVED: by_x and by_y and narrow,
        }
        return [s for s, legal in attention.items() if legal], [s for s, ok in mlp.items() if ok]

    def blocks(self, x: int, y: int, cp: int, dp: int) -> list[tuple[int, ...]]:
        """Return the table `blocks` for the degrees tp_x, tp_y, cp and dp: legal tuples of the columns `BLOCKS`.

        Context parallelism by an all-gather of keys and values is included only if pinned.
        """
        r, names = self.request, BLOCKS[:2]
        on_tokens = self._tokens(x, y, cp)
        if y > 1:
            # Both blocks 1-D equals tp_x = tp without a second axis, so it is a choice only if pinned.
            pinned = all(name in r.pins for name in names)
            shapes = [
                s
                for s in itertools.product(*self.shapes(x, y))
                if (pinned or s != (_ONE, _ONE)) and all(map(r.allows, names, s))
                if on_tokens is not None or s[0] != _TWO
            ]
        else:
            shapes = [(r.pins.get(names[0], _TWO), r.pins.get(names[1], _TWO))]
        gathered = int(self._cp_kind() == "all_gather")
        # With expert parallelism the MLP has little tensor-parallel work, so its shape follows attention's.
        return [
            (*s, ep, etp, u, on_tokens or 0 if s[0] == _TWO else 0, gathered)
            for s, (ep, etp), u in itertools.product(
                shapes, self._experts(x * y, dp * cp * x * y), self._ulysses(x * y, cp)
            )
            if ep == 1 or s[0] == s[1]
        ]

    def _experts(self, tp: int, ranks: int) -> list[tuple[int, int]]:
        """Return the legal (ep, etp) for `tp` tensor-parallel ranks and `ranks` ranks of a pipeline stage."""
        r, experts = self.request, self.request.model.num_experts
        inner = math.gcd(experts, ranks) if experts else 1
        divisible = not experts or all(w % tp == 0 for w in r.model.intermediate_sizes)
        free = experts and self._any_etp
        return [
            (ep, etp)
            for ep in self._divisors("ep", inner)
            if ep == 1 or not r.executable or self._runs_with_ep(ep)
            for etp in sorted({1, tp} if free else {1 if ep > 1 else tp})
            if ranks % (ep * etp) == 0 and (etp == 1 or divisible) and r.allows("etp", etp)
        ]

    def _cp_kind(self) -> str:
        pinned = self.request.pins.get("cp_kind")
        return "" if pinned is None else str(PINNABLE["cp_kind"].shown(pinned))

    def _ulysses(self, tp: int, cp: int) -> list[int]:
        r, kind = self.request, self._cp_kind()
        local, kv = r.model.num_heads // tp, max(1, r.model.num_kv_heads // tp)
        candidates = {"ulysses": [cp], "hybrid": divisors(cp)[1:-1], "": divisors(cp)}
        return [
            u
            for u in (candidates.get(kind, [1]) if cp > 1 else [1])
            if local % u == 0 and (kv % u == 0 or u % kv == 0) and r.allows("cp_ulysses", u)
        ]

    def _tokens(self, x: int, y: int, cp: int) -> int | None:
        """Return the value of column `attention_tokens` for 2-D attention: 0 scatters heads over y, 1 scatters tokens.

        Tokens are scattered only if pinned, or if the heads cannot be sharded over x * y ranks. With y > 1, this
        excludes context parallelism. None if neither is legal.
        """
        pinned = self.request.pins.get("attention_scatter")
        if pinned != 1 and self.whole_heads(x * y):
            return 0
        return 1 if pinned != 0 and (cp == 1 or y == 1) else None

    def refusal_of(self, shard: int, cp: int, x: int, y: int, *block: int, pp: int = 1) -> str | None:
        """Return why this version cannot run strategies with the given degrees; None if it can.

        The result is also None if the request is not limited to strategies that this version can run. `block` is a row
        of the table `blocks`; the other arguments are degrees.
        """
        if not self.request.executable:
            return None
        columns = dict(zip(BLOCKS, block, strict=True))
        del columns["etp"]
        if columns["ep"] == 1:
            shard = 1
            if y == 1:
                cp, columns = 1, {}
        # Layouts depend on whether there is a pipeline, not on its number of stages.
        staged = min(pp, 2)
        key = (staged, shard, cp, x, y, *columns.values())
        if key not in self._refusals:
            row = Candidates.of_columns(pp=staged, dp_shard=shard, cp=cp, tp_x=x, tp_y=y, **columns)
            workload = Workload(self.request.workload.seq_len)
            strategy, _ = row.strategy_at(0, self.request.base, workload)
            self._refusals[key] = self.request.refusal(strategy)
        return self._refusals[key]

    def open_overlap(self, columns: Columns) -> Columns:
        """Return values of `OVERLAP_COLUMNS` for which the predicted time is a lower bound over all allowed overlaps.

        A value -n means any number from 1 to n. The result is {} if only the strategy without overlap is allowed.
        """
        if self.overlaps == (Overlap(),):
            return {}
        chunks = max(o.ep_chunks for o in self.overlaps)
        halves = any(o.half_batch for o in self.overlaps)
        halved = (columns["cp"] == 1) & (columns["tp_y"] == 1) & (columns["microbatch"] % 2 == 0)
        halved &= (np.asarray(columns.get("pp", 1.0)) == 1) & halves
        chunked = (columns["ep"] > 1) & (chunks > 1)
        tokens = max(o.tp_chunks for o in self.overlaps)
        divided = (columns["tp_x"] > 1) & (columns["tp_y"] == 1) & (tokens > 1)
        return {
            "halves": np.where(halved, -2.0, 1.0),
            "ep_chunks": np.where(chunked, -float(chunks), 1.0),
            "tp_chunks": np.where(divided, -float(tokens), 1.0),
        }

    def overlaps_of(self, *key: int) -> list[tuple[int, int, int]]:
        """Return the table `overlap`: legal values of `OVERLAP_COLUMNS` for one row of the columns `OVERLAP_KEY`."""
        named: dict[str, Any] = dict(zip(OVERLAP_KEY, key, strict=True))
        micro, zero = named.pop("microbatch"), named.pop("zero")
        plain = Strategy(**named, zero=zero if zero < 2 else None)
        workload = Workload(self.request.workload.seq_len, microbatch=micro)
        if self.overlaps == (Overlap(),):
            return [(1, 1, 1)]
        options = []
        for overlap in self.overlaps:
            if overlap.tp_chunks > 1 and self._whole_stream(named["tp_x"]):
                continue
            try:
                check_overlap(replace(plain, overlap=overlap), workload)
            except UnsupportedSharding as error:
                self.rule_out(error.what)
            else:
                options.append((1 + overlap.half_batch, overlap.ep_chunks, overlap.tp_chunks))
        return options

    def _holds_all_tokens(self, tp: int) -> bool:
        """Return whether the residual stream is replicated over `tp` tensor-parallel ranks, or `tp` is refused."""
        try:
            return tp > 1 and self.request.shard(Strategy(tp_x=tp)).whole_stream
        except HyperParallelError:
            return True

    def overlaps_with(self, offload: int, regather: int) -> bool:
        """Return whether half-batches and tensor parallelism are legal with these values of the two columns."""
        inputs: Literal["keep", "re-gather"] = "re-gather" if regather else "keep"
        half = Overlap(half_batch=True)
        strategy = Strategy(tp_x=2, offload=bool(offload), gathered_inputs=inputs, overlap=half)
        try:
            check_overlap(strategy, Workload(8, microbatch=2))
        except UnsupportedSharding:
            return False
        return True

    def states(self, pp: int, dp: int, inner: int, fold: int) -> list[tuple[int, ...]]:
        """Return the table `states`: legal (dp_replicate, dp_shard, zero) of `dp` data-parallel ranks.

        Experts fold over dp_shard x cp x tp, so `fold` (ep * etp) must divide dp_shard * `inner` (cp * tp).
        """
        splits = [s for s in self._splits(dp) if (s[1] * inner) % fold == 0]
        return [(*split, zero) for split in splits for zero in self.zeros_of(pp)]

    def zeros_of(self, pp: int) -> list[int]:
        """Return the allowed ZeRO stages with `pp` pipeline ranks; this version runs no pipeline with ZeRO-1."""
        return [z for z in self.zeros if z != 1 or pp == 1 or self._zero_1_staged]

    def distinct_zero(self, rows: Columns) -> NDArray[np.bool_]:
        """Return the mask of rows whose ZeRO stage differs in effect from the stages of other rows.

        With a single microbatch, ZeRO-1 has the effect of ZeRO-2. If dp_shard * cp is 1, ZeRO-0 has the effect of
        ZeRO-1. For a pinned stage, the mask is that of `has_pinned_zero`.
        """
        if "zero" in self.request.pins:
            has_pinned: NDArray[np.bool_] = self.has_pinned_zero(rows["dp_shard"] * rows["cp"])
            reason = f"zero={self.request.pins['zero']} shards nothing where dp_shard * cp is 1"
            self.rule_out(reason, int((~has_pinned).sum()))
            return has_pinned
        single_microbatch = rows["accumulation"] == 1
        single_shard = rows["dp_shard"] * rows["cp"] == 1
        is_zero, is_one = rows["zero"] == 0, rows["zero"] == 1
        repeated = (is_one & single_microbatch) | (is_zero & single_shard)
        return np.asarray(~repeated)

    def has_pinned_zero(self, shards: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return the mask of strategies with dp_shard * cp = `shards` ranks to which a pinned ZeRO stage applies.

        A stage above 0 that a user pins requires dp_shard * cp > 1. A stage that a recipe sets does not, because a
        single rank ignores it.
        """
        pinned = self.request.pins.get("zero", 0) > 0 and not self.request.from_recipe
        return np.asarray((shards > 1) | (not pinned))

    def schedules(self, pp: int, microbatches: int) -> list[tuple[int, int]]:
        """Return the table `schedule`: legal (index into `cost.SCHEDULES`, virtual stages per rank)."""
        layers = self.request.model.num_layers
        options = [("1f1b", 1)]
        if pp > 1:
            options += [("gpipe", 1), ("zb-h1", 1)]
            if 2 * pp <= layers:
                options += [("zbv", 2), *[("dualpipev", 2)] * (microbatches >= 2 * pp)]
            if microbatches % pp == 0:
                candidates = divisors(-(-layers // pp))
                options += [("interleaved", v) for v in candidates if v > 1 and v * pp <= layers]
            options = [
                (s, v)
                for s, v in options
                if self.request.allows("schedule", SCHEDULES.index(s)) and self.request.allows("vpp", v)
            ]
        return [(SCHEDULES.index(s), v) for s, v in options]

    def orders(self, degrees: tuple[int, ...], tiers: tuple[int, ...], inner: bool) -> list[int]:
        """Return the table `order`: `distinct_orders` in `TENSOR_INNERMOST` if `inner`, else the others.

        If only one order is allowed, such as a pinned one, it is returned with `inner` and omitted without.
        """
        if len(self._orders) == 1:
            return self._orders if inner else []
        return [i for i in distinct_orders(degrees, tiers) if (i in TENSOR_INNERMOST) == inner]
