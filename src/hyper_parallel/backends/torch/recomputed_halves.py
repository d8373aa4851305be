"""Activation recomputation of a layer that runs on two half-batches, see `half_batch`.

    forward     keeps the inputs of the layer; the tensors that autograd saves are replaced by consecutive numbers
    backward    unpacking the first number recomputes both half-batches in turns, up to their last saved tensors

`torch.utils.checkpoint` cannot be used. A checkpoint of both half-batches would make both end at the end of the layer.
With one checkpoint per half-batch, no computation would hide the collectives of the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.in_flight import Turns, apply_hooks
from hyper_parallel.backends.torch.pass_context import RunningPass
from hyper_parallel.errors import UnsupportedSharding


class _AllRecomputed(Exception):
    """Signal that all tensors that a half-batch saved in forward have been recomputed."""


class _Input:
    """Input of a layer, detached from the autograd graph."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._version, self._is_trained = x.detach(), x._version, x.requires_grad

    def restore(self) -> Tensor:
        """Return the input as a leaf tensor; raise HP205 if it has been changed in place since forward."""
        if self._x._version != self._version:
            raise UnsupportedSharding(
                "the input of a recomputed layer was changed in place before backward",
                where="training.recompute",
                hint="training.recompute=none training.recompute_layers=null",
            )
        return self._x.detach().requires_grad_(self._is_trained)


class _SavedTensors:
    """Tensors that autograd saves for one half-batch: counted in forward, recomputed in backward."""

    def __init__(self) -> None:
        self.count = 0
        self.values: dict[int, Tensor] = {}
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def pack(self, _: Tensor) -> int:
        """Return a new number for a tensor that forward saves; the tensor is not kept."""
        self.count += 1
        return self.count - 1

    def hooks_of_recomputation(self) -> saved_tensors_hooks:
        """Return hooks that store the recomputed tensors by number and raise `_AllRecomputed` after the last one."""
        number = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal number
            x = x.detach() if x.requires_grad else x
            self.values[number] = x
            number += 1
            if number == self.count:
                raise _AllRecomputed
            return x

        return saved_tensors_hooks(pack, lambda x: x)


class RecomputedHalves:
    """Forward pass of two half-batches through one layer that is recomputed in backward."""

    def __init__(
        self,
        forward: Callable[..., Any],
        running: RunningPass,
        precision: AbstractContextManager[Any],
    ) -> None:
        """Begin a pass; recomputation uses the current context of `running`, and runs in the context `precision`."""
        self._forward, self._running, self._precision = forward, running, precision
        self._context = running.recomputed()
        self._saved = _SavedTensors(), _SavedTensors()

    def run(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the layer for half-batch `index`, in a call of `Turns`."""
        saved = self._saved[index]
        saved.arguments = tree_map_only(Tensor, _Input, (args, kwargs))
        with apply_hooks(saved_tensors_hooks(saved.pack, partial(self._unpack, saved))):
            return self._forward(*args, **kwargs)

    def _unpack(self, saved: _SavedTensors, number: int) -> Tensor:
        """Return the saved tensor with this number, which is then freed; another request recomputes the layer again."""
        if number not in saved.values:
            self._recompute()
        return saved.values.pop(number)

    def _recompute(self) -> None:
        running, turns = self._running, Turns()
        now, running.context = running.context, self._context
        try:
            with torch.enable_grad(), self._precision:
                turns.add([partial(self._recompute_half, saved) for saved in self._saved])
                turns.finish()
        finally:
            running.context = now

    def _recompute_half(self, saved: _SavedTensors) -> None:
        args, kwargs = tree_map_only(_Input, _Input.restore, saved.arguments)
        try:
            with apply_hooks(saved.hooks_of_recomputation()):
                self._forward(*args, **kwargs)
        except _AllRecomputed:
            return
        if len(saved.values) < saved.count:
            raise UnsupportedSharding(
                f"a layer saves {saved.count} tensors in forward, but only {len(saved.values)} when it is recomputed",
                where="training.recompute",
                got=f"{len(saved.values)} of {saved.count}",
                hint="training.recompute=none training.recompute_layers=null",
            )
