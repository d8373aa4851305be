"""Local tensors of parameters, and gradient reduction of parameters replicated over tensor-parallel ranks.

On each rank, a replicated parameter (a norm, a bias after a reduction) may act only on the rank's own tokens or heads.
Each tensor-parallel rank then computes a partial gradient. At the end of backward, one all-reduce per process group and
dtype sums the gradients of all such parameters. It runs after FSDP's reduction over the data-parallel ranks, so each
rank sends only its shard of each gradient.
"""

from __future__ import annotations

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
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.ir import Purpose

PartialParameter = tuple[nn.Parameter, dist.ProcessGroup]
"""Parameter with partial gradients, and the process group to sum them over."""


def to_local(param: Any, owner: TpGradients | None, rows: slice | None = None) -> Any:
    """Return the local tensor of a parameter, or rows of it; differentiable with respect to the parameter.

    Args:
        param: The parameter; None (no bias) and tensors other than DTensors are used unchanged.
        owner: Reducer whose `begin_backward` is called when the parameter receives its gradient; None: no reducer.
        rows: Rows to select; None: all local rows.
    """
    if rows is not None and param is not None:
        return to_local(param, owner)[rows]
    if not isinstance(param, DTensor):
        return param
    # `to_local` can be compiled. Hooks on the model's outputs notify the owner when backward starts.
    if torch.compiler.is_compiling():
        return param.to_local()
    spec = param._spec

    def back(grad: Tensor) -> DTensor:
        if owner is not None:
            owner.begin_backward()
        # Fused optimizers iterate over memory, so strides of parameter and gradient must match; autograd uses `stride`.
        grad = grad.contiguous()
        if _is_shared(grad):
            # Autograd takes the DTensor as the gradient without a copy, and later adds to it in place.
            grad = grad.clone()
        # `DTensor.from_local`, an autograd function that makes a new spec, takes 16 times as long.
        return DTensor(grad, spec, requires_grad=False)

    return paired(lambda p: p._local_tensor.view_as(p._local_tensor), back, param)


def _is_shared(tensor: Tensor) -> bool:
    """Return whether another tensor may have the same storage, or the storage is larger than the tensor."""
    if type(tensor) is not Tensor:  # a fake tensor
        return False
    storage = tensor.untyped_storage()  # this Python object counts as one use
    if storage.nbytes() > tensor.nbytes:
        return True
    uses = torch._C._storage_Use_Count(storage._cdata) - 2
    # A view keeps its base alive. If nothing else does, the base counts two uses: by the view and by this variable.
    base = tensor._base
    return uses > 0 if base is None else uses > 1 or base._use_count() > 2


def use_local_parameters(
    module: nn.Module,
    owner: TpGradients | None,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    rows: slice | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> None:
    """Make a module's forward run with the local tensors of its parameters.

    Args:
        module: The module to wrap.
        owner: Reducer of gradients or None, see `to_local`.
        inside: Function that returns a context in which the forward runs.
        rows: Rows to select, see `to_local`.
        modules: Modules whose own parameters, not those of children, are replaced; None: only `module`.
    """
    originals: list[dict[str, Any]] = []
    # Number of running calls: the second half-batch begins while the first one is suspended, and ends after it.
    running = 0

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        holders = (module,) if modules is None else modules
        if running == 0:
            originals[:] = [m._parameters for m in holders]
            for m, params in zip(holders, originals, strict=True):
                m.__dict__["_parameters"] = {n: to_local(p, owner, rows) for n, p in params.items()}
        running += 1
        try:
            with inside():
                return inner(*args, **kwargs)
        finally:
            running -= 1
            if running == 0:
                for m, params in zip(holders, originals, strict=True):
                    m.__dict__["_parameters"] = params
                originals.clear()

    wrap(module, forward)


class TpGradients:
    """Reducer that sums the partial gradients of replicated parameters over tensor-parallel ranks."""

    def __init__(self) -> None:
        self.enabled = True
        """True if the next backward ends with the all-reduce; False for all microbatches of a step except the last."""
        self._list_params: Callable[[], Iterable[PartialParameter]] = tuple
        self._params: list[PartialParameter] = []
        self._summed: set[int] = set()
        self._queued = False

    def watch(self, list_params: Callable[[], Iterable[PartialParameter]]) -> None:
        """Register the parameters with partial gradients, after FSDP has replaced the parameters of the model.

        `list_params` is called again if the parameters were on the meta device and have been replaced since.
        """
        self._list_params = list_params
        self._params = [(p, group) for p, group in list_params() if p.requires_grad]

    def partial_parameters(self) -> tuple[PartialParameter, ...]:
        """Return the parameters with partial gradients, also frozen ones, for callers that do not run `backward`."""
        return tuple(self._list_params())

    def begin_forward(self) -> None:
        """Reset the state that a failed backward may have left."""
        self._queued = False

    def end_forward(self, output: Any) -> None:
        """Register hooks on the model's outputs that call `begin_backward`; hooks in compiled layers would not run."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.begin_backward())

    def begin_backward(self) -> None:
        """Queue the all-reduce of gradients for the end of backward; only the first call in a backward has an effect.

        Hooks call this method when backward starts and when a parameter receives its gradient.
        """
        if self._queued:
            return
        self._queued = True
        self._rescale_accumulated()
        # This callback follows FSDP's own, which was queued when the root's outputs received their gradients.
        Variable._execution_engine.queue_callback(self._end_backward)

    def defer(self) -> None:
        """Defer the all-reduce of gradients in the following backward passes until `reduce_deferred`."""
        self._rescale_accumulated()
        self.enabled = False

    def reduce_deferred(self) -> None:
        """Sum the gradients of the backward passes since `defer` over ranks."""
        self.enabled = True
        self._end_backward()

    def _rescale_accumulated(self) -> None:
        # A gradient accumulated in an earlier pass is already summed. Each rank keeps 1/tp of it, so that the next sum
        # counts it once; dividing by a power of two is exact.
        accumulated: dict[int, list[Tensor]] = {}
        for i, (param, group) in enumerate(self._params):
            if i in self._summed and param.grad is not None:
                accumulated.setdefault(group.size(), []).append(local(param.grad))
        for ranks, grads in accumulated.items():
            torch._foreach_div_(grads, float(ranks))
        self._summed.clear()

    def _end_backward(self) -> None:
        self._queued = False
        if not self.enabled:
            return
        if any(p.is_meta for p, _ in self._params):
            self.watch(self._list_params)
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
