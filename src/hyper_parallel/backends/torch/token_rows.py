"""Selection of the rows of a layer's input that are tokens, without padding of the layout or of the batch.

Padding of the layout makes the shards of tensor and context parallelism equal in size. Padding of the batch is marked
by False in the argument `token_mask` [B, S], which is removed before the model's forward, else in `attention_mask`.
Expert routing ignores padding in router losses, statistics, bias updates and expert capacities.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.context.state import TOKENS, ContextState
from hyper_parallel.backends.torch.in_flight import rows_of_half
from hyper_parallel.backends.torch.pass_context import Padding, RunningPass
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.errors import UnsupportedSharding

TOKEN_MASK: Final = "token_mask"
"""Argument of a model's call and key of a microbatch: mask [B, S], False where a token is padding."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Selector of the rows of a layer's input that are tokens, for the running forward pass.

    The methods raise HP205 if a layer gets only some of the tokens, so that padding rows cannot be identified.
    """

    tp: TpState | None = None
    context: ContextState | None = None
    running: RunningPass = field(default_factory=RunningPass)

    def token_rows(self, rows: int, device: torch.device) -> Tensor | None:
        """Return the indices of the `rows` local rows that are not padding of the layout; None if all are tokens."""
        start, total = 0, rows
        if self.tp is not None and self.tp.shard_sequences_over_y:
            is_token = self.tp.grid.token_indices(self.tp.rank) >= 0
            return None if bool(is_token.all()) else is_token.nonzero().squeeze(1).to(device)
        if self.tp is not None:
            total = math.prod(self.tp.batch)
            if self.tp.grid.rows != rows:
                raise _part_of_tokens(f"{rows} of {total} tokens on {self.tp.degree} ranks", "tp")
            start = min(self.tp.rank * rows, total)
        stop = min(start + rows, total)
        if (inside := self._inside(total)) is not None:
            return inside[start:stop].nonzero().squeeze(1).to(device)
        return torch.arange(stop - start, device=device) if stop - start < rows else None

    def select_real(self, selected: Tensor | None, rows: int) -> Tensor | None:
        """Return a mask over the rows `selected` by `token_rows`, False for padding of the batch.

        None: no row is known to be padding. `rows` is the number of local rows; `selected` None means all of them.
        """
        if (padding := self.running.context.padding) is None:
            return None
        real = rows_of_half(padding.real)
        if self.tp is not None:
            indices = self.tp.grid.token_indices(self.tp.rank).to(real.device)
            real = real[indices.clamp(min=0)]
        if len(real) != rows:  # experts for only images or only text get a part of the tokens
            if bool(real.all()):
                return None
            raise _part_of_tokens(f"{rows} of {len(real)} tokens, with padding", "microbatch")
        return real if selected is None else real[selected]

    def own_tokens(self, rows: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return the indices of the rows that this rank owns, and a mask of those that are not padding of the batch.

        If the indices are None, the rank owns all rows; if the mask is None, no row is padding. The `rows` rows of the
        input may be this rank's shard of the tokens, or the tokens of all tensor-parallel ranks.
        """
        tp = self.tp
        if tp is None or rows != math.prod(tp.batch):
            selected = self.token_rows(rows, device)
            return selected, self.select_real(selected, rows)
        indices = tp.grid.token_indices(tp.rank)
        indices = indices[indices >= 0]
        if (inside := self._inside(rows)) is not None:
            indices = indices[inside[indices]]
        indices, padding = indices.to(device), self.running.context.padding
        return indices, None if padding is None else rows_of_half(padding.real)[indices]

    def _inside(self, total: int) -> Tensor | None:
        """Return a CPU mask of this rank's tokens, False for padding of context parallelism; None without padding."""
        view = self.running.context.view
        if view is None or view.cut.padded == view.cut.seq_len:
            return None
        assert self.context is not None
        inside = torch.tensor(view.cut.positions(self.context.group.rank())) < view.cut.seq_len
        return inside.repeat(total // len(inside))


def _part_of_tokens(got: str, key: str) -> UnsupportedSharding:
    return UnsupportedSharding(
        "a router gets only some of the tokens and cannot tell which of them are padding",
        where="parallel.tp_x" if key == "tp" else "training.microbatch",
        got=got,
        hint={"parallel.tp_x": 1, "parallel.tp_y": 1}
        if key == "tp"
        else "set `training.microbatch=1`, and multiply `training.accumulation_steps` by the former microbatch",
    )


def watch_padding(model: nn.Module, tokens: Tokens) -> None:
    """Add a hook that records the batch's padding in the `PassContext`, and removes the argument `token_mask`."""
    names = list(inspect.signature(model.forward).parameters)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        mask, unread = inputs.get(TOKEN_MASK), True
        if mask is None:
            mask, unread = inputs.get("attention_mask"), False
        padding = None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            ids = next((t for n in TOKENS if (t := inputs.get(n)) is not None), None)
            context, real = tokens.context, mask.bool()
            if context is not None and context.running.context.view is not None:
                real = context.local_tokens(real, 0)
            if ids is not None and real.shape == ids.shape[:2]:
                padding = Padding(real.reshape(-1).to(ids.device), unread)
        if padding is not tokens.running.context.padding:
            tokens.running.update(padding=padding)
        return args, {name: value for name, value in kwargs.items() if name != TOKEN_MASK}

    model.register_forward_pre_hook(before, with_kwargs=True)
