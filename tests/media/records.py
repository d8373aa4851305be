"""Conversations with images or audio in the forms of several datasets, and a recipe on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.media.tiny_models import (
    write_images,
    write_lines,
    write_model,
    write_recordings,
)

ANSWERS = ("one", "two and three", "nine seven", "four")


def records(names: list[str], kind: str = "image") -> list[dict[str, Any]]:
    """Return conversations: two items in one turn, two turns with an item each, one item, and none."""
    mark, column = f"<{kind}>", "images" if kind == "image" else "audios"
    user, assistant = {"role": "user"}, {"role": "assistant"}
    return [
        {"messages": [{**user, "content": f"{mark} and {mark}\nwhat is this"}, {**assistant, "content": ANSWERS[0]}],
         column: names[:2]},
        {"conversations": [{"from": "human", "value": f"{mark}\nwhat is this"}, {"from": "gpt", "value": ANSWERS[1]}],
         kind: names[2]},
        {"messages": [
            {**user, "content": [{"type": kind, kind: names[0]}, {"type": "text", "text": "digit"}]},
            {**assistant, "content": ANSWERS[2]},
            {**user, "content": [{"type": "text", "text": "and"}, {"type": kind, kind: names[2]}]},
            {**assistant, "content": ANSWERS[3]}]},
        {"messages": [{**user, "content": "what is the digit"}, {**assistant, "content": ANSWERS[0]}]},
    ]  # fmt: skip


def write_data(folder: Path, repeats: int = 1, kind: str = "image") -> Path:
    """Write images or recordings of three sizes and a JSON lines file of conversations; return its path."""
    if kind == "image":
        names = write_images(folder, ((20, 20), (36, 24), (16, 40)))
    else:
        names = write_recordings(folder, (4000, 9000, 12000))
    return write_lines(folder / "train.jsonl", records(names, kind) * repeats)


def write_place(
    folder: Path,
    training: str,
    *,
    family: str = "llava",
    repeats: int = 3,
    kind: str = "image",
    validation: bool = False,
) -> Path:
    """Write a small model, its data and a recipe of the stage sft; return the folder."""
    write_model(family, folder / "model")
    source = write_data(folder, repeats, kind)
    held_out = f"validation: {source}, " if validation else ""
    (folder / "recipe.yaml").write_text(
        f"model: {{path: {folder / 'model'}}}\nstage: sft\n"
        f"data: {{source: {source}, {held_out}seq_len: 96, packing: false,"
        f" cache_dir: {folder / 'cache'}}}\n"
        f"training: {{{training}, dtype: float64}}\n"
        "checkpoint: {export: false}\n"
    )
    return folder
