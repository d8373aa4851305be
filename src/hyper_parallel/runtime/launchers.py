"""Launchers of ranks: torchrun command, Slurm script, `srun`, and actors of a Ray cluster.

All but Ray start `hyper-parallel train`. The process is a rank if RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are in its environment. On Ray, every rank is an actor. If an actor dies, the run ends with
an error that names the machine. Other functions check whether this machine can run the local ranks of a run.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.config import Recipe
from hyper_parallel.errors import (
    BadValue,
    DegreesMismatch,
    DeviceUnavailable,
    HyperParallelError,
    LauncherIncomplete,
    MissingDependency,
    RankFailed,
    abbreviated,
)
from hyper_parallel.topology import RankCapacity, rank_capacity

_STORE_PORTS: Final = 20000  # below Linux's range of client ports, ip_local_port_range


def ranks_per_node(recipe: Recipe, ranks: int) -> int:
    """Return the number of ranks per machine.

    Raises:
        DegreesMismatch: HP301 when the machines that the recipe names do not hold exactly these ranks.
    """
    launch = recipe.launch
    ranks_each = launch.nproc_per_node or max(1, ranks // launch.nnodes)
    if ranks_each * launch.nnodes != ranks:
        nodes = max(n for n in range(1, launch.nnodes + 1) if ranks % n == 0)
        raise DegreesMismatch(
            f"the plan has {ranks} ranks, but the launcher starts {ranks_each} on each of {launch.nnodes} nodes",
            where="launch.nnodes, launch.nproc_per_node",
            changes={"launch.nnodes": nodes, "launch.nproc_per_node": ranks // nodes},
        )
    return ranks_each


def torchrun_words(recipe: Recipe, ranks: int, words: Sequence[str]) -> list[str]:
    """Return the arguments of `torchrun` that start this machine's ranks.

    Args:
        recipe: The run.
        ranks: Ranks on all machines.
        words: Arguments of `hyper-parallel` on every rank.
    """
    launch, ranks_each = recipe.launch, ranks_per_node(recipe, ranks)
    options = ["--standalone"]
    if (endpoint := launch.rdzv_endpoint) is not None:
        options = [
            f"--nnodes={launch.nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
        ]
    options.append(f"--nproc-per-node={ranks_each}")
    if restarts := recipe.training.max_restarts:
        options.append(f"--max-restarts={restarts}")
    return [*options, "-m", "hyper_parallel", *words]


def sbatch_script(recipe: Recipe, ranks: int, words: Sequence[str], output_dir: Path) -> str:
    """Return a Slurm script that runs torchrun on every machine, with rendezvous on the first.

    Arguments as for `torchrun_words`; `output_dir` is the directory of the run.
    """
    launch_section = recipe.launch
    if not all(map(str.isprintable, (str(output_dir), *launch_section.sbatch))):
        raise BadValue(
            "an option contains a control character, which would break a line of the job script",
            where="output_dir, launch.sbatch",
            got=abbreviated([str(output_dir), *launch_section.sbatch]),
            allowed="printable characters",
        )
    options = {
        "--job-name": output_dir.name,
        "--nodes": launch_section.nnodes,
        "--ntasks-per-node": 1,
        "--partition": launch_section.partition,
        "--time": launch_section.time,
        "--output": output_dir.absolute() / "logs" / "slurm-%j.log",
    }
    endpoint = f"$first:$(({_STORE_PORTS} + SLURM_JOB_ID % 10000))"
    with_endpoint = launch_section.model_copy(
        update={"rdzv_endpoint": launch_section.rdzv_endpoint or "ENDPOINT"}
    )
    torchrun = torchrun_words(recipe.model_copy(update={"launch": with_endpoint}), ranks, words)
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", *torchrun])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {k}={shlex.quote(str(v))}" for k, v in options.items() if v is not None),
            *(f"#SBATCH {option}" for option in launch_section.sbatch),
            "set -euo pipefail",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "srun " + command.replace("=ENDPOINT", f'="{endpoint}" --rdzv-id="$SLURM_JOB_ID"', 1),
            "",
        ]
    )


def join_srun() -> None:
    """Set RANK and the other variables of a rank from Slurm's, if `srun` has started this process as one of several.

    Raises:
        LauncherIncomplete: HP315 when a variable of Slurm is missing or cannot be read.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_ID" not in env or env.get("SLURM_NTASKS", "1") == "1":
        return
    try:
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
        port = _STORE_PORTS + 10000 + (int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 2000
        variables = {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_NTASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_tasks(per_node)[int(env["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]),
            "MASTER_PORT": str(port),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise LauncherIncomplete(
            "`srun` started several processes, but this one cannot determine its rank",
            where="environment of this process",
            got=f"{type(error).__name__}: {error}",
            allowed="SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_JOB_ID, SLURM_JOB_NODELIST and "
            "SLURM_TASKS_PER_NODE, as srun sets them",
            hint="unset SLURM_STEP_ID",
        ) from error
    env.update({name: value for name, value in variables.items() if name not in env})


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: gpu03 for `gpu[03-05,9],login`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _tasks(text: str) -> list[int]:
    """Return the number of processes of every machine from Slurm's notation: [4, 4, 3] for `4(x2),3`."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


_NODE_RANKS = 8
"""Ranks per machine in hints, if the recipe states none: the devices of a DGX or Atlas server."""


_MOST_OVERSUBSCRIBED: Final = 256
"""Maximum number of CPU ranks on one machine with `launch.oversubscribe`."""


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
    """Raise an error if a run has more local ranks than this machine can run.

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
    """Raise an error for more local ranks than this machine can run.

    Args:
        ranks: Ranks to start on this machine.
        capacity: Number of ranks that the machine can run.
        where: Option or key that sets the number of ranks.
        hint: Commands or values that work instead.

    Raises:
        DeviceUnavailable: HP502 with the number of ranks that this machine can run.
    """
    if ranks > capacity.num_ranks:
        raise DeviceUnavailable(
            f"{ranks:,} ranks would be started on this machine, which can run at most {capacity.num_ranks:,}",
            where=where,
            got=f"{ranks} ranks, {capacity.limit}",
            allowed=f"1..{capacity.num_ranks}",
            hint=hint,
        )


def has_cluster(recipe: Recipe) -> bool:
    """Return whether the recipe or RAY_ADDRESS names a Ray cluster; otherwise Ray starts actors on this machine."""
    return recipe.launch.ray_address is not None or "RAY_ADDRESS" in os.environ


def launch_words(ranks: int, node_ranks: int | None = None) -> str:
    """Return recipe overrides that spread ranks evenly over machines of at most `node_ranks` ranks each."""
    max_per_node = min(node_ranks or _NODE_RANKS, ranks)
    per_node = next(n for n in range(max_per_node, 0, -1) if ranks % n == 0)
    return f"launch.nnodes={ranks // per_node} launch.nproc_per_node={per_node}"


_PLACED_S: Final = 60.0
"""Seconds within which a cluster must reserve machines for the ranks."""
_GRACE_S: Final = 2.0
"""Seconds for other ranks to report failures after the first one."""
STORE_BYTES: Final = 100 * 2**20
"""Object store of a local cluster; small because ranks do not exchange data through it."""


class Rank:
    """Ray actor of one rank of a run; `ray.remote` wraps this class."""

    def place(self) -> tuple[str, str, int, list[str]]:
        """Return host name, IP address, a free port, and the accelerators that Ray assigns to this actor."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        devices = [str(number) for number in ray.get_gpu_ids()]
        return socket.gethostname(), ray.util.get_node_ip_address(), port, devices

    def run(self, fn: Callable[[], Any], environment: dict[str, str]) -> Any:
        """Set environment variables, call `fn`, and return its result."""
        os.environ.update(environment)
        return fn()


def launch_on_ray(
    fn: Callable[[], Any],
    ranks: int,
    nnodes: int = 1,
    *,
    address: str | None = None,
    restart: int = 0,
) -> list[Any]:
    """Run `fn()` in `ranks` Ray actors and return the results in rank order; each has the variables that torchrun sets.

    All machines have equally many ranks, with consecutive numbers. If the cluster has GPUs, each rank reserves one.

    Args:
        fn: Function that each actor calls; it and its result must be picklable.
        ranks: Number of actors, a multiple of the number of machines.
        nnodes: Number of machines.
        address: The cluster. None: that of RAY_ADDRESS, else a local one that is shut down afterwards.
        restart: Number of restarts so far, passed to ranks as TORCHELASTIC_RESTART_COUNT.

    Raises:
        MissingDependency: HP501 without Ray.
        DeviceUnavailable: HP502 when the cluster cannot reserve these machines.
        RankFailed: HP601 with the machine of the first actor that died or failed.
        HyperParallelError: A coded error of a rank, unchanged.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "launching on Ray needs the package `ray`",
            where="launch.launcher",
            hint="pip install 'hyper-parallel[ray]'",
        ) from error
    per_node, cluster_options = ranks // nnodes, {}
    if address is None and "RAY_ADDRESS" not in os.environ:
        address, cores = "local", max(ranks, os.cpu_count() or 1)
        cluster_options = {
            "num_cpus": cores,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
        }
    with ExitStack() as stack:
        ray.init(address, **cluster_options)
        stack.callback(ray.shutdown)
        actors = _start_actors(stack, nnodes, per_node)
        places = ray.get([actor.place.remote() for actor in actors])
        running = {}
        for rank, actor in enumerate(actors):
            environment = _environment(rank, per_node, places, restart)
            running[actor.run.remote(fn, environment)] = rank
        return _results(running, [place[0] for place in places])


def _start_actors(stack: ExitStack, nnodes: int, per_node: int) -> list[Any]:
    """Reserve machines, start one actor per rank, and return the actors in rank order; `stack` kills them on exit.

    Raises:
        DeviceUnavailable: HP502 when the cluster cannot reserve these machines.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = {"CPU": 1.0} | ({"GPU": 1.0} if ray.cluster_resources().get("GPU") else {})
    bundles = [{kind: per_node * share for kind, share in resources.items()}] * nnodes
    group = placement_group(bundles, strategy="STRICT_SPREAD" if nnodes > 1 else "STRICT_PACK")
    stack.callback(remove_placement_group, group)
    if not group.wait(_PLACED_S):
        raise DeviceUnavailable(
            f"the Ray cluster lacks {nnodes} machines with {per_node} of {' and '.join(resources)} free on each",
            where="launch.ray_address",
            got=ray.available_resources(),
            hint="ray status",
        )
    actors = []
    for node in range(nnodes):
        options = {
            "num_cpus": 1,
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, node),
        }
        for _ in range(per_node):
            actors.append(ray.remote(Rank).options(**options).remote())
            stack.callback(ray.kill, actors[-1])
    return actors


def _environment(
    rank: int, per_node: int, places: list[tuple[str, str, int, list[str]]], restart: int
) -> dict[str, str]:
    """Return the environment variables of a rank; `places` are the results of `Rank.place` in rank order."""
    first = rank // per_node * per_node
    variables: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": len(places),
        "LOCAL_RANK": rank - first,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": places[0][1],
        "MASTER_PORT": places[0][2],
        "TORCHELASTIC_RESTART_COUNT": restart,
    }
    # A rank selects its device by its local rank, so the devices of its neighbours must be visible.
    if devices := [d for place in places[first : first + per_node] for d in place[3]]:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {name: str(value) for name, value in variables.items()}


def _results(running: dict[Any, int], hosts: list[str]) -> list[Any]:
    """Wait for all ranks and return their results in rank order; raise RankFailed (HP601) after a failure.

    The error names a dead actor before others, because its death may have made them fail.
    """
    import ray

    results, failures = [None] * len(hosts), []
    pending, patience_s = list(running), None
    while pending:
        done, pending = ray.wait(pending, timeout=patience_s)
        if not done:
            break
        rank = running[done[0]]
        try:
            results[rank] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            died = isinstance(error, ray.exceptions.RayActorError)
            cause = getattr(error, "cause", None)
            if not isinstance(cause, HyperParallelError):
                description = f"rank {rank} on {hosts[rank]} {'died' if died else 'failed'}"
                cause = RankFailed(f"{description}\n{error}", where=f"machine {hosts[rank]}")
            failures.append((not died, len(failures), cause))
            patience_s = _GRACE_S
    if failures:
        raise min(failures)[-1]
    return results
