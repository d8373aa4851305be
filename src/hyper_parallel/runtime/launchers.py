"""Launchers of ranks: torchrun command, Slurm script, `srun`, and actors of a Ray cluster.

torchrun, Slurm and `srun` start `hyper-parallel train` on every rank. A process is a rank if RANK is in its
environment. torchrun also sets WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; under `srun`,
`join_srun` sets all of them. On Ray, every rank is an actor. If an actor dies, the error names its machine. Other
functions check that this machine can run the local ranks of a run.
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
from hyper_parallel.units import plural

_STORE_PORTS: Final = 20000  # first port of rendezvous stores, below ip_local_port_range of Linux


def ranks_per_node(recipe: Recipe, ranks: int) -> int:
    """Return the number of ranks per machine.

    Raises:
        DegreesMismatch: HP301 when `launch.nnodes * launch.nproc_per_node` is not `ranks`.
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
    """Return the arguments of `torchrun` that start the ranks of a machine; `--standalone` without `rdzv_endpoint`.

    Args:
        recipe: Recipe of the run.
        ranks: Number of ranks on all machines.
        words: Arguments of `hyper-parallel` on every rank.

    Raises:
        DegreesMismatch: HP301 when `launch.nnodes * launch.nproc_per_node` is not `ranks`.
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
    """Return a Slurm script that runs torchrun on every machine.

    The rendezvous is `launch.rdzv_endpoint` or, if unset, on the first machine. Arguments as in `torchrun_words`;
    `output_dir` is the directory of the run.

    Raises:
        BadValue: HP102 for a character that is not printable in `launch.sbatch` or `output_dir`.
        DegreesMismatch: HP301 when `launch.nnodes * launch.nproc_per_node` is not `ranks`.
    """
    launch_section = recipe.launch
    for key, texts in {"output_dir": (str(output_dir),), "launch.sbatch": launch_section.sbatch}.items():
        if not all(map(str.isprintable, texts)):
            raise BadValue(
                f"`{key}` contains a character that is not printable, which could break a line of the job script",
                where=key,
                got=abbreviated(texts),
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
    with_endpoint = launch_section.model_copy(update={"rdzv_endpoint": launch_section.rdzv_endpoint or "ENDPOINT"})
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
    """Set RANK and the other variables of a rank from the variables of Slurm.

    No effect if RANK is set, or if `srun` has not started several processes.

    Raises:
        LauncherIncomplete: HP315 when a variable of Slurm is missing or invalid.
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
            "`srun` started several processes, but this process cannot determine its rank",
            where="environment of this process",
            got=f"{type(error).__name__}: {error}",
            allowed="SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_JOB_ID, SLURM_JOB_NODELIST and "
            "SLURM_TASKS_PER_NODE, as srun sets them",
            hint="`unset SLURM_STEP_ID` lets this process run as a single rank",
        ) from error
    env.update({name: value for name, value in variables.items() if name not in env})


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, for example gpu03 of `gpu[03-05,9],login`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _tasks(text: str) -> list[int]:
    """Parse Slurm's list of processes per machine, for example `4(x2),3` to [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


_NODE_RANKS = 8
"""Ranks per machine in hints if the recipe sets none: number of devices of a DGX or Atlas server."""


_MOST_OVERSUBSCRIBED: Final = 256
"""Maximum number of CPU ranks on one machine with `launch.oversubscribe`."""


def local_capacity(device: str | None = None) -> RankCapacity:
    """Return how many ranks this machine can run on a device type, without initializing the device driver.

    Args:
        device: `cpu`, `cuda`, `npu`, ...; None: the accelerator that torch finds, or `cpu`.
    """
    import torch

    with driver_untouched():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = device or ("cpu" if accelerator is None else accelerator.type)
    module: Any = None if kind == "cpu" else getattr(torch, kind, None)
    return rank_capacity(0 if module is None else module.device_count())


def start_capacity(*, oversubscribe: bool) -> RankCapacity:
    """Return how many ranks a run may start on this machine; `oversubscribe` raises the limit of a CPU."""
    capacity = local_capacity()
    if not (capacity.is_cpu and oversubscribe):
        return capacity
    most = max(_MOST_OVERSUBSCRIBED, capacity.num_ranks)
    return RankCapacity(most, "launch.oversubscribe=true", is_cpu=True)


def check_local_start(recipe: Recipe, ranks: int, words: Sequence[str]) -> None:
    """Check that this machine can run its ranks of a run; no effect in a rank, or if a cluster runs the ranks.

    Args:
        recipe: Recipe of the run.
        ranks: Number of all ranks of the run.
        words: Arguments of `hyper-parallel` that start the run, for the hint.

    Raises:
        DeviceUnavailable: HP502 for more ranks than this machine can run; an oversubscribed CPU can run at least 256.
        DegreesMismatch: HP301 when `launch.nnodes * launch.nproc_per_node` is not `ranks`.
    """
    if "RANK" in os.environ:  # this process is a rank already
        return
    launch = recipe.launch
    ray_cluster = launch.ray_address is not None or "RAY_ADDRESS" in os.environ
    if launch.launcher in ("slurm", "kubernetes") or (launch.launcher == "ray" and ray_cluster):
        return
    local_ranks = ranks if launch.launcher == "local" else ranks_per_node(recipe, ranks)
    words = [word for word in words if not word.startswith(("launch.launcher=", "launch.n"))]
    command = shlex.join(["hyper-parallel", *words])
    cluster = f"{command} --launcher slurm {launch_words(ranks, launch.nproc_per_node)}"
    hint = f"{command} --dry-run, or {cluster} (or --launcher ray)"
    capacity = start_capacity(oversubscribe=launch.oversubscribe)
    if capacity.is_cpu and not launch.oversubscribe and local_ranks <= _MOST_OVERSUBSCRIBED:
        hint += ", or launch.oversubscribe=true"
    where = "parallel" if launch.launcher == "local" else "launch.nproc_per_node"
    check_rank_count(local_ranks, capacity, where, hint)


def check_rank_count(ranks: int, capacity: RankCapacity, where: str, hint: str) -> None:
    """Check a number of ranks against the capacity of this machine.

    Args:
        ranks: Number of ranks to start on this machine.
        capacity: Number of ranks that the machine can run.
        where: Option or recipe key that sets the number of ranks, for the error.
        hint: Hint of the error.

    Raises:
        DeviceUnavailable: HP502 with the number of ranks that this machine can run.
    """
    if ranks > capacity.num_ranks:
        raise DeviceUnavailable(
            f"the run needs {ranks:,} ranks on this machine, which can run at most {capacity.num_ranks:,}",
            where=where,
            got=f"{ranks} ranks, {capacity.limit}",
            allowed=f"1..{capacity.num_ranks}",
            hint=hint,
        )


def launch_words(ranks: int, node_ranks: int | None = None) -> str:
    """Return recipe overrides that distribute ranks evenly over machines of at most `node_ranks` (None: 8) each."""
    max_per_node = min(node_ranks or _NODE_RANKS, ranks)
    per_node = next(n for n in range(max_per_node, 0, -1) if ranks % n == 0)
    return f"launch.nnodes={ranks // per_node} launch.nproc_per_node={per_node}"


def connect_ray(ray: Any, address: str | None, **options: Any) -> None:
    """Connect to Ray at `address` (None: RAY_ADDRESS); raise HP502 on failure, or Ray's error if it is `local`."""
    target = address or os.environ["RAY_ADDRESS"]
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "local":
            raise
        raise DeviceUnavailable(
            f"the program cannot connect to the Ray cluster: {error!s:.200}",
            where="launch.ray_address" if address else "RAY_ADDRESS",
            got=target,
            allowed="host:port of a running cluster, or auto for the cluster of this machine",
        ) from error


