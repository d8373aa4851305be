"""Boundary table: the collectives of a training step, with kind, axes, elements of the full tensor, and calls.

The runtime executes these collectives. `cost.step_collectives` counts their bytes, and adds collectives that run once
per step. Sizes are ints of one strategy or arrays over candidates, see `_boundary`.

T: tokens of a microbatch on a data- and context-parallel rank; P = x y tensor-parallel ranks; n: padded tokens per
tensor-parallel rank between blocks; D: hidden size; q, k: rows of query and key projections; F: MLP width. The
collectives in the forward of one block (attention or MLP), with their elements, are as follows. In backward, gathers
become scatters and vice versa.

    1d        gather and scatter over (x, y)        P n D each
    2d        gather over x                         P n D / y
              attention: scatter q, k, v over y     T (q + 2 k) / x; k, v all-reduced if P does not divide their heads
                         gather k, v over y         T 2 k / x, only with `token_scatter`, which does not all-reduce them
                         gather over y              T q / x
              MLP: scatter each input over y        P n F / x
                   gather over y                    P n F / x
              scatter over x                        P n D / y
    weight    gather and scatter over x             x n D each
              each weight gathered over y           out in / x; again in backward, where its gradient is scattered
              attention: gather k, v over y         T 2 k / x

A 2d block adds an all-to-all over y of n D on each side if the hidden dim of the residual stream is not sharded.

Sources: Korthikanti et al. 2022, section 4.2.2 (1d, sequence parallelism); Xu et al. 2021 (GSPMD), section 3.2 and Pope
et al. 2022, sections 3.2.2 and 3.2.3 (2d, weight); Rajbhandari et al. 2020 (ZeRO); Liu et al. 2023 (ring attention);
Jacobs et al. 2023 (DeepSpeed Ulysses), section 3.2; Llama 3 report, section 3.3.2 (gathered keys); Lepikhin et al. 2020
(GShard), section 2.2; Narayanan et al. 2021, section 4.1 (pipeline sends).
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.ir import Part, Purpose, Strategy, exchanged_rows
from hyper_parallel.ir.strategy import BlockShape
from hyper_parallel.model import AttentionSpec
from hyper_parallel.shard._boundary import (
    BlockWidths,
    Boundary,
    Format,
    Number,
    Projection,
    TokenCut,
    common_multiple,
    least,
    pick,
    share,
)

X, Y = ("tp_x",), ("tp_y",)
TP = ("tp_x", "tp_y")
_MIRROR = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def _mirrored(
    kind: str, axes: tuple[str, ...], ranks: Number, elements: Number, purpose: Purpose,
    *, format: Format = "compute", calls: Number = 1, redone: bool = True, resident: bool = True,
) -> Iterator[Boundary]:  # fmt: skip
    """Yield a collective of forward, and its transpose in backward, each with `calls` calls.

    With `redone`, recomputation of the layer repeats the forward collective. Without `resident`, backward repeats the
    forward collective if the strategy frees gathered inputs.
    """
    yield Boundary(
        kind, axes, ranks, elements, purpose, format, forward=calls,
        recomputed=calls if redone else 0, regathered=0 if resident else calls,
    )  # fmt: skip
    back = purpose if kind == "all_reduce" else purpose.backward
    yield Boundary(_MIRROR.get(kind, kind), axes, ranks, elements, back, format, backward=calls)


def block_boundaries(
    block: BlockWidths,
    shape: BlockShape,
    cut: TokenCut,
    *,
    token_scatter: Number = False,
    hidden_cut: Number = True,
    ends_layer: bool = False,
) -> Iterator[Boundary]:
    """Yield the tensor-parallel collectives around and inside one attention or MLP block of a layer.

    Args:
        block: Widths of the block.
        shape: Use of the two tensor-parallel axes: 1d, 2d or weight; must be 1d with one axis.
        cut: Sharding of tokens.
        token_scatter: Whether 2d attention shards tokens over y and gathers keys and values. False: y shards heads.
        hidden_cut: Whether the hidden dim of the residual stream is sharded over y; used for 2d blocks.
        ends_layer: Whether the block ends the layer, so that recomputation stops before its last collective.
    """
    axes, ranks = (TP, cut.tp) if shape == "1d" else (X, cut.x)
    stream = cut.piece * block.hidden * ranks
    turned = ("all_to_all", Y, cut.y, cut.piece * block.hidden, Purpose.RELAYOUT)
    redone = not ends_layer
    if shape == "2d":
        yield from _mirrored(*turned, calls=1 - hidden_cut)
    yield from _mirrored("all_gather", axes, ranks, stream, Purpose.SEQUENCE_GATHER, resident=False)
    if shape == "weight":
        yield from _weight_block_gathers(block, cut)
    elif shape == "2d":
        yield from (_attention_over_y(block, cut, token_scatter) if block.kv_heads else _mlp_over_y(block, cut))
    for _ in block.outputs:
        yield from _mirrored("reduce_scatter", axes, ranks, stream, Purpose.SEQUENCE_SCATTER, redone=redone)
        if shape == "2d":
            yield from _mirrored(*turned, calls=1 - hidden_cut, redone=redone)


def block_program(
    strategy: Strategy, kv_heads: int, hidden_cut: bool, *, keys: bool = False
) -> dict[Purpose, Boundary]:
    """Return the collectives in the forward of a block by purpose, without sizes: `elements` is 0.

    Args:
        strategy: Degrees and block shapes.
        kv_heads: Key and value heads; 0: the block is an MLP.
        hidden_cut: As for `block_boundaries`.
        keys: Whether the input projection is a key or value projection.
    """
    s = strategy
    shape = s.attention_shape if kv_heads else s.mlp_shape
    one = Projection(0, 0, keys)
    table = block_boundaries(
        BlockWidths(0, (one,), (one,), kv_heads), shape if s.tp_y > 1 else "1d", TokenCut(s.tp_x, s.tp_y, 0, 0, 0),
        token_scatter=s.attention_scatter == "token", hidden_cut=hidden_cut,
    )  # fmt: skip
    return {b.purpose: b for b in table if b.forward}


def _weight_block_gathers(block: BlockWidths, cut: TokenCut) -> Iterator[Boundary]:
    """Yield the collectives over y of a block with shape `weight`: gathers of weights, and of keys and values."""
    for p in (*block.inputs, *block.outputs):
        whole = share(p.weights, cut.x)
        if p.keys:  # key heads that the degree of x does not divide are not sharded
            whole = pick(block.kv_heads % cut.x > 0, p.weights, whole)
        gather = ("all_gather", Y, cut.y, whole, Purpose.WEIGHT_GATHER)
        # Freed after forward; recomputation uses the gather of backward.
        yield Boundary(*gather, forward=1, backward=1)
        yield Boundary("reduce_scatter", Y, cut.y, whole, Purpose.WEIGHT_SCATTER, backward=1)
    if block.kv_heads:
        yield from _key_value_gather(block, cut, 1)


def _mlp_over_y(block: BlockWidths, cut: TokenCut) -> Iterator[Boundary]:
    tokens = cut.tp * cut.piece
    for p in block.inputs:
        rows = tokens * share(p.width, cut.x)
        yield from _mirrored("reduce_scatter", Y, cut.y, rows, Purpose.WIDTH_SCATTER)
    for p in block.outputs:
        rows = tokens * share(p.width, cut.x)
        yield from _mirrored("all_gather", Y, cut.y, rows, Purpose.WIDTH_GATHER, resident=False)


def _attention_over_y(block: BlockWidths, cut: TokenCut, token: Number) -> Iterator[Boundary]:
    tokens = pick(token, cut.spans, cut.tokens)
    # If the ranks do not divide the key heads, every y rank gets the sum and selects the heads of its queries.
    doubled = (block.kv_heads % cut.tp > 0) * (1 - token)
    for p in block.inputs:
        rows = tokens * _rows_per_x_rank(p, block, cut)
        scatter = ("reduce_scatter", Y, cut.y, rows, Purpose.HEAD_SCATTER)
        yield from _mirrored(*scatter, calls=1 - doubled if p.keys else 1)
        if p.keys:
            yield from _mirrored("all_reduce", *scatter[1:], calls=doubled)
    yield from _key_value_gather(block, cut, token)
    for p in block.outputs:
        rows = tokens * share(p.width, cut.x)
        yield from _mirrored("all_gather", Y, cut.y, rows, Purpose.HEAD_GATHER, resident=False)


def _key_value_gather(block: BlockWidths, cut: TokenCut, calls: Number) -> Iterator[Boundary]:
    rows = sum(_rows_per_x_rank(p, block, cut) for p in block.inputs if p.keys)
    yield from _mirrored("all_gather", Y, cut.y, cut.spans * rows, Purpose.KEY_VALUE_GATHER, calls=calls)


def _rows_per_x_rank(p: Projection, block: BlockWidths, cut: TokenCut) -> Number:
    """Return the output rows of a projection on one x rank; for keys and values, at least one head."""
    return share(p.width, least(cut.x, block.kv_heads) if p.keys else cut.x)


def norm_boundaries(cut: TokenCut, statistics: int) -> Iterator[Boundary]:
    """Yield the all-reduces of a norm whose features are sharded over y: `statistics` calls of one sum per token."""
    rows = cut.y * cut.piece
    yield from _mirrored("all_reduce", Y, cut.y, rows, Purpose.NORM_STATISTICS, format="statistic", calls=statistics)


def embedding_boundaries(cut: TokenCut, hidden: Number, waits: bool) -> Iterator[Boundary]:
    """Yield the reduction of a vocabulary-parallel embedding.

    With `waits`, the reduce-scatter before the first layer also sums the partial embeddings. Otherwise they are
    all-reduced.
    """
    if waits:
        stream = cut.tp * cut.piece * hidden
        yield from _mirrored("reduce_scatter", TP, cut.tp, stream, Purpose.SEQUENCE_SCATTER)
    else:
        yield from _mirrored("all_reduce", TP, cut.tp, cut.tokens * hidden, Purpose.EMBEDDING)


def head_boundaries(cut: TokenCut, hidden: Number, cut_vocabulary: bool) -> Iterator[Boundary]:
    """Yield the all-gather of tokens before the head, and the collective of the loss.

    The loss needs an all-gather of its statistics with `cut_vocabulary`, a sharded head, else an all-reduce of its sum.
    """
    stream = cut.tp * cut.piece * hidden
    yield from _mirrored("all_gather", TP, cut.tp, stream, Purpose.SEQUENCE_GATHER)
    loss = ("all_reduce", TP, cut.tp, 1, Purpose.LOSS)
    if cut_vocabulary:
        loss = ("all_gather", TP, cut.tp, cut.tp * 2 * cut.tokens, Purpose.LOSS_STATISTICS)
    yield Boundary(*loss, "statistic", forward=1)


def packed_boundaries(parts: tuple[Part, ...], ranks: int, tokens: int) -> Iterator[Boundary]:
    """Yield the all-to-alls of a packed projection's output columns, with the elements that rank 0 sends."""
    rows = sum(p.rows for p in parts)
    peers = range(1, ranks)
    sent = tokens * sum(exchanged_rows(parts, ranks, 0, t) for t in peers)
    back = tokens * sum(exchanged_rows(parts, ranks, s, 0) for s in peers)
    exchange = ("all_to_all", TP, ranks, tokens * rows, Purpose.PACKED_COLUMNS)
    yield Boundary(*exchange, forward=1, recomputed=1, sent=sent)
    yield Boundary(*exchange, backward=1, sent=back)


