"""Offload in one call: a training step that a user wrote, run by a memory plan.

The first call is the step as it is (it makes the optimizer's state), the second is recorded and planned, and from the
third on the plan runs. The first planned step is compared with the plain one, bit for bit on a CPU. With several ranks
every one plans its own step; they begin what they do together in the order in which it was recorded.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hyper_parallel.backends.torch.data.fsdp import gathered
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
from hyper_parallel.errors import BadValue, BudgetImpossible, CaptureUnsupported, StepChanged
from hyper_parallel.ir import MemoryPlan, MemoryProgram
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory, with_seconds
from hyper_parallel.runtime._agreed import agreed
from hyper_parallel.runtime._host_machine import host_machine
from hyper_parallel.runtime._step_parts import models_of, optimizers_of
from hyper_parallel.runtime._step_refusals import (
    refuse_compiled,
    refuse_odd_arguments,
    refuse_reads,
    refuse_schedule,
)
from hyper_parallel.topology import detect_local, load_topology
from hyper_parallel.units import parse_bytes

MOST_SHAPES: Final = 8
"""Most shapes of inputs that are planned: a plan of a large model takes seconds and megabytes."""
_Key = tuple[TreeSpec, tuple[Any, ...]]
"""How the arguments are nested; shape and type of every tensor, and every other value."""


def offload(
    step: Callable[..., Any],
    *,
    budget: str | int | None = None,
    max_slowdown: float | None = None,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    topology: str = "local",
) -> OffloadedStep:
    """Run a training step in less device memory.

    Args:
        step: Forward, backward, `optimizer.step()` and `optimizer.zero_grad()` of one batch, with anything between
            them. Where `zero_grad` comes first, gradients go at the end of a step all the same. Its arguments are nests
            of tensors; what differs from call to call has to be one. It returns tensors (`loss.detach()`, not
            `loss.item()`).
        budget: Device bytes (`"24GiB"`); the plan is the fastest that keeps them.
        max_slowdown: Instead: the least bytes at so much more time (0.02 is 2 %).
        model: The modules that the step works on, one or several; None: those that the function, and what it calls
            beside itself, refer to.
        optimizer: Their optimizers; None: the same. Their state has to be in tensors (`AdamW(..., fused=True)`).
            Learning rates become tensors, which torch's schedulers change in place.
        topology: Name or file; `local`: this machine, on a CPU the device is simulated.

    Returns:
        What is called as `step` was.

    Raises:
        BadValue: HP102 when not exactly one goal is given, or no optimizer is found.
        CaptureUnsupported: HP511 for compiled code, and in the calls for a step that cannot be repeated faithfully.
        BudgetImpossible: HP402 in the second call, on all ranks, with the least budget that can be kept.
    """
    if (budget is None) == (max_slowdown is None):
        raise BadValue(
            "one goal is needed", got=f"budget={budget!r}, max_slowdown={max_slowdown!r}",
            allowed="budget or max_slowdown", hint='hp.offload(step, budget="24GiB")',
        )  # fmt: skip
    models = models_of(step) if model is None else _as_list(model)
    optimizers = optimizers_of(step) if optimizer is None else _as_list(optimizer)
    if not optimizers:
        raise BadValue(
            "the step refers to no optimizer",
            hint="hp.offload(step, budget=..., optimizer=optimizer)",
        )
    whole = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    refuse_compiled(step, whole)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # as torchrun says
    if topology == "local" and ranks > here:
        raise BadValue(
            "`local` is one machine, and the ranks are on several",
            got=f"{ranks} ranks, {here} of them here",
            hint='hp.offload(step, ..., topology="dgx-h100")',
        )
    node = detect_local(here) if topology == "local" else load_topology(topology)
    tier = node.tier_of(ranks) if ranks > 1 else node.tiers[0]
    trained = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    dtype = next((p.dtype for p in trained if p.is_floating_point()), torch.float32)
    flops = node.peak_flops(str(dtype).removeprefix("torch."))
    return OffloadedStep(
        step,
        whole,
        list({id(one): one for one in map(_unwrapped, optimizers)}.values()),
        host_machine(node, None if node.host_bytes is None else int(node.host_bytes), flash=False),
        Roofline(flops, node.device.memory_bytes_s.value),
        Channel(tier.bytes_s.value, tier.latency_s.value),
        None if budget is None else parse_bytes(budget),
        max_slowdown,
    )


@dataclass(slots=True)
class _Planned:
    """The step for one shape of inputs: as it was recorded, and its plan."""

    captured: Captured
    plan: MemoryPlan


class OffloadedStep:
    """A training step under a memory plan, see `offload`; call it as the step.

    Between steps model and optimizer are empty: what reads or changes them (evaluation, a checkpoint) does so inside
    `with step.materialized():`. Inputs of another shape are recorded and planned anew, at most `MOST_SHAPES` of them.

    Attributes:
        plan: The memory plan that runs now; None before the third call.
        measured: What the newest planned step took; None before.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        machine: MemoryMachine,
        roofline: Roofline,
        link: Channel,
        budget_bytes: int | None,
        max_slowdown: float | None,
    ) -> None:
        self._step, self._model, self._optimizers = step, model, list(optimizers)
        groups = [group for one in self._optimizers for group in one.param_groups]
        every = [*model.parameters(), *(p for group in groups for p in group["params"])]
        self._parameters = list({id(p): p for p in every}.values())
        self._machine, self._roofline, self._link = machine, roofline, link
        self._budget_bytes, self._max_slowdown = budget_bytes, max_slowdown
        self._planned: dict[_Key, _Planned] = {}
        self._device: tuple[_Key, PlannedDevice] | None = None
        replicas = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        self._plain = 2 if replicas else 1  # steps to come; in the second buckets are ordered anew
        self._zeroes_first = False
        self.plan: MemoryPlan | None = None
        self.measured: Measured | None = None
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._owned, self._empty = partial(gathered, sharded), list[weakref.ref[Any]]()
        where = self._where = self._parameters[0].device
        # Kernels of an accelerator take a single-precision rate, those of a CPU the number that Python has.
        dtype = torch.float64 if where.type == "cpu" else torch.float32
        for group in groups:
            # Adam takes no tensor there; its count in Python is then what is refused.
            number = "betas" in group and group.get("foreach") and not group.get("capturable")
            if not number and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=where)
        update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; what `step` returns, its tensors on bytes of their own.

        Raises:
            StepChanged: HP512 when model, optimizer or a value that Python saw are not what they were.
            CaptureUnsupported: HP511, BudgetImpossible: HP402, see `offload`.
        """
        leaves, nest = tree_flatten((args, kwargs))
        tensors = {f"input {i}": v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)}
        facts = ((v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in leaves)
        key = nest, tuple(facts)
        refuse_odd_arguments(leaves)
        if self._plain:  # SGD has no state after it either
            self._plain -= 1
            with spill_mode(self._where, owned=self._owned) as mode:  # on a CPU nothing is moved
                result = self._step(*args, **kwargs)
                self._empty = mode.emptied_storages  # by FSDP, which fills it again
            return result
        if key not in self._planned:
            return self._recorded(key, leaves, tensors)
        if self._device is None or self._device[0] != key:
            self.close()
            known = self._planned[key]
            device = PlannedDevice(known.captured, known.plan, self._machine, copies="threads")
            self._device, self.plan = (key, device), known.plan
        outputs, self.measured = self._device[1].step(tensors)
        return outputs

    def _recorded(self, key: _Key, leaves: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
        """A real step, recorded and planned for the next of its shape."""
        if len(self._planned) == MOST_SHAPES:
            raise StepChanged(
                f"the step was called with more than {MOST_SHAPES} shapes of inputs, or values that are no tensors",
                got=str(key[1])[:200],
                hint="pad the inputs to a few lengths, and pass values that differ as tensors",
            )
        self.close()
        returned: list[Any] = []
        parameters = self._parameters
        # Gradients of the step before, which a step that begins with `zero_grad` neither reads nor keeps.
        for p in parameters if self._zeroes_first else ():
            if p.grad is None and p.requires_grad:
                p.grad = _no_gradient(p)
        old = [(p, p.grad) for p in parameters if p.grad is not None]
        grads = [local(grad) for _, grad in old if grad.layout is torch.strided]
        unread = {grad.untyped_storage()._cdata for grad in grads}

        def run(**inputs: torch.Tensor) -> Any:
            args, kwargs = tree_unflatten(
                [inputs.get(f"input {i}", value) for i, value in enumerate(leaves)], key[0]
            )
            returned[:] = [self._step(*args, **kwargs)]
            if old and all(p.grad is not grad for p, grad in old):
                self._zeroes_first = True
                for p in parameters:
                    p.grad = None
            return returned[0]

        named = model_state(self._model)
        known = {id(p) for p in self._model.parameters()}
        others = [p for p in parameters if id(p) not in known]
        named |= {f"parameter {i}": (local(p), "weight") for i, p in enumerate(others)}
        for number, one in enumerate(self._optimizers):
            state = optimizer_state(self._model, one, others)
            named |= {f"{name} ({number})" if number else name: v for name, v in state.items()}
        on_cpu = self._where.type == "cpu"
        captured = record(
            run,
            tensors,
            named,
            name=getattr(self._step, "__name__", type(self._step).__name__),
            training=True,
            empty=self._empty,
            spill=None if on_cpu else spill_mode(self._where, owned=self._owned),
        )
        if any(t.untyped_storage()._cdata in unread for t in captured.state.values()):
            raise CaptureUnsupported(
                "the step reads gradients of the step before it",
                hint="end the step with `optimizer.zero_grad(set_to_none=True)`",
            )
        refuse_reads(captured, self._optimizers)
        refuse_schedule(self._step, captured, self._optimizers)
        captured.source, captured.owned = CaptureSource(self._model, *self._optimizers), self._owned
        program = self._roofline.annotate(captured.program, self._link)
        try:
            timed = with_seconds(program, captured.seconds)
            plan = agreed(partial(self._plan_of, timed), program, self._machine)
        except BudgetImpossible as error:
            error.hint = f"hp.offload(step, budget={error.least_bytes})"
            raise
        self._planned[key] = _Planned(captured, plan)
        return returned.pop()

    def _plan_of(self, program: MemoryProgram) -> MemoryPlan:
        return plan_memory(
            program,
            self._machine,
            budget_bytes=self._budget_bytes,
            max_slowdown=self._max_slowdown,
        )

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Between steps: model and optimizer hold their values for the time of this context."""
        if self._device is None:
            yield
        else:
            with self._device[1].materialized():
                yield

    def close(self) -> None:
        """Give model and optimizer their values back; a further call takes them again."""
        if self._device is not None:
            self._device[1].close()
            self._device = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer without what wraps it, as Accelerate's does."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _no_gradient(p: torch.nn.Parameter) -> torch.Tensor:
    """Zeros for a gradient, of a parameter that is cut over ranks this one's part, in the bytes of a single number."""
    part = local(p)
    zeros = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(part)
    if not isinstance(p, DTensor):
        return zeros
    return DTensor.from_local(
        zeros, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
