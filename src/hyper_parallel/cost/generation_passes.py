"""Seconds and bytes of generation: passes over prompts (prefill), and over one token of every sequence (decode).

The time of a kernel is that of its arithmetic or of its memory reads, whichever is longer; kernels run one after the
other. A pass reads the KV cache and the weights once; of routed experts, it reads only those that its tokens choose.
Pipeline stages run one after the other, so a pass takes the seconds of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from hyper_parallel.cost._communication import (
    call_seconds,
    exposed,
    forward_communication,
    hop_seconds,
)
from hyper_parallel.cost._layer import forward_launch, layer_compute, matmul_seconds, matmuls
from hyper_parallel.cost._memory import activation_bytes
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost.candidates import Array, shape_of
from hyper_parallel.ir import AXES, GenerateWorkload, Purpose
from hyper_parallel.model import AttentionSpec
from hyper_parallel.shard import Boundary, embedding_boundaries, head_boundaries
from hyper_parallel.units import DTYPE_BYTES

CHOICE_BYTES: Final = 48.0
"""Bytes per logit that the choice of the next token reads and writes, in addition to two reads of the logit.

A logit is cast to float64 (8 written). The logarithmic softmax reads it three times and writes it (32), and a gather
reads it (8).
"""

PassSeconds = dict[str, Array]
"""Dict from cause, such as `tp communication`, to seconds."""
LayerKind = tuple[int, ModelNumbers, tuple[int, ...] | None]
"""(number of layers of one kind, numbers of a model with only that kind, shape of MLA's latent projection or None).

The latent projection is the weight that projects MLA's latent to keys and values.
"""


def cache_bytes(attention: AttentionSpec, ranks: int, work: GenerateWorkload, dtype: str) -> int:
    """Return the KV cache bytes of one layer and sequence on one of `ranks` tensor-parallel ranks.

    The cache has every position, even in layers with a sliding window. With fewer key-value heads than ranks, a rank
    has one head. MLA's latent is replicated.
    """
    return int(_cached_elements(attention, ranks)) * work.columns * DTYPE_BYTES[dtype]


def _cached_elements(a: AttentionSpec, ranks: Array | int) -> Array | float:
    if a.kind == "mla":
        return a.kv_cache_width
    elements: Array | float = a.kv_cache_width / np.minimum(ranks, a.num_kv_heads)
    return elements


def _attention_elements(a: AttentionSpec, ranks: Array | int) -> Array | float:
    """Return the elements per cached token that attention derives from the KV cache, and writes to memory.

    With attention masks, transformers repeats keys and values for all query heads. MLA projects its latent to keys and
    values, and copies the keys once more. The result is 0 for multi-head attention without MLA.
    """
    if a.kind == "mla":
        return a.num_heads * (2.0 * a.qk_head_dim + a.v_head_dim) / ranks
    if a.num_heads == a.num_kv_heads:
        return 0.0
    return _cached_elements(a, ranks) * a.num_heads / a.num_kv_heads


def pass_seconds(s: PricingCase, kinds: Sequence[LayerKind], work: GenerateWorkload) -> tuple[PassSeconds, PassSeconds]:
    """Return (seconds of a prefill, seconds of a decode pass) by cause, for all sequences that a rank has at a time.

    The prefill covers whole prompts. The decode pass has one token per sequence, at the mean length of a sequence.

    Args:
        s: Pricing case; its microbatch is the number of sequences at a time on a data-parallel rank.
        kinds: Layers of the model by kind.
        work: Lengths of prompts and completions.
    """
    passes, prompt = work.prompt_passes, work.prompt_len
    whole, chunk, token = (_of_length(s, n) for n in (prompt, -(-prompt // passes), 1))
    mean_prefill_length = prompt * (passes + 1) / (2.0 * passes)
    mean_decode_length = prompt + work.new_tokens / 2.0
    prefill: PassSeconds = {}
    decode: PassSeconds = {}
    for layers, n, latent in kinds:
        attention_s = layer_compute(replace(whole, n=n)).attention / passes
        terms = _layer(replace(chunk, n=n), mean_prefill_length, attention_s, latent)
        _add(prefill, layers * passes, terms)
        flops = sum(count / n.layers * a.forward_flops_per_token(int(mean_decode_length)) for count, a in n.attentions)
        attention_s = token.tokens / s.c.tp * flops / s.machine.attention_flops
        _add(decode, layers, _layer(replace(token, n=n), mean_decode_length, attention_s, latent))
    _add(prefill, passes, _ends(chunk))
    _add(decode, 1, _ends(token))
    return prefill, decode


def _of_length(s: PricingCase, tokens: int) -> PricingCase:
    return replace(s, workload=replace(s.workload, seq_len=tokens))


def _add(total: PassSeconds, times: int, terms: PassSeconds) -> None:
    for name, seconds in terms.items():
        total[name] = total.get(name, np.zeros(1)) + times * seconds


def _layer(s: PricingCase, length: float, attention_s: Array, latent: tuple[int, ...] | None) -> PassSeconds:
    """Return the seconds by cause of one layer in a pass over the tokens of `s`.

    `length` is the number of cached tokens per sequence, `attention_s` the time of the attention matmuls, and `latent`
    the shape of MLA's latent projection, None without MLA.
    """
    n, c, machine, rate = s.n, s.c, s.machine, s.machine.stream_bytes_s
    work, read, visited = layer_compute(s), s.dense(), None
    if n.experts:
        # Expected number of distinct experts of a rank chosen by the tokens of its group, with uniform routing.
        unvisited = 1.0 - n.routed_experts_per_token / n.experts
        visited = n.experts / c.ep * (1.0 - unvisited ** (s.tokens * c.ep * s.etp / c.tp))
        read = read + s.experts() * visited * c.ep / n.experts
    matmul = np.maximum(matmuls(s, visited), read * machine.width / rate)
    moved = sum(
        count / n.layers * (_cached_elements(a, c.tp) + 2.0 * _attention_elements(a, c.tp)) for count, a in n.attentions
    )
    cached_tokens = c.microbatch * length
    attention = np.maximum(attention_s, cached_tokens * moved * machine.width / rate)
    if latent is not None:  # projection of the whole cache instead of the new tokens alone
        for rows, sign in ((cached_tokens, 1.0), (s.tokens, -1.0)):
            seconds = matmul_seconds(machine, rows, latent[0] / c.tp, latent[1])
            attention = attention + sign * seconds
    seconds = matmul + attention + work.elementwise
    tp, ep, gather, _ = forward_communication(s)
    return {
        "weights and products": matmul,
        "cache and attention": attention,
        "element-wise": work.elementwise,
        "kernel launches": forward_launch(s, seconds),
        "tp communication": tp,
        "ep communication": ep,
        "fsdp communication": exposed(gather, seconds, machine.stack.overlap_dp),
    }


def _ends(s: PricingCase) -> PassSeconds:
    """Return the seconds by cause of the work that a pass does once, outside the layers.

    This work is the head and the choice of one token per sequence, collectives of embedding and head, sends between
    pipeline stages, and an all-reduce by which ranks agree whether any rank has work left.
    """
    n, c, machine, rows = s.n, s.c, s.machine, s.c.microbatch
    vocab = n.vocab / c.tp
    reads = n.hidden * vocab * machine.width / machine.stream_bytes_s
    head = np.maximum(matmul_seconds(machine, rows, vocab, n.hidden), reads)
    choice = rows * n.vocab * (CHOICE_BYTES + 2.0 * machine.width) / machine.passing_bytes_s
    ends = [*embedding_boundaries(s.cut, n.hidden, True), *head_boundaries(s.cut, n.hidden, True)]
    stream = (Purpose.SEQUENCE_GATHER, Purpose.SEQUENCE_SCATTER)
    calls = [b for b in ends if b.purpose in stream and np.any(b.forward)]
    calls.append(Boundary("all_gather", ("tp_x", "tp_y"), c.tp, rows * n.vocab, Purpose.LOGITS))
    tp: Array = sum((call_seconds(s, b) for b in calls), np.zeros(1))
    hops = (c.pp - 1.0) * hop_seconds(s) + machine.latency((c.pp, s.places.axis("pp")[1]))
    # Replicas of whole parameters need no agreement.
    agreement = 2.0 * machine.ring(*s.places.group(AXES)).seconds(np.full(1, 8.0))
    agreement = np.where(c.world_size > c.dp_replicate, agreement, 0.0)
    return {
        "head and choice": head + choice,
        "tp communication": np.where(c.tp > 1, tp, 0.0),
        "fsdp communication": forward_communication(s)[3],
        "pipeline sends": np.where(c.pp > 1, hops, 0.0),
        "agreement": np.broadcast_to(agreement, shape_of(c)),
    }


def pass_bytes(s: PricingCase, work: GenerateWorkload) -> tuple[Array, Array]:
    """Return the bytes on a rank other than weights and KV cache, as (fixed bytes, bytes per sequence).

    The fixed bytes are the device context, and with FSDP the gathered parameters of two layers, embedding and head. The
    bytes of a sequence are the activations of one layer in a prefill (as many as training saves for backward), keys and
    values that attention computes from the cache, and logits with two float64 copies.
    """
    n, c, card, width = s.n, s.c, s.machine.card, s.machine.width
    chunk = -(-work.prompt_len // work.prompt_passes)
    single = _of_length(s.with_columns(microbatch=np.ones(1)), chunk)
    expanded = sum(count / n.layers * _attention_elements(a, c.tp) for count, a in n.attentions)
    per_sequence = activation_bytes(single) + work.columns * expanded * width + n.vocab * (width + 16.0)
    gathered = (2.0 * (s.dense() + s.experts()) + s.ends(s.outside)) * width
    overhead = 1.0 + card.fragmentation
    gathered = np.where(c.dp_shard > 1, gathered, 0.0)
    return card.context_bytes + overhead * gathered, overhead * per_sequence
