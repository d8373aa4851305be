"""Reader of records: JSON lines and arrays, rows of CSV, TSV and parquet.

JSON and CSV are read with the standard library, not with Arrow. Errors can therefore name file and line, records may
have different keys, and text that looks like a date or number stays text. The size of a record is limited.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from hyper_parallel.errors import NoData, abbreviated
from hyper_parallel.received import LimitExceeded
from hyper_parallel.trainer.data._tables import read_parquet, records_too_long
from hyper_parallel.trainer.data.data_files import (
    KINDS,
    free_path,
    inner_suffix,
    line_command,
    open_bytes,
    open_text,
    pipe_command,
)
from hyper_parallel.trainer.data.record_keys import WITHOUT_INFLUENCE, Record
from hyper_parallel.units import MiB

_CHUNK: Final = 2**20
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_KEY: Final = re.compile(r'"([^"\\]*)"\s*:')
_HEAD: Final = 4096
"""Number of characters at the start of a file in which a JSON object must begin its list of records."""
_PLAIN_VALUE: Final = r'"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[-+.\w]+)\s*'
"""Pattern of a key with a plain value: a text without escapes, a number, true, false or null."""
_AROUND: Final = re.compile(rf'\s*\{{\s*(?:{_PLAIN_VALUE},\s*)*"[^"\\]*"\s*:\s*(?=\[)')
"""Pattern of the start of a JSON object up to its first array; all values before the array are plain."""
_OBJECT_END: Final = re.compile(rf"\s*(?:,\s*{_PLAIN_VALUE})*\}}\s*")
"""Pattern of the rest of a JSON object after its first array; all further values are plain."""
_SECOND_ARRAY: Final = re.compile(rf'\s*,\s*(?:{_PLAIN_VALUE},\s*)*"([^"\\]*)"\s*:\s*\[')
"""Pattern of the beginning of a second array in a JSON object, after its first array."""
_NOT_PLAIN: Final = "Expecting only plain values after the list of records"
"""Message of the decoding error for an object that has other values after its first array."""
_LONGEST_LITERAL: Final = 16
"""Number of last characters of a chunk; a decoding error there may come from the cut, not from invalid JSON."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs of a JSON object as a dict; used as `object_pairs_hook` of a JSON decoder.

    Raises:
        ValueError: A key occurs twice, so one of its values would be lost.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key `{twice[:40]}` occurs twice in one object")
    return members


_DECODER: Final = json.JSONDecoder(object_pairs_hook=unique_keys)
"""Shared decoder, because `json.loads` with a hook would construct a decoder per call."""


class ArrayReader:
    """Incremental reader of a JSON array, which decodes one element at a time.

    The file may also be a JSON object that contains the array and otherwise only plain values.

    Args:
        file: Text file at its beginning.
        most: Maximum number of characters of an element.

    Attributes:
        key: Key of the array if the file is an object, else "".
        second_key: Key of a second array in the object, set before the error for it is raised; None: none was found.
        outer_keys: Other keys if the file is an object: those before the array and, at the end, those after it.
        first_line: Line number in the file from which line numbers of decoding errors count.
    """

    second_key: str | None

    def __init__(self, file: IO[str], most: int) -> None:
        self._file, self._most = file, most
        self._buffer, self._at, self.first_line = file.read(_HEAD), 0, 1
        self._ended = False
        self.key, self.second_key = "", None
        around = _AROUND.match(self._buffer)
        self._is_value = around is not None
        self.outer_keys: list[str] = []
        if around is not None:
            self._at = around.end()
            *self.outer_keys, self.key = _KEY.findall(around[0])

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        """Yield (element, its JSON text) for each element.

        Raises:
            json.JSONDecodeError: The file is not a valid array; line numbers in the error count from `first_line`.
            LimitExceeded: An element is longer than the limit.
            ValueError, RecursionError: A key occurs twice, a number is too long, or values are nested too deeply.
        """
        self._expect("[", "Expecting value")
        if self._next() == "]":
            self._close()
            return
        while True:
            self._next()
            yield self._element()
            if self._next() == "]":
                self._close()
                return
            self._expect(",", "Expecting ',' delimiter")

    def _fill(self) -> bool:
        """Read a chunk of the file, at least the size of the unread buffer; return False at the end of the file."""
        if self._ended:
            return False
        chunk = self._file.read(max(_CHUNK, len(self._buffer) - self._at))
        if not chunk:
            self._ended = True
            return False
        self.first_line += self._buffer.count("\n", 0, self._at)
        self._buffer, self._at = self._buffer[self._at :] + chunk, 0
        return True

    def _next(self) -> str:
        """Skip white space; return the next character without consuming it, or "" at the end of the file."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _expect(self, character: str, problem: str) -> None:
        if self._next() != character:
            raise self._error(problem)
        self._at += 1

    def _close(self) -> None:
        self._at += 1
        if self._is_value:
            while len(self._buffer) - self._at < _CHUNK and self._fill():
                pass
            end = _OBJECT_END.match(self._buffer, self._at)
            if end is None:
                second = _SECOND_ARRAY.match(self._buffer, self._at)
                self.second_key = second[1] if second else None
                raise self._error(_NOT_PLAIN)
            self._at = end.end()
            self.outer_keys += _KEY.findall(end[0])
        if self._next():
            raise self._error("Extra data")

    def _error(self, problem: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(problem, self._buffer, self._at)

    def _element(self) -> tuple[Any, str]:
        """Read the next element; return it and its JSON text. Raise LimitExceeded if it is longer than the limit."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated")
                cut = cut or error.pos >= len(self._buffer) - _LONGEST_LITERAL
                if not cut or not self._more():
                    raise
                continue
            may_continue = self._buffer[end - 1] not in '}]"'  # a number
            if may_continue and end > len(self._buffer) - _LONGEST_LITERAL and self._more():
                continue
            if end - self._at > self._most:
                raise LimitExceeded(f"{end - self._at:,} characters, more than {self._most:,}")
            text, self._at = self._buffer[self._at : end], end
            return value, text

    def _more(self) -> bool:
        length = len(self._buffer) - self._at
        if length > self._most:
            raise LimitExceeded(f"more than {self._most:,} characters")
        return self._fill()

    @property
    def line(self) -> int:
        """Line number of the start of the current element, for errors."""
        return self.first_line + self._buffer.count("\n", 0, self._at)


