"""Snapshots in memory: a folder in /dev/shm that outlives the ranks and ends with the process that starts them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hyper_parallel.backends.torch.memory import run_folder
from hyper_parallel.errors import Contradiction, SnapshotsTooLarge
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.units import DTYPE_BYTES, format_bytes

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

MEMORY: Final = Path("/dev/shm")  # tmpfs on every Linux
KEPT: Final = 2  # a rank may be killed while it writes the newest


@contextmanager
def snapshot_folder(job: Job) -> Iterator[Path | None]:
    """Where ranks that this process starts keep snapshots, removed at the end; None where the recipe has none.

    A folder of a run that was killed with its launcher is removed by the next run on this machine.

    Raises:
        SnapshotsTooLarge: HP626 when they would not fit.
        Contradiction: HP104 in a process of torchrun, whose ranks this process does not outlive.
    """
    from hyper_parallel.trainer.job import under_torchrun

    if not job.recipe.checkpoint.snapshot_every:
        yield None
        return
    if under_torchrun():
        raise Contradiction(
            "snapshots are kept by the process that starts the ranks, and torchrun has started this one",
            where="checkpoint.snapshot_every",
            got=f"snapshot_every={job.recipe.checkpoint.snapshot_every}",
            hint="checkpoint.snapshot_every=0",
        )
    needed = (KEPT + 1) * _state_bytes(job)
    free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    if needed > free:
        raise SnapshotsTooLarge(
            f"{KEPT + 1} snapshots of the training state do not fit in {MEMORY}",
            where="checkpoint.snapshot_every",
            got=f"{format_bytes(needed)} needed, {format_bytes(free)} free",
            hint="checkpoint.snapshot_every=0",
        )
    with run_folder(MEMORY, f"hyper_parallel-{job.output_dir.name}") as folder:
        yield folder


def _state_bytes(job: Job) -> int:
    """Parameters that a checkpoint holds, and two optimizer states of each that is trained."""
    plan, trained = job.plan, job.plan.workload.trained
    share = 3 * trained if job.recipe.lora is not None else 1 + 2 * trained
    return int(plan.model.num_params * share * DTYPE_BYTES[plan.workload.param_dtype])


def newest_saved(*folders: Path | None) -> int:
    """The newest step that was published in any of these folders; 0: none."""
    return max((step for folder in folders if folder for step in steps(folder)), default=0)
