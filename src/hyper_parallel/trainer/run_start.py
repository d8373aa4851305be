"""Start of a prepared run: on forked local ranks, as a rank of torchrun, or on Ray actors."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from hyper_parallel.backends.torch.memory import run_folder
from hyper_parallel.config import LoadedRecipe, with_absolute_paths
from hyper_parallel.errors import RankHung, written
from hyper_parallel.runtime import (
    Deadlines,
    World,
    check_local_start,
    launch,
    launch_on_ray,
    launched_rank,
    ranks_per_node,
    with_restarts,
)
from hyper_parallel.topology import rank_threads
from hyper_parallel.trainer._elastic import replan_up_to
from hyper_parallel.trainer.data import Stream
from hyper_parallel.trainer.engine.torch_engine import TorchEngine
from hyper_parallel.trainer.job import Job, prepare_job, under_torchrun
from hyper_parallel.trainer.loop import Display, Summary, Trainer
from hyper_parallel.trainer.run_directory import claim_run_directory, run_lock
from hyper_parallel.trainer.signals import Interrupted, StopRequest
from hyper_parallel.trainer.snapshots import newest_saved, snapshot_folder
from hyper_parallel.trainer.stages.rollout_folder import RolloutFolder
from hyper_parallel.trainer.stages.rollouts import sample_rank

_log = logging.getLogger(__name__)


def run_job(job: Job) -> Summary | None:
    """Train on local ranks or, under torchrun, as this rank.

    If a rank dies or hangs, all local ranks are restarted, at most `training.max_restarts` times. They resume from the
    newest intact checkpoint or snapshot. If ranks fail again before another checkpoint, a recipe with
    `training.elastic` is replanned for fewer ranks. A coded error of a rank ends the run.

    SIGINT, SIGTERM and SIGHUP end the run after its current step with a checkpoint. A second signal more than a second
    later, or a signal before the first step of local ranks, ends the run at once.

    Returns:
        Summary of the run; None on ranks of torchrun other than rank 0.

    Raises:
        DeviceUnavailable: HP502 when this machine cannot run all ranks.
        DegreesMismatch: HP301 when `launch.nnodes` x `launch.nproc_per_node` is not the number of ranks.
        ForkUnsafe: HP605 when torch.distributed is initialized, or another thread of this process computes.
        SnapshotsTooLarge: HP626 when /dev/shm has no space for `checkpoint.snapshot_every`.
        OutputNotWritable: HP105 when the run directory cannot be written, or has other files but no marker.
        RunInUse: HP720 when another run writes to the run directory.
        Interrupted: A signal has ended the run; `step` is that of the saved checkpoint, None if it was stopped at once.
        RankFailed: HP601 when a rank died and `training.max_restarts` is 0.
        RankHung: HP620 when a rank hung and `training.max_restarts` is 0.
        RestartsUsedUp: HP621 when ranks failed after the last restart.
        HyperParallelError: A coded error of a rank, unchanged.
    """
    check_local_start(job.recipe, job.ranks, ["train", "RECIPE.yaml"])  # `hp.train` only: the command checks earlier
    stop = StopRequest()
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":
            with written(job.output_dir):
                claim_run_directory(job.output_dir, job.recipe)
            stack.enter_context(run_lock(job.output_dir))
            with written(job.output_dir / "logs"):
                (job.output_dir / "logs").mkdir(exist_ok=True)
        snapshots = stack.enter_context(snapshot_folder(job))
        stack.enter_context(stop.watched())
        if under_torchrun():
            restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            restarted = restarted and job.has_started_since(_start_time_s(os.getppid()))
            return _finished(_train(replace(job, restarted=restarted), stop), stop)
        start_s, current_job, newest_before = time.time(), job, 0

        def attempt(number: int) -> Summary | None:
            nonlocal current_job, newest_before
            newest = newest_saved(job.checkpoint_dir, snapshots)
            if number > 1 and newest == newest_before:  # the previous restart saved no checkpoint
                current_job = _replan_for_fewer(current_job)
            if number:  # the directory may have been removed
                claim_run_directory(job.output_dir, job.recipe)
            newest_before, restarted = newest, number > 0 and job.has_started_since(start_s)
            logs = job.output_dir / "logs" / (f"restart_{number}" if number else "")
            try:
                return _train(replace(current_job, restarted=restarted), stop, logs, snapshots)
            except (RankHung, KeyboardInterrupt) as error:
                if isinstance(error, Interrupted) or not stop.is_requested:
                    raise
                raise Interrupted(stop.signum or signal.SIGTERM) from error

        return _finished(with_restarts(attempt, job.recipe.training.max_restarts), stop)


def run_on_ray(job: Job, loaded: LoadedRecipe) -> Summary | None:
    """Train with Ray actors as ranks; return the summary of rank 0.

    If an actor dies, all actors are restarted, at most `training.max_restarts` times. Every machine must have model and
    data at the same paths, and every rank prepares the run again from `loaded`. An interrupt ends the actors at once.

    Raises:
        HyperParallelError: See `run_job` and `launch_on_ray`.
    """
    portable = replace(loaded, recipe=with_absolute_paths(loaded.recipe))
    launch, ranks = job.recipe.launch, job.ranks
    ranks_per_node(job.recipe, ranks)

    def rank() -> Summary | None:
        return run_job(prepare_job(portable, progress=False))

    def attempt(number: int) -> Summary | None:
        results = launch_on_ray(rank, ranks, launch.nnodes, address=launch.ray_address, restart=number)
        summary: Summary | None = results[0]
        return summary

    return with_restarts(attempt, job.recipe.training.max_restarts)


def _replan_for_fewer(job: Job) -> Job:
    """Return the run prepared for fewer ranks; return `job` if its recipe is not elastic or its plan has one rank."""
    ranks = job.plan.strategy.world_size
    if not job.recipe.training.elastic or ranks == 1:
        return job
    loaded = LoadedRecipe(job.recipe, {}, job.output_dir / "config.yaml")
    fewer = prepare_job(replan_up_to(loaded, ranks - 1), progress=False)
    strategy = fewer.plan.strategy
    _log.warning("replanned for %d of %d ranks: %s", strategy.world_size, ranks, strategy)
    return fewer


def _train(job: Job, stop: StopRequest, logs: Path | None = None, snapshots: Path | None = None) -> Summary | None:
    """Train on forked local ranks with log files in `logs` or, if `logs` is None, as a rank of torchrun.

    Return the summary of rank 0; None on other ranks of torchrun.
    """
    with ExitStack() as stack:
        flash, parent = None, job.recipe.offload.flash_dir
        if parent is not None:
            # This process owns the folder, because a killed rank could not remove it.
            flash = stack.enter_context(
                run_folder(Path(parent), job.output_dir.name, "offload.flash_dir=WRITABLE_FOLDER")
            )
        if logs is None:
            rank = launched_rank()[0]
            if rank == 0:  # before any rank joins a process group
                RolloutFolder(job.output_dir / "rollouts").reset()
            return train_rank(job, rank, flash, stop)
        # Import transformers once before the fork; all ranks share it.
        import transformers.models.auto.modeling_auto  # noqa: F401

        training = job.recipe.training
        RolloutFolder(job.output_dir / "rollouts").reset()
        results = launch(
            lambda rank: train_rank(job, rank, flash, stop, snapshots),
            job.ranks,
            log_dir=logs,
            threads=rank_threads(job.ranks),
            echo_rank=0,
            worlds=job.worlds,
            deadlines=Deadlines(training.timeout_s, training.first_step_timeout_s),
            ending=lambda: stop.is_requested,
        )
    summary: Summary | None = results[0]
    return summary


def train_rank(
    job: Job, rank: int, flash: Path | None, stop: StopRequest, snapshots: Path | None = None
) -> Summary | None:
    """Join the process group and train, or sample rollouts; return the summary on rank 0, None on other ranks.

    `rank` counts over all worlds (training ranks and sampling replicas). `flash` is the folder for offload files of all
    ranks launched by this process; None without `offload.flash_dir`. `snapshots` is the folder of recovery snapshots;
    None without `checkpoint.snapshot_every`.
    """
    if rank >= (train := job.worlds[0]):
        sample_rank(job, (rank - train) // job.recipe.grpo.copy_ranks)
        return None
    training, engine_type = job.recipe.training, TorchEngine
    if job.programs is not None:
        from hyper_parallel.trainer.engine.program_engine import ProgramEngine

        engine_type = ProgramEngine
    with World.join(
        deadlines=Deadlines(training.timeout_s, training.first_step_timeout_s),
        debug=training.debug_collectives,
        worlds=job.worlds,
        ending=stop.received,
    ) as world:
        job = with_first_rank_plan(job)
        display = Display(training.steps, world.rank == 0)
        with engine_type(job, world, display, flash, snapshots) as engine:
            return Trainer(job, engine, display, stop).train()


def with_first_rank_plan(job: Job) -> Job:
    """Return the job with the plan and media costs of rank 0, if its data has images or audio; collective.

    Under torchrun each rank computes plan and media costs on its own machine. The assignment of sequences to
    microbatches depends on both. Ranks with different values would repeat some sequences of a step and omit others.
    """
    if isinstance(job.packed.train, Stream) or not job.packed.train.has_media:
        return job
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return job
    values = [(job.plan, job.media_costs)]
    dist.broadcast_object_list(values)
    plan, costs = values[0]
    return replace(job, plan=plan, media_costs=costs)


def _finished(summary: Summary | None, stop: StopRequest) -> Summary | None:
    if stop.step is None:
        return summary
    # A signal to any rank ends the whole run.
    raise Interrupted(stop.signum or signal.SIGTERM, stop.step)


def _start_time_s(pid: int) -> float:
    """Return the start time of a process in seconds since the epoch; without /proc/PID/stat, the current time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        running_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # not Linux: assume that the process has just started
        return time.time()
    return time.time() - running_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
