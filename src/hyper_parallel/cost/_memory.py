"""Peak memory of the fullest device: one term per cause, each an array over candidates.

Matmuls read a copy of the parameters in the compute format, which ZeRO 3 gathers for one layer (ZeRO 2: for the whole
pass). Where the stack's card says `phased` the peak is that of the fullest phase of a step, see `_phases`; else it lies
at the end of forward of the last microbatch in flight, plus one layer being worked on, and everything is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import SOME, Array, Candidates, shape_of
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._phases import (
    FORMULAS,
    LayerMemory,
    Parts,
    moving,
    phases,
    stage_elements,
    state_bytes,
    staying,
)
from hyper_parallel.cost._setting import Setting, positions
from hyper_parallel.cost.pipeline import in_flight, in_flight_of, lay_out
from hyper_parallel.ir import MemoryTerm

_TIE = 1e-9  # of a layer: what rounding may add to the layers that fit
_LEFT = 2.0  # layers at the end of every stage that are not recomputed, so that nothing is made again at the peak


@dataclass(frozen=True, slots=True)
class RankStages:
    """All stages of one pipeline rank."""

    numbers: ModelNumbers  # of a model with the layers of the rank alone
    first: bool  # whether the first stage, with the embedding, is among them
    last: bool  # whether the last stage, with the head, is among them


@dataclass(frozen=True, slots=True)
class SpaceTerm:
    """One cause of memory over all candidates."""

    name: str
    bytes: Array
    formula: str

    def at(self, index: int) -> MemoryTerm:
        """The term of one candidate."""
        return MemoryTerm(self.name, "hbm", int(np.ceil(self.bytes[index])), self.formula)


def activation_bytes(s: Setting) -> Array:
    """Bytes that one mean layer and microbatch keeps for backward, without recomputation.

    b T ((4h + 2q + 2k + 3f) / P + 2h (1 - 1/P)) with gathered inputs kept; the second part is left out when they are
    gathered again. Without sequence parallelism 5h elements are whole on every rank. Dropout keeps masks of one byte,
    two over h and, without fused attention, the scores 5 a s bytes per token.

    Source: Korthikanti et al. 2022, section 4 and equation 2, generalised to narrow keys and gated widths.
    """
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    dense = n.saved_elements * width + stack.dropout * 2.0 * n.hidden
    uncut, whole = n.whole_bytes(s.uncut, width, stack.eager), 0.0
    if stack.eager and n.measured is not None:
        uncut = min(n.whole_share * n.known_bytes * width / 2.0, dense + n.eager_bytes(width))
    if not stack.sequence_parallel and not s.uncut.stream:
        # Inputs of both norms and both column matmuls, and a dropout mask of each block.
        whole = 4.0 * n.hidden * width + stack.dropout * 2.0 * n.hidden
    # Element-wise kernels also write the experts' outputs, which backward does not need.
    experts = (n.expert_saved_width - n.experts_per_token * n.hidden) * width * stack.imbalance
    gathered = 2.0 * n.hidden * width * (1.0 - 1.0 / c.tp)
    kept = stack.keep_gathered * np.where(c.recompute > 1, 1.0, 1.0 - c.regather)
    extra = kept * stack.sequence_parallel * gathered * (1.0 - s.uncut.stream * s.keeps_whole)
    total = (dense - whole - uncut + stack.eager * n.eager_bytes(width)) / c.tp + whole
    total = total + uncut * s.over_tp(1.0)
    if stack.eager:
        total = (total + n.latent_bytes(width)) * n.unknown_share
        if n.measured is not None:  # experts are not among the modules that were measured
            whole_copies = s.over_tp(s.uncut.stream) - n.unknown_share / c.tp
            total = total + n.expert_copies * width * whole_copies
    total = total + extra + experts * s.over_tp(s.uncut.stream)
    if not stack.flash:
        # Selective recomputation drops the scores.
        per_token = (2.0 * width + 1.0) * n.num_heads * s.workload.seq_len
        scores = per_token * s.over_tp(s.uncut.attention)
        total = total + np.where(c.recompute == 1, 0.0, scores)
    if stack.eager:
        repeated = n.repeated_elements(s.workload.seq_len) * width
        total = total + np.where(
            c.cp > 1, 0.0, (repeated + s.scores) * s.over_tp(s.uncut.attention)
        )
    # Log-sum-exp of fused attention, float32.
    statistics = 4.0 * n.num_heads * s.over_tp(s.uncut.attention) if stack.flash else 0.0
    if stack.eager:
        scores = n.unfused_scores(s.workload.seq_len) * s.over_tp(s.uncut.attention)
        total = total + np.where(c.cp > 1, 0.0, scores)
    return s.tokens * stack.kept * (total + statistics)


def kept_bytes(s: Setting, one_layer: Array | None = None) -> Array:
    """Bytes that one mean layer and microbatch keeps from forward to backward, recomputation counted.

    Args:
        s: What is priced.
        one_layer: The same without recomputation, when it is known.
    """
    if one_layer is None:
        one_layer = activation_bytes(s)
    c, stack = s.c, s.machine.stack
    boundary = s.n.hidden * s.machine.width * s.tokens
    boundary = boundary * (s.over_tp(s.uncut.stream) if stack.sequence_parallel else 1.0)
    selective = np.where(c.recompute == 1, stack.selective_kept, 1.0)
    return np.where(c.recompute > 1, boundary, selective * one_layer)


def memory_terms(
    s: Setting, again: int | None = None, stages: Sequence[RankStages] = ()
) -> tuple[SpaceTerm, ...]:
    """All terms of the peak memory of the fullest device; their sum is the prediction.

    Of a stack whose card says `phased` and that shards parameters the terms are those of the fullest phase of a step;
    of the others everything is taken to be there at once, which their constants were found with.

    Args:
        s: What is priced.
        again: Layers of a rank that `recompute` applies to; None: all. Every phase has a mixture then, and the fullest
            one need not be that of none or of all.
        stages: The stages of every pipeline rank, where they are known; (): equal layers, cut by FLOPs.
    """
    c, card = s.c, s.machine.card
    if again is None:
        found = held_parts(s, stages)
    else:
        some, share = (c.recompute > 1) & (again <= s.layers - _LEFT * c.vpp), again / s.layers
        plain = held_parts(s.under(recompute=0.0 * c.recompute), stages)
        other = held_parts(s.under(recompute=np.where(some, SOME, c.recompute)), stages)
        states = ("parameters", "optimizer states")
        found = [
            {k: v if k in states else (1.0 - share) * v + share * b[k] for k, v in a.items()}
            for a, b in zip(plain, other, strict=True)
        ]
    _, which = fullest(total_bytes(found, s), shape_of(c))
    held = {name: chosen([parts[name] for parts in found], which) for name in FORMULAS}
    terms = [SpaceTerm(name, held[name], formula) for name, formula in FORMULAS.items()]
    context = np.full(which.shape, card.context_bytes)
    return (
        *terms,
        SpaceTerm("device context", context, "driver context, communicators and workspaces"),
        SpaceTerm(
            "fragmentation", card.fragmentation * moving(held),
            f"{card.fragmentation:.0%} of what comes and goes: all but states and context",
        ),
    )  # fmt: skip


def min_recompute_layers(s: Setting, kind: int, capacity_bytes: float) -> tuple[Array, Array]:
    """As few layers of a rank as have to be recomputed, all at most, and the peak bytes with them.

    Every phase of a step falls in a line with the layers, and all have to fit.

    Args:
        s: What is priced, columns of one length; `recompute` is not read.
        kind: Index into `RECOMPUTE`.
        capacity_bytes: What the peak must not exceed.
    """
    c, layers = s.c, s.layers
    kinds = (0, kind, SOME) if kind > 1 else (0, kind)
    end = s.under(recompute=np.array(kinds, dtype=np.float64)[:, None])
    held_at = [np.broadcast_to(t, shape_of(end.c)) for t in total_bytes(held_parts(end), end)]
    plain, whole, *some = zip(*held_at, strict=True)
    needed, used = layers, np.max(whole, axis=0)
    for other, most in ((whole, layers - 1.0), *((o, layers - _LEFT * c.vpp) for o in some)):
        few, held = np.ones(1), np.full(1, -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for a, b in zip(plain, other, strict=True):
                fit = np.where(
                    a > b, np.ceil((a - capacity_bytes) / (a - b) * layers - _TIE), np.inf
                )
                few = np.maximum(few, np.where(a <= capacity_bytes, 1.0, fit))
            if kind > 1 and other is whole:
                few = np.maximum(few, layers - _LEFT * c.vpp + 1.0)
            for a, b in zip(plain, other, strict=True):
                held = np.fmax(held, a - few / layers * (a - b))
        fits = few <= most
        needed, used = np.where(fits, few, needed), np.where(fits, held, used)
    return needed, used


def under(s: Setting, choices: Sequence[tuple[int, int]]) -> Setting:
    """An open grid of candidates, columns of one length, under pairs of `regather` and `recompute`."""
    # What no choice changes is computed once a row.
    rows = {n: np.atleast_2d(getattr(s.c, n)) for n in Candidates.__slots__}
    regather, recompute = np.array(choices, dtype=np.float64).T[:, :, None]
    return s.under(**{**rows, "regather": regather, "recompute": recompute})


def memory_key(columns: Mapping[str, Array], seq_len: int) -> list[Array]:
    """What memory reads of strategies for sequences of a length: rows that agree in it hold as much."""
    c = columns
    named = (
        "pp",
        "vpp",
        "schedule",
        "dp_shard",
        "cp",
        "microbatch",
        "accumulation",
        "zero",
        "offload",
    )
    several = (c["ep"], c.get("dp_replicate", np.ones_like(c["pp"])))
    counts = [c["tp_x"] * c["tp_y"], c["ep"] * c["etp"], *(np.minimum(x, 2.0) for x in several)]
    padded = positions(c["cp"], c.get("cp_ulysses", 1.0), seq_len)
    return [*(c[name] for name in named if name in c), *counts, padded]


def fullest(totals: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, NDArray[np.intp]]:
    """The most of some bytes, and which of them it is, the first of equal ones."""
    shape = np.broadcast_shapes(totals[0].shape, shape)
    best, which = np.broadcast_to(totals[0], shape), np.zeros(shape, dtype=np.intp)
    for index, other in enumerate(totals[1:], 1):
        better = other > best
        best, which = np.where(better, other, best), np.where(better, index, which)
    return best, which


def chosen(values: Sequence[Array], which: NDArray[np.intp]) -> Array:
    """One of the values for every candidate."""
    found = np.broadcast_to(values[0], which.shape)
    for index, value in enumerate(values[1:], 1):
        found = np.where(which == index, value, found)
    return found


def total_bytes(found: Sequence[Parts], s: Setting) -> list[Array]:
    """Bytes of each of `held_parts`; minus infinity where it does not describe a candidate."""
    card = s.machine.card
    totals = [
        moving(p) * (1.0 + card.fragmentation) + staying(p) + card.context_bytes for p in found
    ]
    if len(found) > 1:
        sharded = (s.c.zero > 1) & (s.machine.stack.phased > 0.0)
        if not sharded.all():
            first, *others = totals
            totals = [np.where(sharded, -np.inf, first)]
            totals += [np.where(sharded, other, -np.inf) for other in others]
    return totals


def held_parts(s: Setting, stages: Sequence[RankStages] = ()) -> list[Parts]:
    """Everything at once, and the phases of the first and the last stage where the stack is `phased`.

    The first of them stands for everything at once; where all candidates have phases it is one of these. `stages`
    are as of `memory_terms`.
    """
    c, layer = s.c, _layer_memory(s)
    found: list[Parts] = []
    if s.machine.stack.phased and bool((c.zero > 1).any()):
        found = _phases_of_ranks(s, stages) if stages else _phases_of_stages(s, layer)
        if bool((c.zero > 1).all()):
            return found
    logits, saved = s.logits, s.layers * in_flight(c) * layer.kept
    # With a pipeline the first stage holds most activations and the last one the logits: the fuller of the two.
    last_saved = s.layers * layer.kept * np.where(c.pp > 1, in_flight_last(c), 1.0)
    head_fuller = (c.pp > 1) & (last_saved + logits > saved)
    saved = np.where(head_fuller, last_saved, saved)
    logits = np.where((c.pp > 1) & ~head_fuller, 0.0, logits)
    return [_at_once(s, layer, saved, logits), *found]


def _layer_memory(s: Setting) -> LayerMemory:
    n, c = s.n, s.c
    one_layer = activation_bytes(s)
    kept = kept_bytes(s, one_layer)
    exchange = combine = np.zeros(1)
    if n.experts:
        routed = n.experts_per_token / max(n.moe_share, 1e-9) * n.hidden * s.machine.width
        held = 2.0 * s.tokens / c.tp * (routed * s.machine.stack.imbalance)
        exchange = np.where(c.ep > 1, held, 0.0)
        # Rows of one layer as float32, before and after they are weighted, beside what experts gave and its cast.
        combine = held * (4.0 / s.machine.width + 1.0) * n.wide_combine
    scale = s.tokens * s.machine.width / 2.0 * s.over_tp(n.whole_share)
    worked = np.where(
        (c.recompute > 1) & (c.recompute < SOME), one_layer + scale * n.fullest_bytes, 0.0
    )
    freed = np.where(c.recompute < SOME, kept, one_layer)
    whole = (c.recompute < 1) | (c.recompute >= SOME)
    freed = np.maximum(freed + np.where(whole & (c.pp <= 1), scale * n.last_bytes, 0.0), 0.0)
    return LayerMemory(kept, freed, worked, exchange, combine)


def _phases_of_ranks(s: Setting, stages: Sequence[RankStages]) -> list[Parts]:
    """Return the phases of every pipeline rank with its own layers."""
    n, found = s.n, list[Parts]()
    for rank, held in enumerate(stages):
        own = replace(s, n=held.numbers)
        outside = n.embedding_weights * held.first
        outside += (n.head_params if held.first else n.head_weights) * held.last
        flight = in_flight_of(s.c, rank)
        logits = own.logits if held.last else np.zeros(1)
        layers = np.full(1, float(held.numbers.layers))
        elements = np.full(1, float(outside))
        found += phases(own, _layer_memory(own), layers, elements, flight, logits)
    return found


def _phases_of_stages(s: Setting, layer: LayerMemory) -> list[Parts]:
    """Of the first stage, which has the embedding and most in flight, and of the last one, which has the head."""
    n, c, one = s.n, s.c, s.c.pp <= 1
    flops = 6.0 * (n.attention_weights + n.mlp_weights + n.active_expert_weights)
    flops = flops + 3.0 * n.attention_flops(s.workload.seq_len)
    even, head = bool(s.machine.stack.even_stages), np.full(1, 6.0 * n.head_weights)
    cut = lay_out(c, n.layers, np.full(1, flops), head, even)
    # Every stage has a layer.
    last = np.where(one, n.layers, np.maximum(cut.last, 1.0))
    most = np.where(one, n.layers, np.ceil((n.layers - last) / np.maximum(c.pp - 1.0, 1.0)))
    every = n.embedding_weights + n.head_params
    embedding, output = (
        np.where(one, every, part) * 1.0 for part in (n.embedding_weights, n.head_weights)
    )
    found = phases(s, layer, most, embedding, in_flight(c), np.where(one, s.logits, 0.0))
    if one.all():  # the last stage is the first
        return list(found)
    flight = np.where(one, 1.0, in_flight_last(c))
    return [*found, *phases(s, layer, last, output, flight, s.logits)]


def _at_once(s: Setting, layer: LayerMemory, saved: Array, logits: Array) -> Parts:
    """All of it at the same time."""
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    elements, one, vocabulary = stage_elements(s), s.dense() + s.experts(), s.ends(s.outside)
    states = state_bytes(s, elements)
    if stack.vocabulary_groups > 1:
        vocabulary = np.minimum(
            vocabulary, max(n.embedding_weights, n.head_weights) / s.vocabulary_ranks
        )
    gathered_layers = np.where(c.zero > 2, np.minimum(2.0, s.layers), s.layers)
    reduced = np.where(s.sharded, s.reduce_width + width, width)
    reduced, trained = reduced * s.workload.trained, s.workload.trained
    second_copy = trained * stack.gradient_copy_bytes * np.where(c.zero < 2, elements[0], 0.0)
    return states | {
        "gradients": states["gradients"] + second_copy,
        "gathered parameters": np.where(
            s.copies, (gathered_layers * one + vocabulary) * width, 0.0
        ),
        "gradient buffers": np.where(s.copies, np.maximum(one, vocabulary) * reduced, 0.0),
        "activations": saved + layer.worked,
        # The backward of one layer holds the gradient of a gathered input.
        "work space": np.where(c.tp > 1, s.tokens * n.hidden * width, 0.0),
        "exchange buffers": layer.exchange,
        "logits": logits,
    }


def in_flight_last(c: Candidates) -> Array:
    """Microbatches that the last rank holds, in units of all its layers: 1, interleaved 1 + (p - 1) / v at most."""
    return np.where(c.vpp > 1, in_flight(c) - (c.pp - 1.0), 1.0)
