"""What the steps of a chat template cost: one budget per conversation, in bytes of work.

Steps that could make a long text or a large number at once are charged before they run, by the sizes of their operands;
all others when they have run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Final

from jinja2.sandbox import SecurityError

_BUDGET: Final = 64 * 1024**2
"""Bytes of work that every conversation has: half a million steps, or so much text."""
_BUDGET_PER_TURN: Final = 16 * 1024
"""Bytes of work that each turn adds, up to a number of turns: 128 steps."""
_MOST_TURNS: Final = 8192
_BUDGET_PER_BYTE: Final = 8
"""Bytes of work that each byte of the conversation adds."""
STEP: Final = 128
"""Bytes of work of one step, beside those of its operands."""
READ: Final = 8
"""So many bytes of a text that are only read cost one byte of work."""
ITEM: Final = 4
"""Bytes of work of an item of a list that is only read."""
_MOST_INTEGER: Final = 1_000_000
"""Of a number that a filter or a method is given, such as a width."""
MOST_BITS: Final = 1024
"""Of an integer."""
_WIDTH: Final = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{4,}|\*|\d*\.(?:\d{4,}|\*))")
"""A conversion with a width of thousands, or with one that an argument gives."""
_LONG_COUNT: Final = re.compile(r"\d{4,}|\{")
"""The same in the specification of a field in braces."""
_LINE_ENDS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SHALLOW: Final = (
    "length", "count", "list", "first", "last", "items", "map", "select", "reject", "selectattr", "rejectattr",
    "default", "d", "batch", "slice", "reverse", "attr",
)  # fmt: skip
"""Filters that do not look into the items of a list."""


class TemplateBudget(SecurityError):
    """A template does more work than its conversation allows."""


class Work:
    """What is left of the budget of one rendering."""

    def __init__(self) -> None:
        self.left = self.printed = self.num_pieces = 0

    def begin(self, num_turns: int, num_bytes: int) -> None:
        """Take up the budget of a conversation."""
        turns = _BUDGET_PER_TURN * min(num_turns, _MOST_TURNS)
        self.left = _BUDGET + turns + _BUDGET_PER_BYTE * num_bytes
        self.printed = self.num_pieces = 0

    def prints(self, piece: str) -> None:
        """A piece of the text is done."""
        self.printed += len(piece)
        self.num_pieces += 1
        self.spend(STEP)

    def spend(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise TemplateBudget("the template does more work than its conversation allows")

    def step(self, *values: Any) -> None:
        """One step that reads values."""
        self.spend(STEP + sum(map(_reading, values)))

    def made(self, value: Any) -> Any:
        """A result, which takes memory."""
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise TemplateBudget(f"an integer of more than {MOST_BITS} bits")
        self.spend(size_of(value))
        return value


def _reading(value: Any) -> int:
    """Work of reading a value once, its items not."""
    if isinstance(value, (str, bytes)):
        return len(value) // READ
    return ITEM * len(value) if isinstance(value, (list, tuple, dict, range)) else 0


def size_of(value: Any) -> int:
    if isinstance(value, (str, bytes, list, tuple, dict)):
        return sys.getsizeof(value)
    return 0


def deep_size(value: Any) -> int:
    """Bytes of a value and of all that it holds, at each use of a shared part; more than the budget is refused."""
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        total += 16 + size_of(one)
        if isinstance(one, Mapping):
            stack += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            stack += one
        if total > _BUDGET:
            raise TemplateBudget("a value that holds more than a conversation")
    return total


def num_bytes_of(value: Any) -> int:
    """Return the characters of all texts in a value of objects and lists; a number counts as 8.

    Every member is visited once for each reference to it, so callers pass values that a bounded reader has checked.
    """
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            stack += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            stack += one
        else:
            total += 8
    return total


class Counted:
    """An iterable whose iterations are steps.

    Args:
        values: What is iterated.
        work: Budget.
        constant: Characters that each iteration prints as they stand in the template.
    """

    def __init__(self, values: Any, work: Work, constant: int) -> None:
        self._values, self._work, self._constant = values, work, constant

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._work.spend(STEP + self._constant)
            yield value

    def __len__(self) -> int:
        return len(self._values)


def as_text(value: Any, work: Work) -> str:
    work.spend(ITEM * deep_size(value))
    return str(value)


def charged(name: str, function: Callable[..., Any], work: Work) -> Callable[..., Any]:
    """A filter whose work is charged: what it reads, what it may make, and what it has made."""
    takes_first = hasattr(function, "jinja_pass_arg")  # a context or an environment

    def filtered(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if takes_first else args
        work.step(*values)
        check_integers(values, kwargs)
        if values:
            values = _spend_filter(name, values, kwargs, work)
        return work.made(function(*(*args[:1], *values) if takes_first else values, **kwargs))

    if takes_first:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered


def _spend_filter(
    name: str, values: tuple[Any, ...], kwargs: Mapping[str, Any], work: Work
) -> tuple[Any, ...]:
    """Charge a filter for what it may make of its operands, which are returned."""
    first, rest = values[0], (*values[1:], *kwargs.values())
    if name not in _SHALLOW and not isinstance(first, str):
        work.spend(deep_size(first))
    if name == "tojson":
        work.spend(8 * deep_size(first))
        if any(deep_size(one) > 512 or (isinstance(one, int) and one > 64) for one in rest):
            raise TemplateBudget("an indentation or a separator of tojson that is long")
    elif name == "join":
        first = list(first)
        work.spend(sum(map(size_of, first)) + len(first) * sum(map(size_of, rest)))
        work.spend(sum(ITEM * deep_size(one) for one in first if not isinstance(one, str)))
    elif name == "sum":
        first = list(Counted(first, work, 0))
        if any(isinstance(one, (str, list, tuple)) for one in (*first, *rest[1:])):
            raise TemplateBudget("`sum` adds numbers")
    elif name in ("list", "unique", "sort", "reverse", "groupby", "max", "min"):
        first = first if isinstance(first, str) else list(Counted(first, work, 0))
        work.spend(len(first) * STEP)
    elif name in ("batch", "slice"):
        work.spend(STEP * max((abs(one) for one in rest if isinstance(one, int)), default=0))
    elif isinstance(first, str):
        spend_method(name, first, rest, work)
        if name == "format":
            check_format(first, rest, work)
        elif name in ("e", "escape", "forceescape", "title", "urlencode"):
            work.spend(8 * size_of(first))
    return first, *values[1:]


def spend_method(name: str, text: str | bytes, args: Sequence[Any], work: Work) -> None:
    """Charge a method or filter that makes a longer text, or many."""
    if isinstance(text, bytes):
        work.spend(64 * len(text))
        return
    number = max((abs(a) for a in args if isinstance(a, int)), default=0)
    texts = [a for a in args if isinstance(a, str)]
    longest = max(map(size_of, texts), default=0)
    if name == "replace":
        work.spend((text.count(texts[0]) if texts else len(text)) * longest)
    elif name in ("center", "ljust", "rjust", "zfill", "truncate"):
        work.spend(4 * number)
    elif name in ("expandtabs", "indent"):
        lines = 1 + sum(map(text.count, _LINE_ENDS + "\t"))
        work.spend(lines * (4 * max(number, 8) + longest))
    elif name == "join" and args and isinstance(items := args[0], list):
        work.spend(sum(map(size_of, items)) + len(items) * size_of(text))
    elif name == "translate":
        work.spend(len(text) * max((size_of(v) for a in args for v in _values(a)), default=0))
    elif name in ("split", "rsplit"):
        work.spend(
            size_of(text) + (64 * text.count(texts[0]) if texts and texts[0] else 32 * len(text))
        )
    elif name == "splitlines":
        work.spend(size_of(text) + 64 * sum(map(text.count, _LINE_ENDS)))


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else ()


def check_format(text: str, args: Sequence[Any], work: Work) -> None:
    """Refuse widths that make a text of any length, and charge for each use of an argument."""
    work.spend(text.count("%(") * len(text) // READ)
    fields = (spec or "" for _, _, spec, _ in Formatter().parse(text)) if "{" in text else ()
    if _WIDTH.search(text) or any(map(_LONG_COUNT.search, fields)):
        raise TemplateBudget("a format with a width of thousands")
    uses = text.count("%") + text.count("{")
    work.spend(size_of(text) + uses * max(map(deep_size, args), default=0))


def check_integers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MOST_INTEGER:
            raise TemplateBudget(f"a number above {_MOST_INTEGER:,}")
