"""Snapshots of training state in host memory (/dev/shm), from which restarted ranks recover.

The process that launched the ranks owns the folder of the snapshots, so the folder outlives the ranks.
"""

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
SNAPSHOTS_KEPT: Final = 2  # a rank may be killed while it writes the newest snapshot


@contextmanager
def snapshot_folder(job: Job) -> Iterator[Path | None]:
    """Yield a new folder for the snapshots of the ranks launched by this process; None without snapshots.

    The folder is removed at the end of the context or, if this process is killed, by the next run with snapshots.

    Raises:
        SnapshotsTooLarge: HP626 when the snapshots would not fit into /dev/shm.
        Contradiction: HP104 for `checkpoint.snapshot_every` under torchrun, which launches the ranks itself.
        TransferFailed: HP513 when the folder cannot be created.
    """
    from hyper_parallel.trainer.job import under_torchrun

    if not job.recipe.checkpoint.snapshot_every:
        yield None
        return
    if under_torchrun():
        raise Contradiction(
            "`checkpoint.snapshot_every` is not supported under torchrun, only for ranks that `train` launches itself",
            where="checkpoint.snapshot_every",
            got=f"snapshot_every={job.recipe.checkpoint.snapshot_every}",
            hint="checkpoint.snapshot_every=0",
        )
    needed = (SNAPSHOTS_KEPT + 1) * _state_bytes(job)
    free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    if needed > free:
        raise SnapshotsTooLarge(
            f"{SNAPSHOTS_KEPT + 1} snapshots of the training state do not fit into {MEMORY}",
            where="checkpoint.snapshot_every",
            got=f"{format_bytes(needed)} needed, {format_bytes(free)} free",
            hint="checkpoint.snapshot_every=0",
        )
    with run_folder(MEMORY, f"hyper_parallel-{job.output_dir.name}", "checkpoint.snapshot_every=0") as folder:
        yield folder


def _state_bytes(job: Job) -> int:
    """Return the bytes of a snapshot: saved parameters, and two optimizer states per trained parameter."""
    plan, trained = job.plan, job.plan.workload.trained
    share = 3 * trained if job.recipe.lora is not None else 1 + 2 * trained
    return int(plan.model.num_params * share * DTYPE_BYTES[plan.workload.param_dtype])


def newest_saved(*folders: Path | None) -> int:
    """Return the newest step with a published checkpoint in any of `folders`; 0 if there is no checkpoint."""
    return max((step for folder in folders if folder for step in steps(folder)), default=0)
