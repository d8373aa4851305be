"""Records: lines and arrays of JSON, rows of CSV, TSV and parquet.

JSON and CSV are read with the standard library and not through Arrow: an error names the file and the line, records
may differ in their keys, and text that looks like a date or a number stays text. Parquet goes through `datasets` as a
stream of local files; nothing is fetched and nothing is copied into another cache.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.errors import MissingDependency, NoData

Record = Mapping[str, Any]


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """(where, record) of a parquet, CSV, TSV, JSON lines or JSON array file; NoData (HP602) names the line or row."""
    suffix = path.suffix
    if suffix == ".parquet":
        reader = _read_parquet(path)
    else:
        reader = _read_table(path) if suffix in (".csv", ".tsv") else _read_json(path)
    try:
        for where, record in reader:
            if not isinstance(record, Mapping):
                raise NoData(
                    "a record is not an object with keys",
                    where=where,
                    got=type(record).__name__,
                    allowed='objects such as {"text": "..."}',
                )
            yield where, record
    except UnicodeDecodeError as error:
        kind = "JSON" if suffix in (".json", ".jsonl", ".ndjson") else suffix[1:].upper()
        line = _undecodable_line(path)
        raise NoData(
            f"a {kind} file is not UTF-8 text", where=f"{path}:{line}", got=error.reason
        ) from error
    except OSError as error:
        raise NoData("a data file cannot be read", where=str(path), got=error.strerror) from error


def _undecodable_line(path: Path) -> int:
    """Number of the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        is_array = file.read(4096).lstrip().startswith("[")
        file.seek(0)
        if is_array:
            text = file.read()
            for index, record in enumerate(_parse(text, path, 1), start=1):
                where = f"{path}: record {index}"
                yield where, _unicode(record, text, where)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _unicode(_parse(line, path, number), line, where)


def _parse(text: str, path: Path, number: int) -> Any:
    """The value of a JSON text that begins in line `number` of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        shown = "".join(error.doc.split("\n")[error.lineno - 1 : error.lineno]).strip()[:60]
        number += error.lineno - 1
        raise NoData(
            f"a line is not valid JSON: {error.msg} at column {error.colno}",
            where=f"{path}:{number}",
            got=shown or "an empty line",
            hint=f"sed -n {number}p {path}",
        ) from error
    except (RecursionError, ValueError) as error:
        # Lists within lists without end, and numbers of thousands of digits.
        what = "values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise NoData(
            "a line of JSON cannot be read", where=f"{path}:{number}", got=what[:120]
        ) from error


def _unicode(record: Any, text: str, where: str) -> Any:
    """The record, when all of its words can be written; escapes may spell half a character."""
    if "\\u" in text:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise NoData(
                "a record holds half a character (a lone surrogate), which is not Unicode text",
                where=where,
                got=ascii(error.object[error.start : error.end]),
                allowed="surrogates in pairs, as in \\ud83d\\ude00",
            ) from error
        except RecursionError as error:
            raise NoData("values are nested too deep", where=where) from error
    return record


def _read_table(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # a text may be long
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    raise NoData(
                        "a row has more or fewer columns than the header",
                        where=where,
                        allowed=rows.fieldnames,
                        hint=f"sed -n {rows.line_num}p {path}",
                    )
                yield where, row
        except csv.Error as error:
            where = f"{path}:{rows.reader.line_num}"
            raise NoData("a line of a table cannot be read", where=where, got=str(error)) from error


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
        allowed=f"a string under `{text_key}`; sharegpt, alpaca or prompt_completion records",
        hint=f"data.text_key={max(texts, key=lambda key: texts[key])}" if texts else None,
    )
