"""hp.offload: run a user's training step by a memory plan.

A memory plan lists, for the operators of a recorded step, the tensors to evict, prefetch and recompute. The first call
runs the step eagerly, which creates the optimizer state; with DistributedDataParallel, so does the second call. The
next call records the step and plans its memory. Later calls run by the plan (planned steps). The first planned step is
checked against the eager step, bitwise on a CPU. With several ranks, collectives start in the recorded order. Ranks
with equal recorded programs get the same plan. If planning fails on a rank, all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Final, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hyper_parallel.backends.torch.data.fsdp import gathered_parameters
from hyper_parallel.backends.torch.memory import (
    Captured,
    Measured,
    PlannedDevice,
    model_state,
    optimizer_state,
    record,
    spill_mode,
)
from hyper_parallel.backends.torch.memory.step_source import CaptureSource
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import (
    BadValue,
    BudgetImpossible,
    CaptureUnsupported,
    HyperParallelError,
    StepChanged,
    TierFull,
)
from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    merge_errors,
    plan_memory,
    sufficient_device_bytes,
    with_seconds,
)
from hyper_parallel.runtime._step_refusals import (
    models_of,
    referenced_objects,
    refuse_compiled,
    refuse_odd_arguments,
    refuse_reads,
    refuse_schedule,
)
from hyper_parallel.topology import Supernode, load_topology
from hyper_parallel.units import parse_bytes

FLASH_BYTES_S: Final = 1e9
"""Assumed bytes/s of an NVMe drive, if the topology has no flash."""


def host_machine(node: Supernode, dram_bytes: int | None, flash: bool) -> MemoryMachine:
    """Return the machine model of memory plans, with copy rates from a topology.

    The tiers of the model are device memory, DRAM and optionally flash.

    Args:
        node: Topology of the machine.
        dram_bytes: Bytes of DRAM; None: unlimited.
        flash: Whether to add a flash tier.
    """
    # Without host memory in the topology, a copy reads and writes device memory.
    host = Channel(node.host_bytes_s or node.device.memory_bytes_s.value / 2)
    drives = [pool.bytes_s.value for pool in node.pools if pool.kind == "flash"]
    drive = Channel(drives[0] if drives else FLASH_BYTES_S) if flash else None
    return MemoryMachine(host, host, drive, drive, dram_bytes=dram_bytes)


T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in rank order; collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree_on_plan(compute: Callable[[], MemoryPlan], *inputs: object) -> MemoryPlan:
    """Return the memory plan of this rank, computed by the lowest rank with equal `inputs`; collective over all ranks.

    If planning fails on any rank, all ranks raise the same error. A capacity that it names suffices on every rank.
    """
    digests = gather_objects(hashlib.sha256(repr(inputs).encode()).hexdigest())
    planners = [digests.index(digest) for digest in digests]
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan: MemoryPlan | HyperParallelError | None = None
    if planners[rank] == rank:
        try:
            plan = compute()
        except HyperParallelError as error:
            plan = error
    errors = gather_objects(plan if isinstance(plan, HyperParallelError) else None)
    if error := merge_errors([e for e in errors if e is not None]):
        raise error
    for planner in sorted({p for r, p in enumerate(planners) if p != r}):
        plans = [plan if rank == planner else None]
        dist.broadcast_object_list(plans, src=planner)
        if planners[rank] == planner:
            plan = plans[0]
    assert isinstance(plan, MemoryPlan)
    return plan


MOST_SHAPES: Final = 8
"""Maximum number of planned input shapes; each plan of a large model takes seconds and megabytes."""
_Key = tuple[TreeSpec, tuple[Any, ...]]
"""Structure of the arguments, and for each leaf its shape, dtype and device, or the value of a non-tensor."""


def _budget_bytes(budget: str | int | None, max_slowdown: float | None) -> int | None:
    if (budget is None) == (max_slowdown is None):
        raise BadValue(
            "offload needs exactly one of `budget` and `max_slowdown`",
            got=f"budget={budget!r}, max_slowdown={max_slowdown!r}",
            hint='hp.offload(step, budget="24GiB")',
        )  # fmt: skip
    if max_slowdown is not None and not max_slowdown >= 0:
        raise BadValue(
            "`max_slowdown` is negative",
            got=max_slowdown,
            allowed="a number, 0 or more",
            hint="hp.offload(step, max_slowdown=0.02)",
        )
    try:
        return None if budget is None else parse_bytes(budget)
    except (ValueError, TypeError) as error:
        raise BadValue(
            "`budget` is not a size",
            got=budget,
            allowed="a whole number of bytes, or a text such as 24GiB or 800MB",
            hint='hp.offload(step, budget="24GiB")',
        ) from error


def offload(
    step: Callable[..., Any],
    *,
    budget: str | int | None = None,
    max_slowdown: float | None = None,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    topology: str = "local",
) -> OffloadedStep:
    """Return a callable that runs a training step in less device memory.

    Args:
        step: Function that runs forward, backward, `optimizer.step()` and `optimizer.zero_grad()` on a batch, in this
            order; `zero_grad` may also come first. Arguments are tensors and plain values, also nested in containers. A
            value that differs between calls must be a tensor. Results must be tensors too (`loss.detach()`, not
            `loss.item()`).
        budget: Device memory, for example `"24GiB"`, within which the plan minimizes the time of the step.
        max_slowdown: Relative slowdown, for example 0.02, within which the plan minimizes device memory.
        model: Modules of the step; None: modules to which `step` refers, also through functions of the same file.
        optimizer: Optimizers of the step; None: those to which `step` refers. The state of an optimizer must be tensors
            (`AdamW(..., fused=True)`). Learning rates become tensors, which torch's schedulers change in place.
        topology: Preset name or YAML file; `local`: this machine. On a CPU, a device is simulated.

    Returns:
        A callable with the signature of `step`.

    Raises:
        BadValue: HP102 unless exactly one of `budget` and `max_slowdown` is given, for a `budget` that is not a size, a
            negative `max_slowdown`, a step without optimizer, and topology `local` with ranks on several machines.
        CaptureUnsupported: HP511 for compiled code. See `OffloadedStep.__call__` for errors of later calls.
        HyperParallelError: For an unknown or unreadable `topology`.
    """
    budget_bytes = _budget_bytes(budget, max_slowdown)
    models = models_of(step) if model is None else _as_list(model)
    optimizers = referenced_objects(step, torch.optim.Optimizer) if optimizer is None else _as_list(optimizer)
    if not optimizers:
        goal = f"max_slowdown={max_slowdown}" if budget is None else f"budget={budget!r}"
        raise BadValue(
            "no optimizer was found in the step" if optimizer is None else "`optimizer` contains no optimizer",
            hint=f"hp.offload(step, {goal}, optimizer=optimizer)",
        )
    joint_model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    refuse_compiled(step, joint_model)
    return OffloadedStep(
        step,
        joint_model,
        list({id(opt): opt for opt in map(_unwrapped, optimizers)}.values()),
        _step_machine(topology, optimizers),
        budget_bytes,
        max_slowdown,
    )


@dataclass(frozen=True, slots=True)
class _StepMachine:
    memory: MemoryMachine
    roofline: Roofline
    link: Channel


def _step_machine(topology: str, optimizers: Sequence[torch.optim.Optimizer]) -> _StepMachine:
    """Return the machine model of a topology, with FLOP/s for the dtype of the first trained parameter."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # set by torchrun
    if topology == "local" and ranks > local_size:
        raise BadValue(
            "the topology `local` describes one machine, but the ranks are on several",
            got=f"{ranks} ranks, {local_size} of them here",
            hint='hp.offload(step, ..., topology="dgx-h100")',
        )
    node = load_topology(topology, local_size)
    tier = node.tier_of(ranks)
    trained = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    dtype = next((p.dtype for p in trained if p.is_floating_point()), torch.float32)
    flops = node.peak_flops(str(dtype).removeprefix("torch."))
    return _StepMachine(
        host_machine(node, None if node.host_bytes is None else int(node.host_bytes), flash=False),
        Roofline(flops, node.device.memory_bytes_s.value),
        Channel(tier.bytes_s.value, tier.latency_s.value),
    )


