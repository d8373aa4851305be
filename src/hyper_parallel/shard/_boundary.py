"""Types of the boundary table: collectives (`Boundary`), sharding of tokens, widths of a block.

Formulas are plain arithmetic on `Number`. With ints of one strategy they give exact bytes, padding included
(`TokenCut.of`). With arrays they evaluate all candidates at once, without rounding up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hyper_parallel.ir import Purpose, SequenceCut, Strategy, Workload

Number = Any
"""Int of one strategy, or array over candidates; bools count as 0 and 1."""


Format = Literal["compute", "reduce", "parameter", "statistic", "norm", "count"]
"""Number format of a message. statistic: compute format, at least float32; norm: parameter format, at least float32;
count: int64."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Entry of the boundary table: a collective with its elements and its number of calls."""

    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all or send_recv
    axes: tuple[str, ...]  # mesh axes of the group
    ranks: Number  # ranks of the group
    # of the full tensor (after a gather, before a scatter or reduction); for all_to_all, of one rank before it
    elements: Number
    purpose: Purpose
    format: Format = "compute"
    forward: Number = 0  # calls in the forward of one microbatch and layer
    backward: Number = 0  # calls in the backward
    recomputed: Number = 0  # further calls if backward recomputes the layer
    # further calls if backward does not recompute the layer, and gathered inputs are freed after forward
    regathered: Number = 0
    once: Number = 0  # calls per step
    # elements that this rank sends per call, if ranks differ; None: as in a ring algorithm
    sent: Number | None = None

    def sent_bytes(self, width: Number) -> Number:
        """Return the bytes that one rank sends per call, with `width` bytes per element."""
        if self.sent is not None:
            return self.sent * width
        return ring_bytes(self.kind, self.elements * width, self.ranks)


@dataclass(frozen=True, slots=True)
class TokenCut:
    """Numbers of tokens of one microbatch per context- and tensor-parallel rank."""

    x: Number  # tensor-parallel ranks on x
    y: Number  # tensor-parallel ranks on y
    tokens: Number  # T, tokens of one context-parallel rank
    piece: Number  # n, tokens of one tensor-parallel rank between blocks
    spans: Number  # tokens of all sequences if each is sharded over y, padding included
    ring: Number = 1  # places of the context-parallel ring
    ulysses: Number = 1  # Ulysses ranks at each place
    # sharding of each sequence; None: all ring rounds count, also those outside of a sliding window
    sequence: SequenceCut | None = None

    @classmethod
    def of(cls, strategy: Strategy, workload: Workload) -> TokenCut:
        """Return the numbers of tokens under one strategy, padding included."""
        s, batch = strategy, workload.microbatch or 1
        cut = SequenceCut.of(workload.seq_len, s.cp, s.cp_kind, s.cp_ulysses)
        by_sequence = s.tp_y > 1 and s.attention_shape == "weight"
        span, piece = padded_sizes(batch, cut.local, s.tp_x, s.tp_y, by_sequence)
        tokens, spans = batch * cut.local, s.tp_y * batch * span
        return cls(s.tp_x, s.tp_y, tokens, piece, spans, cut.ring, cut.ulysses, cut)

    @property
    def tp(self) -> Number:
        """Tensor-parallel ranks, P."""
        return self.x * self.y

    def rounds(self, window: int | None) -> Number:
        """Return the number of ring rounds that send keys and values; `window` is None for full attention."""
        return self.ring - 1 if self.sequence is None else len(self.sequence.distances(window))


@dataclass(frozen=True, slots=True)
class Projection:
    """Weight matrix of a block, or several with the same input."""

    width: Number  # rows of a weight that reads the residual stream, columns of one that writes it
    weights: Number  # elements
    keys: bool = False  # whether its rows are key or value heads


@dataclass(frozen=True, slots=True)
class BlockWidths:
    """Widths of an attention or MLP block that determine its collectives."""

    hidden: Number  # width of the residual stream
    inputs: tuple[Projection, ...]  # projections that read the residual stream
    outputs: tuple[Projection, ...]  # projections that write the residual stream
    kv_heads: int = 0  # key and value heads; 0 for an MLP


def padded_sizes(sequences: int, length: int, x: int, y: int, by_sequence: bool) -> tuple[int, int]:
    """Return two numbers of tokens, both including padding.

    Args:
        sequences: Number of sequences in a microbatch.
        length: Tokens of one sequence.
        x: Ranks of the axis tp_x.
        y: Ranks of the axis tp_y.
        by_sequence: True: each sequence is sharded over y first. False: all tokens are sharded over x * y at once.

    Returns:
        Tokens of one sequence on a y rank, and tokens of all sequences that each of the x * y ranks holds between
        attention and MLP blocks.
    """
    span = -(-length // y)
    tokens, pieces = (sequences * span, x) if by_sequence else (sequences * length, x * y)
    return span, -(-tokens // pieces)


def ring_bytes(kind: str, whole_bytes: Number, ranks: Number) -> Number:
    """Return the bytes that one rank sends per call of a collective, by ring algorithms.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or send_recv.
        whole_bytes: Size of the full tensor: after a gather, before a scatter or a reduction.
        ranks: Number g of ranks of the group.

    Cost: (g-1)/g of the whole for all-gather, reduce-scatter and all-to-all, twice that for all-reduce, the whole for
    broadcast and for a message; fractions of bytes are rounded down per call.
    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 3.
    """
    if kind in ("broadcast", "send_recv"):
        return whole_bytes * (ranks > 1)
    passes = 2 if kind == "all_reduce" else 1
    return share(passes * whole_bytes * (ranks - 1), ranks)


def share(whole: Number, parts: Number) -> Number:
    """Return `whole` / `parts`: integer division for ints, true division for arrays."""
    exact = isinstance(whole, int) and isinstance(parts, int)
    return whole // parts if exact else whole / parts


def least(a: Number, b: Number) -> Number:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def pick(condition: Number, yes: Number, no: Number) -> Number:
    """Return `yes` where `condition` is 1, else `no`."""
    return no + (yes - no) * condition


def common_multiple(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    return np.lcm(np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64))
