"""What a rank holds: parameters, gradients, optimizer states, and the phases of a step in which FSDP2 is fullest.

ZeRO 2 and 3 as FSDP2 does it: parameters, gradients and optimizer states are shards in the parameter format. ZeRO 0
and 1 as Megatron does it: parameters in the compute format, float32 gradients, and a float32 copy and two moments in
the optimizer. Phases of a step:

    loss        all activations, the logits and their gradient; embedding and head gathered, and the last layer early
    last layer  all activations, its gradients of activations; two layers gathered
    next layer  one layer's activations fewer; the gradients of the last one are cast and reduced meanwhile
    end         nothing of activations; embedding and head are one group whose gradients are cast and reduced together

With several microbatches sharded gradients are there from the first on. A pipeline adds up unsharded gradients and
reduces them at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Array
from hyper_parallel.cost._setting import Setting
from hyper_parallel.ir import MemoryTerm


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what lives through the whole step, and what the optimizer moves."""

    parameters: Array
    gradients: Array
    optimizer: Array
    optimizer_moved: Array


def stage_elements(
    s: Setting, layers: Array | None = None, outside: Array | None = None
) -> tuple[Array, Array]:
    """Parameters of a rank after pp, tp and ep, before data sharding; and its share of them under full sharding.

    Args:
        s: What is priced.
        layers: Layers of its stage; None: ceil(L / p).
        outside: Elements of embedding and head in its stage; None: the larger of them.
    """
    c = s.c
    layers = s.layers if layers is None else layers
    dense = s.dense(layers) + (s.outside if outside is None else outside) / c.tp
    experts = s.experts(layers)
    # The ranks that hold the same experts: what ep and the cut of an expert leave of dp_shard x cp x tp.
    share = np.maximum(1.0, s.shards * c.tp / (c.ep * c.etp))
    return dense + experts, dense / s.shards + experts / share


def state_bytes(s: Setting, elements: tuple[Array, Array] | None = None) -> States:
    """Parameters, gradients and optimizer states of a rank, the fullest when its elements are not given.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.
    """
    param, compute = s.param_width, s.machine.width
    whole, sharded = elements or stage_elements(s)
    master = param if param != compute else 0.0
    mine = np.where(s.c.zero > 0, sharded, whole)
    fully = s.c.zero > 1
    parameters = np.where(fully, sharded * param, whole * compute)
    gradients = np.where(fully, sharded, whole) * param
    states = mine * (2.0 * param + np.where(fully, 0.0, master))
    # AdamW reads gradient, parameter and two moments and writes three of them; a copy in the compute format is written.
    moved = mine * (7.0 * param + np.where(fully, 0.0, compute))
    return States(parameters, gradients, states, moved)


