"""Cost model for rendering an untrusted chat template: each rendered conversation has a budget of work, in bytes.

A step is one operation of the template, such as a call, a filter or a loop iteration. Charging a step subtracts its
cost from the budget: the size of its operands before it runs, and the size of its result afterwards. A step that may
produce a long text is also charged for the longest possible result before it runs. Charging raises TemplateBudget if
the budget is exhausted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Final

from jinja2 import pass_context
from jinja2.runtime import Context
from jinja2.sandbox import SecurityError

_BUDGET: Final = 64 * 1024**2
"""Work budget of a conversation in bytes: half a million steps, or 64 MiB of text."""
_BUDGET_PER_TURN: Final = 16 * 1024
"""Additional budget per turn or tool in bytes, the cost of 128 steps."""
_MOST_TURNS: Final = 8192
"""Maximum number of turns and tools that add to the budget."""
_BUDGET_PER_BYTE: Final = 8
"""Additional budget in bytes per character of the conversation."""
STEP: Final = 128
"""Bytes of work charged per step, in addition to its operands."""
READ: Final = 8
"""Bytes of text that a step reads per byte of work charged."""
ITEM: Final = 4
"""Bytes of work charged per item of a list that a step reads."""
_MOST_INTEGER: Final = 1_000_000
"""Largest absolute value of an integer argument of a filter or method, such as a width."""
MOST_BITS: Final = 1024
"""Largest size of an integer in bits."""
_WIDTH: Final = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{4,}|\*|\d*\.(?:\d{4,}|\*))")
"""Pattern of a %-format conversion with a width or precision of four or more digits, or from an argument."""
_LONG_COUNT: Final = re.compile(r"\d{4,}|\{")
"""Pattern of a width of four or more digits, or of a nested field, in the format specification of a field in braces."""
_LINE_ENDS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SHALLOW: Final = (
    "length", "count", "list", "first", "last", "items", "map", "select", "reject", "selectattr", "rejectattr",
    "default", "d", "batch", "slice", "reverse", "attr",
)  # fmt: skip
"""Filters that do not read the content of a list's items."""


class TemplateBudget(SecurityError):
    """Error for a template that exceeds its work budget or another limit."""


class Work:
    """Work budget of one rendering.

    Attributes:
        left: Remaining budget in bytes.
        printed: Number of characters printed so far. The text of a macro counts again where its result is printed.
        num_pieces: Number of pieces of text printed so far.
    """

    def __init__(self) -> None:
        self.left = self.printed = self.num_pieces = 0

    def reset(self, num_turns: int, num_bytes: int) -> None:
        """Set the budget for a conversation of `num_turns` turns and `num_bytes` bytes; clear the output size."""
        turns = _BUDGET_PER_TURN * min(num_turns, _MOST_TURNS)
        self.left = _BUDGET + turns + _BUDGET_PER_BYTE * num_bytes
        self.printed = self.num_pieces = 0

    @pass_context
    def finalize(self, _: Context, value: Any) -> str:
        """Return a printed value as text, charge the step, and add the text to the output size."""
        text = value if isinstance(value, str) else as_text(value, self)
        self.printed += len(text)
        self.num_pieces += 1
        self.spend(STEP + sys.getsizeof(text))
        return text

    def spend(self, num_bytes: int) -> None:
        """Subtract `num_bytes` from the budget; raise TemplateBudget if it is exhausted."""
        self.left -= num_bytes
        if self.left < 0:
            raise TemplateBudget("the template does more work than its conversation allows")

    def step(self, *values: Any) -> None:
        """Charge a step that reads `values`, without the content of their items; raise TemplateBudget as `spend`."""
        self.spend(STEP + sum(map(_read_cost, values)))

    def allocate(self, value: Any) -> Any:
        """Charge the memory of a step's result; return the result. Raise TemplateBudget for a huge integer."""
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise TemplateBudget(f"an integer of more than {MOST_BITS} bits")
        self.spend(size_of(value))
        return value


def _read_cost(value: Any) -> int:
    """Return the work in bytes of reading a text or container without its items' content; 0 for other values."""
    if isinstance(value, (str, bytes)):
        return len(value) // READ
    return ITEM * len(value) if isinstance(value, (list, tuple, dict, range)) else 0


def size_of(value: Any) -> int:
    """Return the bytes of memory of a text or container without its items; 0 for other values."""
    if isinstance(value, (str, bytes, list, tuple, dict)):
        return sys.getsizeof(value)
    return 0


