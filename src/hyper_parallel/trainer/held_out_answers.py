"""Answers of the exported model to held-out conversations (`sample_answers`) and the answers of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hyper_parallel.errors import written
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.data.media_arrays import RowMedia, media_arrays, per_token_names
from hyper_parallel.trainer.data.media_records import thumbnail
from hyper_parallel.trainer.data.media_tokens import processor_of, rate_of
from hyper_parallel.trainer.data.prompt_media import PromptMedia
from hyper_parallel.trainer.generation import Generator
from hyper_parallel.trainer.job import Job
from hyper_parallel.trainer.run_directory import write_editable

ANSWERS: Final = "answers.json"
_FURTHER_TOKENS: Final = 32
"""Tokens that an answer may be longer than that of the data: enough to see in a table that it goes on."""


def answer_held_out(job: Job) -> list[dict[str, Any]]:
    """Return prompt, images, expected and given answer of `sample_answers` held-out rows, spread evenly.

    The last answer of a row is decoded greedily from the true tokens of its document before it. Called once, after the
    ranks have ended: one device loads the export.
    """
    rows, found = job.packed.holdout, list[dict[str, Any]]()
    if rows is None:
        return found
    generator = Generator(job.output_dir, trusted=job.recipe.model.trust_remote_code)
    count = min(job.recipe.sample_answers, len(rows))
    for index in range(count):
        at = np.array([index * len(rows) // count])
        (tokens,), (labels,) = rows.read(at)
        targets = np.flatnonzero(labels != IGNORE_INDEX)
        if not len(targets):
            continue
        runs = np.split(targets, np.flatnonzero(np.diff(targets) > 1) + 1)
        first, positions = int(runs[-1][0]), rows.positions(at)
        begin = 0 if positions is None else first - int(positions[0, first])
        prompt, expected = tokens[begin : first + 1].tolist(), labels[runs[-1]].tolist()
        media, images = _media(generator, rows.media(at), tokens[None], len(prompt))
        given = generator.continue_tokens(prompt, len(expected) + _FURTHER_TOKENS, media)
        texts = {"prompt": prompt, "expected": expected, "answer": given}
        decode = generator.tokenizer.decode
        found.append(
            {name: decode(ids, skip_special_tokens=True).strip() for name, ids in texts.items()}
            | {"images": images}
        )
    return found


def _media(
    generator: Generator, row: Sequence[RowMedia], tokens: Any, prompt_length: int
) -> tuple[PromptMedia | None, list[str]]:
    """Return the arrays of the media before the last answer of a row, and small copies of its images."""
    if not row[0].row:
        return None, []
    processor = processor_of(generator.tokenizer)
    names = per_token_names(processor)
    arrays = {
        name: array[:, :prompt_length] if name in names or name == "attention_mask" else array
        for name, array in media_arrays(row, tokens).items()
    }
    pictures = row[0].decode(rate_of(processor))
    return PromptMedia(arrays, names), [thumbnail(p) for kind, p in pictures if kind == "image"]


def write_answers(job: Job, answers: list[dict[str, Any]]) -> None:
    """Write answers.json into the run directory."""
    with written(job.output_dir):
        write_editable(job.output_dir / ANSWERS, json.dumps(answers, indent=1) + "\n")
