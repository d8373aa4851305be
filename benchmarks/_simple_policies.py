"""Simple policies to compare with: what a fixed rule gives, emitted and timed like our own plans.

They share our order of operators, emitter and replay, so a difference is one of choice. None is used by the
planner.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.errors import BadValue
from hyper_parallel.ir import MemoryAction, MemoryProgram, replay
from hyper_parallel.memory._emit import Emitter
from hyper_parallel.memory._memory_machine import MemoryMachine
from hyper_parallel.memory._recompute import Recomputes
from hyper_parallel.memory._select import Rank, Selector
from hyper_parallel.memory._usedef import use_definitions

_RANK: dict[str, Rank] = {
    "longest-gap": "longest_gap",
    "on-demand": "longest_gap",
    "largest-first": "largest",
}


def simple_policy(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    policy: str,
    target_bytes: int,
) -> tuple[int, float]:
    """Exact peak in bytes and simulated seconds of one policy.

    Args:
        program: Operators with their seconds.
        machine: Channels.
        order: Order of the operators.
        policy: `longest-gap` or `largest-first` (activations leave by that rule until the target is met),
            `on-demand` (longest-gap, each reload issued by the operator that needs it).
        target_bytes: Where the selection stops.

    Raises:
        BadValue: HP102 for another policy.
    """
    if policy not in _RANK:
        raise BadValue(f"no policy is called `{policy}`", allowed=list(_RANK))
    recomputes = Recomputes([list(u) for u in use_definitions(program, order).uses])
    movable = [s for s, x in enumerate(program.storages) if x.kind == "activation"]
    selector = Selector(program, machine, tuple(order), recomputes, movable)
    chosen, planned = selector.select(target_bytes, _RANK[policy])
    gaps = [g for c in chosen for g in c.gaps]
    on_demand = policy == "on-demand"  # the operator that needs a storage then fetches it itself
    emitter = Emitter(
        program, machine, order, gaps, recomputes, target_bytes, planned, on_demand=on_demand
    )
    actions: tuple[MemoryAction, ...] | None = emitter.emit()
    assert actions is not None
    judged = replay(program, tuple(emitter.copies.homes), actions)
    return judged.peak_bytes["device"], emitter.ledger.clock.now_s