PLACED_S: Final = 60.0
"""Seconds within which a cluster must reserve machines for the ranks, or schedule the actors of a role."""
_GRACE_S: Final = 2.0
"""Seconds after the first failure in which other ranks can report failures."""
LOCAL_CLUSTER: Final = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
"""Options of `ray.init` for a local cluster, with a small object store, because ranks exchange no data through it."""


class Rank:
    """Ray actor of a rank; `ray.remote` wraps this class."""

    def place(self) -> tuple[str, str, int, list[str]]:
        """Return (host name, IP address, free port, ids of the GPUs that Ray assigns to this actor)."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        devices = [str(number) for number in ray.get_gpu_ids()]
        return socket.gethostname(), ray.util.get_node_ip_address(), port, devices

    def run(self, fn: Callable[[], Any], environment: dict[str, str]) -> Any:
        """Set environment variables, and return the result of `fn()`."""
        os.environ.update(environment)
        return fn()


def import_ray(where: str) -> Any:
    """Return the module `ray`; raise MissingDependency (HP501), with the option `where`, if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "ranks on Ray need the package `ray`",
            where=where,
            hint="pip install 'hyper-parallel[ray]'",
        ) from error
    return ray


def launch_on_ray(
    fn: Callable[[], Any],
    ranks: int,
    nnodes: int = 1,
    *,
    address: str | None = None,
    restart: int = 0,
) -> list[Any]:
    """Run `fn()` in `ranks` Ray actors and return the results in rank order.

    Actors have the environment variables that torchrun sets. Ranks are distributed evenly over the machines, with
    consecutive ranks on each machine. If the cluster has GPUs, each actor reserves a GPU.

    Args:
        fn: Function that each actor calls; the function and its result must be picklable.
        ranks: Number of actors, a multiple of `nnodes`.
        nnodes: Number of machines.
        address: Address of the cluster; None: RAY_ADDRESS or, if unset, a local cluster that is shut down at the end.
        restart: Number of restarts so far, passed to ranks as TORCHELASTIC_RESTART_COUNT.

    Raises:
        MissingDependency: HP501 when the package `ray` is not installed.
        DeviceUnavailable: HP502 when the cluster cannot be reached, or cannot reserve the machines.
        RankFailed: HP601 with the machine of the first actor that died or failed.
        HyperParallelError: Coded error of a rank.
    """
    ray = import_ray("launch.launcher")
    per_node, cluster_options = ranks // nnodes, {}
    if address is None and "RAY_ADDRESS" not in os.environ:
        address, cores = "local", max(ranks, os.cpu_count() or 1)
        cluster_options = {"num_cpus": cores, **LOCAL_CLUSTER}
    with ExitStack() as stack:
        connect_ray(ray, address, **cluster_options)
        stack.callback(ray.shutdown)
        actors = _start_actors(stack, nnodes, per_node)
        places = ray.get([actor.place.remote() for actor in actors])
        running = {}
        for rank, actor in enumerate(actors):
            first = rank // per_node * per_node
            environment = rank_environment(rank, range(first, first + per_node), places)
            environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
            running[actor.run.remote(fn, environment)] = rank
        return _results(running, [place[0] for place in places])


