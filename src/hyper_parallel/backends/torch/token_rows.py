"""Which rows of a layer are tokens, and which of these are real: neither padding of the layout nor of the batch.

Padding of the layout fills pieces of tensor and of context parallelism up to equal sizes. The caller names the padding
of a batch: `token_mask` [B, S] among the arguments of the model, which the model does not see, else an
`attention_mask` [B, S]. Both are False where a token is padding. Rows of padding do not count in losses, statistics,
biases and capacities.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.context.state import TOKENS, ContextState
from hyper_parallel.backends.torch.tensor.collectives import piece_size
from hyper_parallel.backends.torch.tensor.state import TpState

TOKEN_MASK: Final = "token_mask"
"""Argument of a model's call, and key of a microbatch: [B, S], False where a token is padding."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of the batch of one forward pass.

    Attributes:
        real: [T] of the tokens that this rank's layers see, one row of the batch after another.
        unread: Nobody reads what the model computes for padding, so that it need not be computed.
    """

    real: Tensor
    unread: bool


@dataclass(slots=True)
class Tokens:
    """Tells tokens among the rows of a layer; `padding` is that of the running pass, None: there is none."""

    tp: TpState | None = None
    context: ContextState | None = None
    padding: Padding | None = None

    def among(self, rows: int, device: torch.device) -> Tensor | None:
        """Return the indices of the rows that are tokens, None for all; real: see `real`."""
        start, total = 0, rows
        if self.tp is not None and self.tp.shard_sequences_over_y:
            held = self.tp.grid.token_indices(self.tp.rank) >= 0
            return None if bool(held.all()) else held.nonzero().squeeze(1).to(device)
        if self.tp is not None:
            total = math.prod(self.tp.batch)
            assert piece_size(total, self.tp.degree) == rows, f"{rows} rows of {total} tokens"
            start = min(self.tp.rank * rows, total)
        stop = min(start + rows, total)
        if (inside := self._inside(total)) is not None:
            return inside[start:stop].nonzero().squeeze(1).to(device)
        return torch.arange(stop - start, device=device) if stop - start < rows else None

    def real(self, kept: Tensor | None, rows: int) -> Tensor | None:
        """Return which of the rows that `among` gave are real tokens; None: all are."""
        if self.padding is None:
            return None
        real = self.padding.real
        if self.tp is not None:
            places = self.tp.grid.token_indices(self.tp.rank).to(real.device)
            real = real[places.clamp(min=0)]
        assert len(real) == rows, f"{rows} rows of {len(real)} tokens"
        return real if kept is None else real[kept]

    def own(self, rows: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return the indices of this rank's own tokens, and which of them are real; None: all.

        A module may see the rank's piece of the tokens, or all tokens that the tensor-parallel ranks share.
        """
        tp = self.tp
        if tp is None or rows != math.prod(tp.batch):
            kept = self.among(rows, device)
            return kept, self.real(kept, rows)
        places = tp.grid.token_indices(tp.rank)
        places = places[places >= 0]
        if (inside := self._inside(rows)) is not None:
            places = places[inside[places]]
        places = places.to(device)
        return places, None if self.padding is None else self.padding.real[places]

    def _inside(self, total: int) -> Tensor | None:
        """Return which of all tokens are no padding of context parallelism, on the host; None: all."""
        view = self.context.view if self.context is not None else None
        if view is None or view.cut.padded == view.cut.seq_len:
            return None
        assert self.context is not None
        held = torch.tensor(view.cut.positions(self.context.group.rank())) < view.cut.seq_len
        return held.repeat(total // len(held))


def watch_padding(model: nn.Module, tokens: Tokens) -> None:
    """Take note of a batch's padding where the model's forward begins; called after its sequences are cut."""
    names = list(inspect.signature(model.forward).parameters)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        mask, unread = given.get(TOKEN_MASK), True
        if mask is None:
            mask, unread = given.get("attention_mask"), False
        tokens.padding = None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            ids = next((t for n in TOKENS if (t := given.get(n)) is not None), None)
            context, real = tokens.context, mask.bool()
            if context is not None and context.view is not None:
                real = context.local_tokens(real, 0)
            if ids is not None and real.shape == ids.shape[:2]:
                tokens.padding = Padding(real.reshape(-1).to(ids.device), unread)
        return args, {name: value for name, value in kwargs.items() if name != TOKEN_MASK}

    model.register_forward_pre_hook(before, with_kwargs=True)
