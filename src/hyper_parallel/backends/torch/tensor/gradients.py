"""Parameters as local tensors, and the gradients of those that tensor parallelism keeps whole.

A whole parameter (a norm, a bias after a reduction) sees only its rank's tokens or heads, so every rank of the
tensor-parallel group holds one summand of its gradient. The summands of all such parameters are added in one
all-reduce when the backward pass ends, after FSDP has reduced them over the data-parallel ranks, so only 1 / dp_shard
of each is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.collectives import all_reduce, paired
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.ir import Purpose

Summed = tuple[nn.Parameter, dist.ProcessGroup]
"""A parameter, and the ranks that each hold one summand of its gradient."""


def to_local(param: Any, owner: TpGradients | None, rows: slice | None = None) -> Any:
    """The local part of a parameter, or rows of it, with its gradient going back to the parameter.

    `owner` sums the gradient over the ranks when the parameter is whole on each; None: nobody needs to. A parameter of
    None, which stands for no bias, stays None.
    """
    if rows is not None and param is not None:
        return to_local(param, owner)[rows]
    if not isinstance(param, DTensor):
        return param
    # Traceable; the model's outputs tell the owner that backward runs.
    if torch.compiler.is_compiling():
        return param.to_local()
    spec = param._spec

    def back(grad: Tensor) -> DTensor:
        if owner is not None:
            owner.backward_runs()
        # Fused optimizers walk memory: parameter and gradient must lie the same, which autograd sees to by `stride`.
        grad = grad.contiguous()
        return DTensor.from_local(
            grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    return paired(lambda p: p._local_tensor.view_as(p._local_tensor), back, param)


def show_local(
    module: nn.Module,
    owner: TpGradients | None,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    rows: slice | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> None:
    """Let the forward of a module see local tensors in place of its own parameters, or some rows of them.

    `owner` as of `to_local`; the forward runs `inside` a context. `modules`: whose parameters in place of its own.
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        holders = (module,) if modules is None else modules
        kept = [m._parameters for m in holders]
        for m, params in zip(holders, kept, strict=True):
            m.__dict__["_parameters"] = {n: to_local(p, owner, rows) for n, p in params.items()}
        try:
            with inside():
                return inner(*args, **kwargs)
        finally:
            for m, params in zip(holders, kept, strict=True):
                m.__dict__["_parameters"] = params

    module.forward = forward


class TpGradients:
    """Sums gradients of parameters over the tensor-parallel axes that do not cut them, when a backward pass ends."""

    def __init__(self) -> None:
        self.enabled = True
        """Sum at the end of the next backward pass; False between microbatches of one step."""
        self._find: Callable[[], Iterable[Summed]] = tuple
        self._params: list[Summed] = []
        self._summed: set[int] = set()
        self._queued = False

    def watch(self, find: Callable[[], Iterable[Summed]]) -> None:
        """Name the parameters and the ranks that hold their summands, after FSDP has replaced them by its own.

        `find` is called again when weights have replaced parameters that were on the meta device.
        """
        self._find = find
        self._params = [(p, group) for p, group in find() if p.requires_grad]

    def forward_begins(self) -> None:
        """Forget a backward pass that ended with an error."""
        self._queued = False

    def forward_ends(self, output: Any) -> None:
        """Let the gradients of the model's outputs, too, tell that backward runs: compiled layers cannot."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.backward_runs())

    def backward_runs(self) -> None:
        """Called when backward begins, and by every whole parameter's; the first call arranges the sum at its end."""
        if self._queued:
            return
        self._queued = True
        self._share_kept()
        # Queued after FSDP's own callback, which was queued when the root's outputs received their gradients.
        Variable._execution_engine.queue_callback(self._backward_ends)

    def hold(self) -> None:
        """Sum nothing until `release`: several backward passes of one step follow, in any order."""
        self._share_kept()
        self.enabled = False

    def release(self) -> None:
        """Sum now what the backward passes since `hold` have made."""
        self.enabled = True
        self._backward_ends()

    def _share_kept(self) -> None:
        # A gradient kept from an earlier pass is already the sum. Each rank goes on with 1/tp of it, so that adding
        # up over the ranks gives it back once; dividing by a power of two is exact.
        kept: dict[int, list[Tensor]] = {}
        for i, (param, group) in enumerate(self._params):
            if i in self._summed and param.grad is not None:
                kept.setdefault(group.size(), []).append(local(param.grad))
        for ranks, grads in kept.items():
            torch._foreach_div_(grads, float(ranks))
        self._summed.clear()

    def _backward_ends(self) -> None:
        self._queued = False
        if not self.enabled:
            return
        if any(p.is_meta for p, _ in self._params):
            self.watch(self._find)
        buckets: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = {}
        for i, (param, group) in enumerate(self._params):
            if param.grad is not None:
                grad = local(param.grad)
                buckets.setdefault((group, grad.dtype), []).append(grad)
                self._summed.add(i)
        for (group, _), grads in buckets.items():
            flat = torch.cat([g.reshape(-1) for g in grads])
            if flat.numel():
                all_reduce(flat, group, Purpose.WHOLE_PARAMETERS)
                parts = zip(flat.split([g.numel() for g in grads]), grads, strict=True)
                torch._foreach_copy_(grads, [part.view_as(g) for part, g in parts])
