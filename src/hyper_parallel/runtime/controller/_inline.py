"""Interfaces shared by the engines of a controller, and the engine that runs every call in this process."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

BIRTH: Final = 0
"""Number of the call that constructs the object of a role; calls of the program count from 1."""

_LINES_OF_TRACE: Final = 12


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Class and constructor arguments of a role, equal on every rank.

    Attributes:
        name: Name of the role in errors and in the journal.
        cls: Class of the role.
        arguments: Constructor arguments, a JSON list.
        first_device: Local rank of rank 0 with `processes`; None: after the ranks of the other roles.
    """

    name: str
    cls: type
    arguments: str
    first_device: int | None = None


class RoleRanks(Protocol):
    """Interface of the running ranks of one role. All ranks run the same call, one call at a time."""

    def start_call(self, number: int, method: str, arguments: str) -> None:
        """Start a call on every rank without waiting for it."""

    def answers(self) -> dict[int, dict[str, Any]]:
        """Return the answers to the last call that have newly arrived, by rank, without waiting.

        An answer is the parsed JSON of `RoleHost.answer`.
        """

    def lost(self) -> str | None:
        """Return the first rank that has ended, with the reason; None when all are alive."""

    def silent(
        self, silent_s: float, unanswered: Sequence[int]
    ) -> tuple[str, tuple[str, ...], bool]:
        """Describe ranks that do not answer.

        Returns:
            A line about the rank that causes the hang, lines about the other ranks, and whether the first is frozen.
        """

    def end(self) -> None:
        """Kill all ranks and return when they have ended."""


class RoleHost:
    """Object of a role on one rank; runs method calls on it."""

    def __init__(self, spec: RoleSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._object: Any = None

    def answer(self, number: int, method: str, arguments: str) -> str:
        """Run a call and return its outcome as JSON.

        The outcome is `{"value": ...}` (null except on rank 0), `{"raised": ..., "trace": ...}` for an exception, or
        `{"no_json": ...}` for a result that is not a JSON value.
        """
        try:
            values = json.loads(arguments)
            if number == BIRTH:
                self._object, value = self._spec.cls(*values), None
            else:
                value = getattr(self._object, method)(*values)
        except Exception as error:
            lines = traceback.format_exc().splitlines()[-_LINES_OF_TRACE:]
            return json.dumps({"raised": type(error).__name__, "trace": "\n".join(lines)})
        try:
            return json.dumps({"value": value if self._rank == 0 else None})
        except (TypeError, ValueError, RecursionError) as error:
            return json.dumps({"no_json": f"{type(value).__name__}: {error}"})


class InlineRanks:
    """Only rank of an inline role: this process, which runs each call at once."""

    def __init__(self, spec: RoleSpec) -> None:
        self._host = RoleHost(spec, 0)
        self._answer: dict[int, dict[str, Any]] = {}

    def start_call(self, number: int, method: str, arguments: str) -> None:
        """Run a call and keep its answer."""
        self._answer = {0: json.loads(self._host.answer(number, method, arguments))}

    def answers(self) -> dict[int, dict[str, Any]]:
        """Return the answer of the last call."""
        return self._answer

    def lost(self) -> None:
        """Return None: the rank is this process."""

    def end(self) -> None:
        """Do nothing: the object is freed with this instance."""


class InlineEngine:
    """Engine that holds the objects of roles in this process and runs calls synchronously."""

    most_ranks = 1

    def start(self, spec: RoleSpec, size: int) -> InlineRanks:
        """Create the only rank."""
        return InlineRanks(spec)

    def wait(self, busy: Sequence[InlineRanks], most_s: float) -> None:
        """Return at once: calls are synchronous."""

    def close(self) -> None:
        """Do nothing: the engine owns no resources."""
