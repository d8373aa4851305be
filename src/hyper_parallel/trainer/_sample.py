"""The text a trained model writes, so that a person sees what was learned."""

from __future__ import annotations

from hyper_parallel.trainer._files import write_text
from hyper_parallel.trainer._generate import Generator, Sampling
from hyper_parallel.trainer._job import Job

_NEW_TOKENS = 160


def write_sample(job: Job) -> str:
    """Continue the recipe's `sample_prompt` with the exported model; written to sample.txt and returned.

    Called once, after the ranks have ended: one device reads the export as anybody would.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    prompt = job.recipe.sample_prompt or ""
    generator = Generator(job.output_dir)
    context = getattr(generator.model.config, "max_position_embeddings", None) or _NEW_TOKENS * 2
    room = context - len(generator.encode(prompt))
    sampling = Sampling(
        max_new_tokens=max(1, min(_NEW_TOKENS, room)), seed=job.recipe.training.seed
    )
    generation = generator.generate(prompt, sampling)
    text = generation.prompt + generation.text
    write_text(job.output_dir / "sample.txt", text + "\n")
    return text
