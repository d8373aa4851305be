"""`hyper-parallel train --launcher`: start torchrun, submit a Slurm job, or write a Kubernetes manifest."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.cli.app import is_quiet, say
from hyper_parallel.errors import LauncherMissing, written

if TYPE_CHECKING:
    from hyper_parallel.trainer import Job


def describe_submit(launcher: str, job: Job, words: Sequence[str]) -> str:
    """Return the text of a dry run: how the run would start its ranks, and where it would write files.

    `words` are the command-line arguments of `hyper-parallel` on every rank.
    """
    from hyper_parallel.runtime import launch_words, start_capacity

    ranks, launch = job.ranks, job.recipe.launch
    by_hand = torchrun_command(job, words)
    if launcher in ("slurm", "kubernetes"):
        path, text = _job_file(launcher, job, words)
        submit = " and submit it with sbatch" if launcher == "slurm" else ""
        return f"would write {path}{submit}:\n\n{text}"
    if launcher == "torchrun":
        return f"would write {job.output_dir}/ and run on each of {launch.nnodes} machines:\n  {by_hand}"
    how = f"fork {ranks} ranks"
    if launcher == "ray":
        how = f"start {ranks} actors of Ray on {launch.nnodes} machines"
    elif ranks > (most := start_capacity(oversubscribe=launch.oversubscribe).num_ranks):
        machines = launch_words(ranks, launch.nproc_per_node)
        command = shlex.join(["hyper-parallel", *_with_quiet(words)])
        return (
            f"this machine can run {most} of the {ranks} ranks; on a cluster:\n  {command} --launcher slurm {machines}"
        )
    return f"would write {job.output_dir}/ and {how}; the same by hand:\n  {by_hand}"


def submit_job(launcher: str, job: Job, words: Sequence[str]) -> None:
    """Replace this process with torchrun, submit a Slurm job, or write a Kubernetes manifest.

    The command, script or manifest is printed on standard error. `words` as in `describe_submit`.

    Raises:
        OutputNotWritable: HP105 if the script or manifest cannot be written into the run directory.
        LauncherMissing: HP630 if `sbatch` does not exist or rejects the job; the script is written before.
        DegreesMismatch: HP301 if `launch.nnodes * launch.nproc_per_node` is not the number of ranks.
    """
    if launcher == "torchrun":
        command = torchrun_command(job, words)
        sys.stderr.write(command + "\n")
        sys.stderr.flush()
        sys.stdout.flush()
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        os.execv(sys.executable, [*torchrun, *shlex.split(command)[1:]])
    path, text = _job_file(launcher, job, words)
    _write_job_file(job, path, text)
    if launcher == "kubernetes":
        say(f"\nnext:\n  kubectl apply -f {shlex.quote(str(path))}")
        return
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LauncherMissing(
            "this machine has no `sbatch` to submit the job with",
            where=str(path),
            hint=f"on a machine with Slurm, run: sbatch {shlex.quote(str(path))}",
        )
    done = subprocess.run([sbatch, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LauncherMissing(
            "sbatch rejects the job",
            where=str(path),
            got=done.stderr.strip()[-500:],
            hint=f"correct the option in the section `launch`; to see all messages: sbatch {shlex.quote(str(path))}",
        )
    say(done.stdout.strip())


def _job_file(launcher: str, job: Job, words: Sequence[str]) -> tuple[Path, str]:
    """Return path and text of the manifest if `launcher` is kubernetes, else of the sbatch script of a Slurm job."""
    from hyper_parallel.runtime import sbatch_script
    from hyper_parallel.runtime.kubernetes import manifest

    folder = job.output_dir.absolute()
    if launcher == "kubernetes":
        return folder / "job.yaml", manifest(job.recipe, job.ranks, folder)
    script = sbatch_script(job.recipe, job.ranks, _with_quiet(words), job.output_dir)
    return folder / "job.sbatch", script


def _write_job_file(job: Job, path: Path, text: str) -> None:
    from hyper_parallel.serde import write_text
    from hyper_parallel.trainer.run_directory import claim_run_directory

    with written(job.output_dir):
        claim_run_directory(job.output_dir, job.recipe)
        (job.output_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    sys.stderr.write(text)


def torchrun_command(job: Job, words: Sequence[str]) -> str:
    """Return the torchrun command that starts the ranks of one machine; `words` as in `describe_submit`."""
    from hyper_parallel.runtime import torchrun_words

    return shlex.join(["torchrun", *torchrun_words(job.recipe, job.ranks, _with_quiet(words))])


def _with_quiet(words: Sequence[str]) -> list[str]:
    return ["--quiet", *words] if is_quiet() else list(words)
