"""State of tensor parallelism shared by the modules of one model during a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.regather import RegatherScope, regather_in_backward
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
        groups: This rank's process group per axes of the boundary table; without tp_y on one axis.
        shard_hidden_over_y: True if features of the residual stream are sharded over tp_y.
        shard_sequences_over_y: True if sequences are sharded over tp_y before their tokens are sharded over tp_x.
        replicated_activations: True if every rank holds the residual stream of all tokens.
        regather: True if gathered inputs are gathered again in backward instead of being saved.
        gradients: Reducer of the gradients of replicated parameters.
        batch: Shape of the tokens of the running forward pass, (B, S); set at the first decoder layer.
        head_batch: Shape of the head's input tokens, if the head shards them.
        partial_embedding: True if the embedding returned partial sums that are not reduced yet.
        loss_taken: True if the loss function has consumed this pass's logits.
        head: Sharding of the logits: "whole", "vocabulary" or "tokens".
        recomputed: True if the running layer is recomputed in backward, which gathers its inputs anyway.
        same_random: True if the ranks share their random numbers, required to train with replicated activations.
        streams: Random streams for dropout with replicated activations; None: every rank draws its own numbers.
    """

    groups: Mapping[tuple[str, ...], dist.ProcessGroup]
    shard_hidden_over_y: bool = False
    shard_sequences_over_y: bool = False
    replicated_activations: bool = False
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
        """Process group of all tensor-parallel ranks."""
        return self.groups[TP]

    @property
    def degree(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group.rank()

    @property
    def regathers(self) -> bool:
        """True if the running layer gathers its inputs again in backward."""
        return self.regather and not self.recomputed

    def grid_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """Return the sharding of the residual stream of a batch."""
        y = self.groups[Y].size() if Y in self.groups else 1
        return TokenGrid(
            batch, self.groups[X].size(), y, self.shard_hidden_over_y, self.shard_sequences_over_y
        )

    @property
    def grid(self) -> TokenGrid:
        """Sharding of the residual stream of the running pass."""
        return self.grid_of(self.batch)

    def list_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """Return the sharding of a batch as one list of tokens, independent of the residual stream."""
        return TokenGrid(batch, self.degree, 1, False, False)

    def enter(self, full: Tensor) -> Tensor:
        """Shard the stream [B, S, D] and return this rank's part; reduces the embedding's partial sums, if any."""
        parts, summand = self.grid.parts(full), self.partial_embedding
        self.partial_embedding = False
        return (
            scatter(parts, 1, self.group, Purpose.SEQUENCE_SCATTER)
            if summand
            else self.local_part(parts)
        )

    def local_part(self, parts: Tensor) -> Tensor:
        """Return this rank's part of the concatenated parts of all ranks."""
        return parts.chunk(self.degree, dim=1)[self.rank].clone()

    def leave(self, part: Tensor) -> Tensor:
        """Gather the stream [B, S, D] on every rank."""
        return self.grid.whole(gather(part, 1, self.group, Purpose.SEQUENCE_GATHER))

    def local(self, param: Any, rows: slice | None = None) -> Any:
        """Call `to_local` with this state's gradient reducer."""
        return to_local(param, self.gradients, rows)

    def with_gathered(
        self,
        gather: Callable[[Tensor], Tensor],
        piece: Tensor,
        use: Callable[[Tensor], Any],
        scope: RegatherScope | None,
    ) -> Any:
        """Return `use(gather(piece))`; with a scope, backward gathers again instead of saving the result."""
        whole, saved, batch = gather(piece), piece.detach(), self.batch

        def regather() -> Tensor:
            # Backward may run during another forward pass.
            running, self.batch = self.batch, batch
            try:
                return gather(saved)
            finally:
                self.batch = running

        with regather_in_backward(scope, whole, regather):
            return use(whole)
