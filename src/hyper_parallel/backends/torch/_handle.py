"""What one parallel model remembers: its plan, mesh and layouts, and the state of the forward pass that runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.ir import Layout, Plan

if TYPE_CHECKING:
    from hyper_parallel.backends.torch.context._apply import Context
    from hyper_parallel.backends.torch.data._gradients import TpGradients
    from hyper_parallel.backends.torch.experts._routing import ExpertState
    from hyper_parallel.backends.torch.pipeline._apply import Pipeline

FLAT = "dp_shard_cp"
"""Mesh axis that FSDP cuts parameters over when there is context parallelism: dp_shard x cp as one."""
_ATTRIBUTE = "_hyper_parallel"


@dataclass(slots=True)
class TpState:
    """Tensor-parallel state shared by the modules of one model.

    Attributes:
        group: Ranks of this rank's tensor-parallel group.
        batch: Shape of the tokens of the running forward pass, (B, S); set where the first decoder layer begins.
        head_batch: Shape of the tokens the head saw, when it works on pieces of them.
        partial_embedding: The embedding returned a summand that nobody has summed yet.
        loss_taken: The loss function has consumed this pass's logits.
        head: How logits lie: whole, split over the vocabulary, or over the tokens.
        regather: Gathered inputs are gathered again in backward instead of being kept.
        recomputed: The running layer is made again in backward, which gathers its inputs anyway.
        order: The place of each row of this rank's piece in the list of tokens, -1 for padding; None: pieces follow
            one another, and padding is behind the last token.
        shape: Shape of this rank's part of the residual stream, of a batch (B, S) and the number of features; None:
            pieces of ceil(B S / tp) tokens with all features.
    """

    group: dist.ProcessGroup
    batch: tuple[int, ...] = ()
    head_batch: tuple[int, ...] = ()
    partial_embedding: bool = False
    loss_taken: bool = False
    head: str = "whole"
    regather: bool = False
    recomputed: bool = False
    order: Callable[[], Tensor] | None = None
    shape: Callable[[tuple[int, ...], int], tuple[int, ...]] | None = None

    @property
    def regathers(self) -> bool:
        """Whether what the running layer gathers is not kept but gathered again."""
        return self.regather and not self.recomputed

    def part(self, batch: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Shape of this rank's part of the residual stream of [*batch, width]."""
        if self.shape is not None:
            return self.shape(batch, width)
        return (1, -(-math.prod(batch) // self.degree), width)

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group.rank()


@dataclass(slots=True)
class Handle:
    """What `parallelize` attached to a model.

    Attributes:
        plan: The plan that was applied.
        mesh: Device mesh with every axis; None on one rank without process group.
        layouts: Parameter name to its layout.
        styles: Module name to its sharding style.
        shapes: Parameter name to its logical shape.
        tp: Tensor-parallel state, or None.
        context: Context-parallel state, or None.
        gradients: Summation of gradients over the tensor-parallel ranks, or None.
        experts: Expert parallelism and routing; None for a model without experts.
        fsdp: Modules that FSDP manages, root last.
        world_group: All ranks of the mesh; None on one rank.
        pipeline: Runs this rank's pipeline stages; None without a pipeline. `layouts` and `shapes` then hold the
            parameters of those stages only.
    """

    plan: Plan
    mesh: DeviceMesh | None
    layouts: dict[str, Layout]
    styles: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    rank: int
    device: torch.device
    tp: TpState | None = None
    context: Context | None = None
    gradients: TpGradients | None = None
    experts: ExpertState | None = None
    fsdp: list[nn.Module] = field(default_factory=list)
    world_group: dist.ProcessGroup | None = None
    pipeline: Pipeline | None = None

    def copies(self, name: str) -> int:
        """Ranks that hold the same elements of a parameter."""
        layout = self.layouts[name]
        mesh = self.plan.strategy.mesh_of(layout)
        ranks = mesh.size // mesh.degree(layout.sharding_axes)
        if self.pipeline is None:
            return ranks
        return ranks // mesh.degree("pp") * self.pipeline.holders(name)


def attach(model: nn.Module, handle: Handle) -> None:
    """Remember the handle on the model itself, so that it lives as long."""
    object.__setattr__(model, _ATTRIBUTE, handle)


def handle(model: nn.Module) -> Handle:
    """What `parallelize` attached to this model.

    Raises:
        TypeError: The model did not pass through `parallelize`.
    """
    found = model.__dict__.get(_ATTRIBUTE)
    if found is None:
        raise TypeError(f"{type(model).__name__} did not pass through parallelize")
    return found


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, without autograd; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
