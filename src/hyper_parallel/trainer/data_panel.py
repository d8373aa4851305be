"""Start panel rows about the data: the summary, its notes, and one example with its targets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from hyper_parallel.trainer.data.preview import Example, Segment, without_middle
from hyper_parallel.trainer.data.summary import notes
from hyper_parallel.trainer.data_record import data_rows
from hyper_parallel.trainer.job import Job

_MAX_CHARACTERS: Final = 110
"""Maximum characters of a segment in the panel."""
_MAX_SEGMENTS: Final = 5
_NEW_LINE: Final = "\u21b5"


def panel_rows(job: Job) -> dict[str, Any]:
    """Return the rows about the data of a run by name, as texts or rich texts with coloured targets."""
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
    shown.overflow = "fold"  # long words are folded, not truncated
    return shown


def _compact(segments: Iterable[Segment]) -> list[Segment]:
    """Return the first segments, each shortened to one line."""
    all_segments = list(segments)
    shortened = [
        Segment(without_middle(s.text, _MAX_CHARACTERS).replace("\n", _NEW_LINE), s.trained)
        for s in all_segments[:_MAX_SEGMENTS]
    ]
    if len(all_segments) > _MAX_SEGMENTS:
        shortened.append(
            Segment(f" ... {len(all_segments) - _MAX_SEGMENTS} more parts", trained=False)
        )
    return shortened


def highlighted(segments: Iterable[Segment], *, coloured: bool) -> Any:
    """Return segments as a rich text: targets in green, or between `[[` and `]]` without colour."""
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
