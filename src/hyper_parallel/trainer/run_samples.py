"""Samples of a run: the exported model's continuation of `sample_prompt`, and its answers to held-out conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hyper_parallel.errors import written
from hyper_parallel.trainer.data import IGNORE_INDEX, PLAIN
from hyper_parallel.trainer.data.media_arrays import RowMedia, media_arrays, per_token_names
from hyper_parallel.trainer.data.media_records import thumbnail
from hyper_parallel.trainer.data.media_tokens import processor_of, rate_of
from hyper_parallel.trainer.data.prompt_media import PromptMedia
from hyper_parallel.trainer.generation import Generator, Sampling
from hyper_parallel.trainer.job import Job
from hyper_parallel.trainer.run_directory import write_editable

ANSWERS: Final = "answers.json"
_FURTHER_TOKENS: Final = 32
"""Tokens by which an answer may exceed the expected answer: enough to see in a table that it continues."""


def answer_held_out(job: Job) -> list[dict[str, Any]]:
    """Return answers of the exported model to `sample_answers` held-out rows, spread evenly over the held-out data.

    Each result is a dict with `prompt`, `expected`, `answer` and `images`. The last answer of a row is decoded greedily
    from the true tokens of its document before it. Call once after the ranks have ended, as one device loads the
    export.
    """
    rows, answers = job.packed.holdout, list[dict[str, Any]]()
    if rows is None:
        return answers
    generator = Generator(job.output_dir, trusted=job.recipe.model.trust_remote_code)
    count = min(job.recipe.sample_answers, len(rows))
    for index in range(count):
        row_index = np.array([index * len(rows) // count])
        (tokens,), (labels,) = rows.read(row_index)
        targets = np.flatnonzero(labels != IGNORE_INDEX)
        if not len(targets):
            continue
        runs = np.split(targets, np.flatnonzero(np.diff(targets) > 1) + 1)
        first, positions = int(runs[-1][0]), rows.positions(row_index)
        begin = 0 if positions is None else first - int(positions[0, first])
        prompt, expected = tokens[begin : first + 1].tolist(), labels[runs[-1]].tolist()
        media, images = _media(generator, rows.media(row_index), tokens[None], len(prompt))
        answer = generator.continue_tokens(prompt, len(expected) + _FURTHER_TOKENS, media)
        texts = {"prompt": prompt, "expected": expected, "answer": answer}
        decode = generator.tokenizer.decode
        answers.append(
            {name: decode(ids, skip_special_tokens=True).strip() for name, ids in texts.items()}
            | {"images": images}
        )
    return answers


def _media(
    generator: Generator, row: Sequence[RowMedia], tokens: Any, prompt_length: int
) -> tuple[PromptMedia | None, list[str]]:
    """Return the processed media of a prompt, None without media, and thumbnails of its images."""
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


_NEW_TOKENS: Final = 160
_PAIRS_OF_TEXTS: Final = ("prompt_completion", "preference")
_TEMPERATURE: Final = 0.5
"""Sampling temperature: below 1, because small models have learned their most likely tokens best."""


def make_sample(job: Job) -> str:
    """Return the continuation of the recipe's `sample_prompt` by the exported model.

    For a model trained on conversations, the prompt is a user's turn in its chat template, and the result is the whole
    rendered conversation. Call once after the ranks have ended, as one device loads the export.
    """
    prompt = job.recipe.sample_prompt or ""
    generator = Generator(job.output_dir, trusted=job.recipe.model.trust_remote_code)
    chat = _reads_turns(job, generator.tokenizer.chat_template)
    context = getattr(generator.model.config, "max_position_embeddings", None) or _NEW_TOKENS * 2
    ids = generator.encode(prompt, chat=chat)
    sampling = Sampling(
        max_new_tokens=max(1, min(_NEW_TOKENS, context - len(ids))),
        temperature=_TEMPERATURE,
        seed=job.recipe.training.seed,
    )
    generation = generator.generate(prompt, sampling, chat=chat)
    prefix = generator.tokenizer.decode(ids) if chat else generation.prompt
    return f"{prefix}{generation.text}"


def _reads_turns(job: Job, template: str | None) -> bool:
    """Return whether the model was trained on turns rendered by its chat template."""
    recipe = job.recipe
    if recipe.stage == "pt" or recipe.data.chat_template == "none" or not template:
        return False
    # Pairs of texts are joined as plain text if the tokenizer has no template of its own.
    return template != PLAIN or any(c.format not in _PAIRS_OF_TEXTS for c in job.packed.counts)


def write_sample(job: Job, text: str) -> None:
    """Write sample.txt into the run directory."""
    with written(job.output_dir):
        write_editable(job.output_dir / "sample.txt", text + "\n")
