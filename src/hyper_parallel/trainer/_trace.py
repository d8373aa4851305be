"""Trace what one rank of a plan does in a training step, on one process, with fake tensors.

Everything is the program that trains: the model's own code, `parallelize`, the loop's forward, backward, clipping, loss
exchange and optimizer step. Only the ranks and the values are not there: collectives return at once, tensors have
sizes but no bytes. A `Recorder` writes the step down; its peak and its collectives are views of what was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hyper_parallel.backends.torch import FusedAttention, allocate, local
from hyper_parallel.backends.torch.memory import (
    FakeKernels,
    Peak,
    Recorder,
    Workspace,
    collectives_of,
    peak_of,
)
from hyper_parallel.config import Training
from hyper_parallel.ir import Collective, Plan, Purpose
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.trainer.engine.optimizer import build_optimizer
from hyper_parallel.trainer.engine.step_gauges import PhaseSpans
from hyper_parallel.trainer.engine.step_loop import Loop, StepInputs


@dataclass(frozen=True, slots=True)
class TracedRank:
    """One step of one rank.

    Attributes:
        rank: The rank.
        coordinate: Its place on the mesh.
        peaks: Memory tier to the peak of a step in the steady state.
        collectives: Communication of one step.
        operators: Operators of one step.
        seconds: Time the trace took.
    """

    rank: int
    coordinate: dict[str, int]
    peaks: dict[str, Peak]
    collectives: tuple[Collective, ...]
    operators: int
    seconds: float


def differences(rank: TracedRank, plan: Plan) -> tuple[str, ...]:
    """Where a traced rank's collectives are not those of the plan's formulas, one sentence each.

    The formulas are for the rank at coordinate 0 of every axis.
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


class _NoGauge:
    """Stands where the loop expects its memory gauge."""

    def peak_bytes(self) -> int:
        return 0


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Run attention whose values are narrower than its keys as accelerators do; the CPU's kernel wants equal widths.

    The function itself is replaced: torch leaves a `TorchFunctionMode` for the time of a backward pass, so attention
    that is computed again there would run another kernel than in forward.
    """
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape[-1] == value.shape[-1]:
            return plain(query, key, value, *args, **kwargs)
        return FusedAttention.apply(query, key, value)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


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
    """Trace one rank of a plan.

    Args:
        build: Makes the model on the meta device.
        plan: The plan, for any number of ranks.
        training: Optimizer and clipping.
        rank: Which rank.
        alignment_bytes: Rounding of every allocation.
        workspace: Bytes that operators take inside themselves; None: not counted.
        accelerator: Attention is fused for every width of keys and values.
    """
    start = time.perf_counter()
    strategy = plan.strategy
    recorder = Recorder(alignment_bytes, FakeKernels(workspace))
    with World.fake(rank, strategy.world_size) as world:
        # Meshes and FSDP's groups are made before fake tensors: they read values of index tensors.
        model = parallelize(build(), plan, world)
        attention = _fused_attention() if accelerator else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, attention:
            allocate(model, device=world.device)
            optimizer = build_optimizer(model, training)
            _make_state(optimizer)
            _name_state(recorder, model, optimizer)

            def begin(piece: str) -> None:
                recorder.enter(piece)
                if piece == "gradient norm":  # backward is over: what it left are the gradients
                    for name, parameter in model.named_parameters():
                        if parameter.grad is not None:
                            recorder.name(local(parameter.grad), name, "gradient")

            spans, norm = PhaseSpans(begin), training.max_grad_norm
            loop = Loop(model, optimizer, plan, world, spans, _NoGauge(), norm)
            recorder.restart("setup")
            _step(loop, recorder, plan, training)
            recorder.enter("after the step")
            # FSDP pads what does not divide when it first runs: those are the parameters' bytes now.
            _name_state(recorder, model, optimizer)
            recording = recorder.recording(f"{plan.model.name} rank {rank}")
    meshes = plan.mesh, strategy.expert_mesh()
    return TracedRank(
        rank,
        plan.mesh.coordinate(rank),
        {"hbm": peak_of(recording)},
        collectives_of(recording, rank, *meshes, fsdp_axes=strategy.fsdp_axes),
        recording.num_operators,
        time.perf_counter() - start,
    )


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its states, so that the traced step is like every step but the first."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _step(loop: Loop, recorder: Recorder, plan: Plan, training: Training) -> None:
    """One step of the loop without reading a value."""
    work = plan.workload
    shape = (work.microbatch or 1, work.seq_len)
    inputs = []
    for _ in range(work.accumulation_steps or 1):
        with unset_fake_temporarily():  # token ids are known: model code may look at them
            batch = {
                n: torch.zeros(shape, dtype=torch.int64) for n in ("input_ids", "shift_labels")
            }
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
