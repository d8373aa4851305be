"""HyperShard, the framework-free half: rules that map model parts to mesh axes, and the layouts they give."""

from hyper_parallel.shard._checks import check_axes, check_context, legal_tp
from hyper_parallel.shard._plan import ShardPlan, plan_layouts
from hyper_parallel.shard._rules import (
    FAMILIES,
    REFUSED,
    STYLES,
    completed_rules,
    family_rules,
    match,
    normalise_plan,
)

__all__ = [
    "FAMILIES",
    "REFUSED",
    "STYLES",
    "ShardPlan",
    "check_axes",
    "check_context",
    "completed_rules",
    "family_rules",
    "legal_tp",
    "match",
    "normalise_plan",
    "plan_layouts",
]
