"""A role: its calls in order, its ranks, and what follows when they are lost."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from hyper_parallel.errors import (
    BadValue,
    CallFailed,
    HyperParallelError,
    RankFailed,
    RankHung,
    RestartsUsedUp,
)
from hyper_parallel.runtime.controller._engine import BIRTH, RoleEngine, RoleRanks, RoleSpec
from hyper_parallel.runtime.controller._journal import Journal

_log = logging.getLogger(__name__)
_LONGEST_LOOK_S: Final = 2.0
"""Of the time in which the controller does not look, or the machine sleeps, so much counts as silence of a rank."""
_GRACE_S: Final = 2.0
"""Seconds in which the other ranks may answer after one has raised: they may wait for it in a collective, for ever."""


class RoleCall:
    """A call of a role that was made, and answered or not.

    Attributes:
        role: Name of the role.
        number: Of the call in its role, from 1.
        method: What was called.
        arguments: With what, as JSON.
        timeout_s: How long its ranks may take.
        answered: Place of its answer among all answers of the controller, from 1; 0: not yet.
    """

    def __init__(
        self,
        role: str,
        number: int,
        method: str,
        arguments: str,
        timeout_s: float,
        wait: Callable[[], None],
    ) -> None:
        self.role, self.number, self.method, self.arguments = role, number, method, arguments
        self.timeout_s, self.answered = timeout_s, 0
        self._wait = wait
        self._value: Any = None
        self._error: HyperParallelError | None = None

    def __repr__(self) -> str:
        return f"call {self.number} of `{self.method}` of role `{self.role}`"

    def result(self) -> Any:
        """The value that rank 0 has returned; waits for it.

        Raises:
            CallFailed: HP640 when the method has raised, on any rank; with the last lines of the traceback.
            BadValue: HP102 when the value is none of JSON.
            RestartsUsedUp: HP621 when the ranks were lost more often than they may be started again; where they may
                not, RankFailed: HP601 or RankHung: HP620.
        """
        while not self.answered:
            self._wait()
        if self._error is not None:
            raise self._error
        return self._value

    def settle(
        self, place: int, value: Any = None, error: HyperParallelError | None = None
    ) -> None:
        """Have an answer."""
        self.answered, self._value, self._error = place, value, error


class Role:
    """The ranks that run one class. Calls are run one after another, by all ranks.

    Made by `Controller.start`.

    Attributes:
        name: In errors and in the journal.
        size: Number of ranks.
        restarts: How often the ranks were lost and started again.
    """

    def __init__(
        self,
        spec: RoleSpec,
        size: int,
        *,
        engine: RoleEngine,
        journal: Journal,
        max_restarts: int,
        timeout_s: float,
        place: Callable[[], int],
        wait: Callable[[], None],
    ) -> None:
        self.name, self.size, self.restarts = spec.name, size, 0
        self._spec, self._engine, self._journal = spec, engine, journal
        self._max_restarts, self._timeout_s = max_restarts, timeout_s
        self._place, self._wait = place, wait
        self._made = 0
        self._open: deque[RoleCall] = deque()
        self._ranks: RoleRanks | None = None
        self._running: RoleCall | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._silent_s = self._looked = 0.0
        self._raised_s: float | None = None
        self._failure: HyperParallelError | None = None
        self._check(size)
        self._begin_unless_recorded()

    @property
    def busy(self) -> RoleRanks | None:
        """The ranks, while they run something."""
        return self._ranks if self._running is not None else None

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> RoleCall:
        """Have every rank call a method of its object, once the calls before are answered; returns at once.

        Args:
            method: Its name.
            arguments: JSON values; what arrives is what JSON makes of them: a tuple is a list.
            timeout_s: How long the ranks may take before they are lost; None: as the controller says.

        Raises:
            BadValue: HP102 for a method that the class does not have, or an argument that is none of JSON.
            JournalMismatch: HP641 when the journal has another call in this place.
        """
        cls = self._spec.cls
        if method.startswith("_") or not callable(getattr(cls, method, None)):
            raise BadValue(
                f"`{cls.__qualname__}` has no method of this name to call",
                where=f"role `{self.name}`",
                got=method,
                allowed=[n for n in dir(cls) if n[0] != "_" and callable(getattr(cls, n))],
            )
        text = as_json(arguments, f"`{self.name}.{method}`")
        self._made += 1
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        call = RoleCall(self.name, self._made, method, text, wait_s, self._wait)
        if (record := self._journal.recall(self.name, self._made, method, text)) is not None:
            error = CallFailed(record["error"], where=repr(call)) if "error" in record else None
            call.settle(self._place(), record.get("value"), error)
        elif self._failure is not None:
            call.settle(self._place(), error=self._failure)
        else:
            self._open.append(call)
            self.advance()
        return call

    def resize(self, ranks: int) -> None:
        """Have another number of ranks: calls that were made are answered first, then all ranks are started anew.

        Their objects are made again, and find what they need in files.

        Raises:
            BadValue: HP102 for no ranks, Contradiction: HP104 for several with `inline`.
        """
        self._check(ranks)
        while self._open:
            self._wait()
        if self._failure is not None:
            raise self._failure
        self.end()
        self.size = ranks
        self._begin_unless_recorded()

    def advance(self) -> None:
        """Look at the ranks once: take answers, give the next calls, and replace ranks that are lost."""
        while self._open or self._running is not None:
            if self._ranks is None:
                self._begin()
            if self._running is None:
                self._run(self._open[0])
            lost = self._ranks.lost()  # first, so that what such a rank has still answered counts
            self._answers |= self._ranks.answers()
            if len(self._answers) == self.size:
                self._take()
            else:
                self._look(lost)
                return

    def end(self) -> None:
        """End the ranks, whatever they do."""
        ranks, self._ranks, self._running = self._ranks, None, None
        if ranks is not None:
            ranks.end()

    def _check(self, ranks: int) -> None:
        if ranks < 1:
            raise BadValue("a role has one rank or more", where=f"role `{self.name}`", got=ranks)
        self._engine.check(self._spec, ranks)

    def _begin_unless_recorded(self) -> None:
        """Start the ranks now, unless the journal has answers for calls that are still to come."""
        if not self._journal.left(self.name):
            self._begin()

    def _begin(self) -> None:
        self._ranks = self._engine.start(self._spec, self.size)
        self._run(
            RoleCall(
                self.name, BIRTH, "__init__", self._spec.arguments, self._timeout_s, self._wait
            )
        )

    def _run(self, call: RoleCall) -> None:
        assert self._ranks is not None
        self._running, self._answers, self._raised_s = call, {}, None
        self._silent_s, self._looked = 0.0, time.monotonic()
        self._ranks.give(call.number, call.method, call.arguments)

    def _take(self) -> None:
        """The running call is answered."""
        call = self._running
        assert call is not None
        self._running = None
        error = self._error(call)
        if call.number == BIRTH:
            if error is not None:
                self._fail(error)
                return
        else:
            self._open.popleft()
            key = (call.role, call.number, call.method, call.arguments)
            if error is None:
                value = self._answers[0]["value"]
                self._journal.write(*key, value=value)
                call.settle(self._place(), value)
            else:
                self._journal.write(*key, error=error.what)
                call.settle(self._place(), error=error)

    def _error(self, call: RoleCall) -> HyperParallelError | None:
        """What the first rank that has no value says."""
        for rank, answer in sorted(self._answers.items()):
            if "raised" in answer:
                what = f"`{call.method}` of role `{self.name}` has raised {answer['raised']} on rank {rank}"
                return CallFailed(f"{what}\n{answer['trace']}", where=repr(call))
            if "no_json" in answer:
                return _no_json(f"what `{self.name}.{call.method}` returns", answer["no_json"])
        return None

    def _look(self, lost: str | None) -> None:
        """At ranks that have not all answered."""
        call, ranks = self._running, self._ranks
        assert call is not None
        assert ranks is not None
        now = time.monotonic()
        self._silent_s += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        if self._raised_s is None and self._error(call) is not None:
            self._raised_s = self._silent_s
        if lost is not None:
            self._replace(RankFailed(f"role `{self.name}`: {lost}, in {call!r}"))
        elif self._silent_s > call.timeout_s or (
            self._raised_s is not None and self._silent_s > self._raised_s + _GRACE_S
        ):
            left = [rank for rank in range(self.size) if rank not in self._answers]
            what, others, frozen = ranks.silent(self._silent_s, left)
            if self._raised_s is None or frozen:
                hint = (
                    f"Controller(timeout_s={2 * call.timeout_s:g}), where a call may take so long"
                )
                what = f"role `{self.name}`: {what}, in {call!r}"
                self._replace(RankHung(what, hint=hint, others=others))
            else:  # the others wait for the rank that has raised
                self.end()
                self._running = call
                self._take()

    def _replace(self, error: RankFailed | RankHung) -> None:
        """Start the ranks again; the running call and those after it are still open."""
        self.end()
        if self.restarts < self._max_restarts:
            self.restarts += 1
            _log.warning(
                "[%s] %s; restart %d of %d",
                error.code,
                error.what,
                self.restarts,
                self._max_restarts,
            )
            try:
                self._begin()
            except HyperParallelError as why:  # nor can they be started
                self._fail(why)
            return
        if self._max_restarts:
            used_up = RestartsUsedUp(
                f"{error.what}; the ranks were started {self.restarts + 1} times",
                allowed=f"max_restarts={self._max_restarts}",
                hint=error.hint
                or "Controller(journal=...) goes on from the calls that are answered",
                others=error.others,
            )
            used_up.__cause__ = error
            self._fail(used_up)
        else:
            self._fail(error)

    def _fail(self, error: HyperParallelError) -> None:
        """The role has come to its end: every call that is open, or will be made, raises this."""
        self.end()
        self._failure = error
        while self._open:
            self._open.popleft().settle(self._place(), error=error)


def as_json(values: tuple[Any, ...], what: str) -> str:
    """Arguments as a JSON list.

    Raises:
        BadValue: HP102 when one is no JSON value.
    """
    try:
        return json.dumps(json.loads(json.dumps(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise _no_json(f"an argument of {what}", str(error)) from error


def _no_json(what: str, got: str) -> BadValue:
    return BadValue(
        f"{what} is no JSON value: only metadata passes between roles",
        got=got,
        allowed="numbers, texts, true, false, None, and lists and dicts of them",
        hint="write tensors to files, hp.save(model, optimizer, folder, step=version), and pass the version",
    )
