"""The section of a recipe for machines: who starts the ranks, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hyper_parallel.config._maxima import MOST_RANKS
from hyper_parallel.config._sections import Section


class Launch(Section):
    """Who starts the ranks, and on how many machines. Processes that are ranks already do not read it."""

    launcher: Literal["local", "torchrun", "slurm", "ray", "kubernetes"] = "local"
    """This process (local), torchrun on every machine, a job of Slurm, actors of Ray, or a JobSet of Kubernetes, whose
    manifest is written. `--launcher` says it too."""
    nnodes: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Machines."""
    nproc_per_node: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Ranks on each. None: all ranks over `nnodes`."""
    oversubscribe: bool = False
    """Start more ranks on the CPU of this machine than its cores and free memory are made for."""
    rdzv_endpoint: Annotated[str, Field(pattern=r"^[^\s:]+:\d+$")] | None = None
    """HOST:PORT of the machine where the agents of torchrun meet. None: one machine alone; with Slurm the first one of
    the job."""
    partition: str | None = None
    """Slurm's partition. None: its default."""
    time: str | None = None
    """Slurm's limit of time, as `sbatch` takes it (`12:00:00`). None: that of the partition."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch (`[--gpus-per-node=8, --exclusive]`)."""
    ray_address: str | None = None
    """Address of the Ray cluster (`auto`, `HOST:6379`). None: that of RAY_ADDRESS, else one that is started here."""

    image: str | None = None
    """Container image of Kubernetes, with this package and torch."""
    namespace: str | None = None
    """Namespace of Kubernetes. None: that of kubectl."""
    resource: str | None = "nvidia.com/gpu"
    """Resource of Kubernetes that a rank takes one of. None: ranks on the CPU."""
    volume: str | None = None
    """Claim of a shared volume (PersistentVolumeClaim) of Kubernetes with model, data and output. None: no volume."""
    mount_path: str = "/workspace"
    """Where the volume is mounted; paths of the recipe have to lie below it, here and in the pods."""

    @field_validator(
        "partition",
        "time",
        "ray_address",
        "sbatch",
        "image",
        "namespace",
        "resource",
        "volume",
        "mount_path",
    )
    @classmethod
    def _one_line(cls, value: object) -> object:
        """They become lines of a script, which a line feed would end."""
        texts = value if isinstance(value, tuple) else (value,)
        if not all(text.isprintable() for text in texts if isinstance(text, str)):
            raise ValueError("a text of printable characters is wanted")
        return value
