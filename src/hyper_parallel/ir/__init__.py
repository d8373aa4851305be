"""The central types: pure, frozen values that every room exchanges. No framework, no I/O but a plan's own file."""

from hyper_parallel.ir.host_buffers import HostBuffers, slab_bytes, slabs
from hyper_parallel.ir.layout import Layout, MemoryKind
from hyper_parallel.ir.memory import (
    COPIES,
    GRADIENT_PIECES,
    MEMORY_TIERS,
    OF_OPERATORS,
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
from hyper_parallel.ir.packed import (
    Part,
    equal_parts,
    exchanged,
    exchanged_rows,
    gate_up_parts,
    qkv_parts,
    working_rows,
)
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
from hyper_parallel.ir.purpose import Purpose
from hyper_parallel.ir.redistribution import CollectiveStep, redistribute
from hyper_parallel.ir.replay import Replay, replay
from hyper_parallel.ir.schedule import Action, ActionKind, Schedule, grid
from hyper_parallel.ir.search import Alternative, Certificate, Sensitivity
from hyper_parallel.ir.sequence import Interval, SequenceCut, sees_all, sees_some, ulysses_degree
from hyper_parallel.ir.stage import Stage, StageCost
from hyper_parallel.ir.strategy import BLOCK_SHAPES, BlockShape, Rule, Strategy
from hyper_parallel.ir.taskgraph import Cores, Task, TaskGraph, peaks, simulate
from hyper_parallel.ir.timeline import Counter, Span, Timeline
from hyper_parallel.ir.workload import Workload

__all__ = [
    "AXES",
    "BLOCK_SHAPES",
    "COPIES",
    "GRADIENT_PIECES",
    "MEMORY_TIERS",
    "OF_OPERATORS",
    "PLAN_VERSION",
    "Action",
    "ActionKind",
    "Alternative",
    "BlockShape",
    "Certificate",
    "Choice",
    "Collective",
    "CollectiveStep",
    "Cores",
    "CostTerm",
    "Counter",
    "Extent",
    "HostBuffers",
    "Interval",
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
    "Part",
    "Partial",
    "Phase",
    "Placement",
    "Plan",
    "Purpose",
    "Rejected",
    "Replay",
    "Replicate",
    "Rule",
    "Schedule",
    "Sensitivity",
    "SequenceCut",
    "Shard",
    "Span",
    "Stage",
    "StageCost",
    "Storage",
    "StorageKind",
    "Strategy",
    "StridedShard",
    "Task",
    "TaskGraph",
    "Timeline",
    "Workload",
    "equal_parts",
    "exchanged",
    "exchanged_rows",
    "gate_up_parts",
    "grid",
    "peaks",
    "placements",
    "qkv_parts",
    "redistribute",
    "replay",
    "sees_all",
    "sees_some",
    "simulate",
    "slab_bytes",
    "slabs",
    "ulysses_degree",
    "working_rows",
]
