"""Purposes of collectives: one vocabulary for formulas, run-time counters, traces and plans.

A purpose names one direction. `Purpose.backward` is the purpose of the transposed collective: a gather of tokens in
forward is a scatter of their gradients in backward.
"""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """Value of `Collective.purpose`."""

    # FSDP, and replicas of what it shards
    FSDP_PARAMETERS = "fsdp parameters"
    FSDP_GRADIENTS = "fsdp gradients"
    EXPERT_PARAMETERS = "expert parameters"
    EXPERT_GRADIENTS = "expert gradients"
    REPLICA_GRADIENTS = "replica gradients"
    UNIT_ORDER = "order of FSDP units"

    # Tensor parallelism: borders of blocks
    SEQUENCE_GATHER = "sequence gather"
    SEQUENCE_SCATTER = "sequence scatter"
    RELAYOUT = "relayout"
    EMBEDDING = "embedding"
    LOSS = "loss"
    LOSS_STATISTICS = "loss statistics"
    NORM_STATISTICS = "norm statistics"
    WHOLE_PARAMETERS = "gradients of whole parameters"
    ACTIVATIONS = "activations"
    LOGITS = "logits"

    # Tensor parallelism: inside blocks
    HEAD_GATHER = "head gather"
    HEAD_SCATTER = "head scatter"
    WIDTH_GATHER = "width gather"
    WIDTH_SCATTER = "width scatter"
    WEIGHT_GATHER = "weight gather"
    WEIGHT_SCATTER = "weight gradient scatter"
    KEY_VALUE_GATHER = "key and value gather"
    KEY_VALUE_SCATTER = "key and value gradient scatter"
    PACKED_COLUMNS = "packed columns"
    NORMS_OVER_HEADS = "norms over heads"

    # Context parallelism
    KEYS_AND_VALUES = "attention: keys and values"
    KEY_VALUE_GRADIENTS = "attention: key and value gradients"
    HEADS_FOR_TOKENS = "attention: heads for tokens"
    TOKENS_FOR_HEADS = "attention: tokens for heads"

    # Experts
    EXPERT_ROW_COUNTS = "expert row counts"
    EXPERT_ROWS = "expert dispatch and combine"
    EXPERT_LOAD = "expert load"
    BALANCE_LOSS = "balance loss"

    # Pipeline stages
    PIPELINE_ACTIVATIONS = "pipeline activations"
    PIPELINE_GRADIENTS = "pipeline gradients"
    SHARED_WEIGHT = "shared weight"

    SUBMODELS_SUM = "sum over sub-models"

    # Once a step
    GRADIENT_NORM = "gradient norm"
    STEP_LOG = "loss and memory of all ranks"
    """What a trainer sends for its log; no formula counts it."""

    @property
    def backward(self) -> Purpose:
        """Purpose of the transposed collective in backward; the same purpose if it has no other name."""
        return _BACKWARD.get(self, self)

    @property
    def parallelism(self) -> str:
        """Kind that needs the collective: dp, tp, cp, ep, pp, submodels, or step for those once per step."""
        name = self.name
        if name in ("EXPERT_ROW_COUNTS", "EXPERT_ROWS", "EXPERT_LOAD", "BALANCE_LOSS"):
            return "ep"
        if name in ("GRADIENT_NORM", "STEP_LOG"):
            return "step"
        return next((kind for start, kind in _PARALLELISMS if name.startswith(start)), "tp")


_PARALLELISMS = (
    *((start, "dp") for start in ("FSDP_", "EXPERT_", "REPLICA_", "UNIT_")),
    *((start, "cp") for start in ("KEYS_", "KEY_VALUE_GRADIENTS", "HEADS_FOR", "TOKENS_FOR")),
    ("SUBMODELS_", "submodels"),
    *((start, "pp") for start in ("PIPELINE_", "SHARED_")),
)
"""Starts of names, and the kind of parallelism; all others belong to tensor parallelism."""
_PAIRS = (
    (Purpose.SEQUENCE_GATHER, Purpose.SEQUENCE_SCATTER),
    (Purpose.HEAD_GATHER, Purpose.HEAD_SCATTER),
    (Purpose.WIDTH_GATHER, Purpose.WIDTH_SCATTER),
    (Purpose.WEIGHT_GATHER, Purpose.WEIGHT_SCATTER),
    (Purpose.KEY_VALUE_GATHER, Purpose.KEY_VALUE_SCATTER),
    (Purpose.HEADS_FOR_TOKENS, Purpose.TOKENS_FOR_HEADS),
    (Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS),
)
_BACKWARD = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
