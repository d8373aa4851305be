"""Dry run: trace of a recipe's ranks for any machine, rank by rank in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from hyper_parallel.backends.torch import cpu_workspace, device_workspace
from hyper_parallel.config import LoadedRecipe
from hyper_parallel.errors import BadValue, Contradiction
from hyper_parallel.ir import Plan
from hyper_parallel.topology import Supernode, load_topology
from hyper_parallel.trainer._trace import TracedRank, trace_rank
from hyper_parallel.trainer.engine.recipe_model import build_model, read_spec, refuse_submodels
from hyper_parallel.trainer.engine.trained_parameters import trained_of

_ALLOCATOR_BLOCK = 512
"""Granularity in bytes of allocations in the caching allocators of accelerators."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """Traced ranks of a plan.

    Attributes:
        plan: Plan with its predictions.
        device: Name of the device.
        capacity_bytes: Memory of the device.
        ranks: One traced rank of every distinct program.
        notes: Remarks for the reader.
        seconds: Duration of the dry run.
    """

    plan: Plan
    device: str
    capacity_bytes: int
    ranks: tuple[TracedRank, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """Peak device memory of the fullest traced rank, tensors only."""
        return max(rank.peaks["hbm"].num_bytes for rank in self.ranks)

    @property
    def planned_bytes(self) -> int:
        """Planned peak of the fullest device, tensors only: the counterpart of `peak_bytes`."""
        return self.plan.tensor_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the plan reserves in addition to tensors: device context, fragmentation."""
        return self.plan.reserved_bytes

    @property
    def planned_to_traced(self) -> float:
        """Relative excess of the planned tensor peak over the traced one; negative if the plan is too low."""
        return self.planned_bytes / self.peak_bytes - 1.0

    @property
    def fits(self) -> bool:
        """True if the fullest traced rank and the reserve fit the device."""
        return self.peak_bytes + self.reserved_bytes <= self.capacity_bytes


def dry_run(
    loaded: LoadedRecipe, *, num_ranks: int | None = None, rank: int | None = None
) -> DryRun:
    """Plan a recipe and trace the program of its ranks.

    Args:
        loaded: Recipe with the topology to run on.
        num_ranks: Ranks of the whole run; None: as in the recipe.
        rank: The rank to trace; None: one rank of every distinct program.

    Raises:
        BadValue: HP102 when there is no such rank.
        HyperParallelError: Errors of planning and `parallelize`.
    """
    from hyper_parallel.planner import plan_recipe

    start = time.perf_counter()
    recipe = loaded.recipe
    _check_support(loaded)
    spec = read_spec(recipe.model.path, loaded.where("model.path"))
    plan = plan_recipe(recipe, num_ranks, loaded.where, spec, trained_of(build_model(recipe))[0])
    size = plan.strategy.world_size
    if rank is not None and not 0 <= rank < size:
        raise BadValue(
            "there is no such rank", where="--rank", got=rank, allowed=f"0..{size - 1}",
            hint="--rank 0",
        )  # fmt: skip
    machine = load_topology(recipe.topology)
    on_cpu = machine.device.kind == "cpu"
    traced = tuple(
        trace_rank(
            lambda: build_model(recipe),
            plan,
            recipe.training,
            one,
            alignment_bytes=1 if on_cpu else _ALLOCATOR_BLOCK,
            workspace=cpu_workspace if on_cpu else device_workspace,
            accelerator=not on_cpu,
        )
        for one in ([rank] if rank is not None else distinct_ranks(plan))
    )
    return DryRun(
        plan,
        machine.device.name,
        int(machine.device.memory_bytes.value),
        traced,
        tuple(_notes(loaded, plan, machine)),
        time.perf_counter() - start,
    )


def _check_support(loaded: LoadedRecipe) -> None:
    """Raise Contradiction (HP104) for a process of a run, and for a stage that a dry run cannot trace."""
    if dist.is_initialized():
        raise Contradiction(
            "a dry run needs a process without process group, and this one is a rank of a run",
            where="--dry-run",
            hint="start it without torchrun",
        )
    refuse_submodels(loaded, "a dry run traces one layout of the whole model", "--dry-run")
    if loaded.recipe.stage == "rm":
        raise Contradiction(
            "a dry run traces the cross entropy of next tokens, and a reward model has none",
            where=loaded.where("stage"),
            got="stage=rm, --dry-run",
            hint="stage=dpo",
        )


def distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """Return one rank of every distinct program: each pipeline stage, at coordinate 0 of the other axes.

    Coordinate 0 has the largest shards of tensors with uneven shards.
    """
    stages = plan.strategy.pp
    return tuple(range(0, plan.strategy.world_size, plan.strategy.world_size // stages))


def _notes(loaded: LoadedRecipe, plan: Plan, machine: Supernode) -> Iterator[str]:
    if machine.device.kind != "cpu":
        yield (
            "operators are those of the CPU: attention is a flash kernel, and workspaces of the device's own "
            "libraries are not in the bytes"
        )
        yield f"bytes are rounded to {_ALLOCATOR_BLOCK} per tensor, as caching allocators do"
    if loaded.recipe.training.compile:
        yield "training.compile: traced without it; a compiled layer keeps fewer activations"
    if plan.strategy.ep > 1 or plan.model.num_active_params != plan.model.num_params:
        yield "experts: every expert is taken to receive the same number of tokens"
    yield from plan.notes
