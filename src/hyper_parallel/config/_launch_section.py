"""Launch section: how ranks are started, and on how many machines."""

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
"""Time formats of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""


def time_limit_s(text: str) -> int:
    """Return the seconds of a time limit in one of sbatch's formats.

    Raises:
        ValueError: The text has another format, or is not a positive time.
    """
    parts = _TIME.fullmatch(text)
    if parts is None:
        raise ValueError(f"`{text}` is not a time limit; write for example 12:00:00, 90 or 1-12")
    days, hours, minutes, seconds, h, m, s, only = (int(part or 0) for part in parts.groups())
    limit = (days * 24 + hours + h) * 3600 + (minutes + m + only) * 60 + seconds + s
    if limit < 1:
        raise ValueError(f"`{text}` is not a positive time")
    return limit


class Launch(Section):
    """Launcher and machines. Not read by processes that already are ranks."""

    launcher: Literal["local", "torchrun", "slurm", "ray", "kubernetes"] = "local"
    """How ranks start: by this process (local), by torchrun on every machine, as a Slurm job, as Ray actors, or as a
    Kubernetes JobSet, for which a manifest is written. Same as the option `--launcher`."""
    nnodes: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Number of machines."""
    nproc_per_node: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Ranks per machine. None: number of ranks / `nnodes`."""
    oversubscribe: bool = False
    """Allow more CPU ranks on this machine than its cores and free memory support."""
    rdzv_endpoint: Annotated[str, Field(pattern=r"^[^\s:]+:\d+$")] | None = None
    """HOST:PORT of torchrun's rendezvous. None: a single machine; under Slurm, the first machine of the job."""
    partition: str | None = None
    """Slurm partition, or Kueue queue on Kubernetes. None: Slurm's default partition; no queue."""
    time: str | None = None
    """Time limit for Slurm and Kubernetes in sbatch's format (`12:00:00`). None: the limit of the partition; on
    Kubernetes, no limit."""
    sbatch: tuple[str, ...] = ()
    """Additional sbatch options (`[--gpus-per-node=8, --exclusive]`)."""
    ray_address: str | None = None
    """Address of the Ray cluster (`auto`, `HOST:6379`). None: RAY_ADDRESS; if unset, a cluster is started on this
    machine."""

    image: str | None = None
    """Container image for Kubernetes; must contain this package and torch."""
    namespace: str | None = None
    """Kubernetes namespace. None: the current namespace of kubectl."""
    resource: str | None = "nvidia.com/gpu"
    """Kubernetes resource of which each rank requests one. None: CPU ranks."""
    volume: str | None = None
    """PersistentVolumeClaim on Kubernetes that holds model, data and output for all pods. None: no volume."""
    mount_path: str = "/workspace"
    """Mount point of the volume. All paths of the recipe must be below it, on this machine and in the pods."""

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, value: object) -> object:
        """Reject numbers: YAML 1.1 reads an unquoted 12:00:00 as a base-60 integer."""
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(
                "YAML reads an unquoted time as a number; quote it, as in time: '12:00:00'"
            )
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
        """Reject control characters: these values become lines of a script, and a line feed would end one."""
        texts = value if isinstance(value, tuple) else (value,)
        if not all(text.isprintable() for text in texts if isinstance(text, str)):
            raise ValueError("the text contains characters that are not printable")
        return value
