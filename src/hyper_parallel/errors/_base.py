"""The base of every error a user can cause, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class HyperParallelError(Exception):
    """Base of all coded errors.

    A subclass is one code; its docstring is the documentation page of the code (what it means, why it is refused,
    how to fix it). Constructor arguments are the facts of one occurrence.

    Args:
        what: One sentence: what is wrong.
        where: Where the wrong value came from: `recipe.yaml: parallel.tp_x (set by command line)`, a file, a module.
        got: The value or values found.
        allowed: The values that would be accepted.
        hint: One line that can be pasted: a command, an override, a recipe line. None: `changes` as overrides.
        changes: Recipe keys with values that mend it, as data: `{"parallel.ep": 4}`.
        others: Further problems found at the same time, one line each.
    """

    code: ClassVar[str] = "HP000"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        allowed: object = None,
        hint: str | None = None,
        changes: Mapping[str, object] | None = None,
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.allowed = allowed
        self.changes = dict(changes or {})
        self.hint = overrides(self.changes) if hint is None and self.changes else hint
        self.others = tuple(others)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what), vars(self))

    def __str__(self) -> str:
        return self.render()

    def render(self) -> str:
        """The fixed form: code and what; where; got and allowed; hint on its own line; other problems."""
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where is not None:
            lines.append(f"  --> {self.where}")
        facts = []
        if self.got is not None:
            facts.append(f"got: {_plain(self.got)}")
        if self.allowed is not None:
            facts.append(f"allowed: {_plain(self.allowed)}")
        if facts:
            lines.append("  " + "      ".join(facts))
        if self.hint is not None:
            lines += ["", f"hint: {self.hint}"]
        if self.others:
            lines += ["", f"and {len(self.others)} more:", *(f"  {line}" for line in self.others)]
        return "\n".join(lines)


def overrides(changes: Mapping[str, object]) -> str:
    """Changes as overrides that a shell takes: `parallel.pp=2 'parallel.stage_layers=[4, 4]'`."""
    texts = (
        (f"{key}={list(value) if isinstance(value, tuple) else value}")
        for key, value in changes.items()
    )
    return " ".join(f"'{text}'" if text.endswith("]") else text for text in texts)


def _plain(value: object) -> str:
    return (
        ", ".join(str(v) for v in value) if isinstance(value, (list, tuple, range)) else str(value)
    )


def _rebuild(cls: type[HyperParallelError], what: str) -> HyperParallelError:
    return cls(what)


def all_codes() -> dict[str, type[HyperParallelError]]:
    """Every error code with its class, sorted by code.

    Raises:
        TypeError: Two classes share a code; a test calls this.
    """
    found: dict[str, type[HyperParallelError]] = {}
    waiting = list(HyperParallelError.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if found.setdefault(cls.code, cls) is not cls:
            raise TypeError(f"error code {cls.code} is used twice: {found[cls.code]} and {cls}")
    return dict(sorted(found.items()))
