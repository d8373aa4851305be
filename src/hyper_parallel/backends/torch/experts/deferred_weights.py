"""Weight gradients of experts that backward computes while the last exchange of rows is in flight.

With the tokens in chunks, the last rows that backward sends belong to the chunk that forward computed first:

    backward    gradients of rows of that chunk | start their exchange | its weight gradients | wait for all exchanges

The code of the experts is the model's own. A mode replaces its products with an expert weight, or with a view of one.
The replacement leaves the gradient of the weight to a separate autograd node. Autograd runs nodes in the reverse order
of creation. This node must therefore be created between the start of the exchange in forward and the wait for it.
Inputs and output gradients of the products of this chunk are kept until the node runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hyper_parallel.backends.torch.tensor.overlapped_tokens import is_needed


class _Gradients(NamedTuple):
    """Gradient functions of one kind of product.

    Attributes:
        dims: Number of dims of the weight.
        of_rows: Function of (output gradient, weight, offs); `offs`: end of each expert's rows in a grouped product.
        of_weight: Function of (rows, output gradient, weight, offs).
    """

    dims: int
    of_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of_weight: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _grouped_weight(rows: Tensor, grad: Tensor, weight: Tensor, offs: Tensor | None) -> Tensor:
    if weight.stride(-2) == 1:  # the gradient gets the memory format of the weight
        return torch._grouped_mm(grad.t(), rows, offs=offs).transpose(-2, -1)
    return torch._grouped_mm(rows.t(), grad, offs=offs)


_LINEAR: Final = _Gradients(
    2,
    lambda grad, weight, _: grad @ weight,
    lambda rows, grad, *_: _flat(grad).t() @ _flat(rows),
)
_MATMUL: Final = _Gradients(
    2,
    lambda grad, weight, _: grad @ weight.t(),
    lambda rows, grad, *_: _flat(rows).t() @ _flat(grad),
)
_GROUPED: Final = _Gradients(
    3,
    lambda grad, weight, offs: torch._grouped_mm(grad, weight.transpose(-2, -1), offs=offs),
    _grouped_weight,
)
_PRODUCTS: Final = {
    F.linear: _LINEAR,
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch._grouped_mm: _GROUPED,
}
"""Gradient functions, by the function of (rows, weight) with which experts multiply."""


_ViewGradients = list[tuple[Tensor, Callable[[], Tensor]]]
"""Pairs of a view of a weight and a function that returns the gradient of this view."""


class _WeightNode(torch.autograd.Function):
    """Identity on a weight [E, F, C] or [F, C]. Backward adds up the gradients of its views."""

    @staticmethod
    def forward(ctx: Any, gradients: _ViewGradients, weight: Tensor) -> Tensor:
        ctx.gradients, ctx.layout = gradients, (weight.size(), weight.stride())
        ctx.offset = weight.storage_offset()
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, Tensor | None]:
        total: Tensor | None = None
        size, stride = ctx.layout
        while ctx.gradients:
            view, compute = ctx.gradients.pop()
            gradient = compute()
            is_whole = gradient.numel() == size.numel() and gradient.stride() == view.stride()
            if total is None and is_whole:
                total = gradient.as_strided(size, stride)
                continue
            if total is None:
                total = gradient.new_empty_strided(size, stride).zero_()
            offset = view.storage_offset() - ctx.offset
            total.as_strided(view.size(), view.stride(), offset).add_(gradient)
        return None, total


class _Product(torch.autograd.Function):
    """Product of rows and a view of a weight, whose gradient the node of the weight computes.

    The argument `used` is the result of this node, so that the backward of the product precedes that of the node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Callable[[Tensor, Tensor], Tensor],
        kind: _Gradients,
        gradients: _ViewGradients,
        rows: Tensor,
        used: Tensor,
        view: Tensor,
        offs: Tensor | None,
    ) -> Tensor:
        ctx.kind, ctx.weight_gradients = kind, gradients
        ctx.save_for_backward(rows, view, offs)
        return product(rows, view)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, view, offs = ctx.saved_tensors
        if is_needed(ctx, 1):
            of_weight = ctx.kind.of_weight
            ctx.weight_gradients.append((view, lambda: of_weight(rows, grad, view, offs)))
        of_rows = ctx.kind.of_rows(grad, view, offs) if is_needed(ctx, 0) else None
        return None, None, None, of_rows, None, None, None


class DeferredWeights(TorchFunctionMode):
    """Context that defers the weight gradients of expert code, for one chunk of rows."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        """Create the autograd nodes of the weights; the exchange of the rows must have started.

        Args:
            weights: Local tensors of the weights that the experts read; only trained, contiguous ones are deferred.
        """
        super().__init__()
        self._weights: dict[int, tuple[_ViewGradients, Tensor]] = {}
        for weight in weights if torch.is_grad_enabled() else ():
            if weight.requires_grad and weight.is_contiguous():
                gradients: _ViewGradients = []
                node = gradients, _WeightNode.apply(gradients, weight)
                self._weights[weight.untyped_storage()._cdata] = node

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        kind = _PRODUCTS.get(func)
        options = [*args[2:], *(v for k, v in kwargs.items() if k != "offs")]
        if kind is None or len(args) < 2 or any(value is not None for value in options):
            return func(*args, **kwargs)
        rows, view = args[:2]
        node = self._weights.get(view.untyped_storage()._cdata)
        if node is None or view.dim() != kind.dims or not rows.requires_grad:
            return func(*args, **kwargs)
        gradients, used = node

        def product(rows: Tensor, view: Tensor) -> Tensor:
            result: Tensor = func(rows, view, **kwargs)
            return result

        inputs = rows, used, view.detach(), kwargs.get("offs")
        return _Product.apply(product, kind, gradients, *inputs)
