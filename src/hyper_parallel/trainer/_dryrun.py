"""Dry run: trace of a recipe's training step for any machine, rank by rank in this process, with fake tensors.

The traced code is that of a real step: the model, `parallelize`, forward, backward, clipping, loss reduction and
optimizer step. Collectives return at once without transfers. Tensors except the token ids have sizes but no values. A
`Recorder` records the operators. Memory peaks and collectives are computed from the recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hyper_parallel.backends.torch import FusedAttention, allocate, local
from hyper_parallel.backends.torch.memory import (
    Peak,
    Recorder,
    Workspace,
    collectives_of,
    cpu_workspace,
    device_workspace,
    peak_of,
)
from hyper_parallel.config import LoadedRecipe, Training
from hyper_parallel.errors import BadValue, Contradiction
from hyper_parallel.ir import Collective, Plan, Purpose
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.topology import Supernode, load_topology
from hyper_parallel.trainer.engine.optimizer import build_optimizer
from hyper_parallel.trainer.engine.recipe_model import (
    build_model,
    read_spec,
    refuse_submodels,
    trained_of,
)
from hyper_parallel.trainer.engine.step_gauges import MemoryGauge, PhaseSpans
from hyper_parallel.trainer.engine.step_loop import Loop, StepInputs

_ALLOCATOR_BLOCK = 512
"""Granularity in bytes of allocations in the caching allocators of accelerators."""


@dataclass(frozen=True, slots=True)
class TracedRank:
    """Traced step of one rank.

    Attributes:
        rank: Global rank.
        coordinate: Mesh coordinate of the rank, by axis.
        peaks: Peak bytes, by memory tier, of a step that starts with existing optimizer state.
        collectives: Collectives of the step.
        operators: Number of operators of the step.
        seconds: Wall time of the trace.
    """

    rank: int
    coordinate: dict[str, int]
    peaks: dict[str, Peak]
    collectives: tuple[Collective, ...]
    operators: int
    seconds: float


def differences(rank: TracedRank, plan: Plan) -> tuple[str, ...]:
    """Return a sentence per collective kind and mesh axes for which calls or sent bytes of trace and plan differ.

    The plan predicts the collectives of rank 0, so `rank` should be rank 0. Collectives of the step log are ignored.
    """
    totals: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for i, items in enumerate((rank.collectives, plan.collectives)):
        for c in items:
            if c.purpose != Purpose.STEP_LOG:
                both = totals.setdefault((c.kind, c.axes), [0, 0, 0, 0])
                both[2 * i] += c.count
                both[2 * i + 1] += c.sent_bytes
    return tuple(
        f"{kind} over {' '.join(axes)}: traced {calls:,} calls, {sent:,} bytes; "
        f"by formula {planned_calls:,} calls, {planned:,} bytes"
        for (kind, axes), (calls, sent, planned_calls, planned) in totals.items()
        if (calls, sent) != (planned_calls, planned)
    )


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Trace `scaled_dot_product_attention` as a single fused operator even if keys and values differ in head size.

    Accelerators have such a fused kernel; the CPU kernel requires equal head sizes. The torch function is patched
    inside the context, because a `TorchFunctionMode` would not cover recompute during backward.
    """
    original = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape[-1] == value.shape[-1]:
            return original(query, key, value, *args, **kwargs)
        return FusedAttention.apply(query, key, value)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def trace_rank(
    build: Callable[[], nn.Module],
    plan: Plan,
    training: Training,
    rank: int,
    *,
    alignment_bytes: int = 1,
    workspace: Workspace | None = None,
    accelerator: bool = False,
) -> TracedRank:
    """Trace a training step on one rank of a plan, which may have any number of ranks.

    `build` returns the model on the meta device. The bytes of each tensor are rounded up to `alignment_bytes`. Without
    `workspace`, the workspace bytes of operators are not counted. With `accelerator`, attention is a single fused
    operator, as on accelerators.
    """
    start = time.perf_counter()
    strategy = plan.strategy
    recorder = Recorder(alignment_bytes, workspace)
    with World.fake(rank, strategy.world_size) as world:
        # Meshes and FSDP groups read tensor values, so `parallelize` runs outside the fake-tensor mode.
        model = parallelize(build(), plan, world)
        attention = _fused_attention() if accelerator else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, attention:
            allocate(model, device=world.device)
            optimizer = build_optimizer(model, training)
            _create_state(optimizer)
            _name_state(recorder, model, optimizer)

            def begin(piece: str) -> None:
                recorder.enter(piece)
                if piece == "gradient norm":  # backward has finished, so all gradients exist
                    for name, parameter in model.named_parameters():
                        if parameter.grad is not None:
                            recorder.name(local(parameter.grad), name, "gradient")

            spans, gauge = PhaseSpans(begin), MemoryGauge(world.device)
            loop = Loop(model, optimizer, plan, world, spans, gauge, training.max_grad_norm)
            recorder.restart("setup")
            _step(loop, recorder, plan, training)
            recorder.enter("after the step")
            # FSDP pads uneven parameters in its first forward, which changes their bytes.
            _name_state(recorder, model, optimizer)
            recording = recorder.recording(f"{plan.model.name} rank {rank}")
    meshes = plan.mesh, strategy.expert_mesh()
    return TracedRank(
        rank,
        plan.mesh.coordinate(rank),
        {"hbm": peak_of(recording)},
        collectives_of(recording, rank, *meshes),
        recording.num_operators,
        time.perf_counter() - start,
    )


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _step(loop: Loop, recorder: Recorder, plan: Plan, training: Training) -> None:
    work = plan.workload
    shape = (work.microbatch or 1, work.seq_len)
    inputs = []
    for _ in range(work.accumulation_steps or 1):
        with unset_fake_temporarily():  # model code may read token ids, so they are real tensors
            batch = {n: torch.zeros(shape, dtype=torch.int64) for n in ("input_ids", "shift_labels")}
        for name, tensor in batch.items():
            recorder.name(tensor, name, "input")
        inputs.append(batch)
    loss, _ = loop.gradients(StepInputs(inputs, work.tokens_per_step or 1))
    recorder.enter("loss")
    loop.reduce_step_log(loss, 0)
    loop.update(training.lr)


