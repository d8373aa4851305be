"""The central types: pure, frozen values that every room exchanges. No framework, no I/O but a plan's own file."""

from hyper_parallel.ir.layout import Layout, MemoryKind
from hyper_parallel.ir.memory import (
    COPIES,
    MEMORY_TIERS,
    Choice,
    Extent,
    MemoryAction,
    MemoryActionKind,
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
from hyper_parallel.ir.schedule import Action, ActionKind, Schedule, grid
from hyper_parallel.ir.strategy import Rule, Strategy
from hyper_parallel.ir.taskgraph import Task, TaskGraph, peaks, simulate
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
    "MemoryAction",
    "MemoryActionKind",
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
    "Schedule",
    "Shard",
    "Span",
    "Storage",
    "StorageKind",
    "Strategy",
    "StridedShard",
    "Task",
    "TaskGraph",
    "Timeline",
    "Workload",
    "grid",
    "peaks",
    "placements",
    "redistribute",
    "replay",
    "simulate",
]
