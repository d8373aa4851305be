"""`data.json` of a run: counts, lengths and examples of its data, the source of start panels and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.serde import write_text
from hyper_parallel.trainer.data import Stream, StreamBatches
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.summary import notes, records_word, summary_rows

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

DATA_RECORD: Final = "data.json"


def data_facts(job: Job) -> dict[str, Any]:
    """Return the facts about the data of a run as JSON values; for a stream about the records read so far."""
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
    """Return the summary of the data of a run by the names of its rows."""
    packed, stage = job.packed, job.recipe.stage
    streaming = job.recipe.data.streaming
    rows = summary_rows(stage, _counts(job), sampled=streaming)
    if streaming:
        rows["source"] += ", a stream"
    elif len(packed.weights) > 1:
        total = sum(packed.weights)
        parts = zip(packed.weights, packed.counts, strict=True)
        rows["source"] = " + ".join(f"{w / total:.4g} of {c.source}" for w, c in parts)
    rows["epochs"] = _epochs(job)[1]
    return rows


def _counts(job: Job) -> tuple[DataCounts, ...]:
    """Return the counts of the sources; for a stream those of its first epoch, as far as it was read."""
    stream = job.packed.train
    return (stream.counts,) if isinstance(stream, Stream) else job.packed.counts


def _epochs(job: Job) -> tuple[float | None, str]:
    """Return the number of passes over the data, None for a stream, and a description."""
    batches, steps, stage = job.train_batches(), job.recipe.training.steps, job.recipe.stage
    per_step = batches.sequences_per_step
    amount = f"{steps:,} step{'' if steps == 1 else 's'}"
    if isinstance(batches, StreamBatches):
        return None, f"{amount} of {per_step:,} sequences of a stream"
    epochs = job.epochs_at(steps, batches)
    word = "sequences" if stage in ("pt", "sft") else records_word(stage)
    own = (
        f"{per_step // batches.rows.unit:,} {word} per step, {batches.num_sequences:,} in the data"
    )
    if stage == "grpo":
        own += f", {batches.rows.unit} completions of each"
    passes = f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.4g}"
    return epochs, f"{passes} in {amount}; {own}"


def write_data_record(job: Job) -> None:
    """Write `data.json` into the directory of a run."""
    path = Path(job.output_dir) / DATA_RECORD
    write_text(path, json.dumps(data_facts(job), indent=1) + "\n")
