"""Controller: starts roles, waits for the answers to their calls, and records the answers in a journal.

`ahead` yields the calls of a training loop in which sampling runs a bounded number of steps ahead of learning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Self

from hyper_parallel.errors import BadValue, HyperParallelError
from hyper_parallel.runtime.controller._inline import RoleSpec
from hyper_parallel.runtime.controller._role import Role, RoleCall, as_json
from hyper_parallel.runtime.controller.journal import Journal

_ENGINES: Final = {
    "inline": ("_inline", "InlineEngine"),
    "processes": ("_processes", "ProcessEngine"),
    "ray": ("_actors", "RayEngine"),
}
_POLL_S: Final = 0.25  # detects a frozen rank well within a second after its deadline


class Controller:
    """Controller of several roles; a role is a class with an object on each of its ranks.

    Arguments and results of calls are JSON values. Roles exchange weights through checkpoint folders (`hp.save`,
    `hp.load`), which any layout can write and read. The objects of a role are constructed again after the failure of a
    rank, a resize or a restart of the program. Constructors must therefore load their state from files.

    Args:
        engine: `inline`: roles are objects in this process, and calls are synchronous. `processes`: ranks are processes
            on this machine, which end when this process ends. `ray`: ranks are Ray actors in the cluster to which this
            process is connected, else in the cluster of RAY_ADDRESS, else in a new local cluster.
        journal: File that records answered calls. A restarted program reads these answers from the file, and runs only
            the remaining calls. None: no journal.
        max_restarts: Maximum number of restarts of each role.
        timeout_s: Seconds after which the ranks of an unanswered call are restarted; `Role.call` can override this
            value.

    Attributes:
        roles: Started roles by name.

    Raises:
        BadValue: HP102 for an unknown engine.
        MissingDependency: HP501 for `ray` when the package is not installed.
        DeviceUnavailable: HP502 for `ray` when the cluster of RAY_ADDRESS cannot be reached.
        JournalMismatch: HP641 for a file that is not a journal.
        RunInUse: HP720 when another controller or one of its ranks uses the journal.
        OutputNotWritable: HP105 when the journal or, for `processes`, a temporary folder cannot be written.
    """

    def __init__(
        self,
        engine: Literal["inline", "processes", "ray"] = "processes",
        journal: str | Path | None = None,
        max_restarts: int = 3,
        timeout_s: float = 600.0,
    ) -> None:
        if engine not in _ENGINES:
            raise BadValue(
                f"unknown engine `{engine}`",
                got=engine,
                allowed=list(_ENGINES),
                hint='Controller(engine="processes")',
            )
        module, cls = _ENGINES[engine]
        self.engine = getattr(import_module(f"{__package__}.{module}"), cls)()
        try:
            self.journal = Journal(journal)
        except HyperParallelError:
            self.engine.close()
            raise
        self.max_restarts, self.timeout_s = max_restarts, timeout_s
        self.roles: dict[str, Role] = {}
        self.places, self._choices = itertools.count(1), itertools.count(1)

    def start(
        self,
        cls: type,
        *arguments: Any,
        ranks: int = 1,
        name: str | None = None,
        first_device: int | None = None,
    ) -> Role:
        """Start the ranks of a role, which construct `cls(*arguments)`.

        Only the engine `inline` waits for the constructor. Results of calls raise its errors. If the journal has
        answers of the role, the ranks start at the first call without recorded answer. On the ranks, `hp.World.join()`
        joins a world of all ranks of the role, which is also the default world of `hp.parallelize`.

        Args:
            cls: Any class. With `ray`, workers must be able to import the class, unless the main file defines it.
            arguments: Arguments of the constructor, as JSON values.
            ranks: Number of ranks.
            name: Name of the role in errors and in the journal; None: name of the class.
            first_device: With `processes`, index of rank 0's accelerator; other ranks use the following indices. None:
                the lowest indices that other roles do not use. Roles may share devices.

        Raises:
            BadValue: HP102 for a used name, fewer than one rank, or an argument that is not a JSON value.
            Contradiction: HP104 for several ranks with `inline`.
            ForkUnsafe: HP605 with `processes`, when torch.distributed is initialized in this process, or another thread
                of it computes.
            DeviceUnavailable: HP502 with `ray`, when the cluster cannot schedule the ranks.
            RankFailed: HP601 when a rank cannot be started.
            JournalMismatch: HP641 when the journal was written by a program with other roles or arguments.
            OutputNotWritable: HP105 when the journal cannot be written.
        """
        name = cls.__name__ if name is None else name
        if name in self.roles:
            raise BadValue(
                "a role with this name already exists", got=name, hint="controller.start(..., name='another')"
            )
        text = as_json(arguments, f"`{cls.__qualname__}`")
        recorded = self.journal.recall(name, 0, cls.__qualname__, text) is not None
        self.roles[name] = Role(self, RoleSpec(name, cls, text, first_device), ranks)
        if not recorded:
            self.journal.write(name, 0, cls.__qualname__, text, {"value": None})
        return self.roles[name]

    def first(self, calls: Sequence[RoleCall]) -> RoleCall:
        """Wait for an answer to any of the calls, and return the call that was answered first.

        The journal records the choice, so a restarted program repeats it.

        Raises:
            BadValue: HP102 for an empty list of calls.
            JournalMismatch: HP641 when the journal records a choice between other calls.
            OutputNotWritable: HP105 when the journal cannot be written.
        """
        if not calls:
            raise BadValue(
                "the list of calls is empty",
                got="[]",
                hint='controller.first([role.call("METHOD")])',
            )
        among = as_json(tuple([call.role.name, call.number] for call in calls), "`first`")
        number = next(self._choices)
        if (record := self.journal.recall(None, number, "first", among)) is not None:
            return calls[record["value"]]
        while not any(call.answered for call in calls):
            self.wait()
        chosen = min((call.answered, index) for index, call in enumerate(calls) if call.answered)[1]
        self.journal.write(None, number, "first", among, {"value": chosen})
        return calls[chosen]

    def wait(self) -> None:
        """Wait at most 0.25 s for an answer of any role, then process the answers and failures of all roles."""
        busy = [role.busy for role in self.roles.values() if role.busy is not None]
        self.engine.wait(busy, _POLL_S)
        for role in self.roles.values():
            role.advance()

    def close(self) -> None:
        """Kill the ranks of all roles, drop unanswered calls, and close the journal."""
        for role in self.roles.values():
            role.end()
        self.engine.close()
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ahead(steps: int, max_staleness: int) -> Iterator[tuple[Literal["sample", "learn"], int]]:
    """Yield ("sample", s) and ("learn", s) for the steps 1 to `steps`, in the order of the calls of a training loop.

    Version v denotes the weights after v learned steps. The loop must wait for the answer to ("learn", s) before it
    advances the iterator. Sampling of step s then starts with version max(0, s - 1 - `max_staleness`) or newer. With
    `max_staleness` 0, sampling and learning alternate. With 1 or more, step s + 1 is sampled while step s is learned.

    Args:
        steps: Number of steps.
        max_staleness: Maximum age, in learned steps, of the weights that sample a step; at least 0.
    """
    for step in range(1, steps + max_staleness + 2):
        if (learned := step - 1 - max_staleness) >= 1:
            yield "learn", learned
        if step <= steps:
            yield "sample", step
