"""Snapshots of training state in a folder of /dev/shm, which outlives the ranks but not their parent process."""

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
SNAPSHOTS_KEPT: Final = 2  # a rank may be killed while writing the newest


@contextmanager
def snapshot_folder(job: Job) -> Iterator[Path | None]:
    """Yield the snapshot folder for the ranks started by this process; None if the recipe asks for no snapshots.

    The folder is removed at the end. If the launcher is killed, the next run on this machine removes it.

    Raises:
        SnapshotsTooLarge: HP626 when snapshots would not fit into /dev/shm.
        Contradiction: HP104 in a process of torchrun, whose ranks may outlive this process.
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
    needed = (SNAPSHOTS_KEPT + 1) * _state_bytes(job)
    free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    if needed > free:
        raise SnapshotsTooLarge(
            f"{SNAPSHOTS_KEPT + 1} snapshots of the training state do not fit in {MEMORY}",
            where="checkpoint.snapshot_every",
            got=f"{format_bytes(needed)} needed, {format_bytes(free)} free",
            hint="checkpoint.snapshot_every=0",
        )
    with run_folder(MEMORY, f"hyper_parallel-{job.output_dir.name}") as folder:
        yield folder


def _state_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint: its parameters, and two optimizer states per trained parameter."""
    plan, trained = job.plan, job.plan.workload.trained
    share = 3 * trained if job.recipe.lora is not None else 1 + 2 * trained
    return int(plan.model.num_params * share * DTYPE_BYTES[plan.workload.param_dtype])


def newest_saved(*folders: Path | None) -> int:
    """Return the newest step with a published checkpoint in any of these folders; 0 if there is none."""
    return max((step for folder in folders if folder for step in steps(folder)), default=0)
