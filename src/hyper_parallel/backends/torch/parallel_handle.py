"""What `parallelize` leaves on a model: its plan and layouts, and the running state of each parallel axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._logits_hook import LogitsHook
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.experts.balance_loss import BalanceLoss
from hyper_parallel.backends.torch.experts.routing import ExpertState
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.weights.pretrained import HANDLE
from hyper_parallel.ir import Layout, Plan
from hyper_parallel.model import ModelProperties

_PROPERTIES = "_hyper_parallel_properties"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks a model lives on, as torch sees them.

    Attributes:
        mesh: Device mesh with every axis of the strategy; None on one rank without process group.
        rank: Rank of this process on the mesh.
        device: Where real parameters go.
        world_group: All ranks of the mesh; None on one rank.
        expert_mesh: The same ranks with axes pp, dp_replicate, edp, ep; None when ep is 1.
    """

    mesh: DeviceMesh | None
    rank: int
    device: torch.device
    world_group: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """The result of `parallelize`.

    Attributes:
        layouts: Parameter name to its layout; of this rank's stages only, as `shapes`.
        shapes: Parameter name to its logical shape.
        tp: Tensor parallelism, or None.
        context: Context parallelism, or None.
        experts: Expert parallelism and routing; None for a model without experts.
        balance: The auxiliary loss of experts, or None.
        pipeline: Runs this rank's pipeline stages; None without a pipeline.
        fsdp: Modules that FSDP manages, root last.
        loss: The loss function of a causal language model, in whose place an objective takes the logits; or None.
        average: Gradients of a plain backward pass are averaged over the shares of the data, not summed.
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
    average: bool = False

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.ranks.device

    @property
    def routes(self) -> bool:
        """Whether the model routes tokens to experts."""
        return self.experts is not None or self.balance is not None

    def copies(self, name: str) -> int:
        """Ranks that hold the same elements of a parameter."""
        layout = self.layouts[name]
        mesh = self.plan.strategy.mesh_of(layout)
        ranks = mesh.size // mesh.degree(layout.sharding_axes)
        if self.pipeline is None:
            return ranks
        return ranks // mesh.degree("pp") * len(self.pipeline.stages.holders[name])


def attach(model: nn.Module, handle: Handle) -> None:
    """Remember the handle on the model itself, so that it lives as long."""
    object.__setattr__(model, HANDLE, handle)


def attached(model: nn.Module) -> Handle | None:
    """What `parallelize` attached to this model; None: it did not pass through it."""
    found: Handle | None = model.__dict__.get(HANDLE)
    return found


def attach_properties(model: nn.Module, properties: ModelProperties) -> None:
    """Remember measured properties on a model that does not pass through `parallelize`."""
    object.__setattr__(model, _PROPERTIES, properties)


def known_properties(model: nn.Module) -> ModelProperties | None:
    """Return the measured properties of a model, from its plan if it has one; None: they were not measured."""
    found = attached(model)
    if found is not None:
        return found.plan.properties
    properties: ModelProperties | None = model.__dict__.get(_PROPERTIES)
    return properties


def handle(model: nn.Module) -> Handle:
    """What `parallelize` attached to this model.

    Raises:
        TypeError: The model did not pass through `parallelize`.
    """
    found = attached(model)
    if found is None:
        raise TypeError(f"{type(model).__name__} did not pass through parallelize")
    return found
