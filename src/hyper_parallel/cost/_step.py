"""Step time in numbers: the seconds of every cause as arrays over candidates, without names and formulas.

The picture is one pipeline stage that works through m microbatches; the slowest stage sets the pace and the step
ends with the optimizer. `_time` names the causes as terms; a search needs only their sum. Letters as in `_layer`, and
m microbatches, p stages, l layers of the slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Array, distinct
from hyper_parallel.cost._communication import (
    Communication,
    Tail,
    exposed,
    hop_seconds,
    layer_communication,
    step_tail,
    tensor_hops,
)
from hyper_parallel.cost._layer import Compute, layer_compute, matmul_seconds
from hyper_parallel.cost._phases import stage_elements, state_bytes
from hyper_parallel.cost._pipeline import StageSplit, bubble_seconds, lay_out
from hyper_parallel.cost._place import neighbours
from hyper_parallel.cost._setting import Setting
from hyper_parallel.ir import AXES

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
        distinct_layers = Setting(s.n, s.machine, s.workload, c.take(first))
        work = layer_compute(distinct_layers)
        comm = layer_communication(distinct_layers, work)
        return cls(work, comm, _head(distinct_layers)).take(index)

    @property
    def layer(self) -> Array:
        """Seconds of one layer and microbatch, forward and backward, without expert exchanges."""
        w, m = self.work, self.comm
        work = w.forward + w.backward + w.recompute + w.launch
        return work + m.tp + m.cp + m.fsdp

    def take(self, index: NDArray[np.intp]) -> LayerPrices:
        """The prices of the rows that an index lists."""

        def pick(value: Compute | Communication) -> dict[str, Array]:
            return {f.name: _rows(getattr(value, f.name), index) for f in fields(value)}

        work, comm = Compute(**pick(self.work)), Communication(**pick(self.comm))
        return LayerPrices(work, comm, _rows(self.head, index))


def _rows(value: Array, index: NDArray[np.intp]) -> Array:
    return value[index] if value.size > 1 else value


def _head(s: Setting) -> Array:
    """Output projection in the compute dtype, forward and both gradients, and the loss."""
    machine, tokens, vocab = s.machine, s.tokens, s.n.vocab / s.c.tp
    share = machine.card.share("matmul", machine.compute_dtype)
    # The head stays in the compute dtype where the layers use 8 or 4 bits.
    slower = machine.matmul_flops / (machine.peak_flops * share / machine.stack.compute)
    products = 3.0 * matmul_seconds(machine, tokens, vocab, s.n.hidden) * slower
    return products + LOGIT_BYTES * tokens * vocab / machine.passing_bytes_s


def _host_work(s: Setting, layers: Array) -> Array:
    """Core seconds of a step that a rank spends on starting what the axes do, beyond the time on the links."""
    c, seconds = s.c, s.machine.stack.host_s
    total: Array = np.zeros(1)
    if not seconds:
        return total
    all_layers = c.accumulation * layers
    redone = all_layers * np.where(c.recompute > 1, 1.5, 1.0)
    kinds = {
        "dp_replicate": (c.dp_replicate > 1, layers),
        "dp_shard": (s.shards > 1, all_layers),
        "cp": (c.cp - c.cp_ulysses > 0.5, redone),
        "cp_ulysses": (c.cp_ulysses > 1, redone),
        "tp_x": (c.tp > 1, redone),
        "tp_y": (c.tp_y > 1, redone),
        "ep": (c.ep > 1, redone * s.n.moe_share),
        "pp": (c.pp > 1, c.accumulation * c.vpp),
    }
    for axis, (used, times) in kinds.items():
        total = total + np.where(used, times * seconds.get(axis, 0.0), 0.0)
    return total


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step while microbatches go through the stages, without what the sharing of states adds."""

    ep: Array  # exchanges of experts of one layer and microbatch that nothing hides
    ep_hidden: Array  # the share of them that hides
    stages: StageSplit  # layers on stages
    bubble: Array  # filling and draining of the pipeline
    hop: Array  # one send to the next stage
    sends: Array  # all sends that nothing hides

    @classmethod
    def of(cls, s: Setting, prices: LayerPrices) -> Pace:
        """The pace of candidates whose layers are priced."""
        c, pace, stack = s.c, s.machine.pace, s.machine.stack
        work, comm = prices.work, prices.comm
        chunked = (c.pp > 1) & (c.vpp > 1)
        hidden = np.where(chunked, max(stack.overlap_ep_chunks, stack.overlap_ep), stack.overlap_ep)
        ep = comm.ep * (1.0 - hidden)
        even = bool(stack.even_stages)
        stages = lay_out(c, s.n.layers, prices.layer + ep, prices.head, even, pace)
        bubble = sends = hop = np.zeros(1)
        if (c.pp > 1).any():
            traffic = (comm.tp + ep + comm.cp) / 2.0
            bubble = bubble_seconds(
                c,
                stages.others + (c.pp - 1.0) * comm.outside,
                work.forward + work.launch / 3.0 + traffic,
                work.backward + work.recompute + work.launch / 1.5 + traffic,
                work.matmul,
                pace,
            )
            hop = hop_seconds(s, neighbours(c))
            sends = 2.0 * (c.accumulation * c.vpp + c.pp - 1.0) * hop * (1.0 - stack.overlap_pp)
        return cls(ep, hidden, stages, bubble, hop, sends)

    def seconds(self, accumulation: Array, prices: LayerPrices) -> Array:
        """The sum over so many microbatches."""
        work, comm, stages = prices.work, prices.comm, self.stages
        layer = work.forward + work.backward + work.recompute + work.launch
        layer = layer + comm.tp + comm.cp + self.ep
        microbatch = stages.layers * layer + stages.head * prices.head
        return accumulation * microbatch + self.bubble + self.sends


