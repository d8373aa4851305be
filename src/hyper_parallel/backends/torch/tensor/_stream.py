"""Sharding of the residual stream of one microbatch over the tensor-parallel ranks, between the blocks of a decoder.

On one axis, the B*S tokens form one list, sharded into P equal pieces of n tokens; the last pieces are padded. A rank
holds [1, n, D], a shape that modules written for [B, S, D] accept. Sharding the list instead of every sequence needs no
copy around a collective and no divisibility. On two axes, with P = x y ranks, rank (i, j) holds

    piece i y + j with all features, [1, n, D], or
    the y pieces i y ... i y + y - 1 with features j, [1, y n, D / y], if the stream is sharded over y.

With `shard_sequences_over_y`, attention keeps one span of every sequence per y rank. Sequences are first cut into y
spans of ceil(S / y) positions. The ranks (., j) then hold span j of all sequences, [1, n, D] each.
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
    """Sharding of a batch of (B, S) tokens over x * y ranks; y = 1 for one axis."""

    batch: tuple[int, ...]
    x: int
    y: int
    shard_hidden_over_y: bool  # features are sharded over y too
    shard_sequences_over_y: bool  # sequences are sharded over y before tokens are sharded over x

    @property
    def span(self) -> int:
        """Positions of a sequence on one y rank."""
        return padded_sizes(*self.batch, self.x, self.y, self.shard_sequences_over_y)[0]

    @property
    def rows(self) -> int:
        """Tokens of one piece, n."""
        return padded_sizes(*self.batch, self.x, self.y, self.shard_sequences_over_y)[1]

    def part_shape(self, width: int) -> tuple[int, int, int]:
        """Return the shape of a rank's part of a stream with `width` features."""
        return (
            (1, self.y * self.rows, width // self.y)
            if self.shard_hidden_over_y
            else (1, self.rows, width)
        )

    def parts(self, full: Tensor) -> Tensor:
        """Rearrange [B, S, D] into the concatenated parts of all ranks, [1, P n, D] or [1, P y n, D / y]."""
        x, y, pieces = self.x, self.y, self._pieces(full)
        if self.shard_hidden_over_y:
            pieces = pieces.view(x, y * self.rows, y, -1).transpose(1, 2).flatten(0, 2).unsqueeze(0)
        return pieces

    def whole(self, parts: Tensor) -> Tensor:
        """Invert `parts`: rearrange the concatenated parts of all ranks into [B, S, D]."""
        x, y, n = self.x, self.y, self.rows
        if self.shard_hidden_over_y:
            parts = parts.view(x, y, y * n, -1).transpose(1, 2).reshape(1, x * y * n, -1)
        if not self.shard_sequences_over_y:
            return self.without_padding(parts, self.batch)
        spans = parts.view(x, y, n, -1).transpose(0, 1).reshape(y, x * n, -1)
        spans = spans[:, : self.batch[0] * self.span]
        return self.from_spans(spans.reshape(1, -1, spans.shape[-1]))

    def without_padding(self, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reshape [1, T, C] to [*shape, C], dropping the padding at the end."""
        num_tokens = math.prod(shape)
        if tokens.shape[1] != num_tokens:
            tokens = tokens[:, :num_tokens]
        return tokens.view(*shape, tokens.shape[-1])

    def token_indices(self, rank: int) -> Tensor:
        """Return the index in the list of B*S tokens of each row of a rank's piece, -1 for padding."""
        indices = torch.arange(1, math.prod(self.batch) + 1).view(*self.batch, 1)
        return self._pieces(indices).view(self.x * self.y, -1)[rank] - 1

    def spans(self, full: Tensor) -> Tensor:
        """Rearrange [B, S, C] into the concatenated spans of all sequences, [1, y B span, C]."""
        batch, y, span = full.shape[0], self.y, self.span
        spans = padded(full, y * span).view(batch, y, span, -1)
        return spans.transpose(0, 1).reshape(1, y * batch * span, -1)

    def from_spans(self, spans: Tensor) -> Tensor:
        """Invert `spans`: rearrange [1, y B span, C] into [B, S, C]."""
        batch, length = self.batch
        out = spans.view(self.y, batch, self.span, -1).transpose(0, 1).flatten(1, 2)
        # Copied here: a copy by a reader of the view would hide from the regather scope that its source is gathered.
        return out[:, :length].contiguous()

    def _pieces(self, full: Tensor) -> Tensor:
        """Rearrange [B, S, C] into the list of all ranks' pieces, [1, P n, C]."""
        x, y, n = self.x, self.y, self.rows
        if not self.shard_sequences_over_y:
            return padded(full.reshape(1, -1, full.shape[-1]), x * y * n)
        spans = padded(self.spans(full).view(y, -1, full.shape[-1]), x * n)
        return spans.view(y, x, n, -1).transpose(0, 1).reshape(1, x * y * n, -1)
