"""Tables: parquet files, and datasets that the library `datasets` opens (folders, names on the Hugging Face Hub).

Decoding an untrusted parquet file may take any amount of memory: a column may be compressed by a factor of ten
thousand, or refer to one long value in a million rows. The reader first checks the mean size of a row in the file's
metadata. Then it decodes each batch under a limit on the memory of this process.

A dataset on the Hub is read from the library's cache, into which `hub.fetch_dataset` downloads it; streaming reads it
from the Hub.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hyper_parallel.config import Data, parse_yaml
from hyper_parallel.errors import HyperParallelError, MissingDependency, NoData, abbreviated
from hyper_parallel.hub import parse_dataset
from hyper_parallel.received import Limits, bounded_heap, names_outside, outside_target, read_json
from hyper_parallel.trainer.data.data_files import is_file_name
from hyper_parallel.trainer.data.record_keys import Record
from hyper_parallel.units import MiB, TiB, format_bytes

_BATCH_BYTES: Final = 16 * MiB
_MOST_ROWS: Final = 1024
_HEAP_RECORDS: Final = 8
"""Memory limit for decoding a batch, as a multiple of the record size limit: space for a parquet page, its decoded
text, and its rows as Python objects."""
_LEAST_HEAP: Final = 256 * MiB
"""Smallest memory limit: space for libraries and threads that start during a read."""


def read_parquet(path: Path, most: int) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) for each row of a parquet file.

    Raises:
        NoData: HP602 when the file is unreadable, or rows, or the memory to decode them, exceed the limit for
            rows of at most `most` bytes.
        MissingDependency: HP501 when the package `pyarrow` is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(
            "reading parquet needs the package `pyarrow`",
            where=str(path),
            hint="pip install pyarrow",
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                size = _batch_rows(file.metadata.row_group(group), path, number, most)
                batches = file.iter_batches(size, row_groups=[group], use_threads=False)
                while True:
                    with _decoding(f"{path}: row {number}", most):
                        batch = next(batches, None)
                        rows = None if batch is None else batch.to_pylist()
                    if rows is None:
                        break
                    for row in rows:
                        yield f"{path}: row {number}", row
                        number += 1
    except HyperParallelError:
        raise
    except Exception as error:
        # Arrow raises many exception classes; all mean that this file is unreadable.
        raise NoData(
            "a parquet file cannot be read",
            where=str(path),
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            hint="fetch or write the file again",
        ) from error


def _batch_rows(group: Any, path: Path, first: int, most: int) -> int:
    """Return the number of rows to decode at once; raise NoData (HP602) if the mean row exceeds `most` bytes."""
    columns = (group.column(i).total_uncompressed_size for i in range(group.num_columns))
    row_bytes = max(group.total_byte_size, sum(columns)) / max(group.num_rows, 1)
    if row_bytes > most:
        got = f"{row_bytes:,.0f} bytes in a row on average"
        raise records_too_long(f"{path}: row {first}", got, most, about=row_bytes)
    return max(1, min(_MOST_ROWS, int(_BATCH_BYTES / max(row_bytes, 1))))


@contextmanager
def _decoding(where: str, most: int) -> Iterator[None]:
    """Limit the memory for decoding rows; raise NoData (HP602) at the location `where` if it is exceeded."""
    most_heap = max(_HEAP_RECORDS * most, _LEAST_HEAP)
    try:
        with bounded_heap(most_heap):
            yield
    except Exception as error:
        cause: BaseException | None = error  # `datasets` wraps the error of an allocation
        while cause is not None and not isinstance(cause, MemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise NoData(
            "decoding rows takes more memory than `data.max_record_bytes` permits",
            where=where,
            got=f"more than {format_bytes(most_heap)}",
            allowed=f"at most {format_bytes(most_heap)} for the rows that are decoded together",
            hint=_larger(4 * most),
        ) from error


def _larger(num_bytes: float) -> str:
    """Return a hint to set a limit of about `num_bytes`, which may be too small, or above 1 TiB to divide records."""
    size = -(-int(num_bytes) // MiB) * MiB
    return f"a larger value, such as data.max_record_bytes={size}" if size <= TiB else "divide these records"


def records_too_long(where: str, got: str, most: int, size: int | None = None, about: float = 0) -> NoData:
    """Return the error for a record of more than `most` bytes.

    `size` is the size of the record in bytes; None: unknown. `about` is the mean size of the records; 0: unknown.
    """
    hint: str | dict[str, int] = _larger(4 * max(most, about))
    if size is not None:
        hint = {"data.max_record_bytes": size} if size <= TiB else "divide this record"
    return NoData(
        "a record is longer than `data.max_record_bytes`",
        where=where,
        got=got,
        allowed=f"at most {most:,} bytes",
        hint=hint,
    )


_SAVED = ("dataset_dict.json", "state.json")
_CARDS = ("README.md", ".huggingface.yaml")
_CARD_LIMITS = Limits(num_bytes=4 * 1024**2, num_elements=500_000, depth=30)
"""Limits of a dataset card or a JSON list of files."""


@dataclass(frozen=True, slots=True)
class Table:
    """Dataset, or a split of it, opened by the library `datasets`.

    Attributes:
        name: Name for error messages.
        rows: `datasets.Dataset`, or `datasets.IterableDataset` if it is streamed.
        media_columns: Columns of images or audio to read, as undecoded {bytes, path}.
    """

    name: str
    rows: Any
    media_columns: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all columns; 0 for a streamed table."""
        columns = getattr(self.rows, "data", None)
        return 0 if columns is None else int(columns.nbytes)

    @property
    def fingerprint(self) -> str:
        """Hash of the content as computed by `datasets`; "" if there is none."""
        return str(getattr(self.rows, "_fingerprint", ""))

    @property
    def opened(self) -> tuple[str, ...]:
        """Names of columns that are not read, because decoding their values may open files or URLs."""
        return tuple(name for name in self._opening if name not in self.media_columns)

    @property
    def _opening(self) -> dict[str, Any]:
        """Features, by column name, whose decoding may open files or URLs, such as images and audio."""
        features = getattr(self.rows, "features", None) or {}
        return {name: feature for name, feature in features.items() if _opens_files(feature)}

    def _readable(self) -> Any:
        opened = list(self.opened)
        rows = self.rows.remove_columns(opened) if opened else self.rows
        for name in self._opening.keys() - {*opened}:
            rows = rows.cast_column(name, _undecoded(self._opening[name]))
        return rows

    def _sound_rows(self) -> Iterator[bool]:
        """Yield True for each row after validating its Arrow batch, then True forever.

        Without validation, a wrong offset in a memory-mapped file would crash the process.
        """
        columns = getattr(self.rows, "data", None)
        # If the rows are not in file order, validate all batches first.
        in_order = getattr(self.rows, "_indices", None) is None
        begin = 0
        for batch in () if columns is None else columns.table.to_batches():
            try:
                batch.validate(full=True)
            except Exception as error:
                raise NoData(
                    "the Arrow data of the dataset is damaged",
                    where=f"{self.name}: rows {begin} to {begin + batch.num_rows - 1}",
                    got=str(error).splitlines()[0][:200],
                    hint="save the dataset again",
                ) from error
            begin += batch.num_rows
            for _ in range(batch.num_rows if in_order else 0):
                yield True
        while True:
            yield True

    def records(self, most: int) -> Iterator[tuple[str, Record]]:
        """Yield (location, record) for each row.

        Raises:
            NoData: HP602 for an unreadable row, or if decoding a stream exceeds the memory limit for records of at most
                `most` bytes.
        """
        number = -1
        # Only a stream decodes its rows; other tables are in memory or memory-mapped.
        streamed = getattr(self.rows, "data", None) is None
        try:
            sound, rows = self._sound_rows(), iter(self._readable())
            while True:
                where = f"{self.name}: row {number + 1}"
                with _decoding(where, most) if streamed else nullcontext():
                    row = next(rows, None) if next(sound) else None
                if row is None:
                    return
                number += 1
                yield where, row
        except HyperParallelError:
            raise
        except Exception as error:
            # `datasets` and Arrow raise many exception classes; all mean that the next row is unreadable.
            raise NoData(
                "a row of the dataset cannot be read",
                where=f"{self.name}: row {number + 1}",
                got=(str(error).splitlines() or [type(error).__name__])[0][:200],
                hint="check the connection to the hub, then this row" if streamed else "repair or remove this row",
            ) from error


