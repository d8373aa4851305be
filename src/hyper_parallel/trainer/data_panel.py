"""Rows of the start panel on the data: the summary, its notes, and one example with its targets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from hyper_parallel.trainer.data.preview import Example, Segment, without_middle
from hyper_parallel.trainer.data.summary import notes
from hyper_parallel.trainer.data_record import data_rows
from hyper_parallel.trainer.job import Job

_MOST_CHARACTERS: Final = 110
"""Of a segment in the panel."""
_MOST_SEGMENTS: Final = 5
_NEW_LINE: Final = "\u21b5"


def panel_rows(job: Job) -> dict[str, Any]:
    """Return the rows on the data of a run by name; texts, or texts of rich with the targets in colour."""
    rows: dict[str, Any] = {**data_rows(job)}
    lines = [*notes(job.recipe.stage, job.packed.counts), *job.packed.tokenizer_notes]
    if lines:
        rows["note"] = "\n".join(lines)
    example = next((e for p in job.packed.previews for e in p.examples), None)
    if example is not None:
        rows["example"] = _example(example)
    return rows


def _example(example: Example) -> Any:
    from rich.text import Text

    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    lines = []
    for text in example.texts:
        line = Text(f"{text.name}: " if len(example.texts) > 1 else "")
        lines.append(line.append_text(highlighted(_compact(text.segments), coloured=coloured)))
    if any(s.trained for text in example.texts for s in text.segments):
        lines.append(Text("(targets in green)" if coloured else "([[...]]: targets)"))
    shown = Text("\n").join(lines)
    shown.overflow = "fold"  # a word longer than a line is not cut
    return shown


def _compact(segments: Iterable[Segment]) -> list[Segment]:
    """Return the first segments, each shortened and on one line."""
    given = list(segments)
    found = [
        Segment(without_middle(s.text, _MOST_CHARACTERS).replace("\n", _NEW_LINE), s.trained)
        for s in given[:_MOST_SEGMENTS]
    ]
    if len(given) > _MOST_SEGMENTS:
        found.append(Segment(f" ... {len(given) - _MOST_SEGMENTS} more parts", trained=False))
    return found


def highlighted(segments: Iterable[Segment], *, coloured: bool) -> Any:
    """Return segments as a text of rich: targets in green, or between `[[` and `]]` without colour."""
    from rich.text import Text

    from hyper_parallel.errors import printable

    shown = Text()
    for one in segments:
        text = printable(one.text)
        if one.trained:
            shown.append(text if coloured else f"[[{text}]]", style="green" if coloured else "")
        else:
            shown.append(text)
    return shown