def head_norm_boundaries(cut: TokenCut) -> Iterator[Boundary]:
    """Yield the all-reduce of the sum of squares for a norm over all heads, such as a query norm."""
    yield from _mirrored("all_reduce", TP, cut.tp, cut.tokens, Purpose.NORMS_OVER_HEADS, format="statistic")


def context_boundaries(attention: AttentionSpec, cut: TokenCut, gather: Number) -> Iterator[Boundary]:
    """Yield the collectives of one layer's context-parallel attention, for the heads of a tensor-parallel rank.

    Ulysses exchanges tokens for heads of queries, keys, values and output; key and value heads are repeated up to a
    multiple of the ranks. The ring passes keys and values in forward and backward, and their gradients in backward.

    Args:
        attention: Attention of the layer; keys and values of MLA have all query heads.
        cut: Sharding of tokens.
        gather: Whether keys and values are gathered instead of passed around a ring; gradients are then scattered in
            at least float32.
    """
    heads = share(attention.num_heads, cut.tp)
    keys = heads
    if attention.kind != "mla":
        keys = share(attention.num_kv_heads, least(cut.tp, attention.num_kv_heads))
    widths = attention.qk_head_dim + attention.v_head_dim
    u, tokens = cut.ulysses, cut.tokens
    keys = common_multiple(keys, u)
    into = tokens * (heads * attention.qk_head_dim + keys * widths)
    out = tokens * heads * attention.v_head_dim
    for elements, purpose in ((into, Purpose.HEADS_FOR_TOKENS), (out, Purpose.TOKENS_FOR_HEADS)):
        yield from _mirrored("all_to_all", ("cp",), u, elements, purpose, calls=1 * (u > 1))
    elements = tokens * u * share(keys, u) * widths
    passed = ("send_recv", ("cp",), cut.ring, elements)
    rounds = cut.rounds(attention.window) * (1 - gather)
    pair, gradients = Purpose.KEYS_AND_VALUES, Purpose.KEY_VALUE_GRADIENTS
    yield Boundary(*passed, pair, forward=rounds, backward=rounds, recomputed=rounds)
    yield Boundary(*passed, gradients, backward=rounds)
    whole = (("cp",), cut.ring, elements * cut.ring)
    yield Boundary("all_gather", *whole, pair, forward=gather, backward=gather, recomputed=gather)
    yield Boundary("reduce_scatter", *whole, gradients, "statistic", backward=gather)


