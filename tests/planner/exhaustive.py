"""All strategies of a small space, priced one by one without any bound: the oracle of the search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from hyper_parallel.cost import SHAPES, Candidates, PricingCase, memory_terms, score
from hyper_parallel.ir import AXES, Strategy
from hyper_parallel.planner.pricing import price
from hyper_parallel.planner.strategy_space import Space

COLUMNS = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "attention_shape", "mlp_shape", "ep", "etp",
    "cp_ulysses", "microbatch", "accumulation", "schedule", "vpp", "zero", "offload", "order", "attention_tokens",
    "cp_gather", "regather", "halves", "ep_chunks", "tp_chunks",
)  # fmt: skip
TWO = SHAPES.index("2d")


def every_strategy(request):
    """Rows of COLUMNS, each a legal strategy without a choice of recomputation."""
    space = Space(request)
    tiers = request.machine.tiers
    sizes = tuple(t.size for t, outer in itertools.pairwise(tiers) if t.size and not outer.shares_links)
    meshes = space.meshes()
    for row in zip(*meshes.values(), strict=True):
        pp, x, y, cp, dp, micro, steps = (int(v) for v in row)
        for att, mlp, ep, etp, u, tokens, gathered in every_block(space, x, y, cp, dp):
            for replicate, shard, zero in space.states(1, dp, x * y * cp, ep * etp):
                if zero == 1 and request.executable and pp > 1:
                    continue  # no pipeline runs with ZeRO 1
                if request.pins.get("zero", 0) > 0 and shard * cp == 1 and not request.from_recipe:
                    continue  # one rank shares nothing, and a pin asks for it
                if "zero" not in request.pins:
                    if zero == 1 and steps == 1:
                        continue  # one microbatch is reduced once anyway
                    if zero == 0 and shard * cp == 1:
                        continue  # one rank shares nothing
                block = (att, mlp, ep, etp, u, tokens, gathered)
                if space.refusal_of(shard, cp, x, y, *block, pp=pp) is not None:
                    continue
                for schedule, vpp in space.schedules(pp, steps):
                    named = dict(zip(AXES, (pp, replicate, shard, cp, x, y), strict=True))
                    degrees = tuple(named[a] for a in AXES)
                    for order in (o for inner in (True, False) for o in space.orders(degrees, sizes, inner)):
                        for moved, again in itertools.product(space.offloads, regathers(request, x * y)):
                            row = (
                                pp, replicate, shard, cp, x, y, att, mlp, ep, etp, u, micro, steps, schedule, vpp,
                                zero, moved, order, tokens, gathered, again,
                            )  # fmt: skip
                            for overlap in space.overlaps_of(pp, shard, cp, x, y, ep, zero, micro):
                                halves, _, chunks = overlap
                                if max(halves, chunks) == 1 or space.overlaps_with(moved, again):
                                    yield (*row, *overlap)


def regathers(request, tp):
    """Values of re-gathered inputs: a pin, or both where there are gathered inputs."""
    pinned = request.pins.get("gathered_inputs")
    return (0, 1) if pinned is None and tp > 1 else (pinned or 0,)


def every_block(space, x, y, cp, dp):
    """Rows of `Space.blocks` with every way to scatter 2-D attention and to see the whole sequence."""
    pins = space.request.pins
    for *block, u, tokens, gathered in space.blocks(x, y, cp, dp):
        ways = {tokens}
        if block[0] == TWO and y > 1 and "attention_scatter" not in pins:
            ways = {0} if space.whole_heads(x * y) else set()
            ways |= {1} if cp == 1 else set()
        kinds = {0, 1} if u == 1 and cp > 1 and "cp_kind" not in pins else {gathered}
        for way, kind in itertools.product(sorted(ways), sorted(kinds)):
            yield (*block, u, way, kind)


def closed_forms(request):
    """(rows, seconds per token, recompute kind, layers) of every strategy with every number of recomputed layers."""
    rows = np.array(list(every_strategy(request)), dtype=float)
    if not len(rows):
        return rows, []
    columns = dict(zip(COLUMNS, rows.T, strict=True))
    # One microbatch is reduced layer by layer, as `Candidates.of` says.
    alone = (columns["zero"] == 1) & (columns["accumulation"] == 1)
    columns["zero"] = np.where(alone, 2.0, columns["zero"])
    kinds = Space(request).recomputes
    scores = {
        k: score(
            PricingCase(request.numbers, request.machine, request.workload,
                    Candidates.of_columns(**columns, recompute=float(k)))
        )
        for k in {0, *kinds}
    }  # fmt: skip
    dp = columns["dp_replicate"] * columns["dp_shard"]
    tokens = columns["microbatch"] * columns["accumulation"] * dp * request.workload.seq_len
    layers = np.ceil(request.numbers.layers / columns["pp"])
    found = []
    for kind in kinds:
        most = int(layers.max())
        for j in range(most + 1) if kind else (0,):
            share = j / layers if kind else np.zeros(len(rows))
            whole = share == 1.0
            legal = share <= 1.0
            if kind and 0 not in kinds:
                legal &= whole
            # Between no layer and all of them a memory plan drops single results.
            legal &= whole | (columns["offload"] == 0) if kind else True
            step = (1 - share) * scores[0].step_s + share * scores[kind].step_s
            memory = (1 - share) * scores[0].memory_bytes + share * scores[kind].memory_bytes
            if j > 0:
                c = Candidates.of_columns(**columns, recompute=float(kind))
                terms = memory_terms(PricingCase(request.numbers, request.machine, request.workload, c), j)
                mixed = sum(t.bytes for t in terms)
                memory = np.where((columns["offload"] == 0) & (j < layers), mixed, memory)
            legal &= memory <= request.machine.memory_bytes * (1 + 1e-9)
            value = np.where(legal, step / tokens, np.inf)
            found += [(value, kind, np.where(whole, -1, j))]
    return rows, found


def least(request):
    """Least seconds per token of the closed form; infinite when nothing fits."""
    rows, found = closed_forms(request)
    return min((float(v.min()) for v, _, _ in found), default=math.inf) if len(rows) else math.inf


def least_refined(request):
    """Least seconds per token with real stages and simulated schedules, every strategy refined."""
    rows, found = closed_forms(request)
    best = math.inf
    for value, kind, layers in found:
        for i in np.flatnonzero(np.isfinite(value)):
            columns = dict(zip(COLUMNS, rows[i : i + 1].T, strict=True))
            candidate = Candidates.of_columns(**columns, recompute=float(kind))
            strategy, workload = candidate.strategy_at(0, Strategy(), request.workload)
            if kind and layers[i] >= 0:
                strategy = replace(strategy, recompute_layers=int(layers[i]))
            best = min(best, price(request, strategy, workload).per_token_s)
    return best
