"""Engine `ray` of a controller: every rank of a role is a Ray actor."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from hyper_parallel.errors import DeviceUnavailable, RankFailed
from hyper_parallel.runtime.controller._inline import RoleHost, RoleSpec
from hyper_parallel.runtime.launchers import LOCAL_CLUSTER, PLACED_S, Rank, connect_ray, import_ray, rank_environment
from hyper_parallel.runtime.supervision import GONE, STOPPED, process_state

_ENDED_S: Final = 5.0
"""Maximum seconds to wait for the end of killed actors."""


class RoleActor(Rank):
    """Ray actor of a rank of a role; `ray.remote` wraps this class."""

    def process(self) -> int:
        """Return the process id of the actor on its machine."""
        return os.getpid()

    def begin(self, spec: RoleSpec, rank: int, environment: dict[str, str], threads: int) -> None:
        """Set environment variables, CPU threads and seed; the call `BIRTH` then constructs the role's object."""
        import torch

        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.manual_seed(rank)
        self._host = RoleHost(spec, rank)

    def answer(self, number: int, method: str, arguments: str) -> str:
        """Run a call and return its answer as JSON; see `RoleHost.answer`."""
        return self._host.answer(number, method, arguments)


class RayEngine:
    """Engine that starts Ray actors.

    The actors run in the cluster to which the program is connected, else in the cluster of RAY_ADDRESS, else in a new
    local cluster.

    Raises:
        MissingDependency: HP501 when the package `ray` is not installed.
        DeviceUnavailable: HP502 when the cluster of RAY_ADDRESS cannot be reached.
    """

    most_ranks = None

    def __init__(self) -> None:
        ray = import_ray("Controller(engine='ray')")
        self._ray, self._joined, self._is_local = ray, not ray.is_initialized(), False
        if self._joined:
            address, local_options = None, {}
            if "RAY_ADDRESS" not in os.environ:
                address, self._is_local = "local", True
                local_options = LOCAL_CLUSTER
            connect_ray(ray, address, log_to_driver=False, **local_options)

    def start(self, spec: RoleSpec, size: int) -> ActorRanks:
        """Start the actors of a role; each actor reserves a GPU if the cluster has GPUs.

        Raises:
            DeviceUnavailable: HP502 when the cluster cannot schedule the actors.
            RankFailed: HP601 when an actor dies during its start.
        """
        options = {
            # Only this program uses a local cluster, so no cores are reserved.
            "num_cpus": 0 if self._is_local else 1,
            "num_gpus": 1 if self._ray.cluster_resources().get("GPU") else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return ActorRanks(self._ray, spec, size, options)

    def wait(self, busy: Sequence[ActorRanks], most_s: float) -> None:
        if running := [ref for ranks in busy for ref in ranks.running]:
            self._ray.wait(running, timeout=most_s)

    def close(self) -> None:
        """Shut down the local cluster or disconnect from the cluster, unless the program had connected before."""
        if self._joined:
            self._ray.shutdown()


class ActorRanks:
    """Ray actors of a role.

    Args:
        ray: Module `ray`.
        spec: Class and arguments of the role.
        size: Number of actors.
        options: Ray options of each actor.
    """

    def __init__(self, ray: Any, spec: RoleSpec, size: int, options: dict[str, Any]) -> None:
        import torch

        self._ray, self._lost, self.running = ray, None, {}
        self._hosts, self._pids = [], []
        kind = ray.remote(RoleActor).options(**options)
        self._actors = [kind.remote() for _ in range(size)]
        try:
            requests = [(a.place.remote(), a.process.remote()) for a in self._actors]
            places = ray.get([place for place, _ in requests], timeout=PLACED_S)
            self._pids = ray.get([process for _, process in requests])
            self._hosts = [place[0] for place in places]
            begins = []
            for rank, (actor, host) in enumerate(zip(self._actors, self._hosts, strict=True)):
                machine = [r for r, other in enumerate(self._hosts) if other == host]
                environment = rank_environment(rank, machine, places)
                threads = torch.get_num_threads()
                begins.append(actor.begin.remote(spec, rank, environment, threads))
            ray.get(begins)
        except ray.exceptions.GetTimeoutError as error:
            self.end()
            raise DeviceUnavailable(
                f"the Ray cluster does not have the resources for the {size} ranks of role `{spec.name}`",
                got=ray.available_resources(),
                hint="ray status",
            ) from error
        except ray.exceptions.RayError as error:
            self.end()
            raise RankFailed(f"a rank of role `{spec.name}` failed during its start\n{error}") from error

    def start_call(self, number: int, method: str, arguments: str) -> None:
        self.running = {actor.answer.remote(number, method, arguments): rank for rank, actor in enumerate(self._actors)}

    def answers(self) -> dict[int, dict[str, Any]]:
        answers = {}
        refs = list(self.running)
        done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in done:
            rank = self.running.pop(ref)
            try:
                answers[rank] = json.loads(self._ray.get(ref))
            except self._ray.exceptions.RayError as error:
                self._lost = self._lost or f"rank {rank} on {self._hosts[rank]} died: {_why(error)}"
        return answers

    def lost(self) -> str | None:
        """Return a text that names a dead actor and the reason; None while Ray has reported no dead actor."""
        return self._lost

    def silent(self, silent_s: float, unanswered: Sequence[int]) -> tuple[str, tuple[str, ...], bool]:
        """Describe ranks that do not answer; see `RoleRanks.silent`.

        Processes stopped by a signal are detected only on this machine.
        """
        lines = []
        for rank in unanswered:
            is_local = self._hosts[rank] == socket.gethostname()
            stopped = is_local and process_state(self._pids[rank]) in STOPPED
            state = "is stopped by a signal" if stopped else "has not answered"
            lines.append((not stopped, f"rank {rank} {state} (no progress for {silent_s:.0f} s)"))
        (first, first_line), *other_lines = sorted(lines)
        return first_line, tuple(line for _, line in other_lines), not first

    def end(self) -> None:
        """Kill all actors, also those stopped by a signal, and wait at most 5 s for actors on this machine to end."""
        for actor in self._actors:
            self._ray.kill(actor)
        local_ranks = [rank for rank, host in enumerate(self._hosts) if host == socket.gethostname()]
        for rank in local_ranks:
            if process_state(self._pids[rank]) in STOPPED:
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)
        deadline = time.monotonic() + _ENDED_S
        while any(process_state(self._pids[rank]) not in ("", *GONE) for rank in local_ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._actors, self._pids, self._hosts = [], [], []


def _why(error: Exception) -> str:
    """Return the first line of Ray's message about a dead actor that mentions an exit, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line.lower()), lines[0] if lines else "")[:300]