def expert_boundaries(
    hidden: Number, experts: int, ranks: Number, rows: Number, sent: Number = None,
    received: Number = None, cut_experts: Number = 1,
) -> Iterator[Boundary]:  # fmt: skip
    """Yield the collectives of routed experts for one layer and microbatch: row counts, dispatch and combine.

    A row is the hidden state of one token for one of its experts.

    Args:
        hidden: Width of a row.
        experts: Routed experts.
        ranks: Expert-parallel ranks.
        rows: Rows of this rank's tokens, n k if every token chooses k experts.
        sent: Rows sent to experts on other ranks; None: uniform routing.
        received: Rows received for experts of this rank; None: uniform routing.
        cut_experts: Ranks that shard one expert. They gather each other's rows, and scatter the results.
    """
    group, local = ("all_to_all", ("ep",), ranks), rows * hidden
    yield Boundary(*group, experts, Purpose.EXPERT_ROW_COUNTS, "count", forward=1, recomputed=1)
    for moved in (sent, received):  # dispatch, then combine; gradients in the opposite direction
        yield Boundary(
            *group, local, Purpose.EXPERT_ROWS, forward=1, backward=1, recomputed=1,
            sent=None if moved is None else moved * hidden,
        )  # fmt: skip
    cut = local * cut_experts
    yield from _mirrored("all_gather", ("etp",), cut_experts, cut, Purpose.SEQUENCE_GATHER)
    yield from _mirrored("reduce_scatter", ("etp",), cut_experts, cut, Purpose.SEQUENCE_SCATTER)


