"""Traffic of context-parallel attention by formula, to the byte.

Notation, per rank and layer: t local tokens of a microbatch (padding included), H query and G key heads on the rank
after tensor parallelism, d and e widths of query-key and value heads, n places of the ring with u Ulysses ranks each
(n u = cp), c bytes of the compute format, w = max(c, 4). Sent per microbatch:

    Ulysses, hybrid   in     t (H d + lcm(G, u) (d + e)) c (u - 1) / u      once forward, once backward
                      out    t H e c (u - 1) / u                            once forward, once backward
    ring, hybrid      round  t' G' (d + e) c, t' = u t, G' = lcm(G, u) / u  R forward, 2 R backward
    all_gather        keys   t G (d + e) c (n - 1)                          once forward, once backward
                      grads  t G (d + e) w (n - 1)                          once backward

R is n - 1, or the rounds that a sliding window leaves (`SequenceCut.distances`). Recompute runs forward twice.

Sources: Jacobs et al. 2023, DeepSpeed Ulysses, section 3.2; Liu et al. 2023, Ring Attention; Llama 3 report, 3.3.2.
Unlike there, gradients of keys and values go straight to their owner (R rounds instead of n hops).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.ir import SequenceCut
from hyper_parallel.ir.strategy import CpKind
from hyper_parallel.model import AttentionSpec


@dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of collective of an attention layer and microbatch.

    Attributes:
        kind: send_recv, all_to_all, all_gather or reduce_scatter.
        purpose: What it moves.
        forward: Calls forward.
        backward: Calls backward.
        sent_bytes: Bytes one rank sends per call.
    """

    kind: str
    purpose: str
    forward: int
    backward: int
    sent_bytes: int


def context_bytes(
    attention: AttentionSpec,
    cut: SequenceCut,
    kind: CpKind,
    *,
    microbatch: int,
    tp: int = 1,
    compute_bytes: int = 2,
) -> tuple[Exchange, ...]:
    """What one attention layer sends for one microbatch on one rank.

    Args:
        attention: The layer's attention.
        cut: How sequences are cut, `SequenceCut.of` of the kind.
        kind: ring, ulysses, hybrid or all_gather.
        microbatch: Sequences.
        tp: Tensor-parallel ranks that split the heads.
        compute_bytes: Bytes of one activation.
    """
    heads, keys = local_heads(attention, tp)
    widths = attention.qk_head_dim + attention.v_head_dim
    tokens, u = microbatch * cut.local, cut.ulysses
    found: list[Exchange] = []
    if u > 1:
        keys = math.lcm(keys, u)
        into = tokens * (heads * attention.qk_head_dim + keys * widths) * compute_bytes
        out = tokens * heads * attention.v_head_dim * compute_bytes
        # Backward takes the ways back: gradients of the output go where queries, keys and values came from.
        for forward, size in ((1, into), (0, out)):
            sent = size * (u - 1) // u
            found.append(Exchange("all_to_all", "heads for tokens", forward, 1 - forward, sent))
            found.append(Exchange("all_to_all", "tokens for heads", 1 - forward, forward, sent))
        tokens, keys = tokens * u, keys // u
    if cut.ring > 1:
        found.extend(_keys(kind, cut, attention.window, tokens * keys * widths, compute_bytes))
    return tuple(found)


def _keys(
    kind: CpKind, cut: SequenceCut, window: int | None, elements: int, compute_bytes: int
) -> Iterator[Exchange]:
    if kind == "all_gather":
        others = cut.ring - 1
        yield Exchange("all_gather", "keys and values", 1, 1, others * elements * compute_bytes)
        grads = others * elements * max(4, compute_bytes)
        yield Exchange("reduce_scatter", "key and value gradients", 0, 1, grads)
        return
    rounds = len(cut.distances(window))
    yield Exchange("send_recv", "keys and values", rounds, rounds, elements * compute_bytes)
    yield Exchange("send_recv", "key and value gradients", 0, rounds, elements * compute_bytes)


def local_heads(attention: AttentionSpec, tp: int) -> tuple[int, int]:
    """Query and key heads that attention sees on one tensor-parallel rank; MLA expands its latent to all heads."""
    heads = attention.num_heads // tp
    if attention.kind == "mla":
        return heads, heads
    return heads, max(1, attention.num_kv_heads // tp)
