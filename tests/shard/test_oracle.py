"""The table as a program: an MLP block on all ranks in one process, every collective the next entry of the table."""

import itertools

import numpy as np
import pytest

from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.shard import BlockWidths, Projection, TokenCut, block_boundaries

pytestmark = pytest.mark.unit

D, F, S = 24, 48, 13
"""Widths of stream and MLP; tokens, which no number of ranks here divides."""


class Ranks:
    """Arrays of x y ranks, and the entries of the table that move them."""

    def __init__(self, shape, x, y):
        self.x, self.y = x, y
        strategy = Strategy(tp_x=x, tp_y=y, attention_shape="1d", mlp_shape=shape)
        self.cut = TokenCut.of(strategy, Workload(S, microbatch=1))
        into = Projection(F, D * F)
        block = BlockWidths(D, (into, into), (into,))
        table = block_boundaries(block, shape, self.cut)
        self.entries = (b for b in table for _ in range(b.forward))
        self.places = list(itertools.product(range(x), range(y)))

    def each(self, work):
        return {place: work(*place) for place in self.places}

    def communicate(self, arrays):
        """Run the next collective of the table on the rows of every rank's array."""
        b = next(self.entries)
        out = {}
        for place in self.places:
            same = [axis not in b.axes for axis in ("tp_x", "tp_y")]
            group = [p for p in self.places if all(p[d] == place[d] for d in (0, 1) if same[d])]
            assert len(group) == b.ranks
            parts = [arrays[p] for p in group]
            if b.kind == "all_gather":
                whole = out[place] = np.concatenate(parts)
            else:
                assert b.kind == "reduce_scatter"
                whole = sum(parts)
                out[place] = np.split(whole, b.ranks)[group.index(place)]
            assert whole.size == b.elements, b
        return out


def cut(matrix, rows, row, columns=1, column=0):
    """One of rows x columns equal tiles."""
    return np.split(np.split(matrix, rows)[row], columns, axis=1)[column]


def line(ranks, stream, gate, up, down):
    """Shape 1d: widths cut over all ranks."""
    x, y, degree = ranks.x, ranks.y, ranks.x * ranks.y
    tokens = ranks.communicate(ranks.each(lambda i, j: np.split(stream, degree)[i * y + j]))

    def products(i, j):
        g, u = (tokens[i, j] @ cut(w, degree, i * y + j).T for w in (gate, up))
        return (g * u) @ np.split(down, x * y, axis=1)[i * y + j].T

    out = ranks.communicate(ranks.each(products))
    return np.concatenate([out[place] for place in ranks.places])


def plane(ranks, stream, gate, up, down):
    """Shape 2d: widths cut over x and y, the stream's features over y."""
    x, y = ranks.x, ranks.y
    tokens = ranks.communicate(ranks.each(lambda i, j: cut(stream, x, i, y, j)))
    halves = [ranks.communicate(ranks.each(lambda i, j, w=w: tokens[i, j] @ cut(w, x, i, y, j).T)) for w in (gate, up)]
    inner = ranks.communicate(ranks.each(lambda i, j: halves[0][i, j] * halves[1][i, j]))
    out = ranks.communicate(ranks.each(lambda i, j: inner[i, j] @ cut(down, y, j, x, i).T))
    return np.block([[out[i, j] for j in range(y)] for i in range(x)])


def moved(ranks, stream, gate, up, down):
    """Shape weight: tokens cut over y, weights gathered over it."""
    x, y = ranks.x, ranks.y
    pieces = np.split(stream, x * y)
    tokens = ranks.communicate(ranks.each(lambda i, j: pieces[i * y + j]))
    whole = [ranks.communicate(ranks.each(lambda i, j, w=w: cut(cut(w, x, i), y, j))) for w in (gate, up)]
    last = ranks.communicate(ranks.each(lambda i, j: cut(down, y, j, x, i)))

    def products(i, j):
        g, u = (tokens[i, j] @ w[i, j].T for w in whole)
        return (g * u) @ last[i, j].T

    out = ranks.communicate(ranks.each(products))
    return np.concatenate([out[place] for place in ranks.places])


@pytest.mark.parametrize(("x", "y"), [(2, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize(("shape", "block"), [("1d", line), ("2d", plane), ("weight", moved)])
def test_an_mlp_of_all_ranks_is_that_of_one(shape, block, x, y):
    rng = np.random.default_rng(0)
    gate, up, down = rng.normal(size=(F, D)), rng.normal(size=(F, D)), rng.normal(size=(D, F))
    ranks = Ranks(shape, x, y)
    stream = np.zeros((x * y * ranks.cut.piece, D))
    stream[:S] = rng.normal(size=(S, D))
    found = block(ranks, stream, gate, up, down)
    np.testing.assert_allclose(found, ((stream @ gate.T) * (stream @ up.T)) @ down.T, rtol=1e-10)
    assert next(ranks.entries, None) is None  # nothing of the table is left over
