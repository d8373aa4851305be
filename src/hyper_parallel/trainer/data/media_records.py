"""Images and recordings of records: references, files, decoding, and size limits.

A record refers to images and recordings in columns (`images`, `audio`), with a placeholder (`<image>`, `<audio>`) for
each in its texts, or in content parts. A reference is a file name below the media folder, or encoded bytes as in
parquet (`{bytes, path}`) or OpenAI's `input_audio` (`{data, format}`). Nothing is downloaded, and no file outside of
the media folder is read. Only the prompts of generation may refer to any file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from math import gcd, isfinite
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import MissingDependency, NoData, abbreviated
from hyper_parallel.received import LimitExceeded, Limits, names_outside, outside_target, read_bytes
from hyper_parallel.trainer.data.document import BadMedia, MediaFile, Message
from hyper_parallel.trainer.data.media_kinds import IMAGE, KINDS, MEDIA_MARK, MediaKind
from hyper_parallel.trainer.data.record_keys import RecordRules, is_empty
from hyper_parallel.trainer.data.turns import REFERENCES
from hyper_parallel.units import MiB

_MOST_BYTES: Final = 64 * MiB
_MOST_PIXELS: Final = 2**26
_MOST_SAMPLES: Final = 2**26
"""Maximum number of samples of a recording, over all channels: 23 minutes of mono audio at 48 kHz."""
_HIGHEST_RATE: Final = 384_000
"""Maximum sampling rate of a recording in Hz, as the cost of resampling grows with it."""
_SMALL: Final = (96, 96)
"""Maximum width and height of a thumbnail for reports, in pixels."""
_FORMATS: Final = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Image formats to decode; for some other formats, Pillow would start external programs."""
_SKIP: Final = {"data.bad_media": "skip"}
_REFERENCES: Final = "a file name below the media folder, or encoded bytes as {bytes, path}"


def take_media(
    turns: Sequence[Message], values: Mapping[str, Any], rules: RecordRules, where: str
) -> tuple[list[Message], tuple[MediaFile, ...]]:
    """Return the turns with internal marks for images and recordings, and these items in the order of the marks.

    Raises:
        NoData: HP602 when the numbers of items and placeholders differ, items are both in content parts and in a
            column, an answer contains an item, a reference is invalid, or a file is outside of the media folder.
    """
    inline = [reference for turn in turns for reference in turn.get(REFERENCES, ())]
    turns = [{key: value for key, value in t.items() if key != REFERENCES} for t in turns]
    references: dict[str, list[Any]] = {}
    for kind in rules.media_kinds:
        listed = _listed(kind, values, rules, where)
        own = [reference for name, reference in inline if name == kind.name]
        in_parts = any(own)
        if not in_parts:
            turns = [{**t, "content": t["content"].replace(kind.text_mark, kind.mark)} for t in turns]
        references[kind.name] = own if in_parts else listed
        num_marks = sum(turn["content"].count(kind.mark) for turn in turns)
        num_items = len(listed) or sum(map(bool, own))
        if in_parts and (listed or not all(own)):
            problem = f"{kind.plural} are given both in content parts and in a column"
            if not listed:
                problem = f"a content part of type {kind.name} refers to no file, but another one does"
        elif num_marks != len(references[kind.name]):
            problem = f"the number of {kind.plural} differs from the number of placeholders for them"
        else:
            continue
        raise BadMedia(
            problem,
            where=where,
            got=f"{kind.plural}: {num_items}, placeholders: {num_marks}",
            allowed=f"one `{kind.text_mark}` in the texts, or one part of type {kind.name}, for each",
            changes=_SKIP,
        )
    names = [MEDIA_MARK.findall(turn["content"]) for turn in turns]
    for number, (turn, marks) in enumerate(zip(turns, names, strict=True), start=1):
        if turn["role"] == "assistant" and marks:
            raise NoData(
                f"an answer contains {KINDS[marks[0]].one}, but answers are texts",
                where=f"{where}, turn {number}",
                allowed=f"{KINDS[marks[0]].plural} in turns of the user, the system and tools",
            )
    order = [name for marks in names for name in marks]
    items = {name: iter(values) for name, values in references.items()}
    return turns, tuple(_file(KINDS[name], next(items[name]), rules, where) for name in order)


