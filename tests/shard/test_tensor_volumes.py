"""Tensor-parallel volumes against tables worked out from the formulas of the literature, to 0.1 point."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel.ir import Purpose
from hyper_parallel.shard import BlockWidths, Projection, TokenCut, block_boundaries

pytestmark = pytest.mark.unit

# h, heads, kv heads, f, gated
SHAPES = {
    "8b": (4096, 32, 8, 14336, True),
    "70b": (8192, 64, 8, 28672, True),
    "405b": (16384, 128, 8, 53248, True),
    "gpt3": (12288, 96, 96, 49152, False),
    "8x22b attention": (6144, 48, 8, 0, True),
}
LINE, PLANE, MOVED = "1d", "2d", "weight"
MANY = 4096
"""Key heads that every number of ranks here divides: none are doubled."""


def attention_block(h, k, kv_heads=MANY):
    query, keys = Projection(h, h * h), Projection(2 * k, 2 * k * h, keys=True)
    return BlockWidths(h, (query, keys), (Projection(h, h * h),), kv_heads)


def mlp_block(h, outputs, f):
    return BlockWidths(h, (Projection(outputs, outputs * h),), (Projection(f, f * h),))


def widths(name):
    """Attention and feed-forward block; key and value heads are never doubled here."""
    h, heads, kv_heads, f, gated = SHAPES[name]
    attention = attention_block(h, h // heads * kv_heads)
    return (attention, mlp_block(h, 2 * f if gated else f, f)) if f else (attention,)


def volume(block, shape, tokens, x, y, *, keep=1.0, backward=True):
    """Elements a device sends; what is not kept for backward is gathered again, keys and values too."""
    sizes = (x, y, tokens, tokens / (x * y), tokens)
    cut = TokenCut(*(np.asarray([float(v)]) for v in sizes))
    total = 0.0
    for b in block_boundaries(block, shape, cut):
        keys = b.forward if b.purpose == Purpose.KEY_VALUE_GATHER else 0
        again = b.backward + (1.0 - keep) * (b.regathered + keys)
        total += ((b.forward + backward * again) * b.sent_bytes(1.0)).item()
    return total


def splits(ranks, least_x=2):
    return [(x, ranks // x) for x in range(least_x, ranks) if ranks % x == 0 and ranks // x > 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("8b", [35.0, -13.6, -33.0, -47.9, -61.7]),
        ("70b", [33.3, -14.3, -33.3, -48.4, -61.9]),
        ("405b", [26.7, -17.1, -34.7, -50.3, -62.9]),
        ("gpt3", [30.0, -15.7, -34.0, -49.4, -62.4]),
        ("8x22b attention", [-28.9, -41.0, -57.3, -66.5, -76.3]),
    ],
)
def test_ratio_of_2d_to_1d_with_regathered_inputs(name, expected):
    for ranks, percent in zip((4, 8, 16, 32, 64), expected, strict=True):
        blocks = widths(name)
        line = sum(volume(b, LINE, 8192, ranks, 1, keep=0.0) for b in blocks)
        best = min(sum(volume(b, PLANE, 8192, x, y, keep=0.0) for b in blocks) for x, y in splits(ranks))
        assert 100 * (best / line - 1) == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize(
    ("name", "at_8", "at_16"),
    [("8b", -10.7, -31.7), ("70b", -11.6, -32.1), ("405b", -14.7, -33.5), ("gpt3", -14.3, -33.3)],
)
def test_ratio_forward(name, at_8, at_16):
    for (x, y), percent in (((4, 2), at_8), ((8, 2), at_16)):
        blocks = widths(name)
        line = sum(volume(b, LINE, 8192, x * y, 1, backward=False) for b in blocks)
        plane = sum(volume(b, PLANE, 8192, x, y, backward=False) for b in blocks)
        assert 100 * (plane / line - 1) == pytest.approx(percent, abs=0.06)


def test_keeping_gathered_inputs_saves_a_fifth_in_1d():
    blocks = widths("70b")
    keep, again = (sum(volume(b, LINE, 8192, 8, 1, keep=k) for b in blocks) for k in (1.0, 0.0))
    assert keep / again == pytest.approx(0.8)
    assert again == 10 * 8192 * 8192 * 7 / 8


@pytest.mark.parametrize(
    ("name", "line", "plane"),
    [
        ("405b", [2013, 2349, 2517, 2600, 2642], [2550, 1946, 1644, 1292, 981]),
        ("70b", [1007, 1174, 1258, 1300, 1321], [1342, 1007, 839, 671, 503]),
    ],
)
def test_bytes_of_a_layer(name, line, plane):
    for ranks, one, two in zip((4, 8, 16, 32, 64), line, plane, strict=True):
        blocks = widths(name)
        found = sum(volume(b, LINE, 8192, ranks, 1, keep=0.0) for b in blocks)
        assert found * 2 / 1e6 == pytest.approx(one, abs=0.6)
        best = min(sum(volume(b, PLANE, 8192, x, y, keep=0.0) for b in blocks) for x, y in splits(ranks))
        assert best * 2 / 1e6 == pytest.approx(two, abs=0.6)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("8b", [(-6.7, -9.2, -29.2, -45.4), (-17.1, -27.1, -42.9, -58.4),
                (-37.0, -44.3, -57.5, -67.2), (-50.2, -57.1, -68.0, -75.9)]),
        ("70b", [(-8.3, -8.3, -12.9, -32.3), (-17.9, -17.9, -28.7, -46.9),
                 (-38.0, -38.0, -46.6, -59.4), (-50.6, -50.6, -58.7, -70.1)]),
        ("405b", [(-9.2, -9.2, -9.2, -14.8), (-18.2, -18.2, -18.2, -32.4),
                  (-39.7, -39.7, -39.7, -48.5), (-51.5, -51.5, -51.5, -61.0)]),
        ("gpt3", [(0, 0, 0, -1.7), (-15.7, -15.7, -15.7, -29.3),
                  (-34.0, -34.0, -35.3, -42.7), (-49.4, -49.4, -50.6, -59.4)]),
        ("8x22b attention", [(-28.9, -28.9, -42.5, -53.8), (-41.0, -41.0, -54.6, -65.9),
                             (-57.3, -57.3, -65.5, -71.8), (-66.5, -66.5, -74.0, -79.9)]),
    ],
)  # fmt: skip
def test_joint_choice_per_block(name, table):
    """The best pair of shapes and splits; a change of layout between blocks is charged 2 T h / P a layer."""
    blocks, h = widths(name), SHAPES[name][0]
    for ranks, row in zip((4, 8, 16, 32), table, strict=True):
        ways = [(LINE, ranks, 1)]
        ways += [(shape, *split) for shape in (PLANE, MOVED) for split in splits(ranks, 1)]
        for tokens, percent in zip((4096, 8192, 16384, 32768), row, strict=True):
            sent = [{w: volume(b, w[0], tokens, *w[1:], keep=0.0) for w in ways} for b in blocks]
            best = min(
                sum(of[way] for of, way in zip(sent, pair, strict=True))
                + (2 * tokens * h / ranks if len(set(pair)) > 1 else 0.0)
                for pair in itertools.product(ways, repeat=len(blocks))
            )
            line = sum(of[ways[0]] for of in sent)
            assert 100 * (best / line - 1) == pytest.approx(percent, abs=0.06), (ranks, tokens)


@pytest.mark.parametrize(
    ("x", "y", "attention", "mlp", "line"),
    [(2, 2, 2304, 3328, 6144), (4, 2, 2304, 2688, 7168), (2, 4, 2816, 3968, 7168), (4, 4, 1920, 2496, 7680)],
)  # fmt: skip
def test_small_block_with_doubled_keys_and_values(x, y, attention, mlp, line):
    # h 64, 16 heads, 4 key and value heads, f 96: more ranks than key heads double their part of the scatter.
    h, k, f = 64, 16, 96
    one, two = attention_block(h, k, 4), mlp_block(h, 2 * f, f)
    assert volume(one, PLANE, 32, x, y, backward=False) == attention
    assert volume(two, PLANE, 32, x, y, backward=False) == mlp
    assert 2 * volume(two, LINE, 32, x, y, backward=False) == line


def test_moved_weights_cross_over_where_tokens_equal_the_hidden_width():
    blocks = widths("70b")
    for tokens, cheaper in ((0.9 * 8192, False), (1.1 * 8192, True)):
        moved = sum(volume(b, MOVED, tokens, 8, 2, backward=False) for b in blocks)
        plane = sum(volume(b, PLANE, tokens, 8, 2, backward=False) for b in blocks)
        assert (moved < plane) == cheaper


def test_a_stream_of_whole_hidden_is_turned_around_each_2d_block():
    cut = TokenCut(4, 2, 1024, 128, 1024)

    def turned(shape, hidden_cut):
        rows = block_boundaries(mlp_block(64, 192, 96), shape, cut, hidden_cut=hidden_cut)
        return [(b.forward, b.backward, b.sent_bytes(1)) for b in rows if b.purpose == "relayout"]

    sent = 1024 * 64 // 8 // 2
    assert turned(PLANE, False) == [(1, 0, sent), (0, 1, sent)] * 2
    assert not any(forward or backward for forward, backward, _ in turned(PLANE, True))
    assert turned(LINE, False) == []
    assert not any(forward or backward for forward, backward, _ in turned(MOVED, False))
