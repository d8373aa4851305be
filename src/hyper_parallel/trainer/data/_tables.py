"""Tables that `datasets` opens: folders of `save_to_disk`, dataset folders, and names on the Hugging Face hub.

A name is read from the library's cache; it is fetched only where the environment says `HF_HUB_OFFLINE=0`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config import Data
from hyper_parallel.errors import MissingDependency, NoData
from hyper_parallel.trainer.data._records import Record

_SAVED = ("dataset_dict.json", "state.json")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Table:
    """One split of a dataset."""

    name: str
    rows: Any  # datasets.Dataset, or IterableDataset when it is streamed

    @property
    def num_bytes(self) -> int:
        """Size of its columns; 0 when it is streamed."""
        columns = getattr(self.rows, "data", None)
        return 0 if columns is None else int(columns.nbytes)

    @property
    def fingerprint(self) -> str:
        """What the library names its content by."""
        return str(getattr(self.rows, "_fingerprint", ""))

    def _sound_rows(self) -> Iterator[bool]:
        """True for every row that is safe to read, for ever: Arrow maps files, and a wrong offset ends the process."""
        columns = getattr(self.rows, "data", None)
        if getattr(self.rows, "_indices", None) is not None:  # in another order than the file's
            columns = columns.table.validate(full=True)
        for batch in () if columns is None else columns.table.to_batches():
            batch.validate(full=True)
            for _ in range(batch.num_rows):
                yield True
        while True:
            yield True

    def records(self) -> Iterator[tuple[str, Record]]:
        """(where, record) of every row."""
        number = -1
        try:
            sound, rows = self._sound_rows(), iter(self.rows)
            while next(sound) and (row := next(rows, None)) is not None:
                number += 1
                yield f"{self.name}: row {number}", row
        except Exception as error:
            # datasets and Arrow raise many classes here; all of them mean that the next row is unreadable.
            raise NoData(
                "a row of the dataset cannot be read",
                where=f"{self.name}: row {number + 1}",
                got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            ) from error


def is_table(data: Data, path: Path) -> bool:
    """Whether `datasets` opens the source at `path`: a folder that it wrote or that has a card, or a name."""
    if not path.exists():
        # A name whose first part is a folder here is a path with a mistake in it.
        return bool(_HUB_NAME.fullmatch(data.source)) and not path.parent.exists()
    if not path.is_dir():
        return False
    card = path / "README.md"
    described = card.is_file() and card.read_bytes()[:3] == b"---"
    return bool(data.name or data.split) or described or any((path / n).is_file() for n in _SAVED)


def open_table(data: Data, path: Path) -> Table:
    """The split of a dataset that a recipe names.

    Raises:
        NoData: HP602, saying what was tried.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            "reading a dataset needs the package `datasets`",
            where=f"data.source: {data.source}",
            hint="pip install 'hyper-parallel[torch]'",
        ) from error
    saved, here = any((path / n).is_file() for n in _SAVED), path.is_dir()
    try:
        if saved:
            found = datasets.load_from_disk(str(path))
        else:
            source = str(path.absolute()) if here else data.source
            found = datasets.load_dataset(
                source, data.name, split=data.split, streaming=data.streaming
            )
    except Exception as error:
        # datasets, huggingface_hub and Arrow raise many classes: no such name, split, file or column.
        tried = [f"the path {path.absolute()}"]
        if not here:
            offline = "offline" if os.environ.get("HF_HUB_OFFLINE") == "1" else "online"
            tried += [f"the cache {datasets.config.HF_DATASETS_CACHE}", f"the hub ({offline})"]
        hint = None if here else "fetch it once: HF_HUB_OFFLINE=0 hyper-parallel train RECIPE"
        raise _missing(data, str(error), f"tried {', '.join(tried)}", hint) from error
    if not isinstance(found, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        if saved and (data.name or data.split):
            raise _missing(data, "a saved table without splits", None, "data.split=null")
        return Table(data.source, found)
    split = data.split or ("train" if len(found) > 1 else next(iter(found)))
    if split not in found:
        raise _missing(data, f"split {split}", sorted(found), f"data.split={min(found)}")
    return Table(f"{data.source} ({split})", found[split])


def _missing(data: Data, got: str, allowed: object, hint: str | None) -> NoData:
    asked = {"name": data.name, "split": data.split}
    keys = "".join(f", data.{key}: {value}" for key, value in asked.items() if value)
    return NoData(
        "the dataset cannot be had",
        where=f"data.source: {data.source}{keys}",
        got=" ".join(got.split())[:200] or "nothing",
        allowed=allowed,
        hint=hint,
    )
