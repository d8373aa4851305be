"""FSDP of layers that half-batches run through: one gather and one reduction for both halves.

FSDP's own hooks would end a layer's forward, and gather its parameters for backward, around a call that returns before
its second half is done. `HalvedUnit` replaces them:

    forward     gather before the first half enters     reshard when the second half leaves
    backward    gather before the first half enters     reduce and reshard when the second half leaves

While the halves are in two layers, the parameters of both are gathered, and backward prefetches those of a third one.

In backward a layer is gathered before the next layer is reduced, also if passes run whole. So the order of collectives
is the same on ranks whose batches can be halved and on ranks whose batches cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.backends.torch.data.unit_order import groups_of


class HalvedUnit:
    """FSDP unit of one layer, without FSDP's hooks on calls of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        """Remove FSDP's hooks from a layer that FSDP manages."""
        self.layer, self.state = layer, fully_shard.state(layer)
        self.state._pre_forward_hook_handle.remove()
        self.state._post_forward_hook_handle.remove()

    def begin(self, parts: int, previous: UnitPass | None) -> UnitPass:
        """Gather the parameters for a forward pass in parts, after the pass of the previous layer has begun."""
        # Passing no arguments keeps FSDP from reducing gradients after the backward of the first part.
        self.state._pre_forward(self.layer, (), {})
        return UnitPass(self, parts, previous)


class UnitPass:
    """Forward pass through a unit, and its backward.

    Attributes:
        is_trained: Whether an output requires gradients.
    """

    def __init__(self, unit: HalvedUnit, parts: int, previous: UnitPass | None) -> None:
        """Create a pass.

        Args:
            unit: The unit.
            parts: Number of calls of `run`, in any order.
            previous: Pass of the previous layer, or None.
        """
        self.is_trained = False
        self._unit, self._parts, self._previous = unit, parts, previous
        self._num_left = 0
        self._num_entered = self._num_left_backward = 0

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the layer with the arguments of a part."""
        state = self._unit.state
        args, kwargs = self._watch_inputs(*state._cast_forward_inputs(args, kwargs))
        output = forward(*args, **kwargs)
        self._num_left += 1
        leaves = tree_flatten(output)[0]
        self.is_trained |= any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if self._num_left == self._parts:
            return state._post_forward(self._unit.layer, (), output)
        return state._cast_output_dtype(state._register_pre_backward_hook(output))

    def gather_for_backward(self) -> None:
        """Gather the parameters for backward; no effect if they are gathered already."""
        self._unit.state._pre_backward(None)

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a hook on their gradients, which runs when a part's backward has left the layer."""
        leaves, structure = tree_flatten((args, kwargs))
        trained = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not trained or not torch.is_grad_enabled():
            return args, kwargs
        self._num_entered += 1
        watched = _AfterBackward.apply(self._end_backward, *[leaves[i] for i in trained])
        for i, leaf in zip(trained, watched, strict=True):
            leaves[i] = leaf
        result: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, structure)
        return result

    def _end_backward(self) -> None:
        """Reduce the gradients when the backward of all parts has left the layer."""
        self._num_left_backward = (self._num_left_backward + 1) % self._num_entered
        if self._num_left_backward:
            return
        if self._previous is not None and self._previous.is_trained:
            self._previous.gather_for_backward()
        for group in reversed(groups_of(self._unit.state)):
            group.post_backward()


class _AfterBackward(torch.autograd.Function):
    """Identity that calls a function in backward, after the gradients of all its results are complete."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads
