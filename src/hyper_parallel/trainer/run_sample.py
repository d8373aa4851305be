"""Sample of a run: the continuation of the recipe's `sample_prompt` by the exported model."""

from __future__ import annotations

from typing import Final

from hyper_parallel.errors import written
from hyper_parallel.trainer.data import PLAIN
from hyper_parallel.trainer.generation import Generator, Sampling
from hyper_parallel.trainer.job import Job
from hyper_parallel.trainer.run_directory import write_editable

_NEW_TOKENS: Final = 160
_PAIRS_OF_TEXTS: Final = ("prompt_completion", "preference")
_TEMPERATURE: Final = 0.5
"""Below 1, because the most likely tokens of a model with a few million parameters are the best learned."""


def make_sample(job: Job) -> str:
    """Return the continuation of the recipe's `sample_prompt` by the exported model.

    A model trained on conversations gets the prompt as a user's turn through its chat template, and the text is the
    rendered conversation. Called once, after the ranks have ended: one device loads the export.
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