@dataclass(frozen=True, slots=True)
class Rest:
    """Seconds of a step beside its `Pace`: sharing of states, and what comes once."""

    fsdp: Array  # gathers and scatters per microbatch that nothing hides
    once: Tail  # data-parallel traffic once per step
    tail: Array  # what of it nothing hides
    norm: Array  # the gradient norm
    elements: Array  # parameter elements of the rank before data sharding
    moved: Array  # bytes that the optimizer moves
    optimizer: Array  # seconds of that
    accumulated: Array  # sums of unsharded gradients
    host: Array  # core seconds of starting what the axes do
    every: float  # data, logging and host
    noise: Array  # share of the step that stragglers add

    @classmethod
    def of(cls, s: Setting, prices: LayerPrices, layers: Array) -> Rest:
        """The rest of candidates whose layers are priced; `layers` are those of the slowest stage."""
        c, machine, stack, m = s.c, s.machine, s.machine.stack, s.c.accumulation
        work, comm, overlap = prices.work, prices.comm, stack.overlap_dp
        once, last = step_tail(s), work.backward * layers + prices.head
        tail = exposed(once.scatter, last, overlap) + once.late
        tail = tail + exposed(once.gather, last / 2.0, overlap)
        tail = tail + exposed(once.first, work.forward * layers, overlap) + tensor_hops(s)
        norm = machine.ring_seconds(np.full(1, 4.0), *(getattr(s.places, name) for name in AXES))
        elements = stage_elements(s)
        moved = state_bytes(s, elements).optimizer_moved
        added = (m > 1) & ((c.zero < 2) | ((c.pp > 1) & (s.shards > 1)))
        sums = m * 8.0 * machine.card.saturation * elements[0] / machine.stream_bytes_s
        return cls(
            m * (layers * comm.fsdp + comm.outside), once, tail, 2.0 * norm, elements[0], moved,
            moved / machine.stream_bytes_s, np.where(added, sums, 0.0), machine.crowd * _host_work(s, layers),
            stack.step_s, stack.straggle * np.log2(np.maximum(c.world_size, 1.0)),
        )  # fmt: skip

    @property
    def seconds(self) -> Array:
        """The sum, stragglers apart."""
        once = self.tail + self.norm + self.optimizer + self.every
        return self.fsdp + once + self.accumulated + self.host
