"""How the residual stream of one microbatch lies on the tensor-parallel ranks between the blocks of a decoder.

On one axis the B*S tokens are one list, cut into P equal pieces of n tokens, the last ones padded: [1, n, D] on each
rank, which modules written for [B, S, D] accept. Cutting the list instead of every sequence needs no copy on either
side of a collective, and no divisibility. On two axes, with P = x y ranks, rank (i, j) holds

    piece i y + j with all features, [1, n, D], or
    the y pieces i y ... i y + y - 1 with features j, [1, y n, D / y], when the stream is cut over y.

Attention that keeps a part of every sequence per y rank (`by_sequence`) changes the order: sequences are cut into y
spans of ceil(S / y) positions first, so that the ranks (., j) hold span j of all sequences, [1, n, D] each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.backends.torch.tensor.collectives import padded
from hyper_parallel.shard import padded_sizes


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """The cut of a batch of (B, S) tokens over x * y ranks; one axis is y = 1."""

    batch: tuple[int, ...]
    x: int
    y: int
    hidden_cut: bool  # features are cut over y too
    by_sequence: bool  # sequences are cut over y before tokens are cut over x

    @property
    def span(self) -> int:
        """Positions of a sequence on one y rank."""
        return padded_sizes(*self.batch, self.x, self.y, self.by_sequence)[0]

    @property
    def rows(self) -> int:
        """n, the tokens of one piece."""
        return padded_sizes(*self.batch, self.x, self.y, self.by_sequence)[1]

    def part_shape(self, width: int) -> tuple[int, int, int]:
        """Shape of a rank's part of the stream, `width` features wide as a whole."""
        return (
            (1, self.y * self.rows, width // self.y) if self.hidden_cut else (1, self.rows, width)
        )

    def parts(self, full: Tensor) -> Tensor:
        """[B, S, D] as all ranks' parts one after the other, [1, P n, D] or [1, P y n, D / y]."""
        x, y, pieces = self.x, self.y, self._pieces(full)
        if self.hidden_cut:
            pieces = pieces.view(x, y * self.rows, y, -1).transpose(1, 2).flatten(0, 2).unsqueeze(0)
        return pieces

    def whole(self, parts: Tensor) -> Tensor:
        """The way back."""
        x, y, n = self.x, self.y, self.rows
        if self.hidden_cut:
            parts = parts.view(x, y, y * n, -1).transpose(1, 2).reshape(1, x * y * n, -1)
        if not self.by_sequence:
            return self.listed(parts, self.batch)
        spans = parts.view(x, y, n, -1).transpose(0, 1).reshape(y, x * n, -1)
        spans = spans[:, : self.batch[0] * self.span]
        return self.from_spans(spans.reshape(1, -1, spans.shape[-1]))

    def listed(self, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[1, T, C] as [*shape, C], without the padding behind."""
        number = math.prod(shape)
        if tokens.shape[1] != number:
            tokens = tokens[:, :number]
        return tokens.view(*shape, tokens.shape[-1])

    def places(self, rank: int) -> Tensor:
        """The place of each row of a rank's piece in the list of B*S tokens, -1 for padding."""
        places = torch.arange(1, math.prod(self.batch) + 1).view(*self.batch, 1)
        return self._pieces(places).view(self.x * self.y, -1)[rank] - 1

    def spans(self, full: Tensor) -> Tensor:
        """[B, S, C] as [1, y B span, C]: the spans of all sequences one after the other."""
        batch, y, span = full.shape[0], self.y, self.span
        spans = padded(full, y * span).view(batch, y, span, -1)
        return spans.transpose(0, 1).reshape(1, y * batch * span, -1)

    def from_spans(self, spans: Tensor) -> Tensor:
        """The way back."""
        batch, length = self.batch
        out = spans.view(self.y, batch, self.span, -1).transpose(0, 1).flatten(1, 2)
        # A trimmed view would be copied by whoever reads it, which hides what backward can gather again.
        return out[:, :length].contiguous()

    def _pieces(self, full: Tensor) -> Tensor:
        """[B, S, C] as the list of all ranks' pieces, [1, P n, C]."""
        x, y, n = self.x, self.y, self.rows
        if not self.by_sequence:
            return padded(full.reshape(1, -1, full.shape[-1]), x * y * n)
        spans = padded(self.spans(full).view(y, -1, full.shape[-1]), x * n)
        return spans.view(y, x, n, -1).transpose(0, 1).reshape(1, x * y * n, -1)
