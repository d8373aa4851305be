"""HyperOffload: memory as a compiler problem over storages, exact to the byte, free of any framework.

A step is a `MemoryProgram` (ir); this room refines its order, decides per storage whether to keep, recompute, offload
or stream it, emits residency actions, simulates them, and assigns static addresses. What a front end must deliver and
how a back end runs the result is in `backends`.
"""

from hyper_parallel.offload._address import assign_addresses
from hyper_parallel.offload._machine import Channel, MemoryMachine, Roofline
from hyper_parallel.offload._order import order_peak, refine_order
from hyper_parallel.offload._plan import plan_memory
from hyper_parallel.offload._simulate import Clock, simulate
from hyper_parallel.offload._usedef import (
    UseDef,
    dependencies,
    identity_actions,
    use_definitions,
    working_set_bytes,
)

__all__ = [
    "Channel",
    "Clock",
    "MemoryMachine",
    "Roofline",
    "UseDef",
    "assign_addresses",
    "dependencies",
    "identity_actions",
    "order_peak",
    "plan_memory",
    "refine_order",
    "simulate",
    "use_definitions",
    "working_set_bytes",
]