def is_table(data: Data, path: Path) -> bool:
    """Return whether `datasets` opens a source: a Hub name, or a folder with a saved dataset or a dataset card.

    A dataset card is a README.md with a YAML header. With `data.name` or `data.split`, `datasets` opens any folder.
    """
    if not path.exists():
        return parse_dataset(data.source) is not None and not is_file_name(data.source)
    if not path.is_dir():
        return False
    described = _card_text(path / _CARDS[0])[:3] == "---"
    return bool(data.name or data.split) or described or any((path / n).is_file() for n in _SAVED)


def open_table(data: Data, path: Path) -> Table:
    """Open the dataset and split that section `data` names; without `data.split`, the only split, or else `train`.

    `path` is `data.source` as a path.

    Raises:
        NoData: HP602 when the dataset or split cannot be loaded, the folder names or links to a file outside of it, or
            `data.name` or `data.split` is set for a saved dataset without splits.
        MissingDependency: HP501 when the package `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            "reading a dataset needs the package `datasets`",
            where=f"data.source: {data.source}",
            hint="pip install datasets",
        ) from error
    saved, here = any((path / n).is_file() for n in _SAVED), path.is_dir()
    if here:
        _check_folder(path)
    try:
        with _decoding(f"data.source: {data.source}", data.max_record_bytes):
            if saved:
                dataset = datasets.load_from_disk(str(path))
            else:
                source = str(path.absolute()) if here else data.source
                dataset = datasets.load_dataset(source, data.name, split=data.split, streaming=data.streaming)
    except HyperParallelError:
        raise
    except Exception as error:
        # `datasets`, huggingface_hub and Arrow raise many exception classes for a missing name, split, file or column.
        tried, hint = [f"the path {path.absolute()}"], _choice_hint(str(error), data.split)
        if not here:
            is_offline = os.environ.get("HF_HUB_OFFLINE") == "1"
            hub = f"the hub ({'offline' if is_offline else 'online'})"
            tried += [f"the cache {datasets.config.HF_DATASETS_CACHE}", hub]
            if is_offline and hint is None:
                hint = "run this command once with HF_HUB_OFFLINE=0, which downloads the dataset"
        raise _missing(data, str(error), f"an existing dataset in {', '.join(tried)}", hint) from error
    if not isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        if saved and (data.name or data.split):
            hint = {f"data.{key}": None for key in ("name", "split") if getattr(data, key)}
            raise _missing(data, "a saved table without splits", None, hint)
        return Table(data.source, dataset)
    split = data.split or ("train" if len(dataset) > 1 else next(iter(dataset)))
    if split not in dataset:
        near = difflib.get_close_matches(split, dataset, n=1) or [name for name in ("train",) if name in dataset]
        raise _missing(data, f"split {split}", sorted(dataset), {"data.split": (near or [*dataset])[0]})
    return Table(f"{data.source} ({split})", dataset[split])


def _choice_hint(message: str, split: str | None) -> str | dict[str, object] | None:
    choices = re.search(r"(Config name is missing|Unknown split)[^\[]*\[([^\]]*)\]", message)
    names = re.findall(r"'([^']+)'", choices[2]) if choices else []
    if not choices or not names:
        return None
    if choices[1].startswith("Config"):
        return {"data.name": names[0]}
    near = difflib.get_close_matches(split or "", names, n=1) or [name for name in names if name == "train"]
    return {"data.split": (near or names)[0]}


def _undecoded(feature: Any) -> Any:
    """Return a copy of an image or audio feature, or of a list of it, whose values are not decoded: {bytes, path}."""
    undecoded = copy.deepcopy(feature)
    inner = undecoded
    while not hasattr(inner, "decode"):
        inner = inner[0] if isinstance(inner, list) else inner.feature
    inner.decode = False
    return undecoded


def _opens_files(feature: Any) -> bool:
    """Return whether decoding a value of a `datasets` feature may open a file or URL."""
    if hasattr(feature, "decode_example"):
        return True
    inner = feature.values() if isinstance(feature, dict) else feature if isinstance(feature, list) else ()
    return any(map(_opens_files, (*inner, *filter(None, [getattr(feature, "feature", None)]))))


def refuse_outside(file: Path, folder: Path) -> None:
    """Raise if `file` in a data folder is a link out of the folder, a broken link, a pipe, a socket or a device.

    The author of an untrusted folder could otherwise make the reader open a private file or block forever.

    Raises:
        NoData: HP602 naming the file.
    """
    if file.exists() and not file.is_file() and not file.is_dir():
        raise NoData(
            "a file of the data folder is a pipe, a socket or a device",
            where=str(file),
            allowed="regular files",
            hint="move this file out of the data folder",
        )
    if not file.is_symlink():
        return
    target = outside_target(file, folder)
    if target is not None:
        raise NoData(
            "a file of the data folder is a link to a file outside of the folder",
            where=str(file),
            got=str(target),
            allowed="links to files in the folder",
            hint=shlex.join(["cp", "--remove-destination", str(target), str(file)])
            if target.is_file()
            else "remove the link, or replace it by a copy of its target",
        )
    if not file.exists():
        raise NoData(
            "a file of the data folder is a broken link",
            where=str(file),
            got=str(file.readlink()),
            hint=shlex.join(["rm", str(file)]),
        )


def _card_text(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_CARD_LIMITS.num_bytes)


def _check_folder(path: Path) -> None:
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            refuse_outside(Path(folder, name), path)
        for name in set(files) & {*_SAVED, *_CARDS}:
            _check_names(Path(folder, name))


def _check_names(path: Path) -> None:
    """Raise NoData (HP602) if a dataset card or list of files is unreadable or names a file outside its folder."""
    try:
        if path.suffix == ".json":
            values = read_json(path, _CARD_LIMITS)
            named = [values.get(key) for key in ("_data_files", "_indices_data_files", "splits")]
        else:
            text = _card_text(path)
            if path.name == _CARDS[0]:
                text = text.removeprefix("---").partition("\n---")[0] if text[:3] == "---" else ""
            values = parse_yaml(text, _CARD_LIMITS) or {}
            named = [values.get("configs")]
        outside = next(filter(names_outside, _texts(named)), None)
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise NoData(
            "a description of the dataset cannot be read",
            where=str(path),
            got=str(error)[:200],
            hint=f"correct or remove `{path.name}`" if path.name in _CARDS else "fetch or write the dataset again",
        ) from error
    if outside is not None:
        raise NoData(
            "a description of the dataset names a file outside of its folder",
            where=str(path),
            got=abbreviated(outside),
            allowed="names of files in the folder",
            hint="copy that file into the folder, if you trust it, and correct the description",
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _missing(data: Data, got: str, allowed: object, hint: str | Mapping[str, object] | None) -> NoData:
    selection = {"name": data.name, "split": data.split}
    keys = "".join(f", data.{key}: {value}" for key, value in selection.items() if value)
    return NoData(
        "the dataset cannot be loaded",
        where=f"data.source: {data.source}{keys}",
        got=" ".join(got.split())[:200] or "nothing",
        allowed=allowed,
        hint=hint,
    )
