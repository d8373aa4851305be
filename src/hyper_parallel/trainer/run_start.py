"""Start a prepared run: fork local ranks, or be one rank of torchrun's; afterwards, what the trained model writes."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from hyper_parallel.backends.torch.memory import run_folder
from hyper_parallel.config import LoadedRecipe, with_absolute_paths
from hyper_parallel.errors import RankHung, written
from hyper_parallel.runtime import (
    Deadlines,
    check_local_start,
    launch,
    launch_on_ray,
    launched_rank,
    ranks_per_node,
    with_restarts,
)
from hyper_parallel.topology import rank_threads
from hyper_parallel.trainer._elastic import on_at_most
from hyper_parallel.trainer.data import PLAIN
from hyper_parallel.trainer.engine.torch_engine import train_rank
from hyper_parallel.trainer.files import run_lock
from hyper_parallel.trainer.generation import Generator, Sampling
from hyper_parallel.trainer.job import Job, prepare_job, under_torchrun
from hyper_parallel.trainer.loop import Summary
from hyper_parallel.trainer.run_directory import claim_run_directory, write_kept
from hyper_parallel.trainer.signals import Interrupted, StopRequest
from hyper_parallel.trainer.snapshots import newest_saved, snapshot_folder
from hyper_parallel.trainer.stages.rollout_folder import RolloutFolder
from hyper_parallel.trainer.stages.rollouts import sample_rank

_log = logging.getLogger(__name__)
_NEW_TOKENS: Final = 160
_PAIRS_OF_TEXTS: Final = ("prompt_completion", "preference")
_TEMPERATURE: Final = 0.5
"""Below 1: a model of a few million parameters is surest of itself where it has learnt something."""


def run_job(job: Job) -> Summary | None:
    """Train; returns rank 0's summary, None on the other ranks of torchrun.

    Lost ranks are started again as often as the recipe says, and go on from the newest intact checkpoint or snapshot;
    on fewer ranks where the recipe is elastic and a restart saved nothing before ranks were lost again.
    SIGINT, SIGTERM and SIGHUP end the run after its present step with a checkpoint; a second one, or one before the
    first step of local ranks, at once.

    Raises:
        DeviceUnavailable: HP502 when this machine does not run as many ranks.
        SnapshotsTooLarge: HP626 when /dev/shm has no space for `checkpoint.snapshot_every`.
        RunInUse: HP720 when another run writes to the run directory.
        Interrupted: A signal has ended the run; its `step` is that of the checkpoint.
        RankFailed: HP601 when a rank died.
        RankHung: HP620 when a rank held the others up.
        RestartsUsedUp: HP621 when ranks were lost after the last restart.
        TransferFailed: HP513 when there can be no folder in `offload.flash_dir`.
        HyperParallelError: A coded error of a rank, as it is.
    """
    check_local_start(job.recipe, job.ranks, ["train", str(job.output_dir / "config.yaml")])
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
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            again = again and job.begun_since(_started_s(os.getppid()))
            return _finished(_train(replace(job, restarted=again), stop), stop)
        start_s, now, before = time.time(), job, 0

        def attempt(number: int) -> Summary | None:
            nonlocal now, before
            newest = newest_saved(job.checkpoint_dir, snapshots)
            if number > 1 and newest == before:  # the restart before this one saved nothing
                now = _on_fewer(now)
            if number:  # the directory may be gone since
                claim_run_directory(job.output_dir, job.recipe)
            before, again = newest, number > 0 and job.begun_since(start_s)
            logs = job.output_dir / "logs" / (f"restart_{number}" if number else "")
            try:
                return _train(replace(now, restarted=again), stop, logs, snapshots)
            except (RankHung, KeyboardInterrupt) as error:
                if isinstance(error, Interrupted) or not stop.asked:
                    raise
                raise Interrupted(stop.signum or signal.SIGTERM) from error

        return _finished(with_restarts(attempt, job.recipe.training.max_restarts), stop)


def run_on_ray(job: Job, loaded: LoadedRecipe) -> Summary | None:
    """Train with actors of Ray as ranks; returns rank 0's summary.

    Lost actors are started again as often as the recipe says. Model and data are read on every machine, from the same
    paths. An interrupt ends the actors at once.

    Args:
        job: The run.
        loaded: Its recipe, from which every rank prepares it.

    Raises:
        RankFailed: HP601 with the machine of the actor that died first. As `run_job` and `launch_on_ray`.
    """
    given = replace(loaded, recipe=with_absolute_paths(loaded.recipe))
    launch, ranks = job.recipe.launch, job.ranks
    ranks_per_node(job.recipe, ranks)

    def rank() -> Summary | None:
        return run_job(prepare_job(given, progress=False))

    def attempt(number: int) -> Summary | None:
        found = launch_on_ray(
            rank, ranks, launch.nnodes, address=launch.ray_address, restart=number
        )
        summary: Summary | None = found[0]
        return summary

    return with_restarts(attempt, job.recipe.training.max_restarts)


def _on_fewer(job: Job) -> Job:
    """The run planned anew on fewer ranks; as it is where it is not elastic or has one."""
    ranks = job.plan.strategy.world_size
    if not job.recipe.training.elastic or ranks == 1:
        return job
    loaded = LoadedRecipe(job.recipe, {}, job.output_dir / "config.yaml")
    fewer = prepare_job(on_at_most(loaded, ranks - 1), progress=False)
    strategy = fewer.plan.strategy
    _log.warning("planned anew on %d of %d ranks: %s", strategy.world_size, ranks, strategy)
    return fewer


def _train(
    job: Job, stop: StopRequest, logs: Path | None = None, snapshots: Path | None = None
) -> Summary | None:
    """Fork local ranks that write to `logs`, or be one of torchrun's."""
    with ExitStack() as stack:
        flash, parent = None, job.recipe.offload.flash_dir
        if parent is not None:
            # This process removes it: a rank that is killed cannot.
            flash = stack.enter_context(run_folder(Path(parent), job.output_dir.name))
        if logs is None:
            return _launched_rank(job, flash, stop)
        # The model's library is imported once, before the fork, and shared by all ranks.
        import transformers.models.auto.modeling_auto  # noqa: F401

        training = job.recipe.training
        RolloutFolder(job.output_dir / "rollouts").reset()
        results = launch(
            lambda rank: _rank(job, rank, flash, stop, snapshots),
            job.ranks,
            log_dir=logs,
            threads=rank_threads(job.ranks),
            echo_rank=0,
            worlds=job.worlds,
            deadlines=Deadlines(training.timeout_s, training.first_step_timeout_s),
            ending=lambda: stop.asked,
        )
    summary: Summary | None = results[0]
    return summary


