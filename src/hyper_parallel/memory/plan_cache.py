"""Plan cache in files: one step on one machine with one goal is planned once.

A file is named after the fingerprint of all inputs of a plan (program, machine, goal, planner). It holds the decisions,
in columns of numbers, without the program, which the caller has. No content is trusted: the actions are replayed on the
caller's program and timed on its machine, and the addresses are checked for overlap. A file that fails is reported, and
the step is planned again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, cast, get_args

from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.ir import (
    MEMORY_TIERS,
    OF_OPERATORS,
    Choice,
    Extent,
    MemoryAction,
    MemoryActionKind,
    MemoryPlan,
    MemoryProgram,
    Operator,
    Storage,
)
from hyper_parallel.memory._address import wrong_address
from hyper_parallel.memory.memory_machine import MemoryMachine, with_seconds
from hyper_parallel.memory.memory_planner import baseline_seconds, plan_memory
from hyper_parallel.memory.timeline import clocked
from hyper_parallel.received import Limits, read_json
from hyper_parallel.serde import write_text
from hyper_parallel.topology import cache_dir
from hyper_parallel.units import MiB

PLANNER = 15
"""Version of the planner's passes and of the file format; raised with every change, so old files are never matched."""

_KINDS: tuple[MemoryActionKind, ...] = get_args(MemoryActionKind)
_CHOICE_KINDS = ("offload", "recompute", "stream", "update")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CachedGoal:
    """Goal arguments of the planner; part of the fingerprint."""

    budget_bytes: int | None
    max_slowdown: float | None
    recompute: bool
    reorder: bool


_LIMITS: Final = Limits(256 * MiB, num_elements=20_000_000)
"""Limits for plans of about a million actions."""


class _UnusableFile(ValueError):
    """Reason why a cache file must not be used."""


def plan_memory_cached(
    program: MemoryProgram,
    machine: MemoryMachine,
    *,
    cache: Path | None = None,
    measured: Sequence[float] | None = None,
    budget_bytes: int | None = None,
    max_slowdown: float | None = None,
    recompute: bool = True,
    reorder: bool = True,
) -> MemoryPlan:
    """Return the plan of `plan_memory`, or its result from an earlier call with equal arguments.

    Args:
        program: See `plan_memory`.
        machine: See `plan_memory`.
        cache: Directory of the plans; None: `plans` in the user's cache directory.
        measured: Measured seconds of the operators. They differ from run to run and are not part of the fingerprint: a
            cached plan keeps the seconds that it was made with.
        budget_bytes: See `plan_memory`.
        max_slowdown: See `plan_memory`.
        recompute: See `plan_memory`.
        reorder: See `plan_memory`.

    Raises:
        HyperParallelError: See `plan_memory`. A cache that cannot be read or written is logged and costs only time.
    """
    goal = _CachedGoal(budget_bytes, max_slowdown, recompute, reorder)
    key = fingerprint(program, machine, (goal, measured is not None))
    path = (cache or cache_dir() / "plans") / f"{key[:32]}.json"
    if path.exists():
        try:
            return _read(path, key, program, machine, goal)
        except (_UnusableFile, MemoryPlanInvalid, OSError) as error:
            _log.warning("the cached memory plan %s is ignored: %s", path, error)
    plan = plan_memory(
        with_seconds(program, measured),
        machine,
        budget_bytes=budget_bytes,
        max_slowdown=max_slowdown,
        recompute=recompute,
        reorder=reorder,
    )
    try:
        _write(path, key, plan, timed=measured is not None)
    except OSError as error:
        _log.warning("the memory plan could not be cached in %s: %s", path, error)
    return plan


def fingerprint(program: MemoryProgram, machine: MemoryMachine, goal: object) -> str:
    """Return the hash of all inputs of a plan; equal arguments give equal text in every process."""
    # `repr` of a frozen dataclass of numbers is exact, but slow for thousands of operators; columns are not.
    units = program.alignment_bytes, program.address_bytes
    digest = hashlib.sha256(repr((PLANNER, machine, goal, units)).encode())
    columns: list[tuple[type, Sequence[Any]]] = [
        (Storage, program.storages),
        (Operator, program.operators),
    ]
    for cls, rows in columns:
        for field in fields(cls):
            column = [getattr(row, field.name) for row in rows]
            digest.update(json.dumps([field.name, column]).encode())
    return digest.hexdigest()


