"""Reader of one YAML or JSON file into a mapping. Syntax errors and repeated keys are reported with their line.

File size and nesting depth are checked on the text, before objects are built. The number of elements is checked after
aliases and merges (`<<`) are expanded.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from hyper_parallel.errors import HyperParallelError, abbreviated
from hyper_parallel.near_paths import RECIPE_FOLDER, nearest_path
from hyper_parallel.received import LimitExceeded, Limits, check_value, parse_json, read_text

if TYPE_CHECKING:
    _Loader = yaml.SafeLoader
else:
    # libyaml's loader is several times faster, but not every build of PyYAML includes it.
    _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LIMITS: Final = Limits(num_bytes=512 * 1024, num_elements=50_000, depth=30, integer_bits=4096)
"""Limits of recipes, topology files, LlamaFactory files and lists of data sets."""

_MERGE: Final = "tag:yaml.org,2002:merge"
_LONG_NUMBER: Final = re.compile(r"[-+]?[0-9.][0-9a-fA-FxXobeE_:.+-]{1000,}\Z")
"""Plain scalar of more than 1,000 characters that YAML may parse as a number."""


class _StrictLoader(_Loader):
    """SafeLoader that rejects repeated keys, of which PyYAML's loader silently keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # the parent class raises
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key!s:.80}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expand merge keys (`<<`); raise ConstructorError if that gives more keys than `LIMITS.num_elements`."""
        num_keys = len(node.value)
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                continue
            parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for part in parts:
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
                    num_keys += len(part.value)
                if num_keys > LIMITS.num_elements:
                    problem = f"merges of more than {LIMITS.num_elements:,} keys"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        super().flatten_mapping(node)


def read_mapping(path: Path, error: type[HyperParallelError], file_type: str) -> dict[str, Any]:
    """Read a file whose top level is a mapping: JSON if the name ends in `.json`, else YAML.

    Args:
        path: File to read.
        error: Class of the error to raise.
        file_type: File type for messages: `recipe`, `topology file`.

    Raises:
        HyperParallelError: Instance of `error`, if the file cannot be read, is not UTF-8 text, is not YAML or JSON,
            repeats a key, exceeds `LIMITS`, or is not a mapping with text keys.
    """

    def refusal(problem: str, place: str = "", hint: str | None = None) -> HyperParallelError:
        return error(f"the {file_type} {problem}", where=f"{path}{place}", hint=hint)

    is_json = path.suffix.lower() == ".json"
    try:
        text = read_text(path, LIMITS)
        data = parse_json(text, LIMITS, _no_repeats) if is_json else parse_yaml(text)
    except OSError as cause:
        hint = f"ls {shlex.quote(str(path.parent))}"
        near = nearest_path(str(path), [RECIPE_FOLDER])
        if isinstance(cause, FileNotFoundError) and near is not None:
            hint = f"did you mean `{near}`?"
        raise refusal(f"cannot be read: {cause.strerror}", hint=hint) from cause
    except UnicodeDecodeError as cause:
        raise refusal("is not UTF-8 text") from cause
    except json.JSONDecodeError as cause:
        place = f": line {cause.lineno}, column {cause.colno}"
        raise refusal(f"is not JSON: {cause.msg}", place) from cause
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark
        place = "" if mark is None else f": line {mark.line + 1}, column {mark.column + 1}"
        is_syntax = isinstance(cause, (yaml.scanner.ScannerError, yaml.parser.ParserError))
        raise refusal(f"{'is not YAML' if is_syntax else 'cannot be read'}: {cause.problem}", place) from cause
    except LimitExceeded as cause:
        is_file = path.is_file()  # no device or pipe
        raise refusal(f"{'exceeds a size limit' if is_file else 'cannot be read'}: {cause}") from cause
    except (yaml.YAMLError, ValueError) as cause:
        raise refusal(f"cannot be read: {cause}") from cause
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        got = "an empty file" if data is None else type(data).__name__
        if isinstance(data, dict):
            got = f"the key {abbreviated(next(key for key in data if not isinstance(key, str)))}"
        raise error(
            f"the {file_type} is not a mapping of keys",
            where=str(path),
            got=got,
            allowed="lines of the form `key: value`, in which every key is a text",
        )
    return data


def parse_yaml(text: str, limits: Limits = LIMITS) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: The text is not YAML, repeats a key, or contains an invalid number or date.
        LimitExceeded: The text exceeds the limits, or contains a number of more than 1,000 characters.
    """
    if len(text) > limits.num_bytes:
        raise LimitExceeded(f"{len(text):,} characters, more than {limits.num_bytes:,}")
    try:
        _check_events(text, limits)
        value = yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise LimitExceeded(f"nested deeper than {limits.depth}") from None
    except LimitExceeded:
        raise
    except (ValueError, OverflowError, LookupError, AttributeError, TypeError) as cause:
        # PyYAML's constructors raise these for invalid numbers and dates.
        raise yaml.YAMLError(f"{cause!s:.200}") from cause
    check_value(value, limits)
    return value


def _check_events(text: str, limits: Limits) -> None:
    """Check nesting depth and number lengths on parser events, before PyYAML builds nodes recursively."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > limits.depth:
                raise LimitExceeded(f"nested deeper than {limits.depth}")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        elif (
            isinstance(event, yaml.ScalarEvent)
            and len(event.value) > 1000
            and event.implicit[0]
            and _LONG_NUMBER.match(event.value)
        ):
            raise LimitExceeded("a number of more than 1,000 characters")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key `{key[:80]}` is given twice")
        data[key] = value
    return data
