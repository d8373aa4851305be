"""Which rules are tried: what is computed again, and how far copies are counted on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache

from hyper_parallel.ir import MemoryProgram, StorageKind
from hyper_parallel.offload._host import HostUpdates
from hyper_parallel.offload._machine import MemoryMachine
from hyper_parallel.offload._portfolio import Emitted, Search
from hyper_parallel.offload._recompute import (
    Chains,
    cheapest_at_peak,
    choose_recomputes,
    recompute_density,
)
from hyper_parallel.offload._select import Selector
from hyper_parallel.offload._usedef import UseDef, use_definitions

_LARGE = 1500  # operators; below, trying everything takes a few seconds
_SHARES = (0.25, 0.6, 0.95)  # of the allowed time, spent on recomputation


def rules(
    program: MemoryProgram,
    machine: MemoryMachine,
    order: tuple[int, ...],
    identity: Emitted,
    slack_s: float | None,
    where: tuple[str, frozenset[int]],
    *,
    move: Collection[StorageKind] | None,
    recompute: bool,
) -> Search:
    """All rules for one set of updates in host memory.

    Args:
        program: Operators with their seconds.
        machine: Channels and capacities.
        order: Order of the operators.
        identity: The program in which nothing moves.
        slack_s: Seconds by which the step may become longer; None: the least time under a budget is wanted.
        where: Updates in host memory, and what they are called.
        move: Kinds of storages that may leave the device; None: all but inputs and outputs.
        recompute: Results may be computed again.
    """
    on_host, hosted = where
    chains = use_definitions(program, order, hosted)
    finder = Chains(program, chains)
    density = recompute_density(finder) if recompute else {}
    movable = [
        s
        for s, storage in enumerate(program.storages)
        if (storage.kind in move if move is not None else storage.kind not in ("input", "output"))
        and (storage.persistent or not storage.at_start)
    ]

    def selectors(
        chosen: Sequence[int], ways: Sequence[tuple[str, bool, float | None]]
    ) -> Iterator[tuple[str, Selector]]:
        again = choose_recomputes(finder, chosen)
        again.host = HostUpdates.of(program, order, hosted, again.uses)
        for label, stall, stretch in ways:
            yield (
                label,
                Selector(program, machine, order, again, movable, stall=stall, stretch=stretch),
            )

    @cache
    def longer(share: float) -> tuple[str, Selector]:
        """For a step that is longer by a share, all of it for recomputation; copies have that time as well."""
        chosen = cheapest_at_peak(program, chains, density, share * identity.seconds)
        name = f"recompute for {share:.1%} more time{on_host}"
        return next(selectors(chosen, [(name, False, 1 + share)]))

    # Gaps shorter than their copies cost waits: for a budget they may be needed, for a time limit they rarely pay.
    anyway: list[tuple[str, bool, float | None]] = [
        (", copies as if alone", False, None),
        (", waits allowed", True, None),
    ]
    found = []
    for name, chosen in _recompute_sets(program, machine, chains, density, slack_s):
        ways = anyway
        if slack_s is not None:
            ways = [("", False, 1 + slack_s / max(identity.seconds, 1e-30))]
            if len(program.operators) <= _LARGE:
                ways += anyway
        found += [(name + label + on_host, s) for label, s in selectors(chosen, ways)]
    return Search(program, machine, order, found, identity, longer if slack_s is None else None)


def _recompute_sets(
    program: MemoryProgram,
    machine: MemoryMachine,
    chains: UseDef,
    density: dict[int, float],
    slack_s: float | None,
) -> list[tuple[str, list[int]]]:
    """Sets of storages to recompute that are worth trying.

    Under a time limit recomputation may spend a part of the slack only: every second of it is exposed, and what is left
    must absorb the copies. Under a budget there are limits to the seconds per byte: far below a copy's, a copy's, none.
    """
    sets: list[tuple[str, list[int]]] = [("copies only", [])]
    if slack_s is not None:
        for share in _SHARES:
            chosen = cheapest_at_peak(program, chains, density, share * slack_s)
            sets.append((f"recompute for {share:.0%} of the allowed time", chosen))
    else:
        ranked = sorted(density, key=lambda s: (density[s], -program.sizes[s], s))
        transfer = 1 / machine.prefetch.bytes_s
        for name, limit in (
            ("recompute far cheaper than a copy", transfer / 8),
            ("recompute cheaper than a copy", transfer),
            ("recompute everything repeatable", float("inf")),
        ):
            sets.append((name, [s for s in ranked if density[s] <= limit]))
    distinct = {tuple(chosen): (name, chosen) for name, chosen in reversed(sets)}
    return list(reversed(distinct.values()))
