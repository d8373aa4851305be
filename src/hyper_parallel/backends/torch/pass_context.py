"""Context of the running forward pass of a model, shared by the wrappers of its modules.

`PassContext` is immutable. Wrappers of modules replace it by a copy with other values. A recomputed layer keeps the
context of its forward for backward, because other passes may run in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hyper_parallel.ir import Interval, SequenceCut


@dataclass(frozen=True, slots=True)
class PassShape:
    """Shape of a forward pass.

    Attributes:
        batch: Number of sequences and their length, (B, S); with half-batches, those of one half-batch.
        parts: Number of parts into which the sequences are divided: 2 for half-batches, else 1.
    """

    batch: tuple[int, ...] = ()
    parts: int = 1


@dataclass(frozen=True, slots=True)
class SequenceView:
    """Document lengths and boundaries of the sequences in one forward pass, from which attention masks are computed."""

    cut: SequenceCut
    lengths: Tensor
    """For each token of this rank, the length of its document in the full sequence, [B, padded length / cp]."""
    documents: Tensor | None = None
    """Document index of every position, [B, padded length]; None: one document per row."""
    bounds: Mapping[Interval, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """First and last document index in each row, by interval of positions; empty without documents."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of the batch of one forward pass.

    Attributes:
        real: [T], True for real tokens among the flattened tokens of this rank's layers.
        unread: True if the outputs at padding tokens are not used, so they need not be computed.
    """

    real: Tensor
    unread: bool


class PassContext(NamedTuple):
    """Values of one forward pass, as a named tuple, because copying it is cheaper than copying a dataclass.

    Attributes:
        shape: Shape of the pass, set at the first decoder layer or by the pipeline.
        view: Document lengths and boundaries; None without context parallelism, and before the first pass.
        padding: Padding of the batch; None without padding.
        recomputed: True while a layer runs whose activations are recomputed in backward.
        partial_embedding: True if the embedding returned partial sums, which the first layer reduces.
        head: Sharding of the logits: "whole", "vocabulary" or "tokens".
        head_batch: Shape (B, S) of the tokens at the head, with sharded activations.
        loss_consumed: True if the loss function has consumed the logits.
    """

    shape: PassShape = PassShape()
    view: SequenceView | None = None
    padding: Padding | None = None
    recomputed: bool = False
    partial_embedding: bool = False
    head: str = "whole"
    head_batch: tuple[int, ...] = ()
    loss_consumed: bool = False


@dataclass(slots=True)
class RunningPass:
    """Mutable reference to the context of the running forward pass."""

    context: PassContext = field(default_factory=PassContext)
    _forward: PassContext | None = None
    _recomputed: PassContext = field(default_factory=PassContext)

    def update(self, **values: Any) -> None:
        """Replace the context by a copy in which these attributes have new values."""
        self.context = self.context._replace(**values)

    def recomputed(self) -> PassContext:
        """Return the context with `recomputed` set, for a layer that backward recomputes."""
        if self._forward is not self.context:
            self._forward = self.context
            self._recomputed = self.context._replace(recomputed=True)
        return self._recomputed
