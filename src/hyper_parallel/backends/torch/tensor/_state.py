"""State of tensor parallelism that the modules of one model share while a forward pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.torch.tensor._gradients import TpGradients


@dataclass(slots=True)
class TpState:
    """Tensor-parallel state of one model.

    Attributes:
        regather: Gathered inputs are gathered again in backward instead of being kept.
        batch: Shape of the tokens of the running forward pass, (B, S); set where the first decoder layer begins.
        head_batch: Shape of the tokens the head saw, when it works on pieces of them.
        partial_embedding: The embedding returned a summand that nobody has summed yet.
        loss_taken: The loss function has consumed this pass's logits.
        head: How logits lie: whole, split over the vocabulary, or over the tokens.
        recomputed: The running layer is recomputed in backward, which gathers its inputs anyway.
        order: The place of each row of this rank's piece in the list of tokens, -1 for padding; None: pieces follow
            one another, and padding is behind the last token.
        shape: Shape of this rank's part of the residual stream, of a batch (B, S) and the number of features; None:
            pieces of ceil(B S / tp) tokens with all features.
    """

    group: dist.ProcessGroup
    regather: bool = False
    gradients: TpGradients = field(default_factory=TpGradients)
    batch: tuple[int, ...] = ()
    head_batch: tuple[int, ...] = ()
    partial_embedding: bool = False
    loss_taken: bool = False
    head: str = "whole"
    recomputed: bool = False
    order: Callable[[], Tensor] | None = None
    shape: Callable[[tuple[int, ...], int], tuple[int, ...]] | None = None

    @property
    def regathers(self) -> bool:
        """Whether what the running layer gathers is not kept but gathered again."""
        return self.regather and not self.recomputed

    def part(self, batch: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Shape of this rank's part of the residual stream of [*batch, width]."""
        if self.shape is not None:
            return self.shape(batch, width)
        return (1, -(-math.prod(batch) // self.degree), width)

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group.rank()

    @contextmanager
    def pass_of(self, batch: tuple[int, ...]) -> Iterator[None]:
        """Inside, the forward pass of this batch counts as running: another may have passed in between."""
        running, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = running

    def later(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`make`, called in backward with the batch of this forward pass."""
        batch = self.batch

        def run() -> Tensor:
            with self.pass_of(batch):
                return make()

        return run