def deep_size(value: Any) -> int:
    """Return the approximate bytes of memory of a value with all nested items; each reference to an item counts.

    Raises:
        TemplateBudget: The value is larger than `_BUDGET`.
    """
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        total += 16 + size_of(one)
        if isinstance(one, Mapping):
            stack += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            stack += one
        if total > _BUDGET:
            raise TemplateBudget(f"a value that holds more than {_BUDGET:,} bytes")
    return total


def num_bytes_of(value: Any) -> int:
    """Return the number of characters of all texts in nested lists and objects; any other value counts as 8.

    Each reference to an item is visited, without a limit. Pass only values whose size has been checked.
    """
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, (dict, Mapping)):  # `dict` first: testing for `Mapping` is slow
            stack += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            stack += one
        else:
            total += 8
    return total


class Counted:
    """Iterable over `values` that charges one step to the budget `work` for each iteration of a template's loop."""

    def __init__(self, values: Any, work: Work) -> None:
        self._values, self._work = values, work

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._work.spend(STEP)
            yield value

    def __len__(self) -> int:
        return len(self._values)


def as_text(value: Any, work: Work) -> str:
    """Return `str(value)`, after charging `ITEM` times the size of the value with its items."""
    work.spend(ITEM * deep_size(value))
    return str(value)


def charged(name: str, function: Callable[..., Any], work: Work) -> Callable[..., Any]:
    """Return a Jinja filter that calls `function`, and charges operands, largest possible result and actual result."""
    # A function with this attribute takes Jinja's context or environment as its first argument.
    takes_first = hasattr(function, "jinja_pass_arg")

    def filtered(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if takes_first else args
        work.step(*values)
        check_integers(values, kwargs)
        if values:
            values = _spend_filter(name, values, kwargs, work)
        return work.allocate(function(*(*args[:1], *values) if takes_first else values, **kwargs))

    if takes_first:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered


def _spend_filter(name: str, values: tuple[Any, ...], kwargs: Mapping[str, Any], work: Work) -> tuple[Any, ...]:
    """Charge the largest possible result of filter `name`; return its operands, without consumed iterators."""
    first, rest = values[0], (*values[1:], *kwargs.values())
    if name not in _SHALLOW and not isinstance(first, str):
        work.spend(deep_size(first))
    if name == "tojson":
        work.spend(8 * deep_size(first))
        if any(deep_size(one) > 512 or (isinstance(one, int) and one > 64) for one in rest):
            raise TemplateBudget("`tojson` with a long separator or an indentation above 64")
    elif name == "join":
        first = list(first)
        work.spend(sum(map(size_of, first)) + len(first) * sum(map(size_of, rest)))
        work.spend(sum(ITEM * deep_size(one) for one in first if not isinstance(one, str)))
    elif name == "sum":
        first = list(Counted(first, work))
        if any(isinstance(one, (str, list, tuple)) for one in (*first, *rest[1:])):
            raise TemplateBudget("the filter `sum` adds numbers, not texts or lists")
    elif name in ("list", "unique", "sort", "reverse", "groupby", "max", "min"):
        first = first if isinstance(first, str) else list(Counted(first, work))
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
    """Charge the largest possible result of calling string method or filter `name` on `text` with `args`."""
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
        tables = [a for a in args if isinstance(a, Mapping)]
        work.spend(len(text) * max((size_of(v) for t in tables for v in t.values()), default=0))
    elif name in ("split", "rsplit"):
        work.spend(size_of(text) + (64 * text.count(texts[0]) if texts and texts[0] else 32 * len(text)))
    elif name == "splitlines":
        work.spend(size_of(text) + 64 * sum(map(text.count, _LINE_ENDS)))


def check_format(text: str, args: Sequence[Any], work: Work) -> None:
    """Charge each use of an argument in a format string; raise TemplateBudget for widths above 999 or from one."""
    work.spend(text.count("%(") * len(text) // READ)
    fields = (spec or "" for _, _, spec, _ in Formatter().parse(text)) if "{" in text else ()
    if _WIDTH.search(text) or any(map(_LONG_COUNT.search, fields)):
        raise TemplateBudget("a format with a width or precision above 999, or from an argument")
    uses = text.count("%") + text.count("{")
    work.spend(size_of(text) + uses * max(map(deep_size, args), default=0))


def check_integers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateBudget for an integer argument whose absolute value exceeds `_MOST_INTEGER`."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MOST_INTEGER:
            raise TemplateBudget(f"a number above {_MOST_INTEGER:,}")
