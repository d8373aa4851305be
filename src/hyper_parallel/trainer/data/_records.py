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
    """Yield (where, record) of a parquet, JSON lines or JSON array file in file order.

    Raises:
        NoData: HP602 with the file and the line or row that cannot be read.
    """
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
    try:
        with path.open(encoding="utf-8-sig") as file:
            if _starts_with_bracket(path):
                for number, record in enumerate(json.load(file), start=1):
                    yield f"{path}: record {number}", record
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise _bad_json(path, number, error, line) from error
    except json.JSONDecodeError as error:
        raise _bad_json(path, error.lineno, error, error.doc.splitlines()[error.lineno - 1]) from (
            error
        )
    except UnicodeDecodeError as error:
        raise NoData("a JSON file is not UTF-8 text", where=str(path), got=error.reason) from error
    except OSError as error:
        raise NoData("a data file cannot be read", where=str(path), got=error.strerror) from error


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _bad_json(path: Path, line: int, error: json.JSONDecodeError, text: str) -> NoData:
    shown = text.strip()[:60]
    return NoData(
        f"a line is not valid JSON: {error.msg} at column {error.colno}",
        where=f"{path}:{line}",
        got=shown or "an empty line",
        hint=f"sed -n {line}p {path}",
    )


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
    except NoData:
        raise
    except Exception as error:
        # datasets and Arrow raise many classes here; all of them mean that this file is unreadable.
        raise NoData(
            "a parquet file cannot be read", where=str(path), got=str(error).splitlines()[0][:200]
        ) from error


def shape_of(record: Mapping[str, Any], text_key: str, where: str) -> str:
    """Which shape a record has: `sharegpt`, `alpaca` or `records` (text under `text_key`).

    Raises:
        NoData: HP602 with the keys found when it is none of them.
    """
    if any(isinstance(record.get(key), list) for key in _CONVERSATION_KEYS):
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
    """Text of a record.

    Raises:
        NoData: HP602 when the key is missing or does not hold a string.
    """
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
    """Turns of an alpaca record: system, history pairs, instruction with input, output.

    Raises:
        NoData: HP602 when `instruction` or `output` is missing or not text.
    """
    for key in ("instruction", "output"):
        if not isinstance(record.get(key), str):
            raise NoData(
                f"an alpaca record has no text under `{key}`",
                where=where,
                got=sorted(record),
                allowed="instruction, output; optional: input, system, history",
                hint="data.format=sharegpt"
                if any(k in record for k in _CONVERSATION_KEYS)
                else None,
            )
    messages = _system(record)
    for question, answer in record.get("history") or []:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    question = "\n".join(t for t in (record["instruction"], record.get("input") or "") if t)
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": record["output"]})
    return messages


def sharegpt_messages(record: Mapping[str, Any], where: str) -> list[Message]:
    """Turns of a sharegpt (`conversations`: from, value) or OpenAI (`messages`: role, content) record.

    Raises:
        NoData: HP602 for missing keys and for roles that are not supported (tool calls).
    """
    turns = next((record[k] for k in _CONVERSATION_KEYS if isinstance(record.get(k), list)), None)
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
        role, content = _turn(turn)
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


def _turn(turn: Any) -> tuple[Any, Any]:
    if not isinstance(turn, Mapping):
        return None, None
    return turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))


def _system(record: Mapping[str, Any]) -> list[Message]:
    system = record.get("system")
    return [{"role": "system", "content": system}] if system else []
