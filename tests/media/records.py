"""Conversations with images in the forms of several datasets, and a recipe on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.media.tiny_models import write_images, write_lines

ANSWERS = ("one", "two and three", "nine seven", "four")


def records(names: list[str]) -> list[dict[str, Any]]:
    """Return conversations: two images in one turn, two turns with an image each, one image, and none."""
    user, assistant = {"role": "user"}, {"role": "assistant"}
    return [
        {"messages": [{**user, "content": "<image> and <image>\nwhat is this"}, {**assistant, "content": ANSWERS[0]}],
         "images": names[:2]},
        {"conversations": [{"from": "human", "value": "<image>\nwhat is this"}, {"from": "gpt", "value": ANSWERS[1]}],
         "image": names[2]},
        {"messages": [
            {**user, "content": [{"type": "image", "image": names[0]}, {"type": "text", "text": "digit"}]},
            {**assistant, "content": ANSWERS[2]},
            {**user, "content": [{"type": "text", "text": "and"}, {"type": "image", "image": names[2]}]},
            {**assistant, "content": ANSWERS[3]}]},
        {"messages": [{**user, "content": "what is the digit"}, {**assistant, "content": ANSWERS[0]}]},
    ]  # fmt: skip


def write_data(folder: Path, repeats: int = 1) -> Path:
    """Write images of three sizes and a JSON lines file of conversations; return its path."""
    names = write_images(folder, ((20, 20), (36, 24), (16, 40)))
    return write_lines(folder / "train.jsonl", records(names) * repeats)
