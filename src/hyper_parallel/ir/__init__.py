"""The central types: pure, frozen values that every room exchanges. No framework, no I/O but a plan's own file."""

from hyper_parallel.ir.layout import Layout, MemoryKind
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
from hyper_parallel.ir.schedule import Action, ActionKind, Schedule, grid
from hyper_parallel.ir.strategy import Rule, Strategy
from hyper_parallel.ir.taskgraph import Task, TaskGraph, peaks, simulate
from hyper_parallel.ir.timeline import Counter, Span, Timeline
from hyper_parallel.ir.workload import Workload

__all__ = [
    "AXES",
    "PLAN_VERSION",
    "Action",
    "ActionKind",
    "Collective",
    "CollectiveStep",
    "CostTerm",
    "Counter",
    "Layout",
    "MemoryKind",
    "MemoryTerm",
    "Mesh",
    "ModelRef",
    "Partial",
    "Placement",
    "Plan",
    "Rejected",
    "Replicate",
    "Rule",
    "Schedule",
    "Shard",
    "Span",
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
    "simulate",
]
