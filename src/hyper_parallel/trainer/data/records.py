"""Records: lines and arrays of JSON, rows of CSV, TSV and parquet.

JSON and CSV are read with the standard library and not through Arrow: an error names the file and the line, records
may differ in their keys, and text that looks like a date or a number stays text. Nothing is fetched, nothing is copied
into another cache, and no record is read that is longer than a limit.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from hyper_parallel.errors import NoData
from hyper_parallel.received import LimitExceeded
from hyper_parallel.trainer.data._parquet import read_parquet, records_too_long
from hyper_parallel.trainer.data.data_files import inner_name, line_command, open_bytes, open_text
from hyper_parallel.trainer.data.json_array import AROUND, HEAD, ArrayReader, unique_keys
from hyper_parallel.trainer.data.record_keys import WITHOUT_INFLUENCE, Record
from hyper_parallel.units import MiB

_PART: Final = 2**20
_OF_FILES: Final = frozenset(
    (
        "count", "total", "size", "num_records", "num_rows", "num_examples", "name", "title", "description", "info",
        "comment", "note", "format",
    )
)  # fmt: skip
"""Keys that files have beside their list of records."""
_UNCOUNTED: Final = 2**22
"""Characters of a line whose values are not counted before it is read: they take little memory in any case."""
_MOST_VALUES: Final = 8_000_000
"""Of one record: each takes up to a hundred bytes of memory."""


def read_records(path: Path, most: int = 64 * MiB) -> Iterator[tuple[str, Record]]:
    """Yield (where, record) of a parquet, CSV, TSV, JSON lines or JSON array file.

    Args:
        path: The file.
        most: Most bytes of a record; no more than a few times as much is held in memory.

    Raises:
        NoData: HP602 naming the line or row that cannot be read, or is longer.
    """
    suffix = inner_name(path).suffix
    if suffix == ".parquet":
        reader = read_parquet(path, most)
    else:
        reader = (_read_table if suffix in (".csv", ".tsv") else _read_json)(path, most)
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


def _lines(file: IO[str], path: Path, most: int) -> Iterator[str]:
    """Yield lines, none of which is longer than the limit."""
    for number in itertools.count(1):
        line = file.readline(most + 1)
        if len(line) > most:
            raise records_too_long(
                f"{path}:{number}", f"more than {most:,} characters in a line", most
            )
        if not line:
            return
        yield line


def _undecodable_line(path: Path) -> int:
    """Number of the first line that is not UTF-8."""
    decoder, number = codecs.getincrementaldecoder("utf-8")(), 1
    with open_bytes(path) as file:
        while part := file.readline(_PART):
            try:
                decoder.decode(part)
            except UnicodeDecodeError:
                return number
            number += part.endswith(b"\n")
    return number


def _read_json(path: Path, most: int) -> Iterator[tuple[str, Any]]:
    with open_text(path) as file:
        is_array = _is_array(file, most, inner_name(path).suffix != ".json")
    with open_text(path) as file:
        if is_array:
            yield from _read_array(file, path, most)
            return
        for number, line in enumerate(_lines(file, path, most), start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _unicode(_parse(line, path, number), line, where)


def _is_array(file: IO[str], most: int, of_lines: bool) -> bool:
    """Return whether a file is one array of records, or an object around it, and not a record in each line.

    Args:
        file: Text of the file.
        most: Most characters of a record.
        of_lines: The name of the file says that a line is a record: an object in one line is one.
    """
    head = file.read(HEAD)
    if head.lstrip().startswith("["):
        return True
    if AROUND.match(head) is None:
        return False
    text = head.lstrip()
    while "\n" not in text and len(text) <= min(most, _UNCOUNTED) and (part := file.read(_PART)):
        text += part
    line, end, behind = text.partition("\n")
    try:
        value = json.loads(line) if end or len(text) <= min(most, _UNCOUNTED) else None
    except (ValueError, RecursionError):
        return True  # an object over several lines
    if value is None:
        return not of_lines
    if of_lines or (behind or file.read(HEAD)).strip() or not isinstance(value, dict):
        return False
    lists = [part for part in value.values() if isinstance(part, list | dict)]
    records = lists[0] if len(lists) == 1 and isinstance(lists[0], list) else []
    # The list of a record in one line has turns.
    return bool(records) and all(
        isinstance(record, dict) and not {"role", "from"} & record.keys() for record in records
    )


def _read_array(file: IO[str], path: Path, most: int) -> Iterator[tuple[str, Any]]:
    reader = ArrayReader(file, most)
    try:
        for index, (record, text) in enumerate(reader, start=1):
            where = f"{path}: record {index}"
            if index == 1:
                _refuse_beside(reader, path)
            yield where, _unicode(record, text, where)
        _refuse_beside(reader, path)
    except json.JSONDecodeError as error:
        if reader.further is not None:
            raise several_lists([reader.key, reader.further], path) from error
        raise _not_json(error, path, reader.first_line) from error
    except LimitExceeded as error:
        raise records_too_long(f"{path}:{reader.line}", str(error), most) from error
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, f"{path}:{reader.line}") from error


def _refuse_beside(reader: ArrayReader, path: Path) -> None:
    """Refuse keys beside the list of records that could change a record: a system text, or a weight of all of them."""
    if unknown := sorted({*reader.beside} - WITHOUT_INFLUENCE - _OF_FILES):
        raise NoData(
            "an object around the records has keys that no record gets",
            where=str(path),
            got=unknown,
            allowed="the list of records, and keys without influence such as name, version, license",
            hint=f"jq -c '.[] | arrays | .[]' {path} > records.jsonl, if they do not matter",
        )


_DECODER: Final = json.JSONDecoder(object_pairs_hook=unique_keys)
"""One for all records: `json.loads` with a hook makes one for every call, which takes as long as a short record."""


def several_lists(keys: Sequence[str], path: Path | str) -> NoData:
    """Return the refusal of an object that has several lists of records, such as the splits of a data set."""
    first = keys[0]
    name, target = shlex.quote(str(path)), f"{first}.jsonl" if first.isidentifier() else "x.jsonl"
    return NoData(
        "an object around the records has several lists of them, and a source is one list",
        where=str(path),
        got=list(keys),
        allowed="a file for each list",
        hint=f"jq -c '.[\"{first}\"][]' {name} > {target}",
    )


def _parse(text: str, path: Path, number: int) -> Any:
    """The value of a JSON text that begins in line `number` of a file."""
    if len(text) > _UNCOUNTED and sum(map(text.count, ",[{")) > _MOST_VALUES:
        raise NoData(
            "a record of JSON has more values than text",
            where=f"{path}:{number}",
            allowed=f"at most {_MOST_VALUES:,} values",
        )
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if not text[error.pos :].strip() or text.strip() in "{[":
            raise _over_lines(path, number, text) from error
        raise _not_json(error, path, number) from error
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, f"{path}:{number}") from error


def _over_lines(path: Path, number: int, text: str) -> NoData:
    """Return the refusal of a record that stretches over lines, or whose end is missing."""
    return NoData(
        "a line ends within a JSON record; a record is one line",
        where=f"{path}:{number}",
        got=text.strip()[:60],
        allowed="a record in each line",
        hint=over_lines_hint(path),
    )


def over_lines_hint(path: Path | str) -> str:
    """Return the command that writes each record of a file in one line."""
    tool = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(Path(path).suffix)
    name = shlex.quote(str(path))
    return f"{tool} {name} | jq -c . > lines.jsonl" if tool else f"jq -c . {name} > lines.jsonl"


def _not_json(error: json.JSONDecodeError, path: Path, first_line: int) -> NoData:
    """The refusal of a text that begins in a line of a file."""
    begin = error.doc.rfind("\n", 0, error.pos) + 1
    shown = error.doc[begin : begin + 400].partition("\n")[0].strip()[:60]
    number, problem = first_line + error.lineno - 1, error.msg.removesuffix(" at")
    return NoData(
        f"a line is not valid JSON: {problem} at column {error.colno}",
        where=f"{path}:{number}",
        got=shown or "an empty line",
        hint=line_command(path, number),
    )


def _unreadable(error: Exception, where: str) -> NoData:
    """The refusal of lists within lists without end, and of numbers of thousands of digits."""
    what = "values are nested too deep" if isinstance(error, RecursionError) else str(error)
    return NoData("a line of JSON cannot be read", where=where, got=what[:120])


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


def _read_table(path: Path, most: int) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(min(most, 2**31 - 1))
    delimiter = "\t" if inner_name(path).suffix == ".tsv" else ","
    with open_text(path, newline="") as file:
        lines = _narrow(_lines(file, path, most), path, delimiter)
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    raise NoData(
                        "a row has more or fewer columns than the header",
                        where=where,
                        allowed=rows.fieldnames,
                        hint=line_command(path, rows.line_num),
                    )
                yield where, row
        except csv.Error as error:
            where = f"{path}:{rows.reader.line_num}"
            raise NoData("a line of a table cannot be read", where=where, got=str(error)) from error


def _narrow(lines: Iterator[str], path: Path, delimiter: str) -> Iterator[str]:
    """Yield lines of a table, of which none has more columns than any table."""
    for number, line in enumerate(lines, start=1):
        if len(line) > _UNCOUNTED and line.count(delimiter) > _MOST_VALUES:
            raise NoData("a line of a table has millions of columns", where=f"{path}:{number}")
        yield line


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
