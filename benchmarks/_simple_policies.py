"""Simple offload policies for comparison: fixed rules that select the storages to evict.

They use the planner's operator order, plan emitter and timing, so differences come from the selection alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hyper_parallel.errors import BadValue
from hyper_parallel.ir import MemoryAction, MemoryProgram, replay
from hyper_parallel.memory.candidates import OffloadCandidates
from hyper_parallel.memory.copy_issue import Gap, ReloadQueue
from hyper_parallel.memory.def_use import use_definitions
from hyper_parallel.memory.emission import Emitter
from hyper_parallel.memory.memory_machine import MemoryMachine
from hyper_parallel.memory.recompute import Recomputes

_POLICIES = ("longest-gap", "on-demand", "largest-first")


def simple_policy(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: Sequence[int],
    policy: str,
    target_bytes: int,
) -> tuple[int, float]:
    """Return the exact peak in bytes and the simulated seconds of one policy.

    Args:
        program: Operators with their seconds.
        machine: Machine with the copy channels.
        order: Order of the operators.
        policy: `longest-gap` or `largest-first`: rule by which activations are evicted until the target is met.
            `on-demand`: as longest-gap, but each operator issues the reloads that it needs.
        target_bytes: Peak at which the selection stops.

    Raises:
        BadValue: HP102 for another policy.
    """
    if policy not in _POLICIES:
        raise BadValue(f"no policy is called `{policy}`", allowed=list(_POLICIES))
    recomputes = Recomputes([list(u) for u in use_definitions(program, order).uses])
    candidates = OffloadCandidates(program, machine, tuple(order), recomputes, ())
    gaps, planned = _selected(candidates, policy == "largest-first", target_bytes)
    emitter = Emitter(candidates, gaps, target_bytes, planned)
    if policy == "on-demand":
        emitter.reloads = ReloadQueue(())  # the operator that needs a storage fetches it itself
    actions: tuple[MemoryAction, ...] | None = emitter.emit()
    assert actions is not None
    judged = replay(program, tuple(emitter.copies.homes), actions)
    return judged.peak_bytes["device"], emitter.ledger.clock.now_s


def _selected(candidates: OffloadCandidates, largest: bool, target_bytes: int) -> tuple[list[Gap], np.ndarray]:
    """Return the idle gaps in which activations are evicted, and the resulting bytes at every position.

    Gaps that cover the highest position are selected first, until no position exceeds the target.
    """
    program, machine, recomputes = candidates.program, candidates.machine, candidates.recomputes
    ends_s = np.cumsum(candidates.seconds)
    starts_s = ends_s - candidates.seconds
    profile = candidates.profile
    items: list[tuple[float, Gap, int, int]] = []  # value, and the positions at which it is gone
    for s, storage in enumerate(program.storages):
        if storage.kind != "activation" or not program.sizes[s]:
            continue
        out_s = machine.store.seconds(storage.num_bytes)
        back_s = machine.prefetch.seconds(storage.num_bytes)
        for a, b in pairwise(recomputes.uses[s]):
            low = max(int(np.searchsorted(starts_s, ends_s[a] + out_s)), a + 1)
            high = max(int(np.searchsorted(starts_s, starts_s[b] - back_s, "right")) - 1, 0)
            if low < high:
                value = float(program.sizes[s]) if largest else float(starts_s[b] - ends_s[a])
                items.append((value, Gap(s, a, b, "dram"), low, high))
    items.sort(key=lambda item: -item[0])
    chosen: list[Gap] = []
    while len(profile) and profile.max() > target_bytes:
        at = int(np.argmax(profile))
        pick = next((item for item in items if item[2] <= at < item[3]), None)
        if pick is None:
            break
        items.remove(pick)
        chosen.append(pick[1])
        profile[pick[2] : pick[3]] -= program.sizes[pick[1].storage]
    return chosen, profile
