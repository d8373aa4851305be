"""World: the ranks of a training program with a common process group, and the device meshes created in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from hyper_parallel.backends.torch import FLAT
from hyper_parallel.errors import BadValue, CollectiveMismatch, DegreesMismatch, HyperParallelError, LauncherIncomplete
from hyper_parallel.ir import AXES, Strategy
from hyper_parallel.runtime.fork_server import device_of_rank
from hyper_parallel.runtime.local_launch import INIT_METHOD, stamp, world_of_rank
from hyper_parallel.runtime.supervision import (
    BOARD_VARIABLE,
    Deadlines,
    HangMonitor,
    HeartbeatBoard,
    HeartbeatWriter,
    Hosts,
    WaitReporter,
    board_of_machine,
)

_MISMATCH: Final = "Detected mismatch between collectives"
"""Part of torch's error message at debug level DETAIL (ProcessGroupWrapper.cpp)."""


class World:
    """Ranks with a common process group, which train one or more models; also a context manager.

    If the block of a `with` statement fails after the loss of a machine, HostLost (HP631) names the machine. If it
    fails with `debug` because ranks run different collectives, CollectiveMismatch (HP622) contains torch's description.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        local_rank: Rank of this process on its machine.
        device: Device on which this process computes.
        backend: Backend of torch.distributed, such as `cpu:gloo,cuda:nccl`; empty without a process group.
        heartbeat: Writer of this rank's heartbeat; None: the rank is not monitored.
    """

    def __init__(self, rank: int, world_size: int, local_rank: int, device: torch.device, backend: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = device
        self.backend = backend
        self.heartbeat: HeartbeatWriter | None = None
        self._board: Path | None = None
        self._owns_group = False
        self._hosts: Hosts | None = None
        self._watched = ExitStack()
        self._timeout: timedelta | None = None
        self._part: tuple[range, int] | None = None
        """Ranks of this world among the launched ranks, and the number of launched ranks; None: a single world."""
        self._meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @classmethod
    def join(
        cls,
        device: str | None = None,
        deadlines: Deadlines | None = None,
        *,
        debug: bool = False,
        worlds: Sequence[int] = (),
        ending: Callable[[], bool] = lambda: False,
    ) -> World:
        """Join the world that the launcher's environment variables describe; without RANK, create a single-rank world.

        If the process group exists already, it is used, and its owner must destroy it.

        Args:
            device: `cpu`, `cuda`, `npu`, ...; None: the accelerator of this machine, or `cpu` without accelerator.
            deadlines: Maximum time of a rank in a phase of a step. If a rank exceeds its deadline, all ranks of the
                machine are ended. None: only torch's default timeout of collectives. On ranks of `launch`, which
                monitors them itself, only torch's timeout is set.
            debug: Whether torch compares each collective across ranks before running it, which is slow.
            worlds: Sizes of the worlds, in rank order, into which the ranks of torchrun are split; (): a single world.
                Ignored on ranks of `launch`, which splits them itself.
            ending: Function that returns whether a signal has asked ranks to end after the current step. Deadlines are
                then shorter. No effect without deadlines.

        Raises:
            DeviceUnavailable: HP502 when the machine has fewer accelerators than local ranks.
            ForkUnsafe: HP605 when the process that forked this rank has initialized the device driver.
            LauncherIncomplete: HP315 when environment variables of the launcher are missing or invalid.
        """
        rank, world_size, local_rank = launched_rank()
        ranks, launched = range(world_size), world_size
        if len(worlds) > 1 and INIT_METHOD not in os.environ:
            ranks = world_of_rank(rank, worlds)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = device or ("cpu" if accelerator is None else accelerator.type)
        device_of_world = device_of_rank(kind, local_rank)
        world = cls(rank - ranks.start, len(ranks), local_rank, device_of_world, "")
        if len(ranks) < launched:
            world._part = ranks, launched
        if debug:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        if "RANK" in os.environ:
            world._watch(deadlines, ending)
        if "RANK" in os.environ and not dist.is_initialized():
            if INIT_METHOD not in os.environ:
                _variables("MASTER_ADDR", "MASTER_PORT")
            world._open(os.environ.get(INIT_METHOD, "env://"))
            if world._board is not None and local_rank == 0:  # all ranks have mapped the file
                world._board.unlink(missing_ok=True)
        elif dist.is_initialized():
            world.rank, world.world_size = dist.get_rank(), dist.get_world_size()
            world.backend = dist.get_backend_config()
        return world

    @classmethod
    def fake(cls, rank: int, world_size: int, backend: str = "fake") -> World:
        """Create a rank of a simulated world, in which collectives return at once without transfers.

        A single process can trace the operators of any rank in a world of any size. The default process group must not
        be initialized, and `close` destroys it. `backend` is `fake`, or `TRACED` of `backends.torch.traced_groups`.
        """
        # Importing the module registers the backend.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world = cls(rank, world_size, 0, torch.device("cpu"), backend)
        dist.init_process_group(backend, rank=rank, world_size=world_size, store=FakeStore())
        world._owns_group = True
        return world

    def _open(self, init_method: str | None) -> None:
        """Create the default process group; if `init_method` is None, a group that connects to no other process."""
        # gloo for CPU tensors; for the device, the backend that torch or a device plug-in has registered.
        kind = self.device.type
        self.backend = "gloo"
        if kind != "cpu":
            self.backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        options: dict[str, Any] = {"store": dist.HashStore()}
        if init_method:
            options = {"init_method": init_method, "timeout": self._timeout}
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if init_method == "env://" and (restart != "0" or self._part is not None):
            # torchrun keeps its store over a restart. A prefix hides the old addresses in the store.
            store = dist.PrefixStore(f"restart_{restart}", next(rendezvous(init_method))[0])
            if self._timeout is not None:
                store.set_timeout(self._timeout)
            if self._part is not None:
                store = _store_of_world(store, *self._part)
            options = {"store": store, "timeout": self._timeout}
        dist.init_process_group(self.backend, rank=self.rank, world_size=self.world_size, **options)
        self._owns_group = True
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if init_method == "env://" and local_size < self.world_size:
            store = dist.distributed_c10d._get_default_store()
            self._hosts = Hosts(store, self.rank, self.world_size, self.local_rank, local_size)

    def _watch(self, deadlines: Deadlines | None, ending: Callable[[], bool]) -> None:
        """Publish the heartbeats of this rank, and monitor the ranks of this machine unless the launcher does so."""
        if BOARD_VARIABLE in os.environ:
            ranks, path = os.environ[BOARD_VARIABLE].split(" ", 1)
            board, poll = HeartbeatBoard(Path(path), int(ranks)), lambda: None  # the launcher polls
        elif deadlines is not None or "LOCAL_WORLD_SIZE" in os.environ:
            board = HeartbeatBoard(board_of_machine(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            self._board = board.path
            if self.local_rank == 0:
                self._watched.callback(board.path.unlink, missing_ok=True)
            first = launched_rank()[0] - self.local_rank
            if deadlines is not None:
                poll = HangMonitor(board, deadlines, self.local_rank, first, ending).poll
            else:
                poll = WaitReporter(board, first).poll if self.local_rank == 0 else lambda: None
        else:
            return
        # The timeout of torch raises a less specific error, so it must expire later.
        if deadlines is not None:
            self._timeout = timedelta(seconds=max(deadlines.step_s, deadlines.first_step_s) + 60)
        self.heartbeat = HeartbeatWriter(board, self.local_rank)
        self._watched.enter_context(self.heartbeat.watched(poll))

    def mesh(self, strategy: Strategy, ranks: Sequence[int] | None = None) -> DeviceMesh:
        """Return the device mesh of a strategy, with all axes, including axes of degree 1, outermost first.

        Creating a mesh creates process groups. All ranks of the world, also ranks outside `ranks`, must therefore call
        `mesh` in the same order. Meshes are cached.

        Args:
            strategy: Strategy whose degrees multiply to the number of ranks.
            ranks: Ranks of this world in the mesh, used in ascending order; None: all ranks. Several models may use
                disjoint sets of ranks.

        Raises:
            BadValue: HP102 when `ranks` has a repeated rank, or a rank outside the world.
            DegreesMismatch: HP301 when the degrees do not multiply to the number of ranks.
        """
        members = self._members(ranks)
        if strategy.world_size != len(members):
            is_subset = ranks is not None and strategy.world_size <= self.world_size
            raise _degrees_mismatch(strategy, len(members), is_subset=is_subset)
        if not dist.is_initialized():
            self._open(None)
        mesh = self._mesh(AXES, [getattr(strategy, axis) for axis in AXES], members)
        if strategy.cp > 1:
            # Create the flattened FSDP axis here, because all ranks of the world call this function.
            mesh["dp_shard", "cp"]._flatten(FLAT)
        if 1 < len(members) < self.world_size and members not in self._groups:
            self._groups[members] = dist.new_group(list(members))
        return mesh

    def expert_mesh(self, strategy: Strategy, ranks: Sequence[int] | None = None) -> DeviceMesh | None:
        """Return the device mesh of experts, with axes pp, dp_replicate, edp, ep, over the same ranks as `mesh`.

        Return None when ep is 1. All ranks of the world must call this method in the same order, after `mesh`.
        """
        if strategy.ep == 1:
            return None
        expert_axes = strategy.expert_mesh()
        return self._mesh(expert_axes.names, expert_axes.shape, self._members(ranks))

    def _members(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        if ranks is not None and sorted(ranks) != sorted({*ranks}.intersection(range(self.world_size))):
            raise BadValue(
                "`ranks` has a repeated rank, or a rank outside the world",
                got=[*ranks],
                allowed=f"different ranks from 0 to {self.world_size - 1}",
            )
        # Process groups sort their ranks, and shards follow the order of the process group.
        return tuple(range(self.world_size) if ranks is None else sorted(ranks))

    def _mesh(self, names: tuple[str, ...], degrees: Sequence[int], members: tuple[int, ...]) -> DeviceMesh:
        key = (tuple(degrees), members)
        if key not in self._meshes:
            ranks = torch.tensor(members, dtype=torch.int).view(*degrees)
            self._meshes[key] = DeviceMesh(self.device.type, ranks, mesh_dim_names=names)
        return self._meshes[key]

    def group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """Return the process group of all ranks in a mesh that `mesh` has created; None for a single-rank mesh."""
        if mesh.size() == 1:
            return None
        if mesh.size() == self.world_size:
            return dist.group.WORLD
        return self._groups[tuple(mesh.mesh.flatten().tolist())]

    def close(self) -> None:
        """Destroy the process groups that this object has created, after a barrier of all ranks.

        Without the barrier, a rank could close connections that slower ranks are still opening.
        """
        if self._owns_group and dist.is_initialized():
            dist.barrier()
        self.leave()

    def leave(self) -> None:
        """Stop the heartbeat, and destroy the process groups that this object has created, without a barrier."""
        self._watched.close()
        had_meshes = bool(self._meshes)
        self._meshes.clear()
        self._groups.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        if had_meshes and not dist.is_initialized():  # destroyed above, or by its owner
            forget_meshes()
        self._owns_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: Any) -> None:
        if error is None:
            self.close()
        else:  # other ranks may wait in a collective, which fails as soon as this rank has left
            stamp(error)
            lost = None
            if self._hosts is not None:
                # A lost connection raises a RuntimeError without a code.
                if isinstance(error, RuntimeError) and not isinstance(error, HyperParallelError):
                    lost = self._hosts.find_lost()
                else:
                    self._hosts.report_alive()
            self.leave()
            if lost is not None:
                stamp(lost)
                raise lost from error
            if _MISMATCH in str(error):
                mismatch = CollectiveMismatch(" ".join(str(error).split())[:2000], where=f"rank {self.rank}")
                stamp(mismatch)
                raise mismatch from error


def _store_of_world(store: dist.Store, ranks: range, launched: int) -> dist.Store:
    """Wait until all `launched` ranks have joined `store`; return a prefix store for the world of `ranks`."""
    if store.add("joined", 1) == launched:
        store.set("all_joined", "")
    store.wait(["all_joined"])
    return dist.PrefixStore(f"world_{ranks.start}", store)


def forget_meshes() -> None:
    """Free the process groups of closed worlds by clearing torch's caches that are keyed by device mesh.

    Otherwise an entry of a closed world could match an equal mesh of a later world, whose groups differ. Ranks forked
    later would inherit the cached groups without their threads, and would hang when freeing a group.
    """
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    # Same as `torch.distributed.tensor.debug._clear_sharding_prop_cache`, whose import takes 30 ms.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # since the C++ fast path
        torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()


def launched_rank() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) from the environment variables of a launcher; (0, 1, 0) without RANK.

    Without LOCAL_RANK, the local rank is 0.

    Raises:
        LauncherIncomplete: HP315 when WORLD_SIZE is missing, or a variable has an invalid value.
    """
    if "RANK" not in os.environ:
        return 0, 1, 0
    variables = _variables("RANK", "WORLD_SIZE")
    variables["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", "0")
    for name, text in variables.items():
        if not text.isdecimal():
            raise _incomplete(f"`{name}` is not a number", f"{name}={text}")
    rank, world_size, local_rank = (int(text) for text in variables.values())
    if rank >= world_size:
        raise _incomplete("`RANK` is not below `WORLD_SIZE`", f"RANK={rank}, WORLD_SIZE={world_size}")
    return rank, world_size, local_rank


def _degrees_mismatch(strategy: Strategy, num_ranks: int, *, is_subset: bool) -> DegreesMismatch:
    size = strategy.world_size
    dp_shard, remainder = divmod(num_ranks, size // strategy.dp_shard)
    hint = f"torchrun --nproc-per-node {size} SCRIPT"
    if is_subset:
        hint = f"ranks=range({size})"
    elif INIT_METHOD in os.environ:
        hint = f"start {size} ranks, for example hp.launch(fn, {size})"
    return DegreesMismatch(
        f"the degrees multiply to {size}, but there {'is' if num_ranks == 1 else 'are'} {num_ranks} "
        f"rank{'' if num_ranks == 1 else 's'}",
        got=f"{strategy} on {num_ranks} rank{'' if num_ranks == 1 else 's'}",
        hint=hint if remainder else f"{hint}, or dp_shard={dp_shard}",
    )


def _variables(*names: str) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise _incomplete(f"`{missing[0]}` is missing", f"RANK={os.environ['RANK']}")
    return {name: os.environ[name] for name in names}


def _incomplete(problem: str, got: str) -> LauncherIncomplete:
    return LauncherIncomplete(
        f"{problem}, so this rank cannot connect to the other ranks",
        where="environment of this process",
        got=got,
        allowed="RANK below WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
        hint="`unset RANK` lets this process run as a single rank",
    )
