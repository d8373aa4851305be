"""HyperOffload: planning of offload, recomputation and addresses for one training step, without any framework.

A step is a `MemoryProgram` (`ir`): operators over storages, which are device allocations. The planner works in passes:

    order       reorder the operators; a position is an index in this order
    rounding    solve a linear program and round it to a choice: storages to offload and to recompute
    emission    turn the choice into actions (run, copy, wait, free) with simulated times and peak bytes
    address     give every storage that is resident on the device an offset in one buffer, the arena

`backends` records the program and executes the plan.
"""

from hyper_parallel.memory._address import assign_addresses, find_overlap, wrong_address
from hyper_parallel.memory._goals import merge_errors, sufficient_device_bytes, with_capacity_hint
from hyper_parallel.memory._order import order_peak, order_seconds, overlapped, refine_order
from hyper_parallel.memory.def_use import UseDef, dependencies, identity_actions, use_definitions, working_set_bytes
from hyper_parallel.memory.memory_machine import Channel, MemoryMachine, Roofline, with_seconds
from hyper_parallel.memory.memory_planner import paused_garbage_collection, plan_memory, plan_memory_cached
from hyper_parallel.memory.timeline import Copied, ProgramClock, clocked, peak_by_kind, predicted_timeline, summarise

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
    "merge_errors",
    "order_peak",
    "order_seconds",
    "overlapped",
    "paused_garbage_collection",
    "peak_by_kind",
    "plan_memory",
    "plan_memory_cached",
    "predicted_timeline",
    "refine_order",
    "sufficient_device_bytes",
    "summarise",
    "use_definitions",
    "with_capacity_hint",
    "with_seconds",
    "working_set_bytes",
    "wrong_address",
]
