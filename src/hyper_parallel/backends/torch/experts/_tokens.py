"""Which rows of a layer are tokens: tensor and context parallelism pad what does not divide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.backends.torch.context._apply import ContextState
from hyper_parallel.backends.torch.tensor._collectives import piece_size
from hyper_parallel.backends.torch.tensor._state import TpState


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tells the tokens among the rows of a layer from padding.

    Attributes:
        tp: Tensor-parallel state, or None; the last pieces of a sequence end with padding.
        context: Context-parallel state, or None; sequences may be padded to equal parts.
    """

    tp: TpState | None
    context: ContextState | None

    def among(self, rows: int, device: torch.device) -> Tensor | None:
        """Indices of the rows that are tokens; None: all of them."""
        start, total = 0, rows
        if self.tp is not None and self.tp.order is not None:
            real = self.tp.order() >= 0
            return None if bool(real.all()) else real.nonzero().squeeze(1).to(device)
        if self.tp is not None:
            total = math.prod(self.tp.batch)
            assert piece_size(total, self.tp.degree) == rows, f"{rows} rows of {total} tokens"
            start = min(self.tp.rank * rows, total)
        stop = min(start + rows, total)
        view = self.context.view if self.context is not None else None
        if view is not None and view.cut.padded != view.cut.seq_len:
            assert self.context is not None
            held = torch.tensor(view.cut.positions(self.context.group.rank())) < view.cut.seq_len
            real = held.repeat(total // len(held))[start:stop]
            return real.nonzero().squeeze(1).to(device)
        return torch.arange(stop - start, device=device) if stop - start < rows else None
