"""Layers, stages and other inputs of the terms of `_time`, as arrays over candidates.

The model is one pipeline stage that processes m microbatches; the slowest stage sets the pace and the step ends with
the optimizer. Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
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
from hyper_parallel.cost._overlap import with_overlap
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost.pipeline import StageSplit, split_layers_closed_form

LOGIT_BYTES = 24.0
"""Bytes moved per logit by the loss: written, cast to float32 (read 2, written 4), softmax and its gradient in place
(read and written twice), cast back.
"""


@dataclass(frozen=True, slots=True)
class BlockPrices:
    """Prices that depend on blocks, sequences and recomputation of a layer only.

    With equally fast links for every placement of a group, they do not depend on pipelines and sharding of states.
    """

    work: Compute  # compute of a mean layer
    comm: BlockCommunication  # communication inside the blocks of a mean layer
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: PricingCase) -> BlockPrices:
        """Return prices of candidates, columns of one length or an open grid."""
        work = layer_compute(s)
        return cls(work, block_communication(s, work), _head(s))

    def take(self, shape: tuple[int, ...], index: Any) -> BlockPrices:
        """Return the prices at some indices, for candidates of a shape."""

        def taken_part(part: Any) -> Any:
            if isinstance(part, np.ndarray):
                return np.broadcast_to(part, shape)[index]
            return replace(
                part, **{f.name: taken_part(getattr(part, f.name)) for f in fields(part)}
            )

        return BlockPrices(taken_part(self.work), taken_part(self.comm), taken_part(self.head))


@dataclass(frozen=True, slots=True)
class LayerPrices:
    """Prices of the work and communication of a layer, and of the head; they depend on the choices of a layer only."""

    work: Compute  # compute of a mean layer
    comm: Communication  # communication of a mean layer
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: PricingCase, blocks: BlockPrices | None = None) -> LayerPrices:
        """Return prices of the layers of candidates; `blocks` are their block prices if already computed."""
        blocks = blocks or BlockPrices.of(s)
        comm = layer_communication(s, blocks.work, blocks.comm)
        return cls(blocks.work, with_overlap(s, blocks.work, comm), blocks.head)

    @property
    def layer(self) -> Array:
        """Seconds of one layer and microbatch, forward and backward, without expert exchanges."""
        w, m = self.work, self.comm
        work = w.forward + w.backward + w.recompute + w.launch
        return work + m.tp + m.cp + m.fsdp


def _head(s: PricingCase) -> Array:
    """Return seconds of output projection in the compute dtype, forward and both gradients, and the loss.

    A head that tensor parallelism cannot shard processes the tokens of its rank, or all of them if every rank has the
    whole stream.
    """
    machine, vocab = s.machine, s.n.vocab / s.vocabulary_ranks
    tokens = s.tokens * s.vocabulary_ranks / s.logit_ranks
    share = machine.card.share("matmul", machine.compute_dtype)
    # The head stays in the compute dtype if the layers use 8 or 4 bits.
    slower = machine.matmul_flops / (machine.peak_flops * share / machine.stack.compute)
    products = 3.0 * matmul_seconds(machine, tokens, vocab, s.n.hidden) * slower
    return products + LOGIT_BYTES * tokens * vocab / machine.passing_bytes_s


@dataclass(frozen=True, slots=True)
class Step:
    """Layers of candidates and their stages, which set the pace of a step."""

    prices: LayerPrices
    ep: Array  # exposed exchanges of experts of one layer and microbatch
    ep_hidden: Array  # hidden share of the exchanges
    stages: StageSplit

    @classmethod
    def of(cls, s: PricingCase, blocks: BlockPrices | None = None) -> Step:
        """Return priced layers, split into stages; arguments as of `LayerPrices.of`."""
        prices, stack = LayerPrices.of(s, blocks), s.machine.stack
        chunked = (s.c.pp > 1) & (s.c.vpp > 1)
        hidden = np.where(chunked, max(stack.overlap_ep_chunks, stack.overlap_ep), stack.overlap_ep)
        if s.c.any_overlap:  # the simulated layer says how much is hidden
            hidden = np.where((s.c.halves == 1) & (s.c.ep_chunks == 1), hidden, 0.0)
        ep = prices.comm.ep * (1.0 - hidden)
        stages = split_layers_closed_form(
            s.c, s.n.layers, prices.layer + ep, prices.head, bool(stack.even_stages), s.machine.pace
        )
        return cls(prices, ep, hidden, stages)
