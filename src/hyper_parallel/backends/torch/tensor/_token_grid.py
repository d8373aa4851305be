"""Where tokens and features of the residual stream lie on two tensor-parallel axes.

The B*S tokens of a microbatch are cut into P = x y equal pieces of n tokens, the last ones padded. Rank (i, j) holds

    piece i y + j with all features, [1, n, D], or
    the y pieces i y ... i y + y - 1 with features j, [1, y n, D / y], when the stream is cut over y.

Attention that keeps a part of every sequence per y rank (`by_sequence`) changes the order: sequences are cut into y
spans of ceil(S / y) positions first, so that the ranks (., j) hold span j of all sequences, [1, n, D] each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.backends.torch import _collectives
from hyper_parallel.backends.torch._handle import TpState
from hyper_parallel.backends.torch.tensor._collectives import features_to_tokens, tokens_to_features


@dataclass(slots=True)
class TokenGrid:
    """The two axes of one model, and its order of tokens.

    Attributes:
        state: State of the model; its `batch` is the (B, S) of the running forward pass, its group the P ranks.
        x: Ranks along tp_x.
        y: Ranks along tp_y.
        hidden_cut: The residual stream is cut over y.
        by_sequence: Sequences are cut over y before tokens are cut over x.
    """

    state: TpState
    x: dist.ProcessGroup
    y: dist.ProcessGroup
    hidden_cut: bool
    by_sequence: bool

    @property
    def span(self) -> int:
        """Positions of a sequence on one y rank: ceil(S / y)."""
        return -(-self.state.batch[1] // self.y.size())

    @property
    def rows(self) -> int:
        """n, the tokens of one piece."""
        batch, length = self.state.batch
        if self.by_sequence:
            return -(-batch * self.span // self.x.size())
        return -(-batch * length // self.state.degree)

    def shape(self, batch: tuple[int, ...], width: int) -> tuple[int, int, int]:
        """Shape of this rank's part of the stream, for a batch of (B, S) and all its features."""
        now, self.state.batch = self.state.batch, batch
        rows, y = self.rows, self.y.size()
        self.state.batch = now
        return (1, y * rows, width // y) if self.hidden_cut else (1, rows, width)

    def later(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`make`, called in backward with the batch of this forward pass: another may have passed in between."""
        batch = self.state.batch

        def run() -> Tensor:
            now, self.state.batch = self.state.batch, batch
            try:
                return make()
            finally:
                self.state.batch = now

        return run

    def enter(self, full: Tensor, partial: bool) -> Tensor:
        """This rank's part of the stream, where the first layer begins.

        Args:
            full: [B, S, D], equal on all ranks, or one summand per rank.
            partial: Whether it is a summand.
        """
        x, y = self.x.size(), self.y.size()
        pieces = self._pieces(full)
        if self.hidden_cut:
            rows, width = y * self.rows, full.shape[-1] // y
            pieces = pieces.view(x, rows, y, width).transpose(1, 2).reshape(1, -1, width)
        if partial:
            return _collectives.scatter_tokens(pieces, self.state.group)
        return pieces.chunk(x * y, dim=1)[self.state.rank].clone()

    def leave(self, part: Tensor) -> Tensor:
        """[B, S, D] on every rank from every rank's part, behind the last layer."""
        x, y = self.x.size(), self.y.size()
        ranks = self.state.degree
        out = _collectives.gather_tokens(part, (1, ranks * part.shape[1]), self.state.group)
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

    def gather_list(self, part: Tensor, shape: str) -> Tensor:
        """All tokens that a position-wise block of a shape works on, in any order, with the features it reads."""
        group = self.state.group if shape == "1d" else self.x
        return _collectives.gather_tokens(part, (1, group.size() * part.shape[1]), group)

    def scatter_list(self, partial: Tensor, shape: str) -> Tensor:
        """The way back: this rank's tokens of the sum."""
        return _collectives.scatter_tokens(partial, self.state.group if shape == "1d" else self.x)

    def gather_sequences(self, part: Tensor, shape: str) -> Tensor:
        """Tokens as attention needs them: [B, S, .], or this y rank's span [B, span, D] for shape `weight`."""
        batch, length = self.state.batch
        if shape == "weight":
            length = self.span
        tokens = self.gather_list(part, shape)
        if tokens.shape[1] != batch * length:
            tokens = tokens[:, : batch * length]
        return tokens.view(batch, length, -1)

    def scatter_sequences(self, partial: Tensor, shape: str) -> Tensor:
        """The way back."""
        ranks = self.x.size() if shape == "weight" else self.state.degree
        return self.scatter_list(_padded(partial.flatten(0, 1), ranks * self.rows), shape)

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
            return _padded(full.flatten(0, 1), x * y * n)
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


def _padded(tokens: Tensor, rows: int) -> Tensor:
    """[T, C] as [1, rows, C] with zeros behind."""
    if tokens.shape[0] != rows:
        tokens = F.pad(tokens, (0, 0, 0, rows - tokens.shape[0]))
    return tokens.unsqueeze(0)
