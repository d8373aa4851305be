"""Start a prepared run: fork local ranks, or be one rank of torchrun's; afterwards, what the trained model writes."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from hyper_parallel.backends.torch.memory import run_folder
from hyper_parallel.runtime import launch
from hyper_parallel.topology import rank_threads
from hyper_parallel.trainer._files import run_lock, write_text, written
from hyper_parallel.trainer._generate import Generator, Sampling
from hyper_parallel.trainer._job import Job, under_torchrun
from hyper_parallel.trainer._signals import Interrupted, StopRequest
from hyper_parallel.trainer.engine._engine import train_rank
from hyper_parallel.trainer.loop import Summary

_NEW_TOKENS: Final = 160
_TEMPERATURE: Final = 0.5
"""Below 1: a model of a few million parameters is surest of itself where it has learnt something."""


def run_job(job: Job) -> Summary | None:
    """Train; returns rank 0's summary, None on the other ranks of torchrun.

    SIGINT, SIGTERM and SIGHUP end the run after its present step with a checkpoint, a second one at once.

    Raises:
        RunInUse: HP720 when another run writes to the run directory.
        Interrupted: A signal has ended the run; its `step` is that of the checkpoint.
        RankFailed: HP601 when a rank died.
        TransferFailed: HP513 when there can be no folder in `offload.flash_dir`.
        HyperParallelError: A coded error of a rank, as it is.
    """
    stop = StopRequest()
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":
            stack.enter_context(run_lock(job.output_dir))
            with written(job.output_dir / "logs"):
                (job.output_dir / "logs").mkdir(exist_ok=True)
        stack.enter_context(stop.watched())
        flash, parent = None, job.recipe.offload.flash_dir
        if parent is not None:
            # This process removes it: a rank that is killed cannot.
            flash = stack.enter_context(run_folder(Path(parent), job.output_dir.name))
        if under_torchrun():
            return _finished(train_rank(job, flash, stop), stop)
        # The model's library is imported once, before the fork, and shared by all ranks.
        import transformers.models.auto.modeling_auto  # noqa: F401

        ranks = job.plan.strategy.world_size
        results = launch(
            lambda rank: train_rank(job, flash, stop),
            ranks,
            log_dir=job.output_dir / "logs",
            threads=rank_threads(ranks),
            echo_rank=0,
        )
    return _finished(results[0], stop)


def _finished(summary: Summary | None, stop: StopRequest) -> Summary | None:
    if stop.step is None:
        return summary
    # A signal to another rank only is one to the run.
    raise Interrupted(stop.signum or signal.SIGTERM, stop.step)


def write_sample(job: Job) -> str:
    """Continue the recipe's `sample_prompt` with the exported model; written to sample.txt and returned.

    Called once, after the ranks have ended: one device reads the export as anybody would.
    """
    prompt = job.recipe.sample_prompt or ""
    generator = Generator(job.output_dir, trusted=job.recipe.model.trust_remote_code)
    context = getattr(generator.model.config, "max_position_embeddings", None) or _NEW_TOKENS * 2
    room = context - len(generator.encode(prompt))
    sampling = Sampling(
        max_new_tokens=max(1, min(_NEW_TOKENS, room)),
        temperature=_TEMPERATURE,
        seed=job.recipe.training.seed,
    )
    generation = generator.generate(prompt, sampling)
    text = generation.prompt + generation.text
    write_text(job.output_dir / "sample.txt", text + "\n")
    return text
