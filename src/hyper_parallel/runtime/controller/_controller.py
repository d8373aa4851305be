"""The controller of a program of many models: starts roles, waits for their answers, and records them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
_LOOK_S: Final = 0.25  # a frozen rank is to be noticed well within a second after its deadline


class Controller:
    """One program over several roles, each a class of its own on ranks of its own.

    Between roles pass JSON values only; weights pass through folders of checkpoints (`hp.save`, `hp.load`), which any
    layout writes and any other reads. An object of a role is made again when its ranks are lost, after a resize, and
    when the program is started again: it has to find what it needs in files.

    Args:
        engine: `inline`: objects of this process, a call runs when it is made. `processes`: ranks on this machine,
            which end when this process ends. `ray`: an actor for each rank, in the cluster of RAY_ADDRESS or one
            that is started here.
        journal: File of what the calls were answered; a program that is started again with it gets these answers
            and runs the other calls only. None: none.
        max_restarts: How often the ranks of a role may be lost and started again.
        timeout_s: How long a call may take before its ranks are lost; `Role.call` may say otherwise.

    Attributes:
        roles: The roles that were started, by name.

    Raises:
        BadValue: HP102 for an engine that does not exist.
        MissingDependency: HP501 for `ray` without the package.
        JournalMismatch: HP641, RunInUse: HP720, OutputNotWritable: HP105 for a journal that cannot be used.
    """

    def __init__(
        self,
        engine: Literal["inline", "processes", "ray"] = "processes",
        journal: str | Path | None = None,
        max_restarts: int = 3,
        timeout_s: float = 600.0,
    ) -> None:
        if engine not in _ENGINES:
            raise BadValue("there is no engine of this name", got=engine, allowed=list(_ENGINES))
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
        """Start the ranks of a role, each with an object `cls(*arguments)`; returns before they are there.

        With several ranks `hp.World.join()`, and `hp.parallelize` without a world, find the group of the role.

        Args:
            cls: Any class. With `ray` a worker must be able to import it, unless the program's own file defines it.
            arguments: JSON values.
            ranks: Number of processes.
            name: Of the role in errors and in the journal; None: that of the class.
            first_device: With `processes` the accelerator of rank 0, those of the others follow. None: the first ones
                that no other role has. Roles may share devices.

        Raises:
            BadValue: HP102 for a name that is taken, no ranks, or an argument that is none of JSON.
            Contradiction: HP104 for several ranks with `inline`.
            ForkUnsafe: HP605 with `processes`, when this process is a member of a process group.
            JournalMismatch: HP641 when the journal was written by a program with other roles.
        """
        name = cls.__name__ if name is None else name
        if name in self.roles:
            raise BadValue(
                "a role of this name is there already", got=name, hint="start(..., name='another')"
            )
        text = as_json(arguments, f"`{cls.__qualname__}`")
        recorded = self.journal.recall(name, 0, cls.__qualname__, text) is not None
        self.roles[name] = Role(self, RoleSpec(name, cls, text, first_device), ranks)
        if not recorded:
            self.journal.write(name, 0, cls.__qualname__, text, {"value": None})
        return self.roles[name]

    def first(self, calls: Sequence[RoleCall]) -> RoleCall:
        """The call that was answered first, once one is; recorded, so that a program started again chooses alike.

        Raises:
            BadValue: HP102 without calls.
            JournalMismatch: HP641 when the journal has another choice in this place.
        """
        if not calls:
            raise BadValue("there is no first of no calls", got="[]")
        among = as_json(tuple([call.role.name, call.number] for call in calls), "`first`")
        number = next(self._choices)
        if (record := self.journal.recall(None, number, "first", among)) is not None:
            return calls[record["value"]]
        while not any(call.answered for call in calls):
            self.wait()
        chosen = min((call.answered, at) for at, call in enumerate(calls) if call.answered)[1]
        self.journal.write(None, number, "first", among, {"value": chosen})
        return calls[chosen]

    def wait(self) -> None:
        """Until there may be news, for a quarter of a second at most; then all roles go on as far as they can."""
        busy = [role.busy for role in self.roles.values() if role.busy is not None]
        self.engine.wait(busy, _LOOK_S)
        for role in self.roles.values():
            role.advance()

    def close(self) -> None:
        """End all ranks; calls that are not answered are dropped."""
        for role in self.roles.values():
            role.end()
        self.engine.close()
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