def _write(path: Path, key: str, plan: MemoryPlan, timed: bool) -> None:
    """Write the decisions of a plan."""
    actions, choices, ranges = plan.actions, plan.choices, plan.addresses
    document = {
        "fingerprint": key,
        "homes": [MEMORY_TIERS.index(home) for home in plan.homes],
        "actions": [
            [_KINDS.index(a.kind) for a in actions],
            [a.target for a in actions],
            [MEMORY_TIERS.index(a.tier) for a in actions],
        ],
        "choices": [
            [c.storage for c in choices],
            [_CHOICE_KINDS.index(c.what) for c in choices],
            [c.first for c in choices],
            [c.last for c in choices],
            [MEMORY_TIERS.index(c.tier) for c in choices],
            [c.reason for c in choices],
        ],
        "statement": list(plan.statement),
        "offsets": [e.offset_bytes for e in ranges],
        "arena_bytes": plan.arena_bytes,
        "seconds": [op.seconds for op in plan.program.operators] if timed else None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(document, separators=(",", ":")))


def _read(
    path: Path, key: str, program: MemoryProgram, machine: MemoryMachine, goal: _CachedGoal
) -> MemoryPlan:
    """Return the plan of a file, checked against the goal and the machine."""
    try:
        document = read_json(path, _LIMITS)
        if (seconds := document["seconds"]) is not None:
            program = with_seconds(program, [float(s) for s in seconds])
        plan = _decode(document, key, program, machine)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _UnusableFile(f"{type(error).__name__}: {error}") from error
    _check(plan, machine, goal)
    return plan


def _decode(document: Any, key: str, program: MemoryProgram, machine: MemoryMachine) -> MemoryPlan:
    """Decode columns into a plan that was replayed and timed; every index is checked by use or by range."""
    if document["fingerprint"] != key:
        raise _UnusableFile("it belongs to another program, machine, goal or planner")
    homes = tuple(MEMORY_TIERS[_natural(i)] for i in document["homes"])
    if len(homes) != len(program.storages):
        raise _UnusableFile("it has another number of storages")
    operators, storages = len(program.operators), len(program.storages)
    actions = []
    for kind_index, target, tier_index in zip(*document["actions"], strict=True):
        kind = _KINDS[_natural(kind_index)]
        if _natural(target) >= (operators if kind in OF_OPERATORS else storages):
            raise _UnusableFile(f"an action refers to {target}, which does not exist")
        actions.append(MemoryAction(kind, target, MEMORY_TIERS[_natural(tier_index)]))
    choices = tuple(
        Choice(
            s, cast(Any, _CHOICE_KINDS[_natural(w)]), a, b, MEMORY_TIERS[_natural(t)], str(reason)
        )
        for s, w, a, b, t, reason in zip(*document["choices"], strict=True)
    )
    plan = MemoryPlan(program, homes, tuple(actions), 0.0)
    ranges = plan.replayed.residency  # raises HP404 when an action is illegal
    seconds = clocked(program, machine, plan.actions).now_s
    addresses = tuple(
        Extent(e.storage, e.start, e.stop, _natural(offset))
        for e, offset in zip(ranges, document["offsets"], strict=True)
    )
    statement = tuple(str(line) for line in document["statement"])
    arena = _natural(document["arena_bytes"])
    return MemoryPlan(program, homes, plan.actions, seconds, choices, statement, addresses, arena)


def _natural(value: Any) -> int:
    """Return a value that must be a natural number."""
    if type(value) is not int or value < 0:
        raise _UnusableFile(f"{value!r} is not a natural number")
    return value


def _check(plan: MemoryPlan, machine: MemoryMachine, goal: _CachedGoal) -> None:
    """Check that the plan keeps its goal and the capacities, and that its addresses are right."""
    if goal.budget_bytes is not None and plan.device_bytes > goal.budget_bytes:
        raise _UnusableFile(f"it takes {plan.device_bytes} bytes of the device, above the budget")
    if goal.max_slowdown is not None:
        unmoved_s = baseline_seconds(plan.program, reorder=goal.reorder)
        limit_s = unmoved_s * (1 + goal.max_slowdown) * (1 + 1e-9)
        if plan.seconds > limit_s:
            raise _UnusableFile(f"it takes {plan.seconds} s where {limit_s} s are allowed")
    for tier, size, cap in (
        ("dram", plan.dram_bytes, machine.dram_bytes),
        ("flash", plan.peak_bytes["flash"], machine.flash_bytes),
    ):
        if cap is not None and size > cap:
            raise _UnusableFile(f"it takes {size} bytes of {tier}, the machine has {cap}")
    if wrong := wrong_address(plan):
        raise _UnusableFile(wrong)
