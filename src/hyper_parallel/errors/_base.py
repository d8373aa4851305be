"""Base class of all user errors, and their printed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from hyper_parallel.errors._printable import plain, printable

_MOST_CHARACTERS: Final = 20_000
"""Maximum characters of one part of a message."""
_MOST_OTHERS: Final = 50
"""Maximum number of further problems to print."""


class HyperParallelError(Exception):
    """Base of all coded errors.

    A subclass defines one code: `class NoData(HyperParallelError, code="HP602")`. Its docstring documents the code:
    meaning, reason and fix. Constructor arguments describe one occurrence, and are attributes of the error.

    Args:
        what: The problem, in one sentence.
        where: Origin of the wrong value: `recipe.yaml: parallel.tp_x (set by command line)`, a file, a module.
        got: The actual value or values.
        allowed: The accepted values.
        hint: One line that can be pasted: a command, an override, a recipe line. None: the hint shows `changes`, if
            there are any, as overrides.
        changes: Recipe keys with values that fix the problem, as data: `{"parallel.ep": 4}`.
        others: Further problems, one sentence each.
    """

    code: ClassVar[str] = "HP000"

    def __init_subclass__(cls, *, code: str) -> None:
        cls.code = code

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

    def __str__(self) -> str:
        return self.render()

    def render(self) -> str:
        """Return the message as printed: code and problem, location, got and allowed, hint, further problems.

        Long parts are truncated. Control characters, which may come from a file, are escaped.
        """
        lines = [f"error[{self.code}]: {self.what[:_MOST_CHARACTERS]}"]
        if self.where is not None:
            lines.append(f"  --> {self.where[:_MOST_CHARACTERS]}")
        named = {"got": self.got, "allowed": self.allowed}
        if facts := [f"{k}: {plain(v)}" for k, v in named.items() if v is not None]:
            lines.append("  " + "      ".join(facts))
        if self.hint is not None:
            lines += ["", f"hint: {self.hint[:_MOST_CHARACTERS]}"]
        if self.others:
            shown = self.others[:_MOST_OTHERS]
            lines += ["", f"and {len(self.others)} more:"]
            lines += [f"  {line[:_MOST_CHARACTERS]}" for line in shown]
        return printable("\n".join(lines))


def overrides(changes: Mapping[str, object]) -> str:
    """Return changes as overrides, with lists in quotes: `parallel.pp=2 'parallel.stage_layers=[4, 4]'`."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    return " ".join(f"'{k}={v}'" if str(v).endswith("]") else f"{k}={v}" for k, v in plain.items())


def all_codes() -> dict[str, type[HyperParallelError]]:
    """Return a dict from every error code to its class, sorted by code.

    Raises:
        TypeError: Two classes have the same code.
    """
    classes = sorted(HyperParallelError.__subclasses__(), key=lambda cls: cls.code)
    codes = {cls.code: cls for cls in classes}
    if len(codes) < len(classes):
        raise TypeError(f"an error code is used twice: {classes}")
    return codes
