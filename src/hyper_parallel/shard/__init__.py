"""HyperShard: sharding rules, the parameter layouts derived from them, and the table of a step's collectives."""

from hyper_parallel.shard._axis_changes import completed_changes, without_axes
from hyper_parallel.shard._boundary import (
    BlockWidths,
    Boundary,
    Format,
    Projection,
    TokenCut,
    padded_sizes,
    ring_bytes,
)
from hyper_parallel.shard._derive import derived_rules
from hyper_parallel.shard._fit import module_of
from hyper_parallel.shard._plan import ShardPlan, covers, plan_layouts, replicated_matrices
from hyper_parallel.shard._rules import (
    COLUMN_STYLES,
    FAMILIES,
    PACKED,
    REFUSED,
    STYLES,
    completed_rules,
    family_rules,
    match,
    normalise_plan,
)
from hyper_parallel.shard._sizes import check_overlap, legal_tp
from hyper_parallel.shard._table import (
    block_boundaries,
    block_program,
    context_boundaries,
    embedding_boundaries,
    expert_boundaries,
    half_batch_boundaries,
    head_boundaries,
    head_norm_boundaries,
    norm_boundaries,
    packed_boundaries,
    pipeline_boundaries,
    sharing_boundaries,
)

__all__ = [
    "COLUMN_STYLES",
    "FAMILIES",
    "PACKED",
    "REFUSED",
    "STYLES",
    "BlockWidths",
    "Boundary",
    "Format",
    "Projection",
    "ShardPlan",
    "TokenCut",
    "block_boundaries",
    "block_program",
    "check_overlap",
    "completed_changes",
    "completed_rules",
    "context_boundaries",
    "covers",
    "derived_rules",
    "embedding_boundaries",
    "expert_boundaries",
    "family_rules",
    "half_batch_boundaries",
    "head_boundaries",
    "head_norm_boundaries",
    "legal_tp",
    "match",
    "module_of",
    "norm_boundaries",
    "normalise_plan",
    "packed_boundaries",
    "padded_sizes",
    "pipeline_boundaries",
    "plan_layouts",
    "replicated_matrices",
    "ring_bytes",
    "sharing_boundaries",
    "without_axes",
]
