"""What the engines of a controller have in common, and the one that runs every call in this process."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

BIRTH: Final = 0
"""Number of the call that makes the object of a role; the calls of the program count from 1."""

_LINES_OF_TRACE: Final = 12


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What every rank of a role makes its object from.

    Attributes:
        name: The role, in errors and in the journal.
        cls: Its class.
        arguments: Of the constructor, a JSON list.
        first_device: Local number of its rank 0 with `processes`; None: after the ranks of the other roles.
    """

    name: str
    cls: type
    arguments: str
    first_device: int | None = None


class RoleRanks(Protocol):
    """The ranks of one role, from their start to their end. They run one call at a time, all the same."""

    def give(self, number: int, method: str, arguments: str) -> None:
        """Have every rank run a call; it returns at once."""

    def answers(self) -> dict[int, dict[str, Any]]:
        """New answers to the last call by rank, as `RoleHost` gives them; it does not wait."""

    def lost(self) -> str | None:
        """Which rank has ended, and how."""

    def silent(
        self, silent_s: float, unanswered: Sequence[int]
    ) -> tuple[str, tuple[str, ...], bool]:
        """Which of these ranks holds the call up, what the others do, and whether it is frozen."""

    def end(self) -> None:
        """End all ranks, whatever they do, and return when they have ended."""


class RoleHost:
    """The object of a role on one rank."""

    def __init__(self, spec: RoleSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._object: Any = None

    def answer(self, number: int, method: str, arguments: str) -> str:
        """Run a call. JSON: `{"value": ...}` (of rank 0), `{"raised": ..., "trace": ...}` or `{"no_json": ...}`."""
        try:
            given = json.loads(arguments)
            if number == BIRTH:
                self._object, value = self._spec.cls(*given), None
            else:
                value = getattr(self._object, method)(*given)
        except Exception as error:
            lines = traceback.format_exc().splitlines()[-_LINES_OF_TRACE:]
            return json.dumps({"raised": type(error).__name__, "trace": "\n".join(lines)})
        try:
            return json.dumps({"value": value if self._rank == 0 else None})
        except (TypeError, ValueError, RecursionError) as error:
            return json.dumps({"no_json": f"{type(value).__name__}: {error}"})


class InlineRanks:
    """The one rank of a role in this process: it is never lost or waited for."""

    def __init__(self, spec: RoleSpec) -> None:
        self._host = RoleHost(spec, 0)
        self._answer: dict[int, dict[str, Any]] = {}

    def give(self, number: int, method: str, arguments: str) -> None:
        """Run a call."""
        self._answer = {0: json.loads(self._host.answer(number, method, arguments))}

    def answers(self) -> dict[int, dict[str, Any]]:
        """The answer, which is there."""
        return self._answer

    def lost(self) -> None:
        """This process is here."""

    def end(self) -> None:
        """The object goes with this one."""


class InlineEngine:
    """Objects of this process; a call runs when it is made."""

    most_ranks = 1

    def start(self, spec: RoleSpec, size: int) -> InlineRanks:
        """One object."""
        return InlineRanks(spec)

    def wait(self, busy: Sequence[InlineRanks], most_s: float) -> None:
        """Nothing is ever waited for."""

    def close(self) -> None:
        """Nothing is held."""
