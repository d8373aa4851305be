"""Layers, stages and the rest of a step in numbers: what the terms of `_time` are made of, as arrays over candidates.

The picture is one pipeline stage that works through m microbatches; the slowest stage sets the pace and the step
ends with the optimizer. Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hyper_parallel.cost._candidates import Array
from hyper_parallel.cost._communication import (
    BlockCommunication,
    Communication,
    block_communication,
    layer_communication,
)
from hyper_parallel.cost._layer import Compute, layer_compute, matmul_seconds
from hyper_parallel.cost._setting import Setting
from hyper_parallel.cost.pipeline import StageSplit, lay_out

LOGIT_BYTES = 24.0
"""Bytes moved per logit by the loss: written, cast to float32 (read 2, written 4), softmax and its gradient in place
(read and written twice), cast back."""


@dataclass(frozen=True, slots=True)
class BlockPrices:
    """What the blocks, the sequences and the recomputation of a layer decide.

    Where links are as fast wherever a group lies, pipelines and the ranks that share states change nothing of it.
    """

    work: Compute  # compute of a mean layer
    comm: BlockCommunication  # communication inside the blocks of a mean layer
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: Setting) -> BlockPrices:
        """Prices of candidates, columns of one length or an open grid."""
        work = layer_compute(s)
        return cls(work, block_communication(s, work), _head(s))

    def at(self, shape: tuple[int, ...], index: Any) -> BlockPrices:
        """Those that an index selects, of candidates of a shape."""

        def chosen(part: Any) -> Any:
            if isinstance(part, np.ndarray):
                return np.broadcast_to(part, shape)[index]
            return replace(part, **{f.name: chosen(getattr(part, f.name)) for f in fields(part)})

        return BlockPrices(chosen(self.work), chosen(self.comm), chosen(self.head))


@dataclass(frozen=True, slots=True)
class LayerPrices:
    """What depends on the layer's own choices only: work and communication of a layer, and the head."""

    work: Compute  # compute of a mean layer
    comm: Communication  # communication of a mean layer
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: Setting, blocks: BlockPrices | None = None) -> LayerPrices:
        """Prices of the layers of candidates; `blocks` are those of their blocks when they are known."""
        blocks = blocks or BlockPrices.of(s)
        return cls(blocks.work, layer_communication(s, blocks.work, blocks.comm), blocks.head)

    @property
    def layer(self) -> Array:
        """Seconds of one layer and microbatch, forward and backward, without expert exchanges."""
        w, m = self.work, self.comm
        work = w.forward + w.backward + w.recompute + w.launch
        return work + m.tp + m.cp + m.fsdp


def _head(s: Setting) -> Array:
    """Output projection in the compute dtype, forward and both gradients, and the loss.

    A head that tensor parallelism cannot cut works on the tokens of its rank, or on all of them where every rank holds
    the whole stream.
    """
    machine, vocab = s.machine, s.n.vocab / s.vocabulary_ranks
    tokens = s.tokens * s.vocabulary_ranks / s.logit_ranks
    share = machine.card.share("matmul", machine.compute_dtype)
    # The head stays in the compute dtype where the layers use 8 or 4 bits.
    slower = machine.matmul_flops / (machine.peak_flops * share / machine.stack.compute)
    products = 3.0 * matmul_seconds(machine, tokens, vocab, s.n.hidden) * slower
    return products + LOGIT_BYTES * tokens * vocab / machine.passing_bytes_s


@dataclass(frozen=True, slots=True)
class Step:
    """The layers of candidates and how they lie on stages: what sets the pace of a step."""

    prices: LayerPrices
    ep: Array  # exchanges of experts of one layer and microbatch that nothing hides
    ep_hidden: Array  # the share of them that hides
    stages: StageSplit

    @classmethod
    def of(cls, s: Setting, blocks: BlockPrices | None = None) -> Step:
        """Layers priced, and laid out on stages; arguments as of `LayerPrices.of`."""
        prices, stack = LayerPrices.of(s, blocks), s.machine.stack
        chunked = (s.c.pp > 1) & (s.c.vpp > 1)
        hidden = np.where(chunked, max(stack.overlap_ep_chunks, stack.overlap_ep), stack.overlap_ep)
        ep = prices.comm.ep * (1.0 - hidden)
        stages = lay_out(
            s.c, s.n.layers, prices.layer + ep, prices.head, bool(stack.even_stages), s.machine.pace
        )
        return cls(prices, ep, hidden, stages)
