"""Base class of all user errors, and their printed form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

from hyper_parallel.errors._callers import Caller, overrides
from hyper_parallel.errors._printable import plain, printable

_MOST_CHARACTERS: Final = 20_000
"""Maximum characters of one part of a message."""
_MOST_OTHERS: Final = 50
"""Maximum number of further problems to print."""


class HyperParallelError(Exception):
    """Base of all coded errors.

    A subclass defines one code: `class NoData(HyperParallelError, code="HP602")`. Its docstring documents the code:
    meaning, reason and fix. Constructor arguments describe one occurrence, and are attributes of the error.

    Arguments name recipe keys and command options. The attributes `where` and `hint` translate them to the names of the
    caller, see `reported_by`.

    Args:
        what: The problem, in one sentence.
        where: Origin of the wrong value: `recipe.yaml: parallel.tp_x (set by command line)`, a file, a module.
        got: The actual value or values.
        allowed: The accepted values, or a description of them.
        hint: One line that can be pasted: a command, a recipe line, a sentence; or `changes`. None: the hint shows
            `changes`, if there are any.
        changes: Values that fix the problem by recipe key or option, as data: `{"parallel.ep": 4}`; see `overrides`.
        others: Further problems, one sentence each.
    """

    code: ClassVar[str] = "HP000"
    caller: Caller = Caller()

    def __init_subclass__(cls, *, code: str) -> None:
        cls.code = code

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        allowed: object = None,
        hint: str | Mapping[str, object] | None = None,
        changes: Mapping[str, object] | None = None,
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.allowed = allowed
        self.changes = dict(hint if isinstance(hint, Mapping) else changes or {})
        self.hint = hint if isinstance(hint, str) else None
        self.others = tuple(others)

    @property
    def where(self) -> str | None:
        return None if self._where is None else self.caller.where(self._where)

    @where.setter
    def where(self, text: str | None) -> None:
        self._where = text

    @property
    def hint(self) -> str | None:
        if self._hint is not None:
            return self.caller.sentence(self._hint)
        return (self.caller.hint(self.changes) or overrides(self.changes)) if self.changes else None

    @hint.setter
    def hint(self, text: str | None) -> None:
        self._hint = text

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


@contextmanager
def reported_by(caller: Caller) -> Iterator[None]:
    """Set the caller of coded errors that leave the block; of nested blocks, the outermost one decides."""
    try:
        yield
    except HyperParallelError as error:
        error.caller = caller
        raise


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
