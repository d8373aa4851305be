"""Records: JSON lines, JSON arrays and parquet rows, and what a conversation looks like in them.

JSON is read with the standard library and not through Arrow: an error names the file and the line, records may
differ in their keys, and text that looks like a date stays text. Parquet goes through `datasets` as a stream of
local files; nothing is fetched and nothing is copied into another cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from hyper_parallel.errors import MissingDependency, NoData

Message = dict[str, str]
"""One turn of a conversation: `role` (system, user or assistant) and `content`."""

Record = Mapping[str, Any]

_SAME_ROLE: Final = {"human": "user", "gpt": "assistant"}
_TURNS: Final = ("conversations", "messages")


class _Turn(BaseModel):
    role: Literal["system", "user", "human", "assistant", "gpt"] = Field(
        validation_alias=AliasChoices("from", "role")
    )
    content: str = Field(validation_alias=AliasChoices("value", "content"))


class _Sharegpt(BaseModel):
    """A sharegpt (`conversations`: from, value) or OpenAI (`messages`: role, content) record."""

    system: str | None = None
    turns: list[_Turn] = Field(validation_alias=AliasChoices(*_TURNS))

    def exchanges(self) -> Iterator[tuple[str, str]]:
        """Role and content of every turn."""
        return ((_SAME_ROLE.get(t.role, t.role), t.content) for t in self.turns)


class _Alpaca(BaseModel):
    """An alpaca record: history pairs, then the instruction with its input, and the output."""

    system: str | None = None
    history: list[tuple[str, str]] = []
    instruction: str
    input: str = ""
    output: str

    def exchanges(self) -> Iterator[tuple[str, str]]:
        """Role and content of every turn."""
        question = "\n".join(t for t in (self.instruction, self.input) if t)
        for asked, answer in (*self.history, (question, self.output)):
            yield "user", asked
            yield "assistant", answer


_CONVERSATIONS: Final[dict[str, tuple[type[_Sharegpt | _Alpaca], str]]] = {
    "sharegpt": (
        _Sharegpt,
        "`conversations` with from and value, or `messages` with role and content",
    ),
    "alpaca": (_Alpaca, "instruction, output; optional: input, system, history"),
}
"""How a conversation is read, and what its record holds in words."""


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
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


def shape_of(record: Record, text_key: str, where: str) -> str:
    """Which shape a record has: `sharegpt`, `alpaca` or `records` (text under `text_key`)."""
    shape = _conversation(record)
    if shape is None:
        text_of(record, text_key, where)
    return shape or "records"


def _conversation(record: Record) -> str | None:
    if any(isinstance(record.get(key), list) for key in _TURNS):
        return "sharegpt"
    return "alpaca" if "instruction" in record and "output" in record else None


def text_of(record: Record, text_key: str, where: str) -> str:
    """Text of a record."""
    value = record.get(text_key)
    if isinstance(value, str):
        return value
    texts = {key: len(text) for key, text in record.items() if isinstance(text, str)}
    raise NoData(
        f"a record has no text under `{text_key}`",
        where=where,
        got=f"{text_key}: {type(value).__name__}" if text_key in record else sorted(record),
        allowed=f"a string under `{text_key}`; sharegpt or alpaca records",
        hint=f"data.text_key={max(texts, key=lambda key: texts[key])}" if texts else None,
    )


def messages_of(record: Record, shape: str, where: str) -> tuple[Message, ...]:
    """Turns of an alpaca or sharegpt record, the system's first; NoData (HP602) names the turn that is wrong."""
    model, allowed = _CONVERSATIONS[shape]
    try:
        read = model.model_validate({k: v for k, v in record.items() if v is not None})
    except ValidationError as error:
        problem, other = error.errors(include_url=False)[0], _conversation(record)
        turn = next((f", turn {part + 1}" for part in problem["loc"] if isinstance(part, int)), "")
        key, found = ".".join(map(str, problem["loc"])), problem["input"]
        raise NoData(
            f"a record is not {shape}: `{key}`, {problem['msg']}",
            where=where + turn,
            got=sorted(found) if isinstance(found, dict) else f"{found!r:.60}",
            allowed=allowed,
            hint=f"data.format={other}" if other not in (None, shape) else None,
        ) from error
    turns = [("system", read.system)] if read.system else []
    return tuple({"role": r, "content": c} for r, c in (*turns, *read.exchanges()))
