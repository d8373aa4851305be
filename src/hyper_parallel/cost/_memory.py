"""Peak memory of the fullest device: one term per cause, each an array over candidates.

Mixed precision as FSDP2 does it: the parameters, gradients and optimizer states are shards in the parameter format,
the matmuls read a gathered copy in the compute format that lives for one layer (or, without resharding, for the
whole pass). The peak lies at the end of forward of the last microbatch in flight, plus one layer being worked on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._layer import (
    outside_elements,
    saved_on_rank,
    stage_elements,
    tokens_of,
)
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._numbers import ModelNumbers
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


def memory_terms(
    numbers: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> tuple[SpaceTerm, ...]:
    """All terms of the peak memory of the fullest device; their sum is the prediction.

    Source: Korthikanti et al. 2022, section 4 (activations); Rajbhandari et al. 2020, section 3 (states).
    """
    n, e = numbers, machine.efficiency
    width = float(DTYPE_BYTES[workload.compute_dtype])
    param_width = float(DTYPE_BYTES[workload.param_dtype])
    reduce_width = float(DTYPE_BYTES[workload.reduce_dtype])
    tokens = tokens_of(workload, c)
    layers = np.ceil(n.layers / c.pp)
    elements = stage_elements(n, c)
    expert_split = np.where(c.ep > 1, c.ep, c.tp)
    layer = (
        (n.attention_weights + n.mlp_weights) / c.tp
        + n.vector_weights
        + n.expert_weights / expert_split
    )
    split = c.dp_shard * c.cp > 1
    # A copy exists where parameters are gathered or where the compute format differs from the stored one.
    copies = split | (width != param_width)
    gathered_layers = np.where(c.reshard > 0, np.minimum(2.0, layers), layers)
    gathered = np.where(copies, gathered_layers * layer * width, 0.0)
    vocabulary = outside_elements(n, c) / c.tp
    gathered = gathered + np.where(copies, vocabulary * width, 0.0)
    gradient_buffer = np.where(
        copies, np.maximum(layer, vocabulary) * np.where(split, reduce_width + width, width), 0.0
    )

    in_flight = np.where(c.pp > 1, np.minimum(c.accumulation, c.pp), 1.0)
    one_layer = saved_on_rank(n, c) * width * tokens
    boundary = n.hidden * width * tokens / c.tp
    kept = np.where(c.recompute > 0, boundary, one_layer)
    saved = layers * in_flight * kept + np.where(c.recompute > 0, one_layer, 0.0)
    # The backward of one layer holds the gradient of a gathered input.
    working = np.where(c.tp > 1, tokens * n.hidden * width, 0.0)
    logits = tokens * n.vocab / c.tp * (width + 2.0 * max(width, 4.0))
    # With a pipeline the first stage holds most activations and the last one the logits: the fuller of the two.
    last_saved = layers * kept + np.where(c.recompute > 0, one_layer, 0.0)
    head_fuller = (c.pp > 1) & (last_saved + logits > saved)
    activations = np.where(head_fuller, last_saved, saved)
    logits = np.where((c.pp > 1) & ~head_fuller, 0.0, logits)

    parameters = elements * param_width
    terms = (
        SpaceTerm("parameters", parameters, "elements of the stage / P / d * bytes of the parameter format"),
        SpaceTerm("gradients", parameters, "elements of the stage / P / d * bytes of the parameter format"),
        SpaceTerm("optimizer states", 2.0 * parameters, "two AdamW moments in the parameter format"),
        SpaceTerm("gathered parameters", gathered,
                  "two layers (all, when not resharded) and the embedding or head, / P, in the compute format"),
        SpaceTerm("gradient buffers", gradient_buffer,
                  "unsharded gradients of the largest group before and in reduction"),
        SpaceTerm("activations", activations,
                  "layers * microbatches in flight * T b ((4h + 2q + 2k + 3f) / P + 2h (1 - 1/P)), or T b h / P"),
        SpaceTerm("work space", working, "gradient of a gathered layer input, T h b"),
        SpaceTerm("logits", logits, "T V / P: the logits, float32 probabilities and their gradient"),
        SpaceTerm("device context", np.full(len(c), float(e.context_bytes)),
                  "driver context, communicators and workspaces"),
    )  # fmt: skip
    waste = e.fragmentation * sum((t.bytes for t in terms[:-1]), np.zeros(len(c)))
    return (
        *terms,
        SpaceTerm(
            "fragmentation", waste, f"{e.fragmentation:.0%} of the terms above but the context"
        ),
    )
