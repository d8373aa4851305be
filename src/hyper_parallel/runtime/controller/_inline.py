"""Interface between roles and the engines that run their ranks, and the engine `inline`, which runs in this process."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

BIRTH: Final = 0
"""Number of the call that constructs the objects of a role; all other calls are numbered from 1."""

_LINES_OF_TRACE: Final = 12


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Class and constructor arguments of a role.

    Attributes:
        name: Name of the role in errors and in the journal.
        cls: Class of the role.
        arguments: Constructor arguments as a JSON list.
        first_device: With `processes`, index of rank 0's device; None: lowest index that other roles do not use.
    """

    name: str
    cls: type
    arguments: str
    first_device: int | None = None


class RoleRanks(Protocol):
    """Interface of the running ranks of a role. All ranks run the same call, and only one call at a time."""

    def start_call(self, number: int, method: str, arguments: str) -> None:
        """Start a call on every rank without waiting for it."""

    def answers(self) -> dict[int, dict[str, Any]]:
        """Return a dict from rank to answer (see `RoleHost.answer`), at least for answers since the last poll."""

    def lost(self) -> str | None:
        """Return a text that names an ended rank and the reason; None while all ranks are alive."""

    def silent(self, silent_s: float, unanswered: Sequence[int]) -> tuple[str, tuple[str, ...], bool]:
        """Describe the ranks `unanswered`, which have not answered for `silent_s` seconds.

        Returns:
            (line about the rank that causes the hang, lines about other ranks, whether a signal has stopped a rank).
        """

    def end(self) -> None:
        """Kill all ranks, and wait until they have ended."""


class RoleHost:
    """Runner of calls on a rank, which holds the object of the role."""

    def __init__(self, spec: RoleSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._object: Any = None

    def answer(self, number: int, method: str, arguments: str) -> str:
        """Run a call and return its answer as JSON.

        The answer is `{"value": ...}` (null except on rank 0), `{"raised": ..., "trace": ...}` after an exception, or
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
    """The single rank of a role with engine `inline`: this process, which runs calls synchronously."""

    def __init__(self, spec: RoleSpec) -> None:
        self._host = RoleHost(spec, 0)
        self._answer: dict[int, dict[str, Any]] = {}

    def start_call(self, number: int, method: str, arguments: str) -> None:
        self._answer = {0: json.loads(self._host.answer(number, method, arguments))}

    def answers(self) -> dict[int, dict[str, Any]]:
        return self._answer

    def lost(self) -> None:
        """Return None: the rank is this process."""

    def end(self) -> None:
        """Do nothing; the role's object is freed with this instance."""


class InlineEngine:
    """Engine that keeps the objects of roles in this process and runs calls synchronously."""

    most_ranks = 1

    def start(self, spec: RoleSpec, size: int) -> InlineRanks:
        return InlineRanks(spec)

    def wait(self, busy: Sequence[InlineRanks], most_s: float) -> None:
        """Return at once, because calls are synchronous."""

    def close(self) -> None:
        """Do nothing; the engine owns no resources."""