def half_batch_boundaries(ranks: Number) -> Iterator[Boundary]:
    """Yield the all-reduce by which `ranks` expert-parallel ranks agree to run a forward pass on half-batches."""
    yield Boundary("all_reduce", ("ep",), ranks, 1, Purpose.HALF_BATCHES, "count", forward=1)


def sharing_boundaries(
    elements: Number, axes: tuple[str, ...], ranks: Number, replicas: Number, zero: Number, once: Number,
    freed: Number, *, experts: bool = False,
) -> Iterator[Boundary]:  # fmt: skip
    """Yield the data-parallel collectives of a parameter group: gathers of parameters, reductions of gradients.

    Args:
        elements: Elements of the group, padding included.
        axes: Axes over which the group is sharded.
        ranks: Number of ranks of these axes.
        replicas: Number of ranks of dp_replicate.
        zero: ZeRO stage: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters.
        once: Whether gradients are reduced once per step instead of once per microbatch.
        freed: Whether parameters are freed after forward and gathered for backward.
        experts: Whether the group belongs to routed experts.
    """
    parameters, gradients = Purpose.FSDP_PARAMETERS, Purpose.FSDP_GRADIENTS
    if experts:
        parameters, gradients = Purpose.EXPERT_PARAMETERS, Purpose.EXPERT_GRADIENTS
    group, shards = (axes, ranks, elements), 1 * (zero > 0)
    resident = 1 * (1 - freed)
    yield Boundary(
        "all_gather", *group, parameters, forward=1 - once * resident, backward=1 * freed,
        once=once * resident * shards,
    )  # fmt: skip
    yield Boundary("reduce_scatter", *group, gradients, "reduce", backward=1 - once, once=once * shards)
    yield Boundary("all_reduce", *group, gradients, "reduce", once=1 - shards)
    shard = share(elements, pick(shards, ranks, 1))
    replica = (("dp_replicate",), replicas, shard, Purpose.REPLICA_GRADIENTS)
    yield Boundary("all_reduce", *replica, "reduce", once=1)


def pipeline_boundaries(cut: TokenCut, hidden: Number, onward: Number, back: Number) -> Iterator[Boundary]:
    """Yield the messages between pipeline stages; every tensor-parallel rank sends its own tokens.

    Args:
        cut: Sharding of tokens.
        hidden: Width of the residual stream.
        onward: Number of the rank's stages that send activations to another rank.
        back: Number of the rank's stages that send gradients to another rank.
    """
    message = ("send_recv", ("pp",), 2, cut.piece * hidden)
    yield Boundary(*message, Purpose.PIPELINE_ACTIVATIONS, forward=onward)
    yield Boundary(*message, Purpose.PIPELINE_GRADIENTS, backward=back)
