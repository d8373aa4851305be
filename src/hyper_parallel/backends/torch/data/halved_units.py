"""FSDP of layers that run on two half-batches: one all-gather and one reduction for both, see `half_batch`.

With half-batches, the call of a layer returns before the second half-batch is done. FSDP's own hooks on the call would
therefore reshard the parameters too early. `UnitPass` replaces them:

    forward     gather before the first half-batch enters the layer, reshard when the second one leaves it
    backward    gather before the first half-batch enters, reduce gradients and reshard when the second one leaves

While the half-batches are in two different layers, the parameters of both layers are gathered, and backward prefetches
those of a third layer.

In backward, the parameters of a layer are gathered before the gradients of the layer after it are reduced. Whole
batches use the same order, because other ranks may run half-batches at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.backends.torch.data.unit_order import groups_of


def remove_hooks(layer: nn.Module) -> None:
    """Remove FSDP's hooks on calls of a layer that FSDP manages; `UnitPass` then runs the layer."""
    state = fully_shard.state(layer)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


class UnitPass:
    """Forward pass, and its backward pass, through a layer whose FSDP hooks `remove_hooks` has removed.

    Attributes:
        is_trained: Whether an output of the layer requires gradients.
    """

    def __init__(self, layer: nn.Module, parts: int, previous: UnitPass | None) -> None:
        """Gather the parameters for `parts` calls of `run`; `previous` is the pass through the layer before, if any."""
        self.is_trained = False
        self._layer, self._state = layer, fully_shard.state(layer)
        self._parts, self._previous = parts, previous
        self._num_left = 0
        self._num_entered = self._num_left_backward = 0
        # Passing no arguments keeps FSDP from reducing gradients after the backward of the first part.
        self._state._pre_forward(layer, (), {})

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the layer with the arguments of one half-batch or of the whole batch."""
        state = self._state
        args, kwargs = self._watch_inputs(*state._cast_forward_inputs(args, kwargs))
        output = forward(*args, **kwargs)
        self._num_left += 1
        leaves = tree_flatten(output)[0]
        self.is_trained |= any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if self._num_left == self._parts:
            return state._post_forward(self._layer, (), output)
        return state._cast_output_dtype(state._register_pre_backward_hook(output))

    def gather_for_backward(self) -> None:
        """Begin FSDP's backward of the layer: gather its parameters if necessary, and prefetch those of other layers.

        A second call in the same backward has no effect.
        """
        self._state._pre_backward(None)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a hook on their gradients, which runs when backward leaves the layer."""
        leaves, structure = tree_flatten((args, kwargs))
        trained = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return args, kwargs
        self._num_entered += 1
        watched = _AfterBackward.apply(self._end_backward, *[leaves[i] for i in trained])
        for i, leaf in zip(trained, watched, strict=True):
            leaves[i] = leaf
        result: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, structure)
        return result

    def _end_backward(self) -> None:
        """Reduce the gradients of the layer when the backward of all calls of `run` has left it."""
        self._num_left_backward = (self._num_left_backward + 1) % self._num_entered
        if self._num_left_backward:
            return
        if self._previous is not None and self._previous.is_trained:
            self._previous.gather_for_backward()
        for group in reversed(groups_of(self._state)):
            group.post_backward()


class _AfterBackward(torch.autograd.Function):
    """Identity function that calls `call` in backward, when the gradients of all results are complete."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads
