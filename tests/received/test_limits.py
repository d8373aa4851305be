"""Bounded readers: each limit refuses by name, and a refusal costs no more than the limit."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyper_parallel.received import LimitExceeded, Limits, check_value, parse_json, read_json

pytestmark = pytest.mark.unit
SMALL = Limits(num_bytes=1000, num_elements=100, depth=5)


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps(list(range(101))), "more than 100 elements"),
        (json.dumps({"a": list(range(60)), "b": list(range(60))}), "more than 100 elements"),
        (_nested(7), "nested deeper than 5"),
        (f"[1, {2**64}]", "an integer of more than 64 bits"),
        (f'"{"x" * 1000}"', "1,002 bytes, more than 1,000"),
    ],
)
def test_each_limit_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "value.json"
    path.write_text(text)
    with pytest.raises(LimitExceeded, match=problem):
        read_json(path, SMALL)


def test_nesting_beyond_the_parser_is_a_limit() -> None:
    with pytest.raises(LimitExceeded, match="nested deeper than 50"):
        parse_json(_nested(200_000), Limits())


@pytest.mark.parametrize("text", ["[" + "0, " * 99 + "0]", _nested(5), f"{2**63}", "NaN", "1e999"])
def test_values_at_the_limits_are_read(text: str) -> None:
    value = parse_json(text, SMALL)
    assert value == json.loads(text) or value != value


@pytest.mark.parametrize("text", ["NaN", "[1, -Infinity]", '{"a": 1e999}'])
def test_numbers_are_finite_on_demand(text: str) -> None:
    with pytest.raises(LimitExceeded, match="not a finite number"):
        parse_json(text, Limits(finite=True))


def test_aliases_count_at_each_use() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    started = time.process_time()
    with pytest.raises(LimitExceeded, match="more than 1,000,000 elements"):
        check_value(yaml.safe_load("\n".join(lines)), Limits())
    assert time.process_time() - started < 5


def test_a_value_inside_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(LimitExceeded, match="nested deeper than"):
        check_value(value, Limits())


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(LimitExceeded, match="not a regular file"):
        read_json(pipe, SMALL)
    with pytest.raises(LimitExceeded, match="not a regular file"):
        read_json(Path("/dev/zero"), SMALL)
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path, SMALL)


def test_a_sparse_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LimitExceeded, match=r"1,099,511,627,776 bytes"):
        read_json(path, SMALL)
