"""Layers, stages and the rest of a step in numbers: what the terms of `_time` are made of, as arrays over candidates.

The picture is one pipeline stage that works through m microbatches; the slowest stage sets the pace and the step
ends with the optimizer. Letters as in `_layer`, and m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Array, distinct
from hyper_parallel.cost._communication import Communication, layer_communication
from hyper_parallel.cost._layer import Compute, layer_compute, matmul_seconds
from hyper_parallel.cost._pipeline import StageSplit, lay_out
from hyper_parallel.cost._setting import Setting

_LAYER_COLUMNS = (
    "dp_shard", "cp", "cp_ulysses", "tp_x", "tp_y", "attention_shape", "mlp_shape", "ep", "etp", "microbatch",
    "recompute", "zero", "order", "regather", "attention_tokens", "cp_gather",
)  # fmt: skip
_FACTORISE_FROM = 512
"""Rows from which pricing distinct layers once is worth finding them."""
LOGIT_BYTES = 24.0
"""Bytes moved per logit by the loss: written, cast to float32 (read 2, written 4), softmax and its gradient in place
(read and written twice), cast back."""


@dataclass(frozen=True, slots=True)
class LayerPrices:
    """What depends on the layer's own choices only: work and communication of a layer, and the head."""

    work: Compute  # compute of a mean layer
    comm: Communication  # communication of a mean layer
    head: Array  # seconds of the output projection and the loss of one microbatch

    @classmethod
    def of(cls, s: Setting) -> LayerPrices:
        """Prices of the layers of candidates, each distinct layer computed once."""
        c = s.c
        if c.pp.ndim != 1 or len(c) < _FACTORISE_FROM:
            work = layer_compute(s)
            return cls(work, layer_communication(s, work), _head(s))
        # With another order than the mesh's own the strides of a layer's groups also depend on the outer axes.
        moved = bool((c.order > 0).any())
        columns = (*_LAYER_COLUMNS, "pp", "dp_replicate") if moved else _LAYER_COLUMNS
        # Of a pipeline only that it is one: its sharded gradients are reduced once per step.
        first, index = distinct([getattr(c, name) for name in columns] + [np.minimum(c.pp, 2.0)])
        layers = Setting(s.n, s.machine, s.workload, c.take(first))
        work = layer_compute(layers)
        return cls(
            _rows(work, index), _rows(layer_communication(layers, work), index), _rows(_head(layers), index)
        )  # fmt: skip

    @property
    def layer(self) -> Array:
        """Seconds of one layer and microbatch, forward and backward, without expert exchanges."""
        w, m = self.work, self.comm
        work = w.forward + w.backward + w.recompute + w.launch
        return work + m.tp + m.cp + m.fsdp


def _rows(value: Any, index: NDArray[np.intp]) -> Any:
    """The rows that an index lists, of a column that is not one value for all."""
    if isinstance(value, np.ndarray):
        return value[index] if value.size > 1 else value
    return replace(value, **{f.name: _rows(getattr(value, f.name), index) for f in fields(value)})


def _head(s: Setting) -> Array:
    """Output projection in the compute dtype, forward and both gradients, and the loss."""
    machine, tokens, vocab = s.machine, s.tokens, s.n.vocab / s.c.tp
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
    def of(cls, s: Setting) -> Step:
        """Layers priced, and laid out on stages."""
        prices, stack = LayerPrices.of(s), s.machine.stack
        chunked = (s.c.pp > 1) & (s.c.vpp > 1)
        hidden = np.where(chunked, max(stack.overlap_ep_chunks, stack.overlap_ep), stack.overlap_ep)
        ep = prices.comm.ep * (1.0 - hidden)
        stages = lay_out(
            s.c, s.n.layers, prices.layer + ep, prices.head, bool(stack.even_stages), s.machine.pace
        )
        return cls(prices, ep, hidden, stages)