def _listed(kind: MediaKind, values: Mapping[str, Any], rules: RecordRules, where: str) -> list[Any]:
    value = rules.one_of(values, kind.columns, where)
    if is_empty(value):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _file(kind: MediaKind, reference: Any, rules: RecordRules, where: str) -> MediaFile:
    """Return the media file of a reference; raise NoData (HP602) if it is invalid or outside the media folder."""
    root = rules.media_root
    if isinstance(reference, Mapping):
        content = reference.get("bytes")
        if isinstance(content, bytes):
            return MediaFile(kind.name, "", Path(), content)
        if isinstance(data := reference.get("data"), str):
            return MediaFile(kind.name, "", Path(), _from_base64(data, kind, where))
        reference = reference.get("path") or reference.get("url")
    if not isinstance(reference, str) or not reference:
        got, problem = abbreviated(reference, 60), f"{kind.one} has no file name"
        raise BadMedia(problem, where=where, got=got, allowed=_REFERENCES, changes=_SKIP)
    if root is None:
        return MediaFile(kind.name, str(Path(reference).expanduser().absolute()), Path())
    path, folder = Path(reference), Path(reference).parent
    if ".." not in path.parts and path.is_absolute() and path.is_relative_to(root):
        reference = str(path.relative_to(root))
    if names_outside(reference) or outside_target(root / reference, root):
        raise NoData(
            f"{kind.one} is outside of the media folder",
            where=where,
            got=abbreviated(reference),
            allowed=f"names of files below {root}; URLs are not read",
            changes={"data.media_dir": folder}
            if path.is_absolute() and not folder.is_relative_to(root) and not outside_target(path, folder)
            else None,
        )
    return MediaFile(kind.name, reference, root)


def _from_base64(text: str, kind: MediaKind, where: str) -> bytes:
    most = 4 * _MOST_BYTES // 3
    if len(text) > most:
        raise BadMedia(
            f"{kind.one} encoded as base64 is too long",
            where=where,
            got=f"{len(text):,} characters",
            allowed=f"at most {most:,} characters",
            changes=_SKIP,
        )
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        problem = f"{kind.one} is not encoded as base64"
        raise BadMedia(problem, where=where, got=abbreviated(text, 40), changes=_SKIP) from error


def content_of(item: MediaFile, where: str) -> bytes:
    """Return the encoded bytes of an image or recording.

    Raises:
        BadMedia: HP602 when the file is missing, unreadable or too large.
    """
    if item.content is not None:
        return item.content
    try:
        return read_bytes(item.folder / item.name, Limits(num_bytes=_MOST_BYTES))
    except (OSError, LimitExceeded) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem = f"{KINDS[item.kind].one} cannot be read"
        got = f"{item.folder / item.name}: {reason}"
        raise BadMedia(problem, where=where, got=got, changes=_SKIP) from error


def checksum(content: bytes) -> str:
    """Return the SHA-256 of encoded bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def decoded(item: MediaFile, where: str, rate: int = 0) -> Any:
    """Decode an image or recording to the form that processors read.

    Args:
        item: Encoded image or recording.
        where: Location of the record, for error messages.
        rate: Sampling rate of the result for audio, in Hz; 0: as in the file.

    Returns:
        Pillow RGB image, rotated according to its EXIF data; or [n] float32 samples of a recording, averaged over its
        channels.

    Raises:
        MissingDependency: HP501 when the package that decodes this kind is not installed.
        BadMedia: HP602 for an unreadable file, an unknown format, or too many bytes, pixels or samples.
    """
    content, kind = content_of(item, where), KINDS[item.kind]
    try:
        return _image(content) if kind is IMAGE else _samples(content, rate)
    except ImportError as error:
        raise MissingDependency(
            f"decoding {kind.plural} needs the package `{kind.package}`",
            where=where,
            hint=f"pip install 'hyper-parallel[{kind.argument}]'",
        ) from error
    except Exception as error:  # damaged files raise many exception classes
        raise BadMedia(
            f"{kind.one} cannot be decoded",
            where=where,
            got=f"{item.name or 'bytes of the record'}: {str(error)[:160]}",
            allowed=", ".join(_FORMATS) if kind is IMAGE else "WAV, FLAC, OGG, MP3",
            changes=_SKIP,
        ) from error


def _image(content: bytes) -> Any:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        width, height = image.size
        if width * height > _MOST_PIXELS:
            raise LimitExceeded(f"{width} x {height} pixels, more than {_MOST_PIXELS:,}")
        return ImageOps.exif_transpose(image).convert("RGB")


def _samples(content: bytes, rate: int) -> Any:
    import soundfile
    from scipy.signal import resample_poly

    with soundfile.SoundFile(io.BytesIO(content)) as file:
        own_rate = file.samplerate
        if not 0 < own_rate <= _HIGHEST_RATE:
            raise LimitExceeded(f"{own_rate:,} samples per second, not 1 to {_HIGHEST_RATE:,}")
        # The number of samples in the header may be wrong, so read at most one sample more than allowed.
        most = _MOST_SAMPLES // max(file.channels, 1)
        samples = file.read(most + 1, dtype="float32", always_2d=True).mean(axis=1)
        if max(len(samples), len(samples) * rate // own_rate) > most:
            raise LimitExceeded(f"more than {most:,} samples")
        if not len(samples) or not isfinite(samples.sum(dtype="float64")):
            raise LimitExceeded("samples that are not numbers" if len(samples) else "no samples")
        if rate and own_rate != rate:
            common = gcd(own_rate, rate)
            samples = resample_poly(samples, rate // common, own_rate // common)
    return samples.astype("float32")


def thumbnail(picture: Any) -> str:
    """Return a small PNG of a decoded image as base64, for reports; `picture` may be resized in place."""
    picture.thumbnail(_SMALL)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode("ascii")
