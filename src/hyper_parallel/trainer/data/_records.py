"""Records: JSON lines, JSON arrays and parquet rows, and what a conversation looks like in them.

JSON is read with the standard library and not through Arrow: an error names the file and the line, records may
differ in their keys, and text that looks like a date stays text. Parquet goes through `datasets` as a stream of
local files; nothing is fetched and nothing is copied into another cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.errors import MissingDependency, NoData

Message = dict[str, str]
"""One turn of a conversation: `role` (system, user or assistant) and `content`."""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_CONVERSATION_KEYS = ("conversations", "messages")


def read_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, record) of a parquet, JSON lines or JSON array file; NoData (HP602) names the line or row."""
    reader = _read_parquet if path.suffix == ".parquet" else _read_json
    for where, record in reader(path):
        if not isinstance(record, Mapping):
            raise NoData(
                "a record is not an object with keys",
                where=where,
                got=type(record).__name__,
                allowed='objects such as {"text": "..."}',
            )
        yield where, record


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    number = 1
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_array = file.read(4096).lstrip().startswith("[")
            file.seek(0)
            if is_array:
                for index, record in enumerate(json.load(file), start=1):
                    yield f"{path}: record {index}", record
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        shown = "".join(error.doc.split("\n")[error.lineno - 1 : error.lineno]).strip()[:60]
        number += error.lineno - 1
        raise NoData(
            f"a line is not valid JSON: {error.msg} at column {error.colno}",
            where=f"{path}:{number}",
            got=shown or "an empty line",
            hint=f"sed -n {number}p {path}",
        ) from error
    except UnicodeDecodeError as error:
        raise NoData("a JSON file is not UTF-8 text", where=str(path), got=error.reason) from error
    except OSError as error:
        raise NoData("a data file cannot be read", where=str(path), got=error.strerror) from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            "reading parquet needs the package `datasets`",
            where=str(path),
            hint="pip install 'hyper-parallel[torch]'",
        ) from error
    try:
        rows = datasets.load_dataset(
            "parquet", data_files=[str(path)], split="train", streaming=True
        )
        for number, row in enumerate(rows):
            yield f"{path}: row {number}", row
    except Exception as error:
        # datasets and Arrow raise many classes here; all of them mean that this file is unreadable.
        raise NoData(
            "a parquet file cannot be read", where=str(path), got=str(error).splitlines()[0][:200]
        ) from error


def shape_of(record: Mapping[str, Any], text_key: str, where: str) -> str:
    """Which shape a record has: `sharegpt`, `alpaca` or `records` (text under `text_key`)."""
    if _turns(record) is not None:
        return "sharegpt"
    if "instruction" in record and "output" in record:
        return "alpaca"
    if text_key in record:
        return "records"
    raise NoData(
        "the first record has no key that holds text",
        where=where,
        got=sorted(record),
        allowed=f"`{text_key}` (data.text_key); `conversations` or `messages`; `instruction` and `output`",
        hint=_text_key_hint(record),
    )


def _text_key_hint(record: Mapping[str, Any]) -> str | None:
    keys = [k for k, v in record.items() if isinstance(v, str)]
    return f"data.text_key={max(keys, key=lambda k: len(record[k]))}" if keys else None


def text_of(record: Mapping[str, Any], text_key: str, where: str) -> str:
    """Text of a record."""
    value = record.get(text_key)
    if not isinstance(value, str):
        found = f"{text_key}: {type(value).__name__}" if text_key in record else sorted(record)
        raise NoData(
            f"a record has no text under `{text_key}`",
            where=where,
            got=found,
            allowed=f"a string under `{text_key}`",
            hint=_text_key_hint(record),
        )
    return value


def alpaca_messages(record: Mapping[str, Any], where: str) -> list[Message]:
    """Turns of an alpaca record: system, history pairs, instruction with input, output."""
    for key in ("instruction", "output"):
        if not isinstance(record.get(key), str):
            swapped = any(k in record for k in _CONVERSATION_KEYS)
            raise NoData(
                f"an alpaca record has no text under `{key}`",
                where=where,
                got=sorted(record),
                allowed="instruction, output; optional: input, system, history",
                hint="data.format=sharegpt" if swapped else None,
            )
    question = "\n".join(t for t in (record["instruction"], record.get("input") or "") if t)
    messages = _system(record)
    for asked, answer in [*(record.get("history") or []), (question, record["output"])]:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ]
    return messages


def sharegpt_messages(record: Mapping[str, Any], where: str) -> list[Message]:
    """Turns of a sharegpt (`conversations`: from, value) or OpenAI (`messages`: role, content) record."""
    turns = _turns(record)
    if turns is None:
        raise NoData(
            "a sharegpt record has no list of turns",
            where=where,
            got=sorted(record),
            allowed="`conversations` with from and value, or `messages` with role and content",
            hint="data.format=alpaca" if "instruction" in record else None,
        )
    messages = _system(record)
    for number, turn in enumerate(turns, start=1):
        spot = f"{where}, turn {number}"
        keys = turn if isinstance(turn, Mapping) else {}
        role = keys.get("from", keys.get("role"))
        content = keys.get("value", keys.get("content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise NoData(
                "a turn of a conversation lacks its speaker or its text",
                where=spot,
                got=sorted(turn) if isinstance(turn, Mapping) else type(turn).__name__,
                allowed="from and value, or role and content, both text",
            )
        if role not in _ROLES:
            raise NoData(
                "a turn has a speaker that is not supported",
                where=spot,
                got=role,
                allowed=sorted(_ROLES),
            )
        messages.append({"role": _ROLES[role], "content": content})
    return messages


def _turns(record: Mapping[str, Any]) -> list[Any] | None:
    return next((record[k] for k in _CONVERSATION_KEYS if isinstance(record.get(k), list)), None)


def _system(record: Mapping[str, Any]) -> list[Message]:
    system = record.get("system")
    return [{"role": "system", "content": system}] if system else []
