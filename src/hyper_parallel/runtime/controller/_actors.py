"""Ranks of roles as actors of Ray, one for each; a cluster that is started here ends with this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from hyper_parallel.errors import DeviceUnavailable, MissingDependency, RankFailed
from hyper_parallel.runtime.controller._inline import RoleHost, RoleSpec
from hyper_parallel.runtime.ray_ranks import STORE_BYTES, Rank
from hyper_parallel.runtime.supervision import process_state

_PLACED_S: Final = 60.0
"""Seconds in which a cluster has to find a place for a rank."""
_ENDED_S: Final = 5.0
"""Seconds in which Ray ends what it is told to kill."""
_STOPPED: Final = ("t", "T")
_GONE: Final = ("", "X", "Z")  # states of processes, proc(5)


class RoleActor(Rank):
    """One rank of a role; made into an actor."""

    def process(self) -> int:
        """Its number on its machine."""
        return os.getpid()

    def begin(self, spec: RoleSpec, rank: int, environment: dict[str, str], threads: int) -> None:
        """Be a rank of a role, which has no object yet."""
        import torch

        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.manual_seed(rank)
        self._host = RoleHost(spec, rank)

    def answer(self, number: int, method: str, arguments: str) -> str:
        """Run a call."""
        return self._host.answer(number, method, arguments)


class RayEngine:
    """Starts actors, in the cluster of RAY_ADDRESS, in one that the program has joined, or in one of its own.

    Raises:
        MissingDependency: HP501 without Ray.
    """

    most_ranks = None

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency(
                "the engine `ray` needs the package `ray`",
                where="Controller(engine='ray')",
                hint="pip install 'hyper-parallel[ray]'",
            ) from error
        self._ray, self._joined, self._own = ray, not ray.is_initialized(), False
        if self._joined:
            address, own = None, {}
            if "RAY_ADDRESS" not in os.environ:
                address, self._own = "local", True
                own = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
            ray.init(address, log_to_driver=False, **own)

    def start(self, spec: RoleSpec, size: int) -> ActorRanks:
        """Start the actors; where the cluster has GPUs each takes one.

        Raises:
            DeviceUnavailable: HP502 when the cluster finds no place for them.
            RankFailed: HP601 when one ends while it is placed.
        """
        options = {
            # On this machine alone nobody counts the cores.
            "num_cpus": 0 if self._own else 1,
            "num_gpus": 1 if self._ray.cluster_resources().get("GPU") else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return ActorRanks(self._ray, spec, size, options)

    def wait(self, busy: Sequence[ActorRanks], most_s: float) -> None:
        """Until a rank answers or ends."""
        if running := [ref for ranks in busy for ref in ranks.running]:
            self._ray.wait(running, timeout=most_s)

    def close(self) -> None:
        """Leave the cluster, and end it where it was started here."""
        if self._joined:
            self._ray.shutdown()


class ActorRanks:
    """The actors of one role.

    Args:
        ray: The package.
        spec: The role.
        size: Number of actors.
        options: Of each actor.
    """

    def __init__(self, ray: Any, spec: RoleSpec, size: int, options: dict[str, Any]) -> None:
        import torch

        self._ray, self._lost, self.running = ray, None, {}
        self._hosts, self._pids = [], []
        kind = ray.remote(RoleActor).options(**options)
        self._actors = [kind.remote() for _ in range(size)]
        try:
            asked = [(a.place.remote(), a.process.remote()) for a in self._actors]
            places = ray.get([place for place, _ in asked], timeout=_PLACED_S)
            self._pids = ray.get([process for _, process in asked])
            self._hosts = [place[0] for place in places]
            seen: Counter[str] = Counter()
            begun = []
            for rank, (host, *_) in enumerate(places):
                given = {
                    "RANK": rank,
                    "WORLD_SIZE": size,
                    "LOCAL_RANK": seen[host],
                    "LOCAL_WORLD_SIZE": self._hosts.count(host),
                    "MASTER_ADDR": places[0][1],
                    "MASTER_PORT": places[0][2],
                }
                seen[host] += 1
                # A rank finds its device by its local number, so it must see those of its neighbours.
                if devices := [d for place in places if place[0] == host for d in place[3]]:
                    given["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
                environment = {key: str(value) for key, value in given.items()}
                begin = self._actors[rank].begin
                begun.append(begin.remote(spec, rank, environment, torch.get_num_threads()))
            ray.get(begun)
        except ray.exceptions.GetTimeoutError as error:
            self.end()
            raise DeviceUnavailable(
                f"the Ray cluster has no place for the {size} ranks of role `{spec.name}`",
                got=ray.available_resources(),
                hint="ray status",
            ) from error
        except ray.exceptions.RayError as error:
            self.end()
            raise RankFailed(
                f"a rank of role `{spec.name}` was lost at its start\n{error}"
            ) from error

    def give(self, number: int, method: str, arguments: str) -> None:
        """Have every rank run a call."""
        self.running = {
            actor.answer.remote(number, method, arguments): rank
            for rank, actor in enumerate(self._actors)
        }

    def answers(self) -> dict[int, dict[str, Any]]:
        """New answers by rank."""
        found = {}
        refs = list(self.running)
        done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in done:
            rank = self.running.pop(ref)
            try:
                found[rank] = json.loads(self._ray.get(ref))
            except self._ray.exceptions.RayError as error:
                self._lost = self._lost or f"rank {rank} on {self._hosts[rank]} died: {_why(error)}"
        return found

    def lost(self) -> str | None:
        """The first rank of which Ray says that it has died."""
        return self._lost

    def silent(
        self, silent_s: float, unanswered: Sequence[int]
    ) -> tuple[str, tuple[str, ...], bool]:
        """Of ranks on this machine by what the system says of their processes."""
        said = []
        for rank in unanswered:
            here = self._hosts[rank] == socket.gethostname()
            stopped = here and process_state(self._pids[rank]) in _STOPPED
            how = "is stopped by a signal" if stopped else "has not answered"
            said.append((not stopped, f"rank {rank} {how} since {silent_s:.0f} s"))
        (first, what), *others = sorted(said)
        return what, tuple(other for _, other in others), not first

    def end(self) -> None:
        """Kill all ranks, on this machine also those that a signal has stopped, and see them end."""
        for actor in self._actors:
            self._ray.kill(actor)
        here = [rank for rank, host in enumerate(self._hosts) if host == socket.gethostname()]
        for rank in here:
            if process_state(self._pids[rank]) in _STOPPED:
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)
        deadline = time.monotonic() + _ENDED_S
        while any(process_state(self._pids[rank]) not in _GONE for rank in here):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._actors, self._pids, self._hosts = [], [], []


def _why(error: Exception) -> str:
    """One line of what Ray says of a lost actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line.lower()), lines[0] if lines else "")[:300]
