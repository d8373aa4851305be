"""Model inputs of a batch with images or audio (pixel values, audio features, ...), computed by the model's processor.

Each rank computes these arrays when it reads a batch. Arrays with one number per token (`mm_token_type_ids`,
`token_type_ids`) are padded or cut to the length of the rows. Other arrays of media are passed on unchanged.

The attention mask is all ones, because rows are padded on the right. Without a mask, some models (Qwen2.5-Omni) would
give image tokens the positions of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import NoData
from hyper_parallel.trainer.data.data_files import free_path
from hyper_parallel.trainer.data.document import MEDIA_BLOB, MediaFile
from hyper_parallel.trainer.data.media_kinds import KINDS
from hyper_parallel.trainer.data.media_records import checksum, content_of, decoded
from hyper_parallel.trainer.data.media_tokens import TEXT_ARRAYS, load_processor, process, rate_of

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowMedia:
    """Text, images and audio of one row of prepared data.

    Attributes:
        row: Dict written by `reference_line`; empty for a row without media.
        processor: Directory of the model's processor.
        root: Folder of the media files.
        prepared: Folder of the prepared data, with the media whose bytes are in the records.
    """

    row: Mapping[str, Any] = field(default_factory=dict)
    processor: Path = Path()
    root: Path = Path()
    prepared: Path = Path()

    @property
    def where(self) -> str:
        """Location of the record, for error messages."""
        return str(self.row["where"])

    def decode(self, rate: int) -> list[tuple[str, Any]]:
        """Return (kind, decoded value) of each image or recording, with audio at the sampling rate `rate` in Hz.

        Raises:
            NoData: HP602 when a file is unreadable or has changed since the data was prepared.
            MissingDependency: HP501 when the package that decodes a kind is not installed.
        """
        items = []
        for stored in self.row["media"]:
            item = MediaFile(stored["kind"], stored.get("name", ""), self.root)
            content = content_of(item, self.where) if item.name else self._from_blob(stored)
            if checksum(content) != stored["sha256"]:
                problem = f"{KINDS[item.kind].one} was changed after the data was prepared"
                raise _changed(problem, self.where, item.name)
            items.append((item.kind, decoded(replace(item, content=content), self.where, rate)))
        return items

    def _from_blob(self, stored: Mapping[str, Any]) -> bytes:
        with (self.prepared / MEDIA_BLOB).open("rb") as file:
            file.seek(stored["start"])
            return file.read(stored["size"])


def _changed(problem: str, where: str, got: str) -> NoData:
    folder = free_path("prepared-again")
    return NoData(problem, where=where, got=got, changes={"data.cache_dir": folder})


_MASK = "attention_mask"


def media_arrays(rows: Sequence[RowMedia], input_ids: Int64) -> dict[str, NDArray[Any]]:
    """Return the media inputs of a batch and its attention mask, by argument name of the model's forward.

    Args:
        rows: Text and media of each row, all with the same processor.
        input_ids: [B, S] token ids of the rows.

    Raises:
        NoData: HP602 when a file is unreadable, or a file or the processor has changed since the data was prepared.
        BadValue: HP102 when the processor rejects or ignores the media.
        MissingDependency: HP501 when a package that the media need is not installed.
    """
    mask = {_MASK: np.ones(input_ids.shape, np.int64)}
    filled = [i for i, row in enumerate(rows) if row.row]
    processor = load_processor(rows[filled[0] if filled else 0].processor)
    if not filled:
        names = per_token_names(processor)
        return mask | {name: np.zeros(input_ids.shape, np.int64) for name in names}
    chosen = [rows[i] for i in filled]
    media = [row.decode(rate_of(processor)) for row in chosen]
    where = chosen[0].where + (f" and {len(chosen) - 1} more records" if len(chosen) > 1 else "")
    arrays = process(processor, [row.row["text"] for row in chosen], media, where)
    ids, lengths = arrays["input_ids"], arrays[_MASK].sum(1) - 1
    for i, row, own, length in zip(filled, chosen, ids, lengths, strict=True):
        if not np.array_equal(own[:length], input_ids[i, :length]):
            problem = "the processor returns different tokens than when the data was prepared"
            raise _changed(problem, row.where, str(row.processor))
    extra = {name: array for name, array in arrays.items() if name not in TEXT_ARRAYS}
    width = min(ids.shape[1], input_ids.shape[1])
    for name in extra.keys() & per_token_names(processor):
        own = extra[name]
        extra[name] = np.zeros(input_ids.shape, own.dtype)
        extra[name][filled, :width] = own[:, :width]
    return mask | extra


@lru_cache(maxsize=2)
def per_token_names(processor: Any) -> frozenset[str]:
    """Return the names of a processor's arrays, except `TEXT_ARRAYS`, that have one number per token."""
    text = processor.tokenizer.eos_token
    arrays = processor(text=[text], add_special_tokens=False, return_tensors="pt")
    names = (n for n, tensor in arrays.items() if n not in TEXT_ARRAYS and tensor.dim() == 2)
    return frozenset(names)
