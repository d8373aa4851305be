"""The section of a recipe for machines: who starts the ranks, and where."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from hyper_parallel.config._maxima import MOST_RANKS
from hyper_parallel.config._sections import Section

_TIME: Final = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+))?(?::(?P<seconds>\d+))?)"
    r"|(?:(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+))|(?P<only>\d+)"
)
"""Forms of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""


def time_limit_s(text: str) -> int:
    """Return the seconds of a limit of time in a form of sbatch.

    Raises:
        ValueError: The text has another form, or is no time.
    """
    parts = _TIME.fullmatch(text)
    if parts is None:
        raise ValueError(f"`{text}` is no limit of time; write for example 12:00:00, 90 or 1-12")
    days, hours, minutes, seconds, h, m, s, only = (int(part or 0) for part in parts.groups())
    limit = (days * 24 + hours + h) * 3600 + (minutes + m + only) * 60 + seconds + s
    if limit < 1:
        raise ValueError(f"`{text}` is no time")
    return limit


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
    """Slurm's partition, or the queue of Kueue on Kubernetes. None: Slurm's default; no queue."""
    time: str | None = None
    """Limit of time of Slurm and Kubernetes, as `sbatch` takes it (`12:00:00`). None: that of the partition; none."""
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

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, value: object) -> object:
        """Refuse a number: YAML 1.1 reads 12:00:00 as one, in base 60."""
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("YAML reads this as a number; quote it, as in time: '12:00:00'")
        if isinstance(value, str):
            time_limit_s(value)
        return value

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
