"""MemoryPlan: a program in its chosen order, with residency actions and static addresses; a JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from hyper_parallel.errors import MemoryPlanInvalid
from hyper_parallel.ir.host_buffers import slab_bytes
from hyper_parallel.ir.memory import Choice, Extent, MemoryAction, MemoryProgram, MemoryTier
from hyper_parallel.ir.replay import Replay, replay
from hyper_parallel.received import Limits, parse_json
from hyper_parallel.serde import decode, encode, write_text
from hyper_parallel.units import MiB

_LIMITS: Final = Limits(256 * MiB, num_elements=20_000_000)
"""Of plans of about a million actions."""


@dataclass(frozen=True)
class MemoryPlan:
    """Program in a chosen order, with residency actions and static device addresses.

    Attributes:
        program: The operators.
        homes: Tier of every persistent storage between steps; `device` for all others.
        actions: The emitted program.
        seconds: Simulated seconds of the step, copies included.
        choices: Decisions, one entry per offloaded or recomputed gap.
        statement: Explanation by the planner: beneficial, useless and illegal decisions, with reasons.
        addresses: Every live range on the device with its offset in the arena.
        arena_bytes: Size of the arena.
    """

    program: MemoryProgram
    homes: tuple[MemoryTier, ...]
    actions: tuple[MemoryAction, ...]
    seconds: float
    choices: tuple[Choice, ...] = ()
    statement: tuple[str, ...] = ()
    addresses: tuple[Extent, ...] = ()
    arena_bytes: int = 0

    @cached_property
    def replayed(self) -> Replay:
        """The plan walked once; raises HP404 when an action is illegal."""
        return replay(self.program, self.homes, self.actions)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes per tier, by replay; on the device those of the storages that live at the same time."""
        return self.replayed.peak_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes of the plan: the arena and the staging buffers of results."""
        return self.arena_bytes + self.program.staging_bytes

    @cached_property
    def dram_bytes(self) -> int:
        """Host bytes of the plan: slabs for the maximum of concurrent buffers of every size."""
        return slab_bytes(self.replayed.host_buffers)

    def to_json(self) -> str:
        """Return the plan as one JSON document; equal plans give equal text."""
        return json.dumps(encode(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> MemoryPlan:
        """Read a plan back and replay it, so a damaged one is refused.

        Raises:
            MemoryPlanInvalid: HP404 when the text is not a plan or its actions are illegal.
        """
        try:
            plan = decode(MemoryPlan, parse_json(text, _LIMITS))
        except ValueError as error:
            raise MemoryPlanInvalid("the memory plan cannot be read", got=str(error)) from error
        _ = plan.replayed
        return plan

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        write_text(path, self.to_json() + "\n")
