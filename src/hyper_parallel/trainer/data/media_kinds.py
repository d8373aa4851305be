"""Kinds of media in records: columns and parts that refer to them, and marks that stand for them in texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MediaKind:
    """Kind of media: images or recordings.

    Attributes:
        name: Type of its parts in chat templates, and its argument of processors in the singular.
        one: One item, as errors call it.
        argument: Argument of processors.
        columns: Columns of records with references.
        parts: Types of parts of contents, each with the keys of its reference.
        processors: Names of the part of a model's processor that reads it.
        extra: Extra of this package that decodes it.
    """

    name: str
    one: str
    argument: str
    columns: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    processors: tuple[str, ...]
    extra: str

    @property
    def mark(self) -> str:
        """Text inside this package that stands for one item in the content of a turn."""
        return f"\0{self.name}\0"

    @property
    def text_mark(self) -> str:
        """Text in records that stands for the next item of a column."""
        return f"<{self.name}>"


IMAGE: Final = MediaKind(
    "image",
    "an image",
    "images",
    ("images", "image", "image_path", "image_paths"),
    {"image": ("image", "url", "path"), "image_url": ("image_url",)},
    ("image_processor",),
    "images",
)
AUDIO: Final = MediaKind(
    "audio",
    "a recording",
    "audio",
    ("audio", "audios", "audio_path", "audio_paths"),
    {
        "audio": ("audio", "audio_url", "url", "path"),
        "audio_url": ("audio_url",),
        "input_audio": ("input_audio",),
    },
    ("feature_extractor", "audio_processor"),
    "audio",
)
KINDS: Final = {kind.name: kind for kind in (IMAGE, AUDIO)}
MEDIA_MARK: Final = re.compile(f"\0({'|'.join(KINDS)})\0")
"""Marks of all kinds; the group is the kind's name."""


def kind_of_part(part: object, kinds: tuple[MediaKind, ...]) -> MediaKind | None:
    """Return the kind of a part of a content; None for other parts."""
    name = part.get("type") if isinstance(part, Mapping) else None
    return next((kind for kind in kinds if name in kind.parts), None)


def without_marks(content: str) -> list[str]:
    """Return the texts between the marks of a content."""
    return MEDIA_MARK.split(content)[::2]
