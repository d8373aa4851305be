"""The boundary table on numbers worked out by hand and from the literature, with ints and with arrays."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.ir import SequenceCut, Strategy, Workload
from hyper_parallel.model import AttentionSpec
from hyper_parallel.shard import (
    BlockWidths,
    Projection,
    TokenCut,
    block_boundaries,
    context_boundaries,
    ring_bytes,
    sharing_boundaries,
)

pytestmark = pytest.mark.unit

ATTENTION = AttentionSpec("full", num_heads=8, num_kv_heads=2, qk_head_dim=64, v_head_dim=32)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_gather", 750), ("reduce_scatter", 750), ("all_reduce", 1500), ("all_to_all", 750), ("broadcast", 1000)],
)  # fmt: skip
def test_ring_volumes(kind, sent):
    assert ring_bytes(kind, 1000, 4) == sent
    assert ring_bytes(kind, 1000, 1) == 0
    assert ring_bytes(kind, np.array([1000.0, 1000.0]), np.array([4.0, 1.0])).tolist() == [sent, 0]


def context(kind, seq_len=64, cp=4, ulysses=1, attention=ATTENTION, tp=1):
    """(kind, calls forward, calls backward, bytes) of what is called at all, activations of two bytes."""
    strategy = Strategy(cp=cp, cp_kind=kind, cp_ulysses=ulysses, tp_x=tp)
    cut = TokenCut.of(strategy, Workload(seq_len, microbatch=3))
    return [
        (b.kind, b.forward, b.backward, b.sent_bytes(4 if b.format == "statistic" else 2))
        for b in context_boundaries(attention, cut, kind == "all_gather")
        if b.forward + b.backward
    ]


def test_context_parallel_bytes_by_hand():
    tokens = 3 * 16
    keys = tokens * 2 * (64 + 32) * 2
    assert context("ring") == [("send_recv", 3, 3, keys), ("send_recv", 0, 3, keys)]
    # Gathered gradients are added up in float32.
    assert context("all_gather") == [
        ("all_gather", 1, 1, 3 * keys),
        ("reduce_scatter", 0, 1, 3 * 2 * keys),
    ]
    # Two key heads are repeated to four.
    into, out = tokens * (8 * 64 + 4 * 96) * 2, tokens * 8 * 32 * 2
    assert context("ulysses") == [
        ("all_to_all", 1, 0, into * 3 // 4),
        ("all_to_all", 0, 1, into * 3 // 4),
        ("all_to_all", 1, 0, out * 3 // 4),
        ("all_to_all", 0, 1, out * 3 // 4),
    ]
    into = tokens * (8 * 64 + 2 * 96) * 2
    assert context("hybrid", ulysses=2) == [
        ("all_to_all", 1, 0, into // 2),
        ("all_to_all", 0, 1, into // 2),
        ("all_to_all", 1, 0, out // 2),
        ("all_to_all", 0, 1, out // 2),
        ("send_recv", 1, 1, keys),
        ("send_recv", 0, 1, keys),
    ]


def test_windows_tensor_parallelism_latents_and_padding_change_the_bytes():
    window = AttentionSpec("sliding", 8, 2, 64, 32, window=4)
    assert [x[1] for x in context("ring", attention=window)] == [2, 0]  # of three rounds
    assert context("ring", tp=2)[0][3] * 2 == context("ring", tp=1)[0][3]
    assert context("ring", tp=4)[0][3] == context("ring", tp=2)[0][3]  # one key head is not cut
    latent = AttentionSpec("mla", 8, 1, 64, 32)
    assert context("ring", attention=latent)[0][3] == 4 * context("ring")[0][3]  # all heads
    assert context("ring", seq_len=57)[0][3] == context("ring")[0][3]


def small_blocks():
    """32 tokens, width 64, 16 heads, 4 key heads, gated width 96."""
    attention = BlockWidths(
        64,
        (Projection(64, 64 * 64), Projection(16, 64 * 16, True), Projection(16, 64 * 16, True)),
        (Projection(64, 64 * 64),),
        4,
    )
    into = Projection(96, 96 * 64)
    return attention, BlockWidths(64, (into, into), (into,))


@pytest.mark.parametrize(
    ("x", "y", "attention", "mlp", "line"),
    [(2, 2, 2304, 3328, 6144), (4, 2, 2304, 2688, 7168), (2, 4, 2816, 3968, 7168), (4, 4, 1920, 2496, 7680)],
)  # fmt: skip
def test_elements_of_a_small_layer_forward(x, y, attention, mlp, line):
    """Sums of g - 1 shards, worked out by hand; more ranks than key heads double their part of the scatter."""
    cut = TokenCut.of(Strategy(tp_x=x, tp_y=y), Workload(32, microbatch=1))
    column = TokenCut(*(np.array([float(v)]) for v in (x, y, 32, 32 / (x * y), 32)))
    for sizes in (cut, column):
        sent = [
            sum(b.forward * b.sent_bytes(1) for b in block_boundaries(block, "2d", sizes)) for block in small_blocks()
        ]
        assert sent == [attention, mlp]
        one = block_boundaries(small_blocks()[1], "1d", sizes)
        assert 2 * sum(b.forward * b.sent_bytes(1) for b in one) == line


SHAPES = ("1d", "2d", "weight")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("token", [False, True])
def test_arrays_of_candidates_are_priced_as_each_of_them(shape, token):
    """No formula has another form for arrays: where nothing is padded both give the same numbers."""
    attention, mlp = small_blocks()
    cuts = [
        TokenCut.of(Strategy(tp_x=x, tp_y=y, attention_shape=shape), Workload(64, microbatch=2))
        for x, y in ((2, 2), (4, 2), (2, 4), (4, 4))
    ]
    names = ("x", "y", "tokens", "piece", "spans")
    column = TokenCut(*(np.array([float(getattr(c, n)) for c in cuts]) for n in names))
    for block in (attention, mlp):
        options = {"token_scatter": token, "hidden_cut": False}
        many = list(block_boundaries(block, shape, column, **options))
        for i, cut in enumerate(cuts):
            one = list(block_boundaries(block, shape, cut, **options))
            assert [b.purpose for b in one] == [b.purpose for b in many]
            for a, b in zip(one, many, strict=True):
                for phase in ("forward", "backward", "recomputed", "regathered"):
                    calls, sent = getattr(b, phase), b.sent_bytes(2)
                    expected = getattr(a, phase) * a.sent_bytes(2)
                    assert np.broadcast_to(calls * sent, 4)[i] == expected


def test_shared_states_are_gathered_and_reduced_as_zero_says():
    def calls(zero, once, freed):
        rows = sharing_boundaries(80, ("dp_shard",), 8, 2, zero, once, freed)
        return {(b.kind, *b.axes): (b.forward, b.backward, b.once) for b in rows}

    gather, scatter = ("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard")
    fully = calls(3, False, True)
    assert (fully[gather], fully[scatter]) == ((1, 1, 0), (0, 1, 0))
    kept = calls(2, False, False)
    assert (kept[gather], kept[scatter]) == ((1, 0, 0), (0, 1, 0))
    piped = calls(3, True, True)
    assert (piped[gather], piped[scatter]) == ((1, 1, 0), (0, 0, 1))
    states = calls(1, True, False)
    assert (states[gather], states[scatter]) == ((0, 0, 1), (0, 0, 1))
    nothing = calls(0, True, False)
    assert (nothing[gather], nothing[scatter]) == ((0, 0, 0), (0, 0, 0))
    assert nothing["all_reduce", "dp_shard"] == nothing["all_reduce", "dp_replicate"] == (0, 0, 1)


def test_padding_is_in_the_cut_of_one_strategy():
    cut = TokenCut.of(Strategy(tp_x=4, tp_y=2, attention_shape="weight"), Workload(13, microbatch=3))
    assert (cut.tokens, cut.spans, cut.piece) == (
        39,
        2 * 3 * 7,
        6,
    )  # 21 tokens of a span on four ranks
    assert TokenCut.of(Strategy(tp_x=4, tp_y=2), Workload(13, microbatch=3)).piece == 5
    ring = TokenCut.of(Strategy(cp=4), Workload(57))
    assert (ring.tokens, ring.sequence) == (16, SequenceCut(57, 4))
