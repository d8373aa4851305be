"""Start a prepared run: fork local ranks, or be one rank of torchrun's."""

from __future__ import annotations

import os

from hyper_parallel.runtime import launch
from hyper_parallel.trainer._job import Job, clear_run, under_torchrun
from hyper_parallel.trainer._rank import Summary, train_rank


def run_job(job: Job) -> Summary | None:
    """Train; returns rank 0's summary, None on the other ranks of torchrun.

    Raises:
        RankFailed: HP601 when a rank died.
        HyperParallelError: A coded error of a rank, as it is.
    """
    if job.recipe.checkpoint.resume == "never" and int(os.environ.get("RANK", "0")) == 0:
        clear_run(job)
    if under_torchrun():
        return train_rank(job)
    # The model's library is imported once, before the fork, and shared by all ranks.
    import transformers.models.auto.modeling_auto  # noqa: F401

    ranks = job.plan.strategy.world_size
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // ranks))
    results = launch(
        lambda rank: train_rank(job),
        ranks,
        log_dir=job.output_dir / "logs",
        threads=threads,
        echo_rank=0,
    )
    summary: Summary | None = results[0]
    return summary
