"""HyperOffload: memory planning as a compiler problem over storages, exact to the byte, without any framework.

A step is a `MemoryProgram` (ir). The planner refines its order, decides per storage whether to keep, recompute or
offload it, emits residency actions, simulates them, and assigns static addresses. `backends` captures the program and
executes the plan.
"""

from hyper_parallel.memory._address import assign_addresses, find_overlap, wrong_address
from hyper_parallel.memory._goals import with_capacity_hint
from hyper_parallel.memory._order import order_peak, order_seconds, overlapped, refine_order
from hyper_parallel.memory.def_use import (
    UseDef,
    dependencies,
    identity_actions,
    use_definitions,
    working_set_bytes,
)
from hyper_parallel.memory.memory_machine import Channel, MemoryMachine, Roofline, with_seconds
from hyper_parallel.memory.memory_planner import (
    paused_garbage_collection,
    plan_memory,
    plan_memory_cached,
)
from hyper_parallel.memory.timeline import (
    Copied,
    ProgramClock,
    clocked,
    peak_by_kind,
    predicted_timeline,
    summarise,
)

__all__ = [
    "Channel",
    "Copied",
    "MemoryMachine",
    "ProgramClock",
    "Roofline",
    "UseDef",
    "assign_addresses",
    "clocked",
    "dependencies",
    "find_overlap",
    "identity_actions",
    "order_peak",
    "order_seconds",
    "overlapped",
    "paused_garbage_collection",
    "peak_by_kind",
    "plan_memory",
    "plan_memory_cached",
    "predicted_timeline",
    "refine_order",
    "summarise",
    "use_definitions",
    "with_capacity_hint",
    "with_seconds",
    "working_set_bytes",
    "wrong_address",
]
