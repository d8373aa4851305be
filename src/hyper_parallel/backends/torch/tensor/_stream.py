"""How the residual stream lies on the tensor-parallel ranks between the blocks of a decoder.

On one axis (`TokenList`) the B*S tokens of a microbatch are cut into P equal pieces of n tokens, the last ones padded:
[1, n, D] on each rank. On two axes (`TokenGrid`) with P = x y ranks, rank (i, j) holds

    piece i y + j with all features, [1, n, D], or
    the y pieces i y ... i y + y - 1 with features j, [1, y n, D / y], when the stream is cut over y.

Attention that keeps a part of every sequence per y rank (`by_sequence`) changes the order: sequences are cut into y
spans of ceil(S / y) positions first, so that the ranks (., j) hold span j of all sequences, [1, n, D] each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.backends.torch.tensor._collectives import (
    features_to_tokens,
    gather_tokens,
    padded,
    piece_size,
    scatter_tokens,
    slice_tokens,
    tokens_to_features,
)
from hyper_parallel.backends.torch.tensor._state import TpState


@dataclass(frozen=True, slots=True)
class TokenList:
    """Pieces of one list of tokens; the methods are those of `TokenGrid`, for blocks of the one shape there is."""

    state: TpState

    def enter(self, full: Tensor, partial: bool) -> Tensor:
        """[1, n, D] of [B, S, D], equal on all ranks or one summand per rank."""
        return (scatter_tokens if partial else slice_tokens)(full, self.state.group)

    def leave(self, part: Tensor) -> Tensor:
        """[B, S, D] on every rank from every rank's piece."""
        return gather_tokens(part, self.state.batch, self.state.group)

    def gather(self, part: Tensor, shape: str, attention: bool) -> Tensor:
        """[B, S, D] for a block."""
        return self.leave(part)

    def scatter(self, partial: Tensor, shape: str, attention: bool) -> Tensor:
        """[1, n, D] of the sum of the ranks' [B, S, D]."""
        return scatter_tokens(partial, self.state.group)

    def align(self, part: Tensor, shape: str) -> Tensor:
        """The piece itself: every block reads it as it lies."""
        return part

    back = align


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """The two axes of one model, and its order of tokens."""

    state: TpState
    x: dist.ProcessGroup
    y: dist.ProcessGroup
    hidden_cut: bool
    """The residual stream is cut over y."""
    by_sequence: bool
    """Sequences are cut over y before tokens are cut over x."""

    @property
    def span(self) -> int:
        """Positions of a sequence on one y rank: ceil(S / y)."""
        return piece_size(self.state.batch[1], self.y.size())

    @property
    def rows(self) -> int:
        """n, the tokens of one piece."""
        batch, length = self.state.batch
        if self.by_sequence:
            return piece_size(batch * self.span, self.x.size())
        return piece_size(batch * length, self.state.degree)

    def part_shape(self, batch: tuple[int, ...], width: int) -> tuple[int, int, int]:
        """Shape of this rank's part of the stream, for a batch of (B, S) and all its features."""
        with self.state.pass_of(batch):
            rows, y = self.rows, self.y.size()
        return (1, y * rows, width // y) if self.hidden_cut else (1, rows, width)

    def enter(self, full: Tensor, partial: bool) -> Tensor:
        """This rank's part of the stream, of [B, S, D] equal on all ranks or (`partial`) one summand per rank."""
        x, y = self.x.size(), self.y.size()
        pieces = self._pieces(full)
        if self.hidden_cut:
            rows, width = y * self.rows, full.shape[-1] // y
            pieces = pieces.view(x, rows, y, width).transpose(1, 2).reshape(1, -1, width)
        if partial:
            return scatter_tokens(pieces, self.state.group)
        return pieces.chunk(x * y, dim=1)[self.state.rank].clone()

    def leave(self, part: Tensor) -> Tensor:
        """[B, S, D] on every rank from every rank's part, behind the last layer."""
        x, y = self.x.size(), self.y.size()
        ranks = self.state.degree
        out = gather_tokens(part, (1, ranks * part.shape[1]), self.state.group)
        if self.hidden_cut:
            out = out.view(x, y, part.shape[1], -1).transpose(1, 2)
            out = out.reshape(1, ranks * self.rows, -1)
        return self._whole(out)

    def align(self, part: Tensor, shape: str) -> Tensor:
        """The stream as a block of a shape reads it, before anything is gathered."""
        if shape == "2d" and not self.hidden_cut:
            return tokens_to_features(part, self.y)
        return part

    def back(self, part: Tensor, shape: str) -> Tensor:
        """A block's output, as the stream has it."""
        if shape == "2d" and not self.hidden_cut:
            return features_to_tokens(part, self.y)
        return part

    def gather(self, part: Tensor, shape: str, attention: bool) -> Tensor:
        """What a block of a shape reads, from this rank's part of the stream after `align`.

        Attention reads whole sequences, [B, S, .], or this y rank's span [B, span, D] for shape `weight`; any other
        block all tokens in any order, [1, P n, .].
        """
        group = self.state.group if shape == "1d" else self.x
        tokens = gather_tokens(part, (1, group.size() * part.shape[1]), group)
        if not attention:
            return tokens
        batch, length = self.state.batch
        if shape == "weight":
            length = self.span
        if tokens.shape[1] != batch * length:
            tokens = tokens[:, : batch * length]
        return tokens.view(batch, length, -1)

    def scatter(self, partial: Tensor, shape: str, attention: bool) -> Tensor:
        """The way back: this rank's tokens of the sum."""
        if attention:
            ranks = self.x.size() if shape == "weight" else self.state.degree
            partial = padded(partial.flatten(0, 1), ranks * self.rows).unsqueeze(0)
        return scatter_tokens(partial, self.state.group if shape == "1d" else self.x)

    def order(self) -> Tensor:
        """The place of each row of this rank's piece in the list of B*S tokens, -1 for padding."""
        batch, length = self.state.batch
        places = torch.arange(1, batch * length + 1).view(batch, length, 1)
        pieces = self._pieces(places).view(self.state.degree, -1)
        return pieces[self.state.rank] - 1

    def spans(self, full: Tensor) -> Tensor:
        """[B, S, C] as [1, y B span, C]: the spans of all sequences one after the other."""
        batch, length, width = full.shape
        y, span = self.y.size(), self.span
        if y * span != length:
            full = F.pad(full, (0, 0, 0, y * span - length))
        return full.view(batch, y, span, width).transpose(0, 1).reshape(1, -1, width)

    def from_spans(self, spans: Tensor) -> Tensor:
        """The way back."""
        batch, length = self.state.batch
        y, span = self.y.size(), self.span
        out = spans.view(y, batch, span, -1).transpose(0, 1).reshape(batch, y * span, -1)
        # A trimmed view would be copied by whoever reads it, which hides what backward can gather again.
        return out[:, :length].contiguous()

    def _pieces(self, full: Tensor) -> Tensor:
        """[B, S, C] as the list of all ranks' pieces, [1, P n, C]."""
        x, y, n = self.x.size(), self.y.size(), self.rows
        if not self.by_sequence:
            return padded(full.flatten(0, 1), x * y * n).unsqueeze(0)
        spans = self.spans(full).view(y, -1, full.shape[-1])
        if spans.shape[1] != x * n:
            spans = F.pad(spans, (0, 0, 0, x * n - spans.shape[1]))
        return spans.view(y, x, n, -1).transpose(0, 1).reshape(1, x * y * n, -1)

    def _whole(self, pieces: Tensor) -> Tensor:
        """The way back."""
        batch, length = self.state.batch
        x, y = self.x.size(), self.y.size()
        if not self.by_sequence:
            return pieces[0, : batch * length].view(batch, length, -1)
        spans = pieces.view(x, y, self.rows, -1).transpose(0, 1).reshape(y, x * self.rows, -1)
        return self.from_spans(spans[:, : batch * self.span].reshape(1, -1, spans.shape[-1]))
