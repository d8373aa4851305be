"""Data whose records take unbounded memory: refused by file and row, before the memory is spent."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config import Data
from hyper_parallel.trainer.data.records import ArrayReader
from hyper_parallel.trainer.data.sources import Document, resolve
from tests.received.bounds import refusal, within_bounds
from tests.slow import slow_cells

pytestmark = pytest.mark.unit

MIB = 2**20


def documents(path: Path, stage: str = "pt", **data: Any) -> list[Document]:
    return list(resolve(Data(source=str(path), **data), stage).documents())


def parquet(path: Path, rows: dict[str, Any], **how: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(rows), path, compression="zstd", **how)


def saved(path: Path, rows: dict[str, Any]) -> None:
    """A folder of `save_to_disk` whose one file is compressed, as Arrow allows."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(path)
    (file,) = path.glob("*.arrow")
    table = pa.table(rows)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(file), "wb") as out,
        pa.ipc.new_stream(out, table.schema, options=options) as to,
    ):
        to.write_table(table)


LONG = "x" * 3 * MIB
LINES = {
    "a.jsonl": json.dumps({"text": "short"}) + "\n" + json.dumps({"text": LONG}) + "\n",
    "a.json": '[{"text": "short"},\n' + json.dumps({"text": LONG}) + "]",
    "a.csv": f'text\nshort\n"{LONG}"\n',
    "a.tsv": f"text\nshort\n{LONG}\n",
}


@pytest.mark.parametrize("name", LINES)
def test_a_record_beyond_the_limit_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(LINES[name])
    error = refusal(lambda: documents(path, max_record_bytes=MIB), "HP602", "max_record_bytes", f"{path}:")
    assert f"data.max_record_bytes={4 * MIB}" in str(error.hint)
    assert len(documents(path, max_record_bytes=4 * MIB)) == 2


@slow_cells("rows1-how1")
@pytest.mark.torch
@pytest.mark.parametrize(
    ("rows", "how"),
    [
        ({"text": ["x" * 64 * MIB]}, {}),
        ({"text": ["short"] * 500 + ["x" * 384 * MIB] + ["short"] * 500}, {}),
        ({"text": ["x" * 2 * MIB] * 200}, {}),
        ({"text": ["x" * 2 * MIB] * 20}, {"use_dictionary": False}),
    ],
)
def test_parquet_that_expands_is_refused(tmp_path: Path, rows: Any, how: dict[str, Any]) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, rows, **how)
    assert path.stat().st_size < MIB / 2
    refusal(lambda: documents(path, max_record_bytes=MIB), "HP602", "max_record_bytes", "a.parquet: row")


@pytest.mark.torch
def test_rows_of_parquet_within_the_limit_are_read_in_order(tmp_path: Path) -> None:
    texts = [f"text {n} " + "word " * (n % 50) for n in range(3000)]
    path = tmp_path / "a.parquet"
    parquet(path, {"text": texts}, row_group_size=700)
    assert [document.text for document in documents(path)] == texts
    assert documents(path)[2999].where == f"{path}: row 2999"


@pytest.mark.torch
def test_a_saved_table_that_expands_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "saved", {"text": ["x" * 384 * MIB]})
    refusal(lambda: documents(tmp_path / "saved", max_record_bytes=MIB), "HP602", "max_record_bytes")


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.jsonl", '{"text": [' + "[]," * 6 * MIB + "[]]}\n", "too many values"),
        ("a.csv", "text\n" + "," * 9 * MIB + "\n", "too many values"),
    ],
)
def test_a_record_of_millions_of_values_is_refused(tmp_path: Path, name: str, text: str, word: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    refusal(lambda: documents(path), "HP602", word, f"{path}:")


def test_a_long_text_file_is_read_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "".join(f"line {n} \u00e9\u4e2d\U0001f600\n" for n in range(1000))
    path.write_text(text)
    whole, pieces = documents(path), documents(path, max_record_bytes=1000)
    assert [document.text for document in whole] == [text]
    assert "".join(document.text for document in pieces) == text
    assert all(document.text.endswith("\n") for document in pieces)
    assert len(pieces) > 10
    source = resolve(Data(source=str(path), max_record_bytes=1000), "pt")
    assert source.identity() != resolve(Data(source=str(path)), "pt").identity()


@pytest.mark.parametrize("size", range(5, 14))
def test_a_line_without_end_is_cut_between_characters(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.txt"
    text = "a\u00e9\u4e2d\U0001f600" * 50
    path.write_text(text)
    pieces = documents(path, max_record_bytes=size)
    assert "".join(document.text for document in pieces) == text


def read_array(text: str, chunk: int, most: int = 1000) -> list[Any]:
    """The elements of an array that is read in chunks of a few characters."""
    import io

    class Slow(io.StringIO):
        def read(self, size: int | None = -1, /) -> str:
            return super().read(chunk)

    return [value for value, _ in ArrayReader(Slow(text), most)]


ARRAYS = [
    "[]", " [ ] ", "[1]", '[{"a": [1, {"b": "]},["}]}, "x\\"y", -1.5e+3, true, null]', "[12345, 678 , 9]\n",
    '["\\u00e9\\ud83d\\ude00", [[], {}], {"": ""}]',
]  # fmt: skip


@pytest.mark.parametrize("text", ARRAYS)
def test_an_array_is_read_in_any_chunks_as_at_once(text: str) -> None:
    for chunk in range(1, len(text) + 1):
        assert read_array(text, chunk) == json.loads(text)


def test_a_damaged_array_is_refused_wherever_it_is_damaged() -> None:
    text = ARRAYS[3]
    for at, character in itertools.product(range(len(text)), ("", ",", "}", "]", "x")):
        damaged = text[:at] + character + text[at + 1 :]
        for chunk in (1, 3, 1000):
            assert _outcome(read_array, damaged, chunk) == _outcome(json.loads, damaged), damaged


def _outcome(read: Callable[..., Any], *given: Any) -> str:
    try:
        return repr(read(*given))
    except json.JSONDecodeError:
        return "refused"


def test_millions_of_short_records_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + ",\n".join(['{"text": "short text"}'] * 200_000) + "]")
    with within_bounds(most_mib=100):
        assert sum(1 for _ in resolve(Data(source=str(path)), "pt").documents()) == 200_000
