"""The central types: pure, frozen values that every room exchanges. No framework, no I/O but a plan's own file."""

from hyper_parallel.ir.layout import Layout, MemoryKind
from hyper_parallel.ir.memory import (
    COPIES,
    MEMORY_TIERS,
    Action,
    ActionKind,
    Choice,
    Extent,
    MemoryProgram,
    MemoryTier,
    Operator,
    Phase,
    Storage,
    StorageKind,
)
from hyper_parallel.ir.memory_plan import MemoryPlan
from hyper_parallel.ir.mesh import AXES, Mesh
from hyper_parallel.ir.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    placements,
)
from hyper_parallel.ir.plan import (
    PLAN_VERSION,
    Collective,
    CostTerm,
    MemoryTerm,
    ModelRef,
    Plan,
    Rejected,
)
from hyper_parallel.ir.redistribution import CollectiveStep, redistribute
from hyper_parallel.ir.replay import Replay, replay
from hyper_parallel.ir.strategy import Rule, Strategy
from hyper_parallel.ir.timeline import Counter, Span, Timeline
from hyper_parallel.ir.workload import Workload

__all__ = [
    "AXES",
    "COPIES",
    "MEMORY_TIERS",
    "PLAN_VERSION",
    "Action",
    "ActionKind",
    "Choice",
    "Collective",
    "CollectiveStep",
    "CostTerm",
    "Counter",
    "Extent",
    "Layout",
    "MemoryKind",
    "MemoryPlan",
    "MemoryProgram",
    "MemoryTerm",
    "MemoryTier",
    "Mesh",
    "ModelRef",
    "Operator",
    "Partial",
    "Phase",
    "Placement",
    "Plan",
    "Rejected",
    "Replay",
    "Replicate",
    "Rule",
    "Shard",
    "Span",
    "Storage",
    "StorageKind",
    "Strategy",
    "StridedShard",
    "Timeline",
    "Workload",
    "placements",
    "redistribute",
    "replay",
]
