"""State that `parallelize` attaches to a model: its plan and layouts, and the run-time state of each parallel axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._logits_hook import LogitsHook
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.experts.balance_loss import BalanceLoss
from hyper_parallel.backends.torch.experts.routing import ExpertState
from hyper_parallel.backends.torch.half_batch import HalfBatch
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.submodels.exchange import Submodels
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.traced_groups import TracedGroup
from hyper_parallel.backends.torch.weights.pretrained import HANDLE
from hyper_parallel.ir import Layout, Plan
from hyper_parallel.model import ModelProperties

_PROPERTIES = "_hyper_parallel_properties"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a model with their process groups and device meshes.

    Attributes:
        mesh: Device mesh with every axis of the strategy; None for one rank without a process group.
        rank: Rank of this process on the mesh.
        device: Device of the parameters.
        world_group: Process group of all ranks of the mesh; None for one rank.
        expert_mesh: Mesh of the same ranks with the axes pp, dp_replicate, edp, ep; None if ep is 1. edp is the data
            parallelism of experts: its ranks hold the same experts.
    """

    mesh: DeviceMesh | None
    rank: int
    device: torch.device
    world_group: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None

    @property
    def traced(self) -> bool:
        """True if this rank's step is traced into a `StepProgram`; the program then shards parameters, not FSDP."""
        return isinstance(self.world_group, TracedGroup)


@dataclass(frozen=True, slots=True)
class Handle:
    """Result of `parallelize`: plan, layouts and run-time state of a model on this rank.

    Attributes:
        layouts: Layout of each parameter on this rank's pipeline stages, by name.
        shapes: Unsharded shape of each of these parameters, by name.
        tp: State of tensor parallelism; None without it.
        context: State of context parallelism; None without it.
        experts: State of expert parallelism and routing; None for a model without experts.
        balance: Load-balancing loss of experts; None without it.
        pipeline: Executor of this rank's pipeline stages; None without a pipeline.
        fsdp: Modules that FSDP manages, the root last.
        loss: Loss function that can pass the logits to an objective; None without a next-token loss or scores.
        halves: Executor of layers on half-batches; None without them.
        average: True if `backward` averages gradients over data-parallel ranks; False: it sums them.
        submodels: Encoders and language model on this rank after `parallelize_submodels`; None for other models.
    """

    plan: Plan
    ranks: Ranks
    layouts: dict[str, Layout]
    shapes: dict[str, tuple[int, ...]]
    tp: TpState | None
    context: ContextState | None
    experts: ExpertState | None
    balance: BalanceLoss | None
    pipeline: Pipeline | None
    fsdp: tuple[nn.Module, ...]
    loss: LogitsHook | None
    halves: HalfBatch | None
    average: bool = False
    submodels: Submodels | None = None
    _copies: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.ranks.device

    @property
    def routes(self) -> bool:
        """True if the model has a router that assigns tokens to experts."""
        return self.experts is not None or self.balance is not None

    def copies(self, name: str) -> int:
        """Return the number of ranks, this one included, that hold the same elements of the parameter `name`."""
        if name not in self._copies:  # read for every parameter in every step
            layout = self.layouts[name]
            mesh = self.plan.strategy.mesh_of(layout)
            ranks = mesh.size // mesh.degree(layout.sharding_axes)
            if self.pipeline is not None:
                ranks = ranks // mesh.degree("pp") * len(self.pipeline.stages.holders[name])
            self._copies[name] = ranks
        return self._copies[name]


def attach(model: nn.Module, handle: Handle) -> None:
    """Store the handle as an attribute of the model."""
    object.__setattr__(model, HANDLE, handle)


def attached(model: nn.Module) -> Handle | None:
    """Return the handle that `parallelize` attached to a model; None if the model did not pass through it."""
    return model.__dict__.get(HANDLE)


def attach_properties(model: nn.Module, properties: ModelProperties) -> None:
    """Store measured properties on a model that does not pass through `parallelize`."""
    object.__setattr__(model, _PROPERTIES, properties)


def known_properties(model: nn.Module) -> ModelProperties | None:
    """Return the properties in the plan of a parallelized model, else those of `attach_properties`; None without."""
    if (attached_handle := attached(model)) is not None:
        return attached_handle.plan.properties
    return model.__dict__.get(_PROPERTIES)


def handle(model: nn.Module) -> Handle:
    """Return the handle that `parallelize` attached to a model; raise TypeError without one."""
    attached_handle = attached(model)
    if attached_handle is None:
        raise TypeError(f"{type(model).__name__} did not pass through hp.parallelize(model, plan)")
    return attached_handle


def overlap_counts(model: nn.Module) -> dict[str, int]:
    """Return and reset the counters of overlap since the last call, by name; an empty dict if the plan has no overlap.

    `halved_layers` and `whole_layers` count layer calls on half-batches and on whole batches. `chunked_blocks` counts
    attention and MLP blocks whose collectives overlap with their products, `whole_blocks` those that ran serially.
    """
    known = attached(model)
    counted = () if known is None else (known.halves, known.tp)
    return {k: v for owner in counted if owner is not None for k, v in owner.take_counts().items()}
