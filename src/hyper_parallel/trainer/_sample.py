"""The text a trained model writes, so that a person sees what was learned."""

from __future__ import annotations

from hyper_parallel.trainer._files import write_text
from hyper_parallel.trainer._generate import Generator, Sampling
from hyper_parallel.trainer._job import Job


def write_sample(job: Job) -> str:
    """Continue the recipe's `sample_prompt` with the exported model; written to sample.txt and returned.

    Called once, after the ranks have ended: one device reads the export as anybody would.
    """
    prompt = job.recipe.sample_prompt or ""
    generation = Generator(job.output_dir).generate(prompt, Sampling(seed=job.recipe.training.seed))
    text = generation.prompt + generation.text
    write_text(job.output_dir / "sample.txt", text + "\n")
    return text
