"""Peak memory of the fullest device: one term per cause, each an array over candidates.

ZeRO 2 and 3 as FSDP2 does it: parameters, gradients and optimizer states are shards in the parameter format, matmuls
read a gathered copy in the compute format that lives for one layer (ZeRO-2: for the whole pass). ZeRO 0 and 1 as
Megatron does it: parameters in the compute format, float32 gradients, and a float32 copy and two moments in the
optimizer. The peak lies at the end of forward of the last microbatch in flight, plus one layer being worked on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates, shape_of
from hyper_parallel.cost._layer import saved_elements, tokens_of
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._pipeline import in_flight
from hyper_parallel.ir import MemoryTerm, Workload
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]


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
class Elements:
    """Parameter elements on the fullest rank.

    Attributes:
        whole: After pp, tp and ep, before data sharding.
        sharded: The share of one data-parallel rank under full sharding.
    """

    whole: Array
    sharded: Array


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what lives through the whole step, and what the optimizer moves."""

    parameters: Array
    gradients: Array
    optimizer: Array
    optimizer_moved: Array


def outside_elements(numbers: ModelNumbers, c: Candidates) -> Array:
    """Elements of embedding and head in the stage that holds more of them, before tp and data sharding."""
    n = numbers
    largest = max(n.embedding_weights, n.head_weights)
    return np.where(c.pp > 1, largest, n.embedding_weights + n.head_params) * 1.0


