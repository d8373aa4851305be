"""State of tensor parallelism that the modules of one model share while a forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.regather import RegatherScope, instead_of
from hyper_parallel.backends.torch.tensor._random_streams import RandomStreams
from hyper_parallel.backends.torch.tensor._stream import TokenGrid
from hyper_parallel.backends.torch.tensor.collectives import gather, scatter
from hyper_parallel.backends.torch.tensor.gradients import TpGradients, to_local
from hyper_parallel.ir import Purpose

X, Y = ("tp_x",), ("tp_y",)
TP = (*X, *Y)


@dataclass(slots=True)
class TpState:
    """Tensor-parallel state of one model.

    Attributes:
        groups: This rank's group over axes, as the boundary table names them; without tp_y on one axis.
        hidden_cut: The residual stream is cut over tp_y.
        by_sequence: Sequences are cut over tp_y before their tokens are cut over tp_x.
        whole_stream: Every rank holds the residual stream of all tokens.
        regather: Gathered inputs are gathered again in backward instead of being kept.
        batch: Shape of the tokens of the running forward pass, (B, S); set where the first decoder layer begins.
        head_batch: Shape of the tokens the head saw, when it works on pieces of them.
        partial_embedding: The embedding returned a summand that nobody has summed yet.
        loss_taken: The loss function has consumed this pass's logits.
        head: How logits lie: whole, split over the vocabulary, or over the tokens.
        same_random: The ranks draw the same random numbers, as a whole stream needs when it is trained.
        recomputed: The running layer is recomputed in backward, which gathers its inputs anyway.
        streams: Random numbers of a whole stream with dropout; None: every rank draws its own.
    """

    groups: Mapping[tuple[str, ...], dist.ProcessGroup]
    hidden_cut: bool = False
    by_sequence: bool = False
    whole_stream: bool = False
    regather: bool = False
    gradients: TpGradients = field(default_factory=TpGradients)
    batch: tuple[int, ...] = ()
    head_batch: tuple[int, ...] = ()
    partial_embedding: bool = False
    loss_taken: bool = False
    head: str = "whole"
    recomputed: bool = False
    same_random: bool = False
    streams: RandomStreams | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """All tensor-parallel ranks."""
        return self.groups[TP]

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group.rank()

    @property
    def regathers(self) -> bool:
        """Whether what the running layer gathers is not kept but gathered again."""
        return self.regather and not self.recomputed

    def grid_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """How the residual stream of a batch lies."""
        y = self.groups[Y].size() if Y in self.groups else 1
        return TokenGrid(batch, self.groups[X].size(), y, self.hidden_cut, self.by_sequence)

    @property
    def grid(self) -> TokenGrid:
        """How the residual stream of the running pass lies."""
        return self.grid_of(self.batch)

    def list_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """A batch cut as one list of tokens, whatever the residual stream is."""
        return TokenGrid(batch, self.degree, 1, False, False)

    def enter(self, full: Tensor) -> Tensor:
        """This rank's part of the stream of [B, S, D], which the embedding may have left as one summand per rank."""
        parts, summand = self.grid.parts(full), self.partial_embedding
        self.partial_embedding = False
        return (
            scatter(parts, 1, self.group, Purpose.SEQUENCE_SCATTER) if summand else self.own(parts)
        )

    def own(self, parts: Tensor) -> Tensor:
        """This rank's part of all parts, equal on all ranks and one after the other."""
        return parts.chunk(self.degree, dim=1)[self.rank].clone()

    def leave(self, part: Tensor) -> Tensor:
        """[B, S, D] on every rank from every rank's part."""
        return self.grid.whole(gather(part, 1, self.group, Purpose.SEQUENCE_GATHER))

    def local(self, param: Any, rows: slice | None = None) -> Any:
        """`to_local`, of a parameter whose gradients this state sums."""
        return to_local(param, self.gradients, rows)

    def gathered(
        self,
        gather: Callable[[Tensor], Tensor],
        piece: Tensor,
        use: Callable[[Tensor], Any],
        scope: RegatherScope | None,
    ) -> Any:
        """`use` of `gather(piece)`, which backward gathers once more in a scope; None: it is kept."""
        whole, kept, batch = gather(piece), piece.detach(), self.batch

        def regather() -> Tensor:
            # Another pass may run when backward asks.
            running, self.batch = self.batch, batch
            try:
                return gather(kept)
            finally:
                self.batch = running

        with instead_of(scope, whole, regather):
            return use(whole)
