"""Description of a run's training data, for `data.json` and for the panel printed at the start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.serde import write_text
from hyper_parallel.trainer.data import Stream, StreamBatches
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.preview import Example, Segment, without_middle
from hyper_parallel.trainer.data.summary import notes, records_word, summary_rows

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

DATA_RECORD: Final = "data.json"


def data_facts(job: Job) -> dict[str, Any]:
    """Return the contents of `data.json`: counts, lengths and examples of each data source, and a summary.

    For streamed data, counts cover the records read so far in the first epoch.
    """
    packed, stage = job.packed, job.recipe.stage
    weights = packed.weights or (1.0,) * len(packed.counts)
    sources = []
    for counts, preview, weight in zip(_counts(job), packed.previews, weights, strict=True):
        values = preview.as_dict() | {"lengths": preview.lengths.buckets()}
        sources.append({**counts.as_dict(), "weight": weight, **values})
    return {
        "stage": stage,
        "records": records_word(stage),
        "rows": data_rows(job),
        "notes": [*notes(stage, _counts(job)), *packed.tokenizer_notes],
        "epochs": _epochs(job)[0],
        "sources": sources,
    }


def data_rows(job: Job) -> dict[str, str]:
    """Return the summary of a run's data, as a dict from row title to text."""
    packed, stage = job.packed, job.recipe.stage
    streaming = job.recipe.data.streaming
    rows = summary_rows(stage, _counts(job), packed.weights, sampled=streaming)
    if streaming:
        rows["source"] += ", a stream"
    rows["epochs"] = _epochs(job)[1]
    return rows


def _counts(job: Job) -> tuple[DataCounts, ...]:
    """Return the counts of each source; for a stream, only records read so far in the first epoch are counted."""
    stream = job.packed.train
    return (stream.counts,) if isinstance(stream, Stream) else job.packed.counts


def _epochs(job: Job) -> tuple[float | None, str]:
    batches, steps, stage = job.train_batches(), job.recipe.training.steps, job.recipe.stage
    per_step = batches.sequences_per_step
    amount = f"{steps:,} step{'' if steps == 1 else 's'}"
    if isinstance(batches, StreamBatches):
        return None, f"{amount} of {per_step:,} sequences of a stream"
    epochs = job.epochs_at(steps, batches)
    word = "sequences" if stage in ("pt", "sft") else records_word(stage)
    own = f"{per_step // batches.rows.unit:,} {word} per step, {batches.num_sequences:,} in the data"
    if stage == "grpo":
        own += f", {batches.rows.unit} completions of each"
    passes = f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.4g}"
    return epochs, f"{passes} in {amount}; {own}"


def write_data_record(job: Job) -> None:
    """Write `data.json` into the directory of a run."""
    path = Path(job.output_dir) / DATA_RECORD
    write_text(path, json.dumps(data_facts(job), indent=1) + "\n")


_MAX_CHARACTERS: Final = 110
"""Maximum characters of a segment in the panel."""
_MAX_SEGMENTS: Final = 5
_NEW_LINE: Final = "\u21b5"


def panel_rows(job: Job) -> dict[str, Any]:
    """Return the rows of the start panel about the data, as a dict from row title to a string or rich text.

    The rows are the summary and, if there are any, the notes and one example with its targets marked.
    """
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
    all_segments = list(segments)
    shortened = [
        Segment(without_middle(s.text, _MAX_CHARACTERS).replace("\n", _NEW_LINE), s.trained)
        for s in all_segments[:_MAX_SEGMENTS]
    ]
    if len(all_segments) > _MAX_SEGMENTS:
        shortened.append(Segment(f" ... {len(all_segments) - _MAX_SEGMENTS} more parts", trained=False))
    return shortened


def highlighted(segments: Iterable[Segment], *, coloured: bool) -> Any:
    """Return segments as rich text with the targets in green or, without `coloured`, between `[[` and `]]`."""
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
