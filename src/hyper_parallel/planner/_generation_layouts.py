"""Layouts for generation with their predicted time and memory, for `plan_generation` and for sampling in `stage: grpo`.

A slot is the memory for one sequence at a time on a data-parallel rank; prompts may wait for a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyper_parallel.cost import Candidates, PricingCase, partition
from hyper_parallel.cost.generation_passes import cache_bytes, pass_bytes, pass_seconds
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import GenerateWorkload, Strategy
from hyper_parallel.planner.request import PlanRequest
from hyper_parallel.units import DTYPE_BYTES, divisors

LAYOUT_AXES: Final = ("pp", "dp_replicate", "dp_shard", "tp_x", "ep")
"""Degrees that may be above 1 in a generation layout."""


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """Predictions for one layout; bytes are those of the fullest device."""

    parallel: str  # value of `generate --parallel`; "" for one device
    slots: int  # slots of a data-parallel rank, value of `generate --slots`
    batch: int  # number of sequences generated at a time on all devices
    prefill_s: float  # seconds until every sequence in the slots has its first token, without casts of weights
    token_s: float  # seconds of a decode step (one new token per sequence) at the mean length, without casts
    total_s: float  # seconds to prefill the sequences in the slots and decode all their tokens, casts included
    tokens_s: float  # new tokens per second on all devices, over `total_s`
    tokens_s_device: float  # new tokens per second per device
    weight_bytes: int
    cache_bytes: int  # keys and values of all slots
    memory_bytes: int  # weights, cache, and memory of a pass
    largest_batch: int  # sequences at a time that fit in memory, even if there are fewer prompts
    prefill: dict[str, float]  # `prefill_s` by cause
    decode: dict[str, float]  # `token_s` by cause


@dataclass(frozen=True, slots=True)
class StagedLayout:
    """Layout for generation with its pipeline stages, and the bytes of weights and KV cache of each stage."""

    strategy: Strategy
    needed: int  # prompts of a data-parallel rank, rounded up; with as many slots, no prompt waits
    weights: NDArray[np.int64]  # [pp] bytes of the weights on a rank of each stage
    cache: NDArray[np.int64]  # [pp] bytes of the KV cache of one sequence on a rank of each stage


class GenerationPricer:
    """Predictor of time and memory for generation with the prompts and lengths of `work`, for layouts of a model."""

    def __init__(self, request: PlanRequest, work: GenerateWorkload) -> None:
        self.request, self.work = request, work
        self._bytes: dict[tuple[int, ...], dict[str, int] | str] = {}

    def candidates(self) -> Iterator[Strategy]:
        """Yield every strategy whose degrees pp, dp_replicate, dp_shard and tp_x multiply to the number of devices.

        The degree pp is at most the number of layers, and ep divides dp_shard * tp_x and the number of experts.
        """
        devices, experts = self.request.num_devices, self.request.model.num_experts or 1
        for pp in (d for d in divisors(devices) if d <= self.request.model.num_layers):
            for tp in divisors(devices // pp):
                for shard in divisors(devices // pp // tp):
                    for ep in (e for e in divisors(shard * tp) if experts % e == 0):
                        replicas = devices // pp // tp // shard
                        yield Strategy(pp=pp, tp_x=tp, dp_shard=shard, dp_replicate=replicas, ep=ep)

    def layout(self, s: Strategy) -> StagedLayout | str:
        """Return the layout of a strategy, or the reason why generation with it cannot run or be predicted.

        If `s.stage_layers` is empty, the layers are split such that the fullest rank has the fewest bytes of weights
        and KV cache, with a slot for every prompt.
        """
        r, work = self.request, self.work
        if s.pp > 1 and "pp" in (unsplit := dict(r.model.unsplit)):
            return unsplit["pp"]
        if s.dp > work.prompts:
            return "more data-parallel ranks than prompts"
        key = (s.tp_x, s.dp_shard, s.ep)  # other degrees do not change the bytes of a rank
        if key not in self._bytes:
            self._bytes[key] = self._local_bytes(Strategy(tp_x=key[0], dp_shard=key[1], ep=key[2]))
        sizes = self._bytes[key]
        if isinstance(sizes, str):
            return sizes
        needed, dtype = -(-work.prompts // s.dp), r.workload.compute_dtype
        weights, cache = np.zeros((2, r.model.num_layers), dtype=np.int64)
        for block in r.model.blocks:
            # A tied head has its own copy of the weight if it is on another stage.
            own = sum(sizes[p.name] for p in block.params if s.pp > 1 or not p.tied_to)
            place = [*block.layers] or [0 if block.name == "embedding" else -1]
            weights[place] += own
            if block.attention is not None:
                cache[place] = cache_bytes(block.attention, s.tp, work, dtype)
        cut = s.stage_layers or partition((weights + needed * cache).tolist(), s.pp)
        starts = [0, *accumulate(cut)][:-1]
        stage_bytes = (np.add.reduceat(weights, starts), np.add.reduceat(cache, starts))
        return StagedLayout(replace(s, stage_layers=cut if s.pp > 1 else ()), needed, *stage_bytes)

    def _local_bytes(self, s: Strategy) -> dict[str, int] | str:
        """Return a dict from parameter name to bytes of its largest shard, or the reason why `s` is not supported."""
        r = self.request
        try:
            shards = r.shard(s)
        except HyperParallelError as error:
            return error.what
        if shards.whole_stream:
            return "tensor parallelism cannot shard its attention"
        sizes, width = {}, DTYPE_BYTES[r.workload.param_dtype]
        for p in (p for b in r.model.blocks for p in b.params):
            layout = shards.layouts[p.name]
            sizes[p.name] = width * int(np.prod(layout.max_local_shape(p.shape, s.mesh_of(layout))))
        return sizes

    def _case(self, layouts: Sequence[StagedLayout], slots: ArrayLike = 1.0) -> PricingCase:
        columns = {name: [getattr(x.strategy, name) for x in layouts] for name in LAYOUT_AXES}
        r, candidates = self.request, Candidates.of_columns(**columns, microbatch=slots)
        return PricingCase(r.numbers, r.machine, r.workload, candidates)

    def memory(self, layouts: Sequence[StagedLayout]) -> tuple[NDArray[np.float64], ...]:
        """Return (fixed bytes of a pass, bytes per sequence, slots that fit), as arrays over the layouts.

        The bytes exclude weights and KV cache. The slots are those of a data-parallel rank, and 0 or negative if not
        even one fits.
        """
        terms = pass_bytes(self._case(layouts), self.work)
        fixed, per_sequence = (np.broadcast_to(b, len(layouts)) for b in terms)
        capacity = self.request.machine.memory_bytes
        rows = zip(layouts, fixed, per_sequence, strict=True)
        max_sequences = [np.min((capacity - x.weights - f) // (x.cache + e)) for x, f, e in rows]
        return fixed, per_sequence, np.array(max_sequences)

    def price(self, layouts: Sequence[StagedLayout], slots: ArrayLike) -> list[GenerationLayout]:
        """Return the predictions for layouts with `slots` slots per data-parallel rank.

        If the formats of stored weights and of compute differ, every pass casts the weights. Of the times, only
        `GenerationLayout.total_s` and the rates derived from it include these casts.
        """
        r, work, num_layouts = self.request, self.work, len(layouts)
        counts = np.broadcast_to(np.asarray(slots, dtype=np.int64), num_layouts)
        case = self._case(layouts, counts.astype(np.float64))
        kinds = [(len(layers), n, self._latent(layers[0])) for layers, n in r.layer_kinds]
        terms = pass_seconds(case, kinds, work)
        fixed, per_sequence, largest = self.memory(layouts)
        stored, compute = DTYPE_BYTES[r.workload.param_dtype], DTYPE_BYTES[r.workload.compute_dtype]
        casts = (work.prompt_passes + work.new_tokens - 1) * float(stored != compute)
        # Casts of the current and the next layer, embedding and head; `fixed` includes those of gathered weights.
        inside = 2.0 * (case.dense() + case.experts()) + case.ends(case.outside)
        cast = compute * np.where((case.c.dp_shard > 1) | (casts == 0.0), 0.0, inside)
        cast = np.broadcast_to(cast, num_layouts)
        priced = []
        for row, x in enumerate(layouts):
            count = int(counts[row])
            by_cause = ({k: float(np.broadcast_to(v, num_layouts)[row]) for k, v in t.items()} for t in terms)
            prefill, decode = ({k: v for k, v in t.items() if v} for t in by_cause)
            batch, token_s = min(work.prompts, count * x.strategy.dp), sum(decode.values())
            rank_bytes = x.weights + count * x.cache
            full = int(np.argmax(rank_bytes))
            cast_s = int(x.weights[full]) / stored * (stored + compute) / r.machine.passing_bytes_s
            prefill_s = sum(prefill.values())
            total_s = prefill_s + (work.new_tokens - 1) * token_s + casts * cast_s
            tokens_s = batch * work.new_tokens / total_s
            used = rank_bytes[full] + fixed[row] + count * per_sequence[row] + cast[row]
            priced.append(
                GenerationLayout(
                    parallel=layout_text(x.strategy),
                    slots=count,
                    batch=batch,
                    prefill_s=prefill_s,
                    token_s=token_s,
                    total_s=total_s,
                    tokens_s=tokens_s,
                    tokens_s_device=tokens_s / x.strategy.world_size,
                    weight_bytes=int(x.weights[full]),
                    cache_bytes=int(count * x.cache[full]),
                    memory_bytes=int(used),
                    largest_batch=max(0, int(largest[row])) * x.strategy.dp,
                    prefill=prefill,
                    decode=decode,
                )
            )
        return priced

    def _latent(self, layer: int) -> tuple[int, ...] | None:
        """Return the shape of the weight that projects MLA's latent in a layer; None without MLA."""
        params = self.request.model.block_of(layer).params
        return next((p.shape for p in params if p.name.endswith("kv_b_proj.weight")), None)


def layout_text(strategy: Strategy) -> str:
    """Return a layout as text for `generate --parallel`."""
    named = ((name.removesuffix("_x"), getattr(strategy, name)) for name in LAYOUT_AXES)
    words = [f"{name}={degree}" for name, degree in named if degree > 1]
    if strategy.stage_layers:
        words.append(f"stage_layers=[{','.join(map(str, strategy.stage_layers))}]")
    return " ".join(words)
