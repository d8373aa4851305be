"""Role: a queue of method calls, the ranks that run them in order, and the restart of failed ranks."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.errors import (
    BadValue,
    CallFailed,
    Contradiction,
    HyperParallelError,
    RankFailed,
    RankHung,
    RestartsUsedUp,
)
from hyper_parallel.runtime.controller._inline import BIRTH, RoleRanks, RoleSpec

if TYPE_CHECKING:
    from hyper_parallel.runtime.controller._controller import Controller
    from hyper_parallel.runtime.controller.journal import Journal

_log = logging.getLogger(__name__)
_LONGEST_POLL_S: Final = 2.0
"""At most this many seconds between two polls count towards a time limit, in case the controller itself paused."""
_GRACE_S: Final = 2.0
"""Seconds for the other ranks to answer after a rank has raised; they may wait in a collective for the rank that
raised."""


@dataclass(eq=False)
class RoleCall:
    """Method call of a role, pending or answered by all ranks.

    Attributes:
        role: Role that runs the call.
        number: Position of the call among all calls of the role, from 1.
        method: Name of the method.
        arguments: Arguments as a JSON list.
        timeout_s: Seconds within which all ranks must answer.
        answered: Position of the answer among all answers to the controller, from 1; 0 while the call is pending.
    """

    role: Role
    number: int
    method: str
    arguments: str
    timeout_s: float
    answered: int = 0
    _value: Any = field(default=None, repr=False)
    _error: HyperParallelError | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"call {self.number} of `{self.method}` of role `{self.role.name}`"

    def result(self) -> Any:
        """Wait until all ranks have run the call, and return the result of rank 0.

        Raises:
            CallFailed: HP640 when the method, or before it the constructor, has raised on any rank.
            BadValue: HP102 when the result is not a JSON value.
            RestartsUsedUp: HP621 when ranks of the role were lost or did not answer more than `max_restarts` times.
            RankFailed: HP601 when a rank was lost and `max_restarts` is 0.
            RankHung: HP620 when a rank did not answer and `max_restarts` is 0.
            OutputNotWritable: HP105 when the journal cannot be written.
            HyperParallelError: Errors of `Controller.start`, when the ranks cannot be restarted.
        """
        while not self.answered:
            self.role.controller.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, value: Any = None, error: HyperParallelError | None = None) -> None:
        """Mark the call as answered; `result` then returns `value`, or raises `error` unless it is None."""
        self._value, self._error = value, error
        self.answered = next(self.role.controller.places)


class Role:
    """Ranks that run methods of a class, the same call on all ranks at the same time; see `Controller.start`.

    Attributes:
        controller: Controller of the role.
        name: Name in errors and in the journal.
        size: Number of ranks.
        restarts: Number of restarts after the failure of a rank.
    """

    def __init__(self, controller: Controller, spec: RoleSpec, size: int) -> None:
        self.controller, self._spec, self.name, self.size = controller, spec, spec.name, size
        self.restarts = self._num_calls = 0
        self._open: deque[RoleCall] = deque()
        self._ranks: RoleRanks | None = None
        self._running: RoleCall | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._polled_at = self._silent_s = 0.0
        self._raised_s: float | None = None  # value of `_silent_s` when the first rank raised
        self._failure: HyperParallelError | None = None
        self._begin_unless_recorded(size)

    @property
    def busy(self) -> RoleRanks | None:
        """Ranks of the role while they run a call; None if no call is running."""
        return None if self._running is None else self._ranks

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> RoleCall:
        """Queue a method call for all ranks, after all earlier calls of the role, and return it.

        The call is answered at once if the journal contains its answer, if the role has failed, or with the engine
        `inline`. `RoleCall.result` raises errors of the method or of failed ranks.

        Args:
            method: Name of the method.
            arguments: JSON values; a tuple arrives as a list.
            timeout_s: Seconds after which the ranks are restarted if the call is unanswered; None or 0: value of the
                controller.

        Raises:
            BadValue: HP102 for a name that is no public method of the class, or an argument that is not a JSON value.
            JournalMismatch: HP641 when the journal records another call at this position.
            OutputNotWritable: HP105 when the journal cannot be written.
            HyperParallelError: Errors of `Controller.start`, if this call starts the ranks.
        """
        cls, controller = self._spec.cls, self.controller
        if method.startswith("_") or not callable(getattr(cls, method, None)):
            raise BadValue(
                f"`{cls.__qualname__}` has no public method of this name",
                where=f"role `{self.name}`",
                got=method,
                allowed=[n for n in dir(cls) if n[0] != "_" and callable(getattr(cls, n))],
            )
        text = as_json(arguments, f"`{self.name}.{method}`")
        self._num_calls += 1
        call = RoleCall(self, self._num_calls, method, text, timeout_s or controller.timeout_s)
        record = controller.journal.recall(self.name, call.number, method, text)
        if record is not None:
            error = CallFailed(record["error"], where=str(call)) if "error" in record else None
            call.settle(record.get("value"), error)
        elif self._failure is not None:
            call.settle(error=self._failure)
        else:
            self._open.append(call)
            self.advance()
        return call

    def resize(self, ranks: int) -> None:
        """Wait for all pending calls of the role, end its ranks, and start `ranks` new ranks.

        The new ranks construct the role's object again, so the constructor must load its state from files. If the
        journal has more answers of the role, the first call without recorded answer starts the ranks.

        Raises:
            BadValue: HP102 for fewer than one rank.
            Contradiction: HP104 for several ranks with the engine `inline`.
            HyperParallelError: Error with which the role has failed, or errors of `Controller.start`. Results of later
                calls raise errors of the constructor.
        """
        while self._open:
            self.controller.wait()
        if self._failure is not None:
            raise self._failure
        self._begin_unless_recorded(ranks)

    def advance(self) -> None:
        """Collect answers of the ranks, start queued calls, and restart failed ranks, without waiting for answers."""
        while self._open or self._running is not None:
            if self._ranks is None:
                self._begin()
            if self._running is None:
                self._run(self._open[0])
            # Called before `answers`, so the last answer of an ended rank counts.
            lost = self._ranks.lost()
            self._answers |= self._ranks.answers()
            if len(self._answers) == self.size:
                self._take(self._running)
            else:
                self._poll(self._running, lost)
                return

    def end(self) -> None:
        """Kill the ranks of the role."""
        ranks, self._ranks, self._running = self._ranks, None, None
        if ranks is not None:
            ranks.end()

    def _begin_unless_recorded(self, ranks: int) -> None:
        """Start the ranks, or let the first unrecorded call start them if the journal has answers to replay."""
        if ranks < 1:
            raise BadValue(
                "a role needs at least one rank",
                where=f"role `{self.name}`",
                got=ranks,
                hint="ranks=1",
            )
        if ranks > (self.controller.engine.most_ranks or ranks):
            raise Contradiction(
                f"role `{self.name}` requests {ranks} ranks, but the engine `inline` has one rank per role",
                got=f"ranks={ranks}",
                allowed="ranks=1",
                hint="Controller(engine='processes')",
            )
        self.end()
        self.size = ranks
        if not self.controller.journal.left(self.name):
            self._begin()

    def _begin(self) -> None:
        self._ranks = self.controller.engine.start(self._spec, self.size)
        self._run(RoleCall(self, BIRTH, "__init__", self._spec.arguments, self.controller.timeout_s))

    def _run(self, call: RoleCall) -> None:
        self._running, self._answers, self._raised_s = call, {}, None
        self._silent_s, self._polled_at = 0.0, time.monotonic()
        self._ranks.start_call(call.number, call.method, call.arguments)

    def _take(self, call: RoleCall) -> None:
        """Settle the running call, and write the journal; an error of the constructor fails the role instead."""
        self._running, error = None, self._error(call)
        if call.number == BIRTH:
            if error is not None:
                self._fail(error)
            return
        value = None if error else self._answers[0]["value"]
        answer = {"error": error.what} if error else {"value": value}
        self.controller.journal.write(self.name, call.number, call.method, call.arguments, answer)
        self._open.popleft().settle(value, error)

    def _error(self, call: RoleCall) -> HyperParallelError | None:
        for rank, answer in sorted(self._answers.items()):
            if "raised" in answer:
                description = f"`{call.method}` of role `{self.name}` has raised {answer['raised']} on rank {rank}"
                return CallFailed(f"{description}\n{answer['trace']}", where=str(call))
            if "no_json" in answer:
                return _no_json(f"the result of `{self.name}.{call.method}`", answer["no_json"])
        return None

    def _poll(self, call: RoleCall, lost: str | None) -> None:
        """Restart the ranks if one is lost or `call` exceeds its time limit; settle `call` 2 s after a rank raised."""
        now = time.monotonic()
        self._silent_s += min(now - self._polled_at, _LONGEST_POLL_S)
        self._polled_at = now
        if self._raised_s is None and self._error(call) is not None:
            self._raised_s = self._silent_s
        if lost is not None:
            self._replace(RankFailed(f"role `{self.name}`: {lost}, in {call}"))
            return
        limit_s = call.timeout_s if self._raised_s is None else self._raised_s + _GRACE_S
        if self._silent_s > limit_s:
            unanswered = [rank for rank in range(self.size) if rank not in self._answers]
            description, other_lines, frozen = self._ranks.silent(self._silent_s, unanswered)
            if self._raised_s is None or frozen:
                setting = f"timeout_s={2 * call.timeout_s:g}), if a call may take this long"
                setter = "Controller(" if call.number == BIRTH else f"call({call.method!r}, ..., "
                hint = None if frozen else setter + setting
                description = f"role `{self.name}`: {description}, in {call}"
                self._replace(RankHung(description, hint=hint, others=other_lines))
            else:  # the other ranks wait for the rank that has raised
                self.end()
                self._take(call)

    def _replace(self, error: RankFailed | RankHung) -> None:
        """Restart the ranks after `error`, and keep unanswered calls queued; if that is impossible, fail the role."""
        self.end()
        max_restarts = self.controller.max_restarts
        if self.restarts < max_restarts:
            self.restarts += 1
            _log.warning("[%s] %s; restart %d of %d", error.code, error.what, self.restarts, max_restarts)
            try:
                self._begin()
            except HyperParallelError as why:  # the restart failed as well
                self._fail(why)
        elif max_restarts == 0:
            self._fail(error)
        else:
            self._fail(
                RestartsUsedUp(
                    f"{error.what}; the ranks were started {max_restarts + 1} times",
                    allowed=f"max_restarts={max_restarts}",
                    hint=error.hint or _continuation(self.controller.journal),
                )
            )

    def _fail(self, error: HyperParallelError) -> None:
        self.end()
        self._failure = error
        while self._open:
            self._open.popleft().settle(error=error)


def _continuation(journal: Journal) -> str:
    if journal.path is not None:
        return "start the program again: it continues with the answers in its journal"
    return "Controller(journal='journal.jsonl') lets a program that is started again continue"


def as_json(values: tuple[Any, ...], label: str) -> str:
    """Return `values` as a JSON list; `label` names their owner in the error.

    Raises:
        BadValue: HP102 when any of the values is not a JSON value.
    """
    try:
        return json.dumps(json.loads(json.dumps(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise _no_json(f"an argument of {label}", str(error)) from error


def _no_json(label: str, got: str) -> BadValue:
    return BadValue(
        f"{label} is not a JSON value: only metadata passes between roles",
        got=got,
        allowed="numbers, strings, True, False, None, and lists and dicts of them",
        hint="write tensors to files, hp.save(model, optimizer, folder, step=version), and pass the version",
    )
