"""HyperOffload: memory as a compiler problem over storages, exact to the byte, free of any framework.

A step is a `MemoryProgram` (ir); this room refines its order, decides per storage whether to keep, recompute, offload
or stream it, emits residency actions, simulates them, and assigns static addresses. What a front end must deliver and
how a back end runs the result is in `backends`.
"""

from hyper_parallel.offload._address import (
    assign_addresses,
    can_fit,
    find_overlap,
    wrong_address,
)
from hyper_parallel.offload._bound import least_peak_bound, least_time_bound
from hyper_parallel.offload._cache import plan_memory_cached
from hyper_parallel.offload._cut import Cut, cut_program
from hyper_parallel.offload._enough import say_enough
from hyper_parallel.offload._machine import Channel, MemoryMachine, Roofline
from hyper_parallel.offload._order import order_peak, order_seconds, refine_order
from hyper_parallel.offload._overlap import overlapped
from hyper_parallel.offload._plan import plan_memory
from hyper_parallel.offload._policies import simple_policy
from hyper_parallel.offload._profile import peak_by_kind, predicted_timeline, summarise
from hyper_parallel.offload._reload import ReloadBound, reload_bound
from hyper_parallel.offload._simulate import Clock, Copied, simulate
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
    "Copied",
    "Cut",
    "MemoryMachine",
    "ReloadBound",
    "Roofline",
    "UseDef",
    "assign_addresses",
    "can_fit",
    "cut_program",
    "dependencies",
    "find_overlap",
    "identity_actions",
    "least_peak_bound",
    "least_time_bound",
    "order_peak",
    "order_seconds",
    "overlapped",
    "peak_by_kind",
    "plan_memory",
    "plan_memory_cached",
    "predicted_timeline",
    "refine_order",
    "reload_bound",
    "say_enough",
    "simple_policy",
    "simulate",
    "summarise",
    "use_definitions",
    "working_set_bytes",
    "wrong_address",
]