def _name_state(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        recorder.name(local(tensor), name, "weight")
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                recorder.name(local(value), f"{names[parameter]} {key}", "optimizer")


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        plan: Plan with its predictions.
        device: Name of the device.
        capacity_bytes: Memory of the device.
        ranks: Traced ranks.
        notes: Sentences about the assumptions of the trace.
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
        """Peak bytes of tensors on the fullest traced rank."""
        return max(rank.peaks["hbm"].num_bytes for rank in self.ranks)

    @property
    def planned_to_traced(self) -> float:
        """Relative error of the planned peak of tensors; negative if the plan predicts too little."""
        return self.plan.tensor_bytes / self.peak_bytes - 1.0

    @property
    def fits(self) -> bool:
        """True if `peak_bytes` plus the reserved bytes of the plan fit the device memory."""
        return self.peak_bytes + self.plan.reserved_bytes <= self.capacity_bytes


def dry_run(loaded: LoadedRecipe, *, num_ranks: int | None = None, rank: int | None = None) -> DryRun:
    """Plan a recipe for `num_ranks` ranks (None: as in the recipe), and trace a training step of its ranks.

    `rank` is the only rank to trace; None: one rank per pipeline stage (see `distinct_ranks`).

    Raises:
        BadValue: HP102 when `rank` is not a rank of the plan.
        Contradiction: HP104 if torch.distributed is initialized, or for a recipe that a dry run does not support.
        HyperParallelError: Errors of reading the model, planning and `parallelize`.
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
            f"the plan has no rank {rank}", where="--rank", got=rank, allowed=f"0..{size - 1}",
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
    if dist.is_initialized():
        raise Contradiction(
            "a dry run cannot run in a process whose torch.distributed is initialized",
            where="dry_run",
            hint="torch.distributed.destroy_process_group() before the dry run, or a new process without torchrun",
        )
    refuse_submodels(loaded, "a dry run traces one layout of the whole model", "--dry-run")
    if loaded.recipe.stage == "rm":
        raise Contradiction(
            "a dry run traces next-token cross entropy, but a reward model has another loss",
            where=loaded.where("stage"),
            got="stage=rm, --dry-run",
            hint="stage=dpo" + (" rm=null" if loaded.recipe.rm != type(loaded.recipe.rm)() else ""),
        )


def distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """Return one rank of every pipeline stage: the rank with coordinate 0 on all other axes.

    Ranks of a stage run the same program. Uneven shards are largest at coordinate 0.
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
        yield "experts: every expert is assumed to receive the same number of tokens"
    yield from plan.notes
