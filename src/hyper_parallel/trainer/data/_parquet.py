"""Reader of parquet rows in batches of bounded size.

A column may be compressed by a factor of ten thousand, or refer to one long value in each of a million rows, so the
memory of a batch is known only after decoding. The reader checks the mean size of a row from the file's metadata first
and decodes each batch under a limit on the memory of this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import HyperParallelError, MissingDependency, NoData
from hyper_parallel.received import bounded_heap
from hyper_parallel.units import MiB, format_bytes

_BATCH_BYTES: Final = 16 * MiB
_MOST_ROWS: Final = 1024
_HEAP_RECORDS: Final = 8
"""Memory for decoding a batch, in records of the largest size: a page, its text, and its rows as objects."""
_LEAST_HEAP: Final = 256 * MiB
"""Smallest memory limit; it leaves space for libraries and threads that start during a read."""


def heap_bytes(most: int) -> int:
    """Return the memory limit for reading records of at most `most` bytes."""
    return max(_HEAP_RECORDS * most, _LEAST_HEAP)


def read_parquet(path: Path, most: int) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) of a parquet file; arguments and errors as for `read_records`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(
            "reading parquet needs the package `pyarrow`",
            where=str(path),
            hint="pip install 'hyper-parallel[torch]'",
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                size = _batch_rows(file.metadata.row_group(group), path, number, most)
                batches = file.iter_batches(size, row_groups=[group], use_threads=False)
                while (rows := next_rows(batches, f"{path}: row {number}", most)) is not None:
                    for row in rows:
                        yield f"{path}: row {number}", row
                        number += 1
    except HyperParallelError:
        raise
    except Exception as error:
        # Arrow raises many classes here; all mean that this file is unreadable.
        raise NoData(
            "a parquet file cannot be read",
            where=str(path),
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
        ) from error


def _batch_rows(group: Any, path: Path, first: int, most: int) -> int:
    """Return the number of rows per batch for a row group; raise if its mean row is longer than the limit."""
    columns = (group.column(i).total_uncompressed_size for i in range(group.num_columns))
    row_bytes = max(group.total_byte_size, sum(columns)) / max(group.num_rows, 1)
    if row_bytes > most:
        raise records_too_long(f"{path}: row {first}", f"{row_bytes:,.0f} bytes in a row", most)
    return max(1, min(_MOST_ROWS, int(_BATCH_BYTES / max(row_bytes, 1))))


def next_rows(batches: Iterator[Any], where: str, most: int) -> list[Any] | None:
    """Return the rows of the next Arrow batch, decoded under the memory limit; None after the last batch.

    Raises:
        NoData: HP602 when decoding exceeds the limit.
    """
    try:
        with bounded_heap(heap_bytes(most)):
            batch = next(batches, None)
            return None if batch is None else batch.to_pylist()
    except MemoryError as error:
        got = f"more than {format_bytes(heap_bytes(most))} of memory for a batch of rows"
        raise records_too_long(where, got, most) from error


def records_too_long(where: str, got: str, most: int) -> NoData:
    """Return the error of a record that is longer than the limit."""
    return NoData(
        "a record is longer than `data.max_record_bytes`",
        where=where,
        got=got,
        allowed=f"at most {most:,} bytes",
        hint=f"data.max_record_bytes={4 * most}",
    )
