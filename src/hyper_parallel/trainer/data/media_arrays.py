"""Pixel values and other arrays of the images of a batch, computed by the model's processor when a rank reads them.

Arrays with one number for each token (`mm_token_type_ids`, `token_type_ids`) are padded to the length of the rows. All
others keep the form in which the processor returns them for the rows with images together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.errors import NoData
from hyper_parallel.trainer.data.document import IMAGE_BLOB, ImageFile
from hyper_parallel.trainer.data.media_records import checksum, content_of, decoded
from hyper_parallel.trainer.data.media_tokens import TEXT_ARRAYS, load_processor, process

Int64 = NDArray[np.int64]
_processor = lru_cache(maxsize=1)(load_processor)


@dataclass(frozen=True, slots=True)
class RowImages:
    """Text and images of one row of prepared data.

    Attributes:
        row: Values of the row's line, see `reference_line`; empty for a row without images.
        processor: Directory of the processor.
        root: Folder of the image files.
        prepared: Folder of the prepared data.
    """

    row: Mapping[str, Any] = field(default_factory=dict)
    processor: Path = Path()
    root: Path = Path()
    prepared: Path = Path()

    @property
    def where(self) -> str:
        """Location of the record."""
        return str(self.row["where"])

    def decode(self) -> list[Any]:
        """Return the decoded images.

        Raises:
            NoData: HP602 when an image differs from the one whose size decided the tokens.
        """
        images = []
        for stored in self.row["images"]:
            content, name = self._content(stored), stored.get("name", "")
            if checksum(content) != stored["sha256"]:
                problem = "an image was changed after the data was prepared"
                raise _changed(problem, self.where, name)
            images.append(decoded(content, name, self.where))
        return images

    def _content(self, stored: Mapping[str, Any]) -> bytes:
        if "name" in stored:
            return content_of(ImageFile(stored["name"], self.root), self.where)
        with (self.prepared / IMAGE_BLOB).open("rb") as file:
            file.seek(stored["start"])
            return file.read(stored["size"])


def _changed(problem: str, where: str, got: str) -> NoData:
    """Return the error of an input that differs from the one of the preparation; the hint prepares the data again."""
    return NoData(problem, where=where, got=got, hint="data.cache_dir=prepared-again")


def image_arrays(rows: Sequence[RowImages], input_ids: Int64) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch by their names in the model's forward.

    Args:
        rows: Text and images of each row, all with the same processor.
        input_ids: Tokens of the rows, [B, S].

    Raises:
        NoData: HP602 when the processor returns other tokens than those of the prepared data.
    """
    pictured = [i for i, row in enumerate(rows) if row.row]
    if not pictured:
        return _blank(rows[0].processor, input_ids)
    chosen = [rows[i] for i in pictured]
    texts, images = [row.row["text"] for row in chosen], [row.decode() for row in chosen]
    found = process(_processor(chosen[0].processor), texts, images, chosen[0].where)
    # numpy has no bfloat16
    arrays = {n: (t.float() if t.is_floating_point() else t).numpy() for n, t in found.items()}
    ids, lengths = arrays["input_ids"], arrays["attention_mask"].sum(1) - 1
    for i, row, own, length in zip(pictured, chosen, ids, lengths, strict=True):
        if not np.array_equal(own[:length], input_ids[i, :length]):
            problem = "the image processor returns other tokens than when the data was prepared"
            raise _changed(problem, row.where, str(row.processor))
    extra = {name: array for name, array in arrays.items() if name not in TEXT_ARRAYS}
    for name, array in extra.items():
        if array.shape == ids.shape and array.dtype.kind in "iu":
            extra[name] = np.zeros(input_ids.shape, array.dtype)
            width = min(ids.shape[1], input_ids.shape[1])
            extra[name][pictured, :width] = array[:, :width]
    return extra


def _blank(directory: Path, input_ids: Int64) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch without images: zeros for those with one number for each token."""
    processor = _processor(directory)
    text = processor.tokenizer.eos_token
    arrays = processor(text=[text], add_special_tokens=False, return_tensors="pt")
    names = [
        name for name, tensor in arrays.items() if name not in TEXT_ARRAYS and tensor.dim() == 2
    ]
    return {name: np.zeros(input_ids.shape, np.int64) for name in names}
