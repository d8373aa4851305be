"""Training on one rank: join the world and drive the engine of the recipe's back end."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.runtime import Deadlines, World
from hyper_parallel.trainer.engine.torch_engine import TorchEngine
from hyper_parallel.trainer.job import Job
from hyper_parallel.trainer.loop import Display, Summary, Trainer
from hyper_parallel.trainer.signals import StopRequest


def train_rank(
    job: Job,
    flash: Path | None = None,
    stop: StopRequest | None = None,
    snapshots: Path | None = None,
) -> Summary | None:
    """Train on this rank; return the summary on rank 0, None on other ranks.

    Args:
        job: The run.
        flash: Folder for files of all ranks started by this process; required with `offload.flash_dir`.
        stop: Source of requests to end before the last step; None: no such source.
        snapshots: Folder for snapshots; required with `checkpoint.snapshot_every`.
    """
    training = job.recipe.training
    deadlines = Deadlines(training.timeout_s, training.first_step_timeout_s)
    debug = training.debug_collectives
    ending = (lambda: False) if stop is None else stop.received
    with World.join(deadlines=deadlines, debug=debug, worlds=job.worlds, ending=ending) as world:
        display = Display(job.recipe.training.steps, world.rank == 0)
        engine_type = TorchEngine if job.programs is None else _program_engine()
        with engine_type(job, world, display, flash, snapshots) as engine:
            return Trainer(job, engine, display, stop).train()


def _program_engine() -> type[TorchEngine]:
    from hyper_parallel.trainer.engine.program_engine import ProgramEngine

    return ProgramEngine
