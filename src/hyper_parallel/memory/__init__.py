"""HyperOffload: memory as a compiler problem over storages, exact to the byte, free of any framework.

A step is a `MemoryProgram` (ir); this room refines its order, decides per storage whether to keep, recompute, offload
or stream it, emits residency actions, simulates them, and assigns static addresses. What a front end must deliver and
how a back end runs the result is in `backends`.
"""

from hyper_parallel.memory._address import (
    assign_addresses,
    find_overlap,
    wrong_address,
)
from hyper_parallel.memory._capacity_hint import with_capacity_hint
from hyper_parallel.memory._clock import Copied, ProgramClock, clocked
from hyper_parallel.memory._order import order_peak, order_seconds, refine_order
from hyper_parallel.memory._overlap import overlapped
from hyper_parallel.memory._plan_tasks import plan_tasks, predicted_timeline
from hyper_parallel.memory._profile import peak_by_kind, summarise
from hyper_parallel.memory.def_use import (
    UseDef,
    dependencies,
    identity_actions,
    use_definitions,
    working_set_bytes,
)
from hyper_parallel.memory.memory_machine import (
    Channel,
    MemoryMachine,
    Roofline,
    with_seconds,
)
from hyper_parallel.memory.memory_planner import plan_memory
from hyper_parallel.memory.plan_cache import plan_memory_cached

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
    "peak_by_kind",
    "plan_memory",
    "plan_memory_cached",
    "plan_tasks",
    "predicted_timeline",
    "refine_order",
    "summarise",
    "use_definitions",
    "with_capacity_hint",
    "with_seconds",
    "working_set_bytes",
    "wrong_address",
]
