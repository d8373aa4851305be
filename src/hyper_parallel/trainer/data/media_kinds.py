"""Kinds of media in records (images, audio): the columns and content parts that name them, and their marks in texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MediaKind:
    """Kind of media: images or recordings.

    Attributes:
        name: Name of the kind, and type of its content parts in chat templates: `image` or `audio`.
        one: Words for one item in errors, such as `an image`.
        argument: Argument name of processors, such as `images`.
        columns: Columns of records that refer to items of this kind.
        parts: Types of content parts, each with the keys that may hold the reference.
        processors: Names of the processor's component that reads items of this kind.
        extra: Optional extra of this package that is needed to decode it.
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
        """Internal text that stands for one item in the content of a turn."""
        return f"\0{self.name}\0"

    @property
    def text_mark(self) -> str:
        """Text in records, such as `<image>`, that stands for the next item of a column."""
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
"""Pattern that matches the `mark` of any media kind; its group is the name of the kind."""


def kind_of_part(part: object, kinds: tuple[MediaKind, ...]) -> MediaKind | None:
    """Return the media kind of a content part; None for a part that is not media."""
    name = part.get("type") if isinstance(part, Mapping) else None
    return next((kind for kind in kinds if name in kind.parts), None)


def without_marks(content: str) -> list[str]:
    """Split the content of a turn at its media marks; return the texts between them."""
    return MEDIA_MARK.split(content)[::2]