def _start_actors(stack: ExitStack, nnodes: int, per_node: int) -> list[Any]:
    """Reserve machines and start an actor per rank; return the actors in rank order. Closing `stack` kills them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = {"CPU": 1.0} | ({"GPU": 1.0} if ray.cluster_resources().get("GPU") else {})
    bundles = [{kind: per_node * share for kind, share in resources.items()}] * nnodes
    group = placement_group(bundles, strategy="STRICT_SPREAD" if nnodes > 1 else "STRICT_PACK")
    stack.callback(remove_placement_group, group)
    if not group.wait(PLACED_S):
        raise DeviceUnavailable(
            f"the Ray cluster cannot reserve {' and '.join(plural(per_node, kind) for kind in resources)} "
            f"on {'one machine' if nnodes == 1 else f'each of {nnodes} machines'}",
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


def rank_environment(
    rank: int, machine: Sequence[int], places: Sequence[tuple[str, str, int, list[str]]]
) -> dict[str, str]:
    """Return the environment variables that torchrun would set for an actor, and CUDA_VISIBLE_DEVICES if it has GPUs.

    Args:
        rank: Rank of the actor.
        machine: Ranks on the machine of the actor, ascending.
        places: Result of `Rank.place` of every rank.
    """
    variables: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": len(places),
        "LOCAL_RANK": machine.index(rank),
        "LOCAL_WORLD_SIZE": len(machine),
        "MASTER_ADDR": places[0][1],
        "MASTER_PORT": places[0][2],
    }
    # A rank selects its device by its local rank, so the devices of its neighbours must be visible.
    if devices := [d for neighbour in machine for d in places[neighbour][3]]:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {name: str(value) for name, value in variables.items()}


def _results(running: dict[Any, int], hosts: list[str]) -> list[Any]:
    """Wait for all ranks; return their results in rank order, or raise the first failure.

    A dead actor takes precedence over other failures, which it may have caused.
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
