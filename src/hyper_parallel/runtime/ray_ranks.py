"""Ranks as actors of a Ray cluster, one actor per rank; an actor that dies ends the run and names its machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from hyper_parallel.errors import (
    DeviceUnavailable,
    HyperParallelError,
    MissingDependency,
    RankFailed,
)

_PLACED_S: Final = 60.0
"""Seconds within which a cluster must reserve machines for the ranks."""
_GRACE_S: Final = 2.0
"""Seconds for other ranks to report failures after the first one."""
STORE_BYTES: Final = 100 * 2**20
"""Object store of a local cluster; small because ranks do not exchange data through it."""


class Rank:
    """Rank of a run, wrapped by `ray.remote`."""

    def place(self) -> tuple[str, str, int, list[str]]:
        """Return host name, IP address, a free port, and the accelerators that Ray assigns to this actor."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        devices = [str(number) for number in ray.get_gpu_ids()]
        return socket.gethostname(), ray.util.get_node_ip_address(), port, devices

    def run(self, fn: Callable[[], Any], environment: dict[str, str]) -> Any:
        """Return the result of `fn` run with these environment variables."""
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
    """Run `fn()` in `ranks` actors with the environment of ranks, and return the results in rank order.

    All machines have equally many ranks, with consecutive numbers. If the cluster has GPUs, each rank reserves one.

    Args:
        fn: Function of each actor; it and its result must be picklable.
        ranks: Number of actors, a multiple of the number of machines.
        nnodes: Number of machines.
        address: The cluster. None: that of RAY_ADDRESS, else a local one that is shut down afterwards.
        restart: Number of the attempt, passed to ranks as TORCHELASTIC_RESTART_COUNT.

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
    """Reserve machines and start one actor per rank, in rank order; `stack` ends them.

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
            f"the Ray cluster has not {nnodes} machines with {per_node} of {' and '.join(resources)} free on each",
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
    """Return the results of all ranks; raise the first failure, dead actors first because they make others fail."""
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
