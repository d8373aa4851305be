"""Types of the boundary table, which lists collectives of a training step (`_table`).

A `Boundary` is one collective, `TokenCut` the sharding of tokens, and `BlockWidths` the sizes of a block. A block is
the attention or the MLP of a decoder layer.

Formulas are plain arithmetic on `Number`. With ints they give whole bytes of one strategy, padding included
(`TokenCut.of`). With arrays they evaluate many candidate strategies at once, and sizes are not rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hyper_parallel.ir import Purpose, SequenceCut, Strategy, Workload

Number = Any
"""Int for one strategy, or numpy array with one entry per candidate strategy; bools count as 0 and 1."""


Format = Literal["compute", "reduce", "parameter", "statistic", "norm", "count"]
"""Dtype of a message. compute, reduce and parameter: the run's dtype for computation, gradient reduction or parameters.
statistic: the compute dtype, but at least float32. norm: the parameter dtype, but at least float32. count: int64."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Entry of the boundary table: a collective, the elements of one call, and the number of calls per rank."""

    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all or send_recv
    axes: tuple[str, ...]  # mesh axes of the group
    ranks: Number  # ranks of the group
    # elements of the full tensor (output of a gather, input of a scatter or reduction), else of one rank's input
    elements: Number
    purpose: Purpose
    format: Format = "compute"
    forward: Number = 0  # calls in the forward of one microbatch, and of one layer if the collective is part of layers
    backward: Number = 0  # calls in the backward, counted as in `forward`
    recomputed: Number = 0  # additional calls if backward recomputes the layer
    # additional calls if gathered inputs are freed after forward, and backward does not recompute the layer
    regathered: Number = 0
    once: Number = 0  # calls per step
    # elements that this rank sends per call, if ranks send different numbers; None: as in a ring algorithm
    sent: Number | None = None

    def sent_bytes(self, width: Number) -> Number:
        """Return the bytes that one rank sends per call, with `width` bytes per element."""
        if self.sent is not None:
            return self.sent * width
        return ring_bytes(self.kind, self.elements * width, self.ranks)


@dataclass(frozen=True, slots=True)
class TokenCut:
    """Sharding of a microbatch's tokens: degrees of the axes, and the number of tokens per rank."""

    x: Number  # tensor-parallel ranks on x
    y: Number  # tensor-parallel ranks on y
    tokens: Number  # T, tokens of one context-parallel rank
    piece: Number  # n, tokens of one tensor-parallel rank between blocks
    spans: Number  # tokens of one context-parallel rank, each sequence padded to a multiple of y
    ring: Number = 1  # places of the context-parallel ring
    ulysses: Number = 1  # Ulysses ranks at each place of the ring
    # sharding of each sequence over cp; None: `rounds` also counts ring rounds outside of a sliding window
    sequence: SequenceCut | None = None

    @classmethod
    def of(cls, strategy: Strategy, workload: Workload) -> TokenCut:
        """Return the sharding of one microbatch's tokens under a strategy, padding included."""
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
        """Return the number of ring-attention rounds that send keys and values; `window` None: full attention."""
        return self.ring - 1 if self.sequence is None else len(self.sequence.distances(window))


@dataclass(frozen=True, slots=True)
class Projection:
    """Weight matrix of a block, or several stacked matrices with the same input."""

    width: Number  # output features of an input projection, input features of an output projection
    weights: Number  # elements of the matrix or of all stacked matrices
    keys: bool = False  # whether it projects to keys or values


@dataclass(frozen=True, slots=True)
class BlockWidths:
    """Sizes of an attention or MLP block that determine its collectives."""

    hidden: Number  # width of the residual stream
    inputs: tuple[Projection, ...]  # projections that read the residual stream
    outputs: tuple[Projection, ...]  # projections that write the residual stream
    kv_heads: int = 0  # key and value heads; 0 for an MLP


def padded_sizes(sequences: int, length: int, x: int, y: int, by_sequence: bool) -> tuple[int, int]:
    """Return the numbers of tokens per tensor-parallel rank, padding included.

    Args:
        sequences: Number of sequences in a microbatch.
        length: Tokens of one sequence.
        x: Degree of tp_x.
        y: Degree of tp_y.
        by_sequence: True: each sequence is sharded over y first. False: all tokens are sharded over x * y at once.

    Returns:
        (tokens of one sequence on a y rank, tokens of all sequences on one of the x * y ranks between blocks).
    """
    span = -(-length // y)
    tokens, pieces = (sequences * span, x) if by_sequence else (sequences * length, x * y)
    return span, -(-tokens // pieces)


def ring_bytes(kind: str, whole_bytes: Number, ranks: Number) -> Number:
    """Return the bytes that one rank sends per call of a collective, by ring algorithms.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or send_recv.
        whole_bytes: Size of the full tensor: after a gather, before a scatter or a reduction. all_to_all: size of the
            input of one rank.
        ranks: Number g of ranks of the group.

    Cost: (g-1)/g of `whole_bytes` for all-gather, reduce-scatter and all-to-all, and twice that for all-reduce.
    Broadcast and send_recv send `whole_bytes`; a single rank sends nothing. For ints, fractions of bytes are dropped.
    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 3.
    """
    if kind in ("broadcast", "send_recv"):
        return whole_bytes * (ranks > 1)
    passes = 2 if kind == "all_reduce" else 1
    return share(passes * whole_bytes * (ranks - 1), ranks)


def share(whole: Number, parts: Number) -> Number:
    """Return `whole` / `parts`, rounded down if both are ints."""
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
