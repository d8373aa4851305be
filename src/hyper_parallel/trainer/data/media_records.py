"""Images of records: references in columns and in parts of contents, their files, and limits on both.

A record names its images in a column (`image`, `images`) with a mark `<image>` in its texts for each, or in parts of
contents. A reference is the name of a file below the media folder, or an encoded image as parquet stores it
(`{bytes, path}`). Nothing is downloaded, and no file outside of the media folder is read.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import MissingDependency, NoData, abbreviated
from hyper_parallel.received import LimitExceeded, Limits, names_outside, outside_target, read_bytes
from hyper_parallel.trainer.data.document import IMAGE_MARK, ImageFile, Message
from hyper_parallel.trainer.data.record_keys import IMAGE_KEYS, RecordRules, is_empty
from hyper_parallel.trainer.data.turns import IMAGES
from hyper_parallel.units import MiB

_MARK: Final = "<image>"
"""Text that stands for the next image of a column."""
_LIMITS: Final = Limits(num_bytes=64 * MiB)
_MOST_PIXELS: Final = 2**26
_SMALL: Final = (96, 96)
"""Largest size of a copy for reports, in pixels."""
_FORMATS: Final = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that Pillow decodes itself; some others start programs."""
_REFERENCES: Final = "a file name below the media folder, or an encoded image as {bytes, path}"


def take_images(
    turns: Sequence[Message], values: Mapping[str, Any], rules: RecordRules, where: str
) -> tuple[list[Message], tuple[ImageFile, ...]]:
    """Return turns with one `IMAGE_MARK` for each image, and the images in the order of the marks.

    Raises:
        NoData: HP602 when images and marks differ in number, an answer has an image, or a reference is not allowed.
    """
    listed = _listed(values, rules, where)
    inline = [reference for turn in turns for reference in turn.get(IMAGES, ())]
    if not any(inline):
        turns = [{**t, "content": t["content"].replace(_MARK, IMAGE_MARK)} for t in turns]
    turns = [{key: value for key, value in t.items() if key != IMAGES} for t in turns]
    references = inline if any(inline) else listed
    num_marks = sum(turn["content"].count(IMAGE_MARK) for turn in turns)
    if num_marks != len(references) or (any(inline) and (listed or not all(inline))):
        raise NoData(
            "the images of a record and the places for them in its turns differ in number",
            where=where,
            got=f"{len(listed) or sum(map(bool, inline))} images, {num_marks} places",
            allowed=f"one `{_MARK}` in the texts, or one part of type image, for each image",
        )
    for number, turn in enumerate(turns, start=1):
        if turn["role"] == "assistant" and IMAGE_MARK in turn["content"]:
            raise NoData(
                "an answer contains an image, but answers are texts",
                where=f"{where}, turn {number}",
                allowed="images in turns of the user, the system and tools",
            )
    return turns, tuple(_image(reference, rules, where) for reference in references)


def _listed(values: Mapping[str, Any], rules: RecordRules, where: str) -> list[Any]:
    """Return the references in the column of images."""
    value = rules.one_of(values, IMAGE_KEYS, where)
    if is_empty(value):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _image(reference: Any, rules: RecordRules, where: str) -> ImageFile:
    """Return the image of a reference, which may name a file inside the media folder only."""
    assert rules.media_root is not None
    if isinstance(reference, Mapping):
        content = reference.get("bytes")
        if isinstance(content, bytes):
            return ImageFile("", rules.media_root, content)
        reference = reference.get("path") or reference.get("url")
    if not isinstance(reference, str) or not reference:
        got = abbreviated(reference, 60)
        raise NoData("an image has no file name", where=where, got=got, allowed=_REFERENCES)
    root, path = rules.media_root, Path(reference)
    if ".." not in path.parts and path.is_absolute() and path.is_relative_to(root):
        reference = str(path.relative_to(root))
    if names_outside(reference) or outside_target(root / reference, root):
        raise NoData(
            "an image is outside of the media folder",
            where=where,
            got=abbreviated(reference),
            allowed=f"names of files below {root}; URLs are not read",
            hint=shlex.quote(f"data.media_dir={path.parent}") if path.is_absolute() else None,
        )
    return ImageFile(reference, root)


def content_of(image: ImageFile, where: str) -> bytes:
    """Return the bytes of an encoded image.

    Raises:
        NoData: HP602 when the file is missing, unreadable or too large.
    """
    if image.content is not None:
        return image.content
    try:
        return read_bytes(image.folder / image.name, _LIMITS)
    except (OSError, LimitExceeded) as error:
        got = error.strerror if isinstance(error, OSError) else str(error)
        problem = "the file of an image cannot be read"
        raise NoData(problem, where=where, got=f"{image.folder / image.name}: {got}") from error


def checksum(content: bytes) -> str:
    """Return the SHA-256 of an encoded image."""
    return hashlib.sha256(content).hexdigest()


def decoded(content: bytes, name: str, where: str) -> Any:
    """Return the RGB image of Pillow, upright as its metadata says.

    Raises:
        MissingDependency: HP501 without Pillow.
        NoData: HP602 when the bytes are not an image of a known format, or it has too many pixels.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        hint = "pip install 'hyper-parallel[images]'"
        problem = "training on images needs the package `pillow`"
        raise MissingDependency(problem, where=where, hint=hint) from error
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise LimitExceeded(f"{width} x {height} pixels, more than {_MOST_PIXELS:,}")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow raises any class for damaged files
        raise NoData(
            "an image cannot be decoded",
            where=where,
            got=f"{name or 'bytes of the record'}: {str(error)[:160]}",
            allowed=", ".join(_FORMATS),
        ) from error


def small_copy(image: ImageFile, where: str) -> str:
    """Return a small copy of an image for a report: a PNG as base64."""
    picture = decoded(content_of(image, where), image.name, where)
    picture.thumbnail(_SMALL)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode("ascii")