def _launched_rank(job: Job, flash: Path | None, stop: StopRequest) -> Summary | None:
    """Be a rank that another launcher has started."""
    rank = launched_rank()[0]
    if rank == 0:  # before any rank has joined its world
        RolloutFolder(job.output_dir / "rollouts").reset()
    return _rank(job, rank, flash, stop)


def _rank(
    job: Job, rank: int, flash: Path | None, stop: StopRequest, snapshots: Path | None = None
) -> Summary | None:
    """Train, or sample only; arguments as of `train_rank`."""
    train = job.worlds[0]
    if rank < train:
        return train_rank(job, flash, stop, snapshots)
    sample_rank(job, (rank - train) // job.recipe.grpo.copy_ranks)
    return None


def _finished(summary: Summary | None, stop: StopRequest) -> Summary | None:
    if stop.step is None:
        return summary
    # A signal to another rank only is one to the run.
    raise Interrupted(stop.signum or signal.SIGTERM, stop.step)


def _started_s(pid: int) -> float:
    """When a process was started, as seconds of `time.time`: field 22 of /proc/PID/stat, in ticks since the boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        running_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # no Linux: as if just now
        return time.time()
    return time.time() - running_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def make_sample(job: Job) -> str:
    """Return the continuation of the recipe's `sample_prompt` by the exported model.

    A model that was trained on conversations is given the prompt as a user's turn through its chat template, and the
    text is the conversation as the template writes it. Called once, after the ranks have ended: one device reads the
    export as anybody would.
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
    asked = generator.tokenizer.decode(ids) if chat else generation.prompt
    return f"{asked}{generation.text}"


def _reads_turns(job: Job, template: str | None) -> bool:
    """Return whether the model was trained on turns that its chat template has written."""
    recipe = job.recipe
    if recipe.stage == "pt" or recipe.data.chat_template == "none" or not template:
        return False
    # Pairs of texts are joined as plain text where the tokenizer brought no template of its own.
    return template != PLAIN or any(c.format not in _PAIRS_OF_TEXTS for c in job.packed.counts)


def write_sample(job: Job, text: str) -> None:
    """Write sample.txt into the run directory."""
    with written(job.output_dir):
        write_kept(job.output_dir / "sample.txt", text + "\n")