def stage_elements(numbers: ModelNumbers, c: Candidates) -> Elements:
    """Parameter elements of the fullest rank: ceil(L / p) layers and the larger of embedding and head."""
    n, group, layers = numbers, c.dp_shard * c.cp, np.ceil(numbers.layers / c.pp)
    dense = layers * ((n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights)
    dense = dense + outside_elements(n, c) / c.tp
    experts = layers * n.expert_weights / (c.ep * c.etp)
    # The ranks that hold the same experts: what ep and the cut of an expert leave of dp_shard x cp x tp.
    share = np.maximum(1.0, group * c.tp / (c.ep * c.etp))
    return Elements(dense + experts, dense / group + experts / share)


def state_bytes(numbers: ModelNumbers, workload: Workload, c: Candidates) -> States:
    """Parameters, gradients and optimizer states of the fullest rank.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.
    """
    param, compute = _widths(workload)
    e = stage_elements(numbers, c)
    master = param if param != compute else 0.0
    mine = np.where(c.zero > 0, e.sharded, e.whole)
    fully = c.zero > 1
    parameters = np.where(fully, e.sharded * param, e.whole * compute)
    gradients = np.where(fully, e.sharded, e.whole) * param
    states = mine * (2.0 * param + np.where(fully, 0.0, master))
    # AdamW reads gradient, parameter and two moments and writes three of them; a copy in the compute format is written.
    moved = mine * (7.0 * param + np.where(fully, 0.0, compute))
    resident = np.where(c.offload > 0, 0.0, states)
    return States(parameters, gradients, resident, moved)


def _widths(workload: Workload) -> tuple[float, float]:
    return float(DTYPE_BYTES[workload.param_dtype]), float(DTYPE_BYTES[workload.compute_dtype])


def activation_bytes(n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates) -> Array:
    """Bytes that one mean layer and microbatch keeps for backward, without recomputation.

    b T ((4h + 2q + 2k + 3f) / P + 2h (1 - 1/P)) with gathered inputs kept; the second part is left out when they are
    gathered again. Without sequence parallelism 5h elements are whole on every rank. Dropout keeps masks of one byte,
    two over h and, without fused attention, the scores 5 a s bytes per token.

    Source: Korthikanti et al. 2022, section 4 and equation 2, generalised to narrow keys and gated widths.
    """
    stack, width, tokens = machine.stack, machine.width, tokens_of(workload, c)
    dense = saved_elements(n) * width + stack.dropout * 2.0 * n.hidden
    whole = 0.0
    if not stack.sequence_parallel:
        # Inputs of both norms and both column matmuls, and a dropout mask of each block.
        whole = 4.0 * n.hidden * width + stack.dropout * 2.0 * n.hidden
    # Element-wise kernels also write the experts' outputs, which backward does not need.
    experts = (n.expert_saved_width - n.experts_per_token * n.hidden) * width * stack.imbalance
    gathered = 2.0 * n.hidden * width * (1.0 - 1.0 / c.tp)
    extra = stack.keep_gathered * stack.sequence_parallel * gathered
    total = (dense - whole + experts) / c.tp + whole + extra
    if not stack.flash:
        # Selective recomputation drops the scores.
        scores = (2.0 * width + 1.0) * n.num_heads * workload.seq_len / c.tp
        total = total + np.where(c.recompute == 1, 0.0, scores)
    # Log-sum-exp of fused attention, float32.
    statistics = 4.0 * n.num_heads / c.tp if stack.flash else 0.0
    return tokens * stack.kept * (total + statistics)


def memory_terms(
    numbers: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> tuple[SpaceTerm, ...]:
    """All terms of the peak memory of the fullest device; their sum is the prediction."""
    n, card, stack = numbers, machine.card, machine.stack
    param, width = _widths(workload)
    reduce_width = float(DTYPE_BYTES[workload.reduce_dtype])
    tokens, layers = tokens_of(workload, c), np.ceil(n.layers / c.pp)
    states = state_bytes(n, workload, c)
    dense = (n.attention_weights + n.mlp_weights) / c.tp + n.vector_weights
    layer = dense + n.expert_weights / (c.ep * c.etp)
    vocabulary = outside_elements(n, c) / c.tp
    if stack.vocabulary_groups > 1:
        vocabulary = np.minimum(vocabulary, max(n.embedding_weights, n.head_weights) / c.tp)
    sharded = (c.dp_shard * c.cp > 1) & (c.zero > 1)
    # A copy exists where parameters are gathered or where the compute format differs from the stored one.
    copies = (c.zero > 1) & (sharded | (width != param))
    gathered_layers = np.where(c.zero > 2, np.minimum(2.0, layers), layers)
    gathered = np.where(copies, (gathered_layers * layer + vocabulary) * width, 0.0)
    buffers = np.where(
        copies, np.maximum(layer, vocabulary) * np.where(sharded, reduce_width + width, width), 0.0
    )

    copy = stack.gradient_copy_bytes * np.where(c.zero < 2, stage_elements(n, c).whole, 0.0)
    flight = in_flight(c)
    one_layer = activation_bytes(n, machine, workload, c)
    boundary = n.hidden * width * tokens / (c.tp if stack.sequence_parallel else 1.0)
    kept = np.where(
        c.recompute > 1, boundary, np.where(c.recompute == 1, stack.selective_kept, 1.0) * one_layer
    )
    worked = np.where(c.recompute > 1, one_layer, 0.0)
    saved = layers * flight * kept + worked
    # The backward of one layer holds the gradient of a gathered input.
    working = np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    routed = n.experts_per_token / max(n.moe_share, 1e-9) * n.hidden * width * stack.imbalance
    exchange = np.where(c.ep > 1, 2.0 * tokens / c.tp * routed, 0.0) if n.experts else np.zeros(1)
    logits = tokens * n.vocab / c.tp * stack.logit_bytes * max(width, 2.0) / 2.0
    # With a pipeline the first stage holds most activations and the last one the logits: the fuller of the two.
    last_saved = layers * kept * np.where(c.pp > 1, in_flight_last(c), 1.0) + worked
    head_fuller = (c.pp > 1) & (last_saved + logits > saved)
    activations = np.where(head_fuller, last_saved, saved)
    logits = np.where((c.pp > 1) & ~head_fuller, 0.0, logits)

    terms = (
        SpaceTerm("parameters", states.parameters,
                  "elements of the stage / P; ZeRO 2, 3: / d, in the parameter format, else in the compute format"),
        SpaceTerm("gradients", states.gradients + copy,
                  "elements of the stage / P in the parameter format; ZeRO 2, 3: / d"),
        SpaceTerm("optimizer states", states.optimizer,
                  "two AdamW moments in the parameter format, ZeRO 0, 1: and a copy of the parameters; ZeRO > 0: / d"),
        SpaceTerm("gathered parameters", gathered,
                  "two layers (all, when not resharded) and the embedding or head, / P, in the compute format"),
        SpaceTerm("gradient buffers", buffers, "unsharded gradients of the largest group before and in reduction"),
        SpaceTerm("activations", activations,
                  "layers * microbatches in flight * T b ((4h + 2q + 2k + 3f) / P + gathered inputs), or T b h / P"),
        SpaceTerm("work space", working, "gradient of a gathered layer input, T h b"),
        SpaceTerm("exchange buffers", exchange, "dispatched tokens of one expert layer, sent and received"),
        SpaceTerm("logits", logits, "T V / P: the logits, float32 probabilities and their gradient"),
        SpaceTerm("device context", np.full(1, card.context_bytes), "driver context, communicators and workspaces"),
    )  # fmt: skip
    moving = sum((t.bytes for t in terms[3:-1]), np.zeros(1))
    shape = np.broadcast_shapes(*(t.bytes.shape for t in terms), shape_of(c))
    every = (
        *terms,
        SpaceTerm(
            "fragmentation", card.fragmentation * moving,
            f"{card.fragmentation:.0%} of what comes and goes: all but states and context",
        ),
    )  # fmt: skip
    return tuple(SpaceTerm(t.name, np.broadcast_to(t.bytes, shape), t.formula) for t in every)


def in_flight_last(c: Candidates) -> Array:
    """Microbatches that the last rank holds, in units of all its layers: 1, interleaved 1 + (p - 1) / v at most."""
    return np.where(c.vpp > 1, in_flight(c) - (c.pp - 1.0), 1.0)