_PART: Final = 2**20
_FILE_KEYS: Final = frozenset(
    (
        "count", "total", "size", "num_records", "num_rows", "num_examples", "name", "title", "description", "info",
        "comment", "note", "format",
    )
)  # fmt: skip
"""Metadata keys that a JSON object with a list of records may have, in addition to `WITHOUT_INFLUENCE`."""
_UNCOUNTED: Final = 2**22
"""Maximum characters of a line that is parsed without counting its values first, because it needs little memory."""
_MOST_VALUES: Final = 8_000_000
"""Maximum number of values in a line of more than `_UNCOUNTED` characters."""


def read_records(path: Path, most: int = 64 * MiB) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) for each record of a parquet, CSV, TSV, JSON lines or JSON array file.

    Args:
        path: Path of the file.
        most: Maximum size of a record, in characters of text files and bytes of parquet files.

    Raises:
        NoData: HP602 naming the file, line or row that is unreadable or too long, or is not a record.
        MissingDependency: HP501 when the package that reads or decompresses the file is not installed.
    """
    suffix = inner_suffix(path)
    if suffix == ".parquet":
        reader = read_parquet(path, most)
    else:
        reader = (_read_table if suffix in (".csv", ".tsv") else _read_json)(path, most)
    try:
        for where, record in reader:
            if not isinstance(record, Mapping):
                of_turns = isinstance(record, list) and record and isinstance(record[0], dict)
                rewrite = pipe_command(path, "jq -c '.[] | {messages: .}'")
                raise NoData(
                    "a record is not a JSON object",
                    where=where,
                    got=type(record).__name__,
                    allowed='objects such as {"text": "..."}',
                    hint=f"{rewrite} > {free_path('lines.jsonl')}" if of_turns and ": record " in where else None,
                )
            _refuse_columns(record, path, where)
            yield where, record
    except UnicodeDecodeError as error:
        kind = "JSON" if KINDS.get(suffix, "json") == "json" else suffix[1:].upper()
        line = _undecodable_line(path)
        raise NoData(
            f"a {kind} file is not UTF-8 text",
            where=f"{path}:{line}",
            got=error.reason,
            hint=line_command(path, line),
        ) from error
    except OSError as error:
        raise unreadable_file(path, error) from error


def unreadable_file(path: Path, error: OSError) -> NoData:
    """Return the error for a data file that the operating system cannot read."""
    return NoData(
        "a data file cannot be read",
        where=str(path),
        got=error.strerror or str(error),
        hint="check the path and its permissions",
    )


def _refuse_columns(record: Record, path: Path, where: str) -> None:
    """Raise NoData (HP602) if an object in a .json file has columns as values, as `DataFrame.to_json` writes them."""
    first = next(iter(record.values()), None)
    if not isinstance(first, (dict, list)) or len(record) < 2:
        return
    of_rows = isinstance(first, dict) and bool(first) and all(key.isdigit() for key in first)
    of_texts = isinstance(first, list) and bool(first) and all(isinstance(v, str) for v in first)
    have_equal_sizes = all(type(v) is type(first) and len(v) == len(first) for v in record.values())
    if have_equal_sizes and (of_rows or of_texts) and inner_suffix(path) == ".json":
        target = json.dumps(str(free_path("lines.jsonl")))
        written = f"pandas.read_json({json.dumps(str(path))}).to_json({target}"
        code = f'import pandas; {written}, orient="records", lines=True)'
        raise NoData(
            "a file seems to contain columns instead of records",
            where=where,
            got=[str(key) for key in record],
            allowed="a record in each line, or a list of records",
            hint=shlex.join(["python", "-c", code]),
        )


def _lines(file: IO[str], path: Path, most: int, separators: str) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(most + 1)
        if len(line) > most:
            raise records_too_long(f"{path}:{number}", f"more than {most:,} characters in a line", most)
        if len(line) > _UNCOUNTED and sum(map(line.count, separators)) > _MOST_VALUES:
            raise NoData(
                "a line has too many values",
                where=f"{path}:{number}",
                allowed=f"at most {_MOST_VALUES:,} values",
                hint=f"divide this record; to see its beginning: {line_command(path, number)} | head -c 1000",
            )
        if not line:
            return
        yield line


def _undecodable_line(path: Path) -> int:
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
        is_array = _is_array(file, most, inner_suffix(path) != ".json")
    with open_text(path) as file:
        if is_array:
            yield from _read_array(file, path, most)
            return
        for number, line in enumerate(_lines(file, path, most, ",[{"), start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _unicode(_parse(line, path, number), line, where)


def _is_array(file: IO[str], most: int, of_lines: bool) -> bool:
    """Return whether a file is one JSON array, or an object that contains the list of records.

    Otherwise, each line is a record. With `of_lines`, the file name implies this, so an object in one line is a record.
    """
    head = file.read(_HEAD)
    if head.lstrip().startswith("["):
        return True
    if _AROUND.match(head) is None:
        return False
    text = head.lstrip()
    while "\n" not in text and len(text) <= min(most, _UNCOUNTED) and (part := file.read(_PART)):
        text += part
    line, end, rest = text.partition("\n")
    try:
        value = json.loads(line) if end or len(text) <= min(most, _UNCOUNTED) else None
    except RecursionError:
        return False  # a line with values that are nested too deeply
    except ValueError:
        return True  # the object has several lines
    if value is None:
        return not of_lines
    if of_lines or (rest or file.read(_HEAD)).strip() or not isinstance(value, dict):
        return False
    lists = [part for part in value.values() if isinstance(part, list | dict)]
    records = lists[0] if len(lists) == 1 and isinstance(lists[0], list) else []
    # If the list has turns instead of records, the line is itself a record.
    return bool(records) and all(
        isinstance(record, dict) and not {"role", "from"} & record.keys() for record in records
    )


def _read_array(file: IO[str], path: Path, most: int) -> Iterator[tuple[str, Any]]:
    reader = ArrayReader(file, most)
    try:
        for index, (record, text) in enumerate(reader, start=1):
            where = f"{path}: record {index}"
            if index == 1:
                _check_outer_keys(reader, path)
            yield where, _unicode(record, text, where)
        _check_outer_keys(reader, path)
    except json.JSONDecodeError as error:
        if reader.second_key is not None:
            raise several_lists([reader.key, reader.second_key], path) from error
        if error.msg == _NOT_PLAIN:
            raise _not_plain(reader, path) from error
        raise _not_json(error, path, reader.first_line) from error
    except LimitExceeded as error:
        raise records_too_long(f"{path}:{reader.line}", str(error), most) from error
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, f"{path}:{reader.line}") from error


def _check_outer_keys(reader: ArrayReader, path: Path) -> None:
    if unknown := sorted({*reader.outer_keys} - WITHOUT_INFLUENCE - _FILE_KEYS):
        raise NoData(
            "the object that contains the list of records has unknown keys",
            where=str(path),
            got=unknown,
            allowed="the list of records, and keys without influence such as name, version, license",
            hint=pipe_command(path, "jq -c '.[] | arrays | .[]'") + f" > {free_path('records.jsonl')}",
        )


def _not_plain(reader: ArrayReader, path: Path) -> NoData:
    rewrite = pipe_command(path, f"jq -c {shlex.quote(f'.[{json.dumps(reader.key)}][]')}")
    return NoData(
        "the object that contains the list of records has a nested or invalid value after it",
        where=f"{path}:{reader.line}",
        allowed="texts, numbers, true, false and null after the list",
        hint=f"{rewrite} > {free_path('records.jsonl')}",
    )


def several_lists(keys: Sequence[str], path: Path | str) -> NoData:
    """Return the error for a JSON object with several lists of records, such as the splits of a dataset."""
    first, path = keys[0], Path(path)
    target = free_path(f"{first}.jsonl" if first.isidentifier() else "records.jsonl")
    command = pipe_command(path, f"jq -c {shlex.quote(f'.[{json.dumps(first)}][]')}")
    return NoData(
        "the object that contains the records has several lists, but a source is one list",
        where=str(path),
        got=list(keys),
        allowed="a file for each list",
        hint=f"{command} > {target}" if KINDS.get(inner_suffix(path)) == "json" else None,
    )


def _parse(text: str, path: Path, number: int) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if not text[error.pos :].strip() or text.strip() in "{[":
            raise NoData(
                "a line ends within a JSON record; a record is one line",
                where=f"{path}:{number}",
                got=_excerpt(path, text),
                allowed="a record in each line",
                # After complete records, the line is truncated, which no command mends.
                hint=over_lines_hint(path) if number == 1 else line_command(path, number),
            ) from error
        raise _not_json(error, path, number) from error
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, f"{path}:{number}") from error


def turns_hint(path: Path) -> str:
    """Return a shell command for a JSON file whose records are single turns.

    The command converts an array to one conversation, and other JSON to one record per line.
    """
    with open_text(path) as file:
        of_lists = file.read(_HEAD).lstrip().startswith("[")
    if not of_lists:
        return over_lines_hint(path)
    rewrite = pipe_command(path, "jq -c '{messages: .}'")
    return f"{rewrite} > {free_path('lines.jsonl')}"


def over_lines_hint(path: Path | str) -> str:
    """Return a shell command that converts a JSON file to one record per line."""
    return f"{pipe_command(Path(path), 'jq -c .')} > {free_path('lines.jsonl')}"


def _not_json(error: json.JSONDecodeError, path: Path, first_line: int) -> NoData:
    begin = error.doc.rfind("\n", 0, error.pos) + 1
    shown = _excerpt(path, error.doc[begin : begin + 400].partition("\n")[0])
    number, problem = first_line + error.lineno - 1, error.msg.removesuffix(" at")
    return NoData(
        f"a line is not valid JSON: {problem} at column {error.colno}",
        where=f"{path}:{number}",
        got=shown or "an empty line",
        hint=line_command(path, number),
    )


def _excerpt(path: Path, line: str) -> str:
    """Return the start of a line for an error message; the content of a linked file may be private and is not shown."""
    return "a line of the file that it links to" if path.is_symlink() else line.strip()[:60]


def _unreadable(error: Exception, where: str) -> NoData:
    problem = "values are nested too deeply" if isinstance(error, RecursionError) else str(error)
    return NoData("a line of JSON cannot be read", where=where, got=problem[:120])


def _unicode(record: Any, text: str, where: str) -> Any:
    """Return `record`; raise NoData (HP602) for a lone surrogate, or values nested too deeply to search for one."""
    if "\\u" in text:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise NoData(
                "a record contains a lone surrogate, which is not valid Unicode",
                where=where,
                got=ascii(error.object[error.start : error.end]),
                allowed="surrogates in pairs, as in \\ud83d\\ude00",
            ) from error
        except RecursionError as error:
            raise NoData(
                "values are nested too deeply",
                where=where,
                hint="write the nested values as JSON text",
            ) from error
    return record


def _read_table(path: Path, most: int) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(min(most, 2**31 - 1))
    delimiter = "\t" if inner_suffix(path) == ".tsv" else ","
    with open_text(path, newline="") as file:
        lines = _lines(file, path, most, delimiter)
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    command = line_command(path, rows.line_num)
                    raise NoData(
                        f"a row has {'more' if None in row else 'fewer'} columns than the header",
                        where=where,
                        allowed=rows.fieldnames,
                        hint=f"quote values with a delimiter or line break; see the row's last line: {command}",
                    )
                yield where, row
        except csv.Error as error:
            where = f"{path}:{rows.reader.line_num}"
            if "field limit" in str(error):
                raise records_too_long(where, str(error), most) from error
            hint = line_command(path, rows.reader.line_num)
            raise NoData("a line of a table cannot be read", where=where, got=str(error), hint=hint) from error


def text_of(record: Record, text_key: str, where: str, *, later: bool = False) -> str:
    """Return the text of a record under `text_key`; `later` tells whether the source has earlier records.

    Raises:
        NoData: HP602 when the record has no text under `text_key`.
    """
    value = record.get(text_key)
    if isinstance(value, str):
        return value
    texts = {key: len(text) for key, text in record.items() if isinstance(text, str)}
    hint = {"data.text_key": max(texts, key=texts.__getitem__)} if texts else None
    raise NoData(
        f"a record has no text under `{text_key}`",
        where=where,
        got=f"{text_key}: {abbreviated(value)}" if text_key in record else sorted(record),
        allowed=f"a text under `{text_key}` in every record"
        if later
        else f"a text under `{text_key}`; or, if `data.format` is auto, records of the format sharegpt, alpaca or "
        "prompt_completion",
        hint="add the text to this record, or remove the record" if later else hint,
    )
