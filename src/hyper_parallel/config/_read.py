"""Read one YAML or JSON file into a mapping; syntax errors and repeated keys are refused with their line."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hyper_parallel.errors import HyperParallelError

if TYPE_CHECKING:
    _Loader = yaml.SafeLoader
else:
    # The loader of libyaml reads several times faster; not every build of PyYAML has it.
    _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):
    """SafeLoader that refuses a key given twice; YAML itself would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path, error: type[HyperParallelError], what: str) -> dict[str, Any]:
    """Read a file whose top level is a mapping; a name that ends in `.json` is read as JSON, all others as YAML.

    Args:
        path: The file.
        error: Class of the error to raise.
        what: What the file is, for messages: `recipe`, `topology file`.

    Raises:
        HyperParallelError: Of class `error`, when the file is missing, is not text, is not YAML or JSON, repeats a
            key, or is not a mapping.
    """

    def refusal(problem: str, place: str = "", hint: str | None = None) -> HyperParallelError:
        return error(f"the {what} {problem}", where=f"{path}{place}", hint=hint)

    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_no_repeats) if is_json else parse_yaml(text)
    except OSError as cause:
        raise refusal(f"cannot be read: {cause.strerror}", hint=f"ls {path.parent}") from cause
    except UnicodeDecodeError as cause:
        raise refusal("is not UTF-8 text") from cause
    except json.JSONDecodeError as cause:
        place = f": line {cause.lineno}, column {cause.colno}"
        raise refusal(f"is not JSON: {cause.msg}", place) from cause
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark
        place = "" if mark is None else f": line {mark.line + 1}, column {mark.column + 1}"
        raise refusal(f"is not YAML: {cause.problem}", place) from cause
    except RecursionError as cause:
        raise refusal("is nested too deep") from cause
    except (yaml.YAMLError, ValueError, OverflowError) as cause:
        raise refusal(f"cannot be read: {cause}") from cause
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise error(
            f"the {what} is not a mapping of keys",
            where=str(path),
            got="an empty file" if data is None else type(data).__name__,
            allowed="lines of the form `key: value`",
        )
    return data


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; raises `yaml.YAMLError`, also when a key is given twice."""
    return yaml.load(text, Loader=_StrictLoader)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key `{key}` is given twice")
        data[key] = value
    return data