@dataclass(frozen=True, slots=True)
class SpaceTerm:
    """One cause of memory over all candidates."""

    name: str
    bytes: Array
    formula: str

    def at(self, index: int) -> MemoryTerm:
        """The term of one candidate."""
        return MemoryTerm(self.name, "hbm", int(np.ceil(self.bytes[index])), self.formula)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a device holds at one time or another, bytes; the phases of a step add up some of it."""

    states: States
    gradients: Array
    gathered: Array
    buffers: Array
    activations: Array
    working: Array
    exchange: Array
    logits: Array

    def mixed(self, other: Parts, share: Array) -> Parts:
        """What is held when a share of the layers is as in the other one."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(Parts)}
        del pairs["states"]
        return replace(self, **{k: (1.0 - share) * a + share * b for k, (a, b) in pairs.items()})

    @property
    def staying(self) -> Array:
        """What lives through the step, or is added up in it."""
        return self.states.parameters + self.gradients + self.states.optimizer

    @property
    def moving(self) -> Array:
        """What comes and goes."""
        held = self.gathered + self.buffers + self.activations
        return held + self.working + self.exchange + self.logits

    def terms(self, context_bytes: float) -> tuple[SpaceTerm, ...]:
        """One term for each, and the device's context."""
        states = self.states
        return (
            SpaceTerm("parameters", states.parameters,
                      "elements of the stage / P; ZeRO 2, 3: / d, in the parameter format, else in the compute format"),
            SpaceTerm("gradients", self.gradients,
                      "elements of the stage / P in the parameter format; ZeRO 2, 3: / d"),
            SpaceTerm("optimizer states", states.optimizer,
                      "two AdamW moments in the parameter format, ZeRO 0, 1: and a copy of the parameters; "
                      "ZeRO > 0: / d"),
            SpaceTerm("gathered parameters", self.gathered,
                      "layers (all, when not resharded) and the embedding or head, / P, in the compute format"),
            SpaceTerm("gradient buffers", self.buffers,
                      "unsharded gradients before and in reduction; of a pipeline those of the whole stage"),
            SpaceTerm("activations", self.activations,
                      "layers * microbatches in flight * T b ((4h + 2q + 2k + 3f) / P + gathered inputs), T b h / P"),
            SpaceTerm("work space", self.working, "gradients of activations of the layer or the loss being worked on"),
            SpaceTerm("exchange buffers", self.exchange, "dispatched tokens of one expert layer, sent and received"),
            SpaceTerm("logits", self.logits, "T V / P: the logits, float32 probabilities and their gradient"),
            SpaceTerm("device context", np.full(1, context_bytes), "driver context, communicators and workspaces"),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements of a rank before data sharding: one mean layer, the vocabulary of its stage, and the head."""

    layer: Array
    vocabulary: Array
    head: Array
    sharded: NDArray[np.bool_]
    copies: NDArray[np.bool_]

    @classmethod
    def of(cls, s: Setting, outside: Array | None = None) -> Weights:
        """Elements of a rank; `outside` are those of embedding and head in its stage, None: the larger."""
        zero, tp = s.c.zero, s.c.tp
        sharded = (s.shards > 1) & (zero > 1)
        # A copy exists where parameters are gathered or where the compute format differs from the stored one.
        copies = (zero > 1) & (sharded | (s.machine.width != s.param_width))
        vocabulary = (s.outside if outside is None else outside) / tp
        return cls(s.dense() + s.experts(), vocabulary, s.n.head_params / tp, sharded, copies)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage of every candidate, and what its activations are made of."""

    layers: Array
    outside: Array  # elements of embedding and head, before tensor parallelism
    flight: Array  # microbatches in flight
    logits: Array  # bytes of logits and their gradient; 0 where the head is elsewhere
    kept: Array  # bytes that a layer and microbatch keeps
    freed: Array  # bytes of one that go when the backward of the last layer is done
    worked: Array  # bytes that recomputation makes again of one layer
    exchange: Array  # bytes of the dispatched tokens of one layer


def phases(s: Setting, stage: StageMemory) -> tuple[Parts, ...]:
    """The four phases of a stage."""
    n, c, width, wide = s.n, s.c, s.machine.width, s.reduce_width
    layers, tokens, none = stage.layers, s.tokens, np.zeros(1)
    states = state_bytes(s, stage_elements(s, layers, stage.outside))
    w = Weights.of(s, stage.outside)
    piped, several = c.pp > 1, c.accumulation > 1
    copies = np.where(w.copies, width, 0.0)
    root = copies * w.vocabulary
    # A pipeline's stage gathers its first layer for the next microbatch early.
    most = np.where(piped, layers + 1.0, layers)
    coming = copies * np.where(c.zero > 2, np.minimum(1.0, most), layers) * w.layer
    two = copies * np.where(c.zero > 2, np.minimum(2.0, most), layers) * w.layer
    # Unsharded sums of a pipeline's gradients; without copies the gradients are what they are.
    sums = np.where(piped & w.copies, wide * (w.vocabulary + layers * w.layer), 0.0)
    mine = np.where(piped & w.copies, 0.0, states.gradients)
    before = np.where(several, mine, 0.0)
    shards = np.where(w.sharded, s.shards, 1.0)
    outer = w.vocabulary / shards * wide
    inner = np.maximum(mine - outer, 0.0)
    # Before reduction in the compute format, in reduction wide; a group of one rank makes a wide copy of it all.
    reduced = np.where(w.copies, np.where(w.sharded, width + wide, 2.0 * wide), 0.0)
    single = np.where(w.copies, np.where(w.sharded, width + wide, 3.0 * wide), 0.0)
    head = np.where(piped, 0.0, copies * w.head)
    # The final norm keeps its input wide, and both formats of its output.
    final = np.where(stage.logits > 0.0, tokens * n.hidden * (4.0 + 2.0 * width) / c.tp, 0.0)
    # Stages keep what they receive of every microbatch in flight, and hold a message in and one out.
    message = np.where(piped, tokens * n.hidden * width / c.tp, 0.0)
    held = layers * stage.flight * stage.kept
    # Where every forward comes before the first backward, the sums come as the first microbatch goes.
    fewer = np.maximum(held - sums, layers * (stage.flight - 1.0) * stage.kept)
    held = np.where(piped & (stage.flight >= c.accumulation), fewer, held)
    saved = held + message * (stage.flight + 2.0)
    gradients = tokens * width * (2.0 * n.hidden + 2.0 * n.mlp_width) / c.tp
    gradients = gradients + np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    left = np.maximum(saved - stage.freed, 0.0) + stage.worked
    return (
        Parts(states, before, root + coming, sums, saved + final, none, none, stage.logits),
        Parts(states, before, root + two, sums + head, saved + stage.worked, gradients, stage.exchange, none),
        Parts(states, np.maximum(before, inner / np.maximum(layers, 1.0)), root + two,
              np.where(piped, sums + wide * copies / width * w.layer, head + reduced * w.layer),
              left, none, stage.exchange, none),
        Parts(states, np.where(several, mine, inner + np.where(w.copies, 0.0, outer)), np.where(piped, root, 0.0),
              np.where(piped, sums + np.where(w.copies, wide, 0.0) * w.vocabulary, single * w.vocabulary),
              none, none, none, none),
    )  # fmt: skip
