"""Checks, before a fork, that this machine can run the local ranks of a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any, Final

from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.config import Recipe
from hyper_parallel.errors import DeviceUnavailable
from hyper_parallel.runtime.launchers import ranks_per_node
from hyper_parallel.topology import RankCapacity, rank_capacity

_NODE_RANKS = 8
"""Ranks per machine in hints for other machines, if the recipe has none: devices of a DGX or Atlas server."""


_MOST_OVERSUBSCRIBED: Final = 256
"""Maximum number of processes that a recipe may start on the CPUs of one machine, however few there are."""


def local_capacity(device: str | None = None) -> RankCapacity:
    """Return the number of ranks that this machine can run on a device type, without initializing its driver.

    Args:
        device: cpu, cuda, npu, ...; None: the accelerator that torch finds, else cpu.
    """
    import torch

    with driver_untouched():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = device or ("cpu" if accelerator is None else accelerator.type)
    module: Any = None if kind == "cpu" else getattr(torch, kind, None)
    return rank_capacity(0 if module is None else module.device_count())


def check_local_start(recipe: Recipe, ranks: int, words: Sequence[str]) -> None:
    """Refuse a run with more local ranks than this machine can run.

    Args:
        recipe: The run.
        ranks: Ranks of all its worlds.
        words: Arguments of `hyper-parallel` that start the run, for the hint.

    Raises:
        DeviceUnavailable: HP502 with the number of ranks that this machine can run.
        DegreesMismatch: HP301 when the machines of the recipe do not hold exactly these ranks.
    """
    if "RANK" in os.environ:  # this process is a rank already
        return
    launch = recipe.launch
    if launch.launcher in ("slurm", "kubernetes") or (
        launch.launcher == "ray" and has_cluster(recipe)
    ):
        return
    local_ranks = ranks if launch.launcher == "local" else ranks_per_node(recipe, ranks)
    words = [word for word in words if not word.startswith(("launch.launcher=", "launch.n"))]
    command = shlex.join(["hyper-parallel", *words])
    cluster = f"{command} --launcher slurm {launch_words(ranks, launch.nproc_per_node)}"
    hint = f"{command} --dry-run, or {cluster} (torchrun and ray likewise)"
    capacity = local_capacity()
    if capacity.is_cpu and launch.oversubscribe and local_ranks <= _MOST_OVERSUBSCRIBED:
        return
    check_rank_count(
        local_ranks,
        capacity,
        "launch.launcher",
        hint + (", or launch.oversubscribe=true" if capacity.is_cpu else ""),
    )


def check_rank_count(ranks: int, capacity: RankCapacity, where: str, hint: str) -> None:
    """Refuse more local ranks than this machine can run.

    Args:
        ranks: Ranks to start on this machine.
        capacity: Ranks that it can run.
        where: Option or key that sets the number of ranks.
        hint: Commands or values that work instead.

    Raises:
        DeviceUnavailable: HP502 with the number of ranks that this machine can run.
    """
    if ranks > capacity.num_ranks:
        raise DeviceUnavailable(
            f"{ranks:,} ranks would be started on this machine, which runs {capacity.num_ranks:,}",
            where=where,
            got=f"{ranks} ranks, {capacity.limit}",
            allowed=f"1..{capacity.num_ranks}",
            hint=hint,
        )


def has_cluster(recipe: Recipe) -> bool:
    """Return whether the address of a Ray cluster is known; without one, Ray starts its actors on this machine."""
    return recipe.launch.ray_address is not None or "RAY_ADDRESS" in os.environ


def launch_words(ranks: int, node_ranks: int | None = None) -> str:
    """Return overrides that spread ranks evenly over machines of at most `node_ranks` ranks each."""
    max_per_node = min(node_ranks or _NODE_RANKS, ranks)
    per_node = next(n for n in range(max_per_node, 0, -1) if ranks % n == 0)
    return f"launch.nnodes={ranks // per_node} launch.nproc_per_node={per_node}"
