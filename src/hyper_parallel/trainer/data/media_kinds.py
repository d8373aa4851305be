"""Kinds of media in records: images and audio.

Records refer to images and recordings in columns or in content parts (items of a list in a turn's `content`). A mark is
a placeholder text for one image or recording in a turn.
"""

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
        one: Noun for one item in error messages: `an image` or `a recording`.
        argument: Plural noun (`images` or `audio`): name of the processor's argument, and of this package's optional
            dependencies (extra) that decode this kind.
        columns: Names of record columns that refer to items of this kind.
        parts: Types of content parts of this kind, each with the keys that may hold the file name or bytes.
        processors: Possible names of the component of a transformers processor that reads this kind.
        package: Name of the package that decodes this kind.
    """

    name: str
    one: str
    argument: str
    columns: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    processors: tuple[str, ...]
    package: str

    @property
    def plural(self) -> str:
        """Noun for several items in error messages: `images` or `recordings`."""
        return f"{self.one.partition(' ')[2]}s"

    @property
    def mark(self) -> str:
        """Placeholder in contents of a `Conversation`. A conversation without media must not contain this text."""
        return f"\0{self.name}\0"

    @property
    def text_mark(self) -> str:
        """Mark in the texts of records, such as `<image>`, for the next item of a column."""
        return f"<{self.name}>"


IMAGE: Final = MediaKind(
    "image",
    "an image",
    "images",
    ("images", "image", "image_path", "image_paths"),
    {"image": ("image", "url", "path"), "image_url": ("image_url",)},
    ("image_processor",),
    "pillow",
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
    "soundfile",
)
KINDS: Final = {kind.name: kind for kind in (IMAGE, AUDIO)}
MEDIA_MARK: Final = re.compile(f"\0({'|'.join(KINDS)})\0")
"""Pattern of the internal mark of any kind; its group is the name of the kind."""


def kind_of_part(part: object, kinds: tuple[MediaKind, ...]) -> MediaKind | None:
    """Return which of `kinds` a content part has; None for a part of any other type, such as text."""
    name = part.get("type") if isinstance(part, Mapping) else None
    return next((kind for kind in kinds if name in kind.parts), None)