class OffloadedStep:
    """Training step under a memory plan, created by `offload`; called like the user's step.

    Between planned steps, the tensors of model and optimizer have no valid values. Code that reads or changes them,
    such as an evaluation or a checkpoint, must run inside `with step.materialized():`. Each new combination of input
    shapes and non-tensor values is recorded and planned; at most 8 are supported.

    Attributes:
        plan: Current memory plan; None before the first planned step.
        measured: Measurements of the newest planned step; None before the first planned step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        machine: _StepMachine,
        budget_bytes: int | None,
        max_slowdown: float | None,
    ) -> None:
        self._step, self._model, self._optimizers = step, model, list(optimizers)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        candidates = [*model.parameters(), *(p for group in groups for p in group["params"])]
        self._parameters = list({id(p): p for p in candidates}.values())
        self._machine = machine
        self._budget_bytes, self._max_slowdown = budget_bytes, max_slowdown
        self._planned: dict[_Key, tuple[Captured, MemoryPlan]] = {}
        self._device: tuple[_Key, PlannedDevice] | None = None
        replicas = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        # DDP reorders its buckets in the second step.
        self._num_eager_steps = 2 if replicas else 1
        self._zeroes_first = False
        self.plan: MemoryPlan | None = None
        self.measured: Measured | None = None
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._owned, self._empty = partial(gathered_parameters, sharded), list[weakref.ref[Any]]()
        device = self._compute_device = self._parameters[0].device
        # Optimizer kernels use a float32 learning rate on accelerators and float64 on CPUs.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        for group in groups:
            # In this case Adam rejects tensor learning rates. `refuse_reads` later refuses its Python step counter.
            keeps_number = "betas" in group and group.get("foreach") and not group.get("capturable")
            if not keeps_number and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=device)
        update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step and return the outputs of the user's step.

        Raises:
            StepChanged: HP512 when the model, the optimizer or a value read by Python differs from the recording, when
                the first planned step differs from the eager one, or for more than 8 different inputs.
            CaptureUnsupported: HP511 if the step cannot be replayed.
            BudgetImpossible: HP402 on all ranks, with the smallest feasible budget, if no memory plan fits.
            TierFull: HP403 if host memory is too small for the evicted tensors.
            TransferFailed: HP513 when a copy failed.
        """
        leaves, nest = tree_flatten((args, kwargs))
        tensors = {f"input {i}": v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)}
        facts = ((v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in leaves)
        key = nest, tuple(facts)
        refuse_odd_arguments(leaves)
        if self._num_eager_steps:  # a counter, because SGD has no state even after a step
            self._num_eager_steps -= 1
            # On a CPU this mode does not move tensors.
            with spill_mode(self._compute_device, owned=self._owned) as mode:
                result = self._step(*args, **kwargs)
                # Storages that FSDP has freed, and will allocate again in the next step.
                self._empty = mode.emptied_storages
            return result
        if key not in self._planned:
            return self._recorded(key, leaves, tensors)
        if self._device is None or self._device[0] != key:
            self.close()
            captured, plan = self._planned[key]
            device = PlannedDevice(captured, plan, self._machine.memory, copies="threads")
            self._device, self.plan = (key, device), plan
        outputs, self.measured = self._device[1].step(tensors)
        return outputs

    def _recorded(self, key: _Key, leaves: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
        """Run and record an eager step, plan later steps with the same `key`, and return the outputs."""
        if len(self._planned) == MOST_SHAPES:
            raise StepChanged(
                f"the step was called with more than {MOST_SHAPES} different input shapes or non-tensor values",
                got=str(key[1])[:200],
                hint="pad the inputs to a few lengths, and pass changing values as tensors",
            )
        self.close()
        returned: list[Any] = []
        old = self._previous_gradients()
        grads = [local(grad) for _, grad in old if grad.layout is torch.strided]
        unread = {grad.untyped_storage()._cdata for grad in grads}

        def run(**inputs: torch.Tensor) -> Any:
            args, kwargs = tree_unflatten([inputs.get(f"input {i}", value) for i, value in enumerate(leaves)], key[0])
            returned[:] = [self._step(*args, **kwargs)]
            if old and all(p.grad is not grad for p, grad in old):
                self._zeroes_first = True
                for p in self._parameters:
                    p.grad = None
            return returned[0]

        on_cpu = self._compute_device.type == "cpu"
        captured = record(
            run,
            tensors,
            self._named_state(),
            name=getattr(self._step, "__name__", type(self._step).__name__),
            training=True,
            empty=self._empty,
            spill=None if on_cpu else spill_mode(self._compute_device, owned=self._owned),
        )
        if any(t.untyped_storage()._cdata in unread for t in captured.state.values()):
            raise CaptureUnsupported(
                "the step reads gradients of the previous step",
                hint="end the step with `optimizer.zero_grad(set_to_none=True)`",
            )
        self._planned[key] = captured, self._plan_step(captured)
        return returned.pop()

    def _previous_gradients(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return (parameter, gradient) pairs of the previous step, which the recorded step must not read.

        For a step that begins with `zero_grad`, missing gradients are first set to zeros.
        """
        for p in self._parameters if self._zeroes_first else ():
            if p.grad is None and p.requires_grad:
                p.grad = _no_gradient(p)
        return [(p, p.grad) for p in self._parameters if p.grad is not None]

    def _named_state(self) -> dict[str, tuple[torch.Tensor, str]]:
        """Return (tensor, storage kind such as `weight`) of all model and optimizer tensors, by name."""
        named = model_state(self._model)
        known = {id(p) for p in self._model.parameters()}
        other_params = [p for p in self._parameters if id(p) not in known]
        named |= {f"parameter {i}": (local(p), "weight") for i, p in enumerate(other_params)}
        for number, optimizer in enumerate(self._optimizers):
            state = optimizer_state(self._model, optimizer, other_params)
            named |= {f"{name} ({number})" if number else name: v for name, v in state.items()}
        return named

    def _plan_step(self, captured: Captured) -> MemoryPlan:
        """Check a recorded step and plan its memory; collective over all ranks."""
        refuse_reads(captured, self._optimizers)
        refuse_schedule(self._step, captured, self._optimizers)
        captured.source, captured.owned = CaptureSource(self._model, *self._optimizers), self._owned
        program = self._machine.roofline.annotate(captured.program, self._machine.link)
        try:
            make_plan = partial(
                plan_memory,
                with_seconds(program, captured.seconds),
                self._machine.memory,
                budget_bytes=self._budget_bytes,
                max_slowdown=self._max_slowdown,
            )
            return agree_on_plan(make_plan, program, self._machine.memory)
        except (BudgetImpossible, TierFull) as error:
            error.hint = f"hp.offload(step, ..., budget={sufficient_device_bytes(error)})"
            raise

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Materialize the tensors of model and optimizer inside the context, which must not contain a step."""
        if self._device is None:
            yield
        else:
            with self._device[1].materialize_state():
                yield

    def lent(self) -> AbstractContextManager[None]:
        """Return `materialized()`; deprecated name."""
        warnings.warn("`lent()` is now `materialized()`", DeprecationWarning, stacklevel=2)
        return self.materialized()

    def close(self) -> None:
        """Materialize the tensors of model and optimizer; the next step moves them to planned memory again."""
        if self._device is not None:
            self._device[1].close()
            self._device = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer without wrappers such as `AcceleratedOptimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _no_gradient(p: torch.nn.Parameter) -> torch.Tensor:
    """Return a zero gradient that takes the memory of a single element; a DTensor if the parameter is one."""
    part = local(p)
    zeros = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(part)
    if not isinstance(p, DTensor):
        return zeros
    return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
