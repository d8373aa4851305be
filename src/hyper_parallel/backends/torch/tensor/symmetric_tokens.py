"""Attention and MLP blocks by fused operators over symmetric memory: gather + products, and product + scatter.

    forward     gather and column-parallel products         row-parallel product and scatter
    backward    products with the weights and scatter       gather and product with the weight

Gradients of weights are computed from gathered tokens: forward keeps the gathered input of column-parallel products,
and backward gathers the output gradient of the row-parallel product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import launch_gather_rows, launch_reduce_into
from hyper_parallel.backends.torch.tensor.collectives import gather, padded
from hyper_parallel.backends.torch.tensor.overlapped_tokens import (
    Adapter,
    OverlappedTokens,
    is_needed,
)
from hyper_parallel.backends.torch.tensor.symmetric_memory import (
    gather_and_multiply,
    multiply_and_scatter,
)
from hyper_parallel.ir import Purpose


class Projection(NamedTuple):
    """Weight [F, C] and bias [F] of a linear projection."""

    weight: Tensor
    bias: Tensor | None


class _GatherAndMultiply(torch.autograd.Function):
    """Gather of the tokens [n, D] of P ranks to [P n, D], and products of the result with weights [F, D]."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, part: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        name = Purpose.SEQUENCE_GATHER
        tokens, products = gather_and_multiply(part, [w.t() for w in weights], group, name)
        ctx.group = group
        ctx.save_for_backward(tokens, *weights)
        ctx.set_materialize_grads(False)
        return tokens, *products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tokens_grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        pairs = [(grad, w) for grad, w in zip(grads, weights, strict=True) if grad is not None]
        part_grad = None
        if is_needed(ctx, 0):
            part_grad = _scattered_gradient(tokens_grad, pairs, ctx.group)
        weight_grads = [
            grad.t() @ tokens if grad is not None and is_needed(ctx, number) else None
            for number, grad in enumerate(grads, 1)
        ]
        return None, part_grad, *weight_grads


def _scattered_gradient(
    tokens_grad: Tensor | None, pairs: list[tuple[Tensor, Tensor]], group: ProcessGroup
) -> Tensor | None:
    """Return the gradient [n, D] of this rank's tokens; None if there is no output gradient.

    `pairs` has the output gradient and the weight of each projection. `tokens_grad` is the gradient from other uses of
    the gathered tokens, or None.
    """
    name = Purpose.SEQUENCE_GATHER.backward
    if not pairs and tokens_grad is None:
        return None
    grads, weights = zip(*pairs, strict=True) if pairs else ((), ())
    grad = grads[0] if len(grads) == 1 else torch.cat(grads, 1) if grads else None
    weight = weights[0] if len(weights) == 1 else torch.cat(weights) if weights else None
    if grad is not None and tokens_grad is None:
        return multiply_and_scatter(grad, weight, group, name)
    total = tokens_grad.contiguous()
    total = total if grad is None else total.addmm(grad, weight)
    out = total.new_empty(total.shape[0] // group.size(), total.shape[1])
    return launch_reduce_into(out, total, group, name, async_op=False)()


class _MultiplyAndScatter(torch.autograd.Function):
    """Product of tokens [P n, F] and a weight [D, F], summed over ranks and scattered to [n, D]."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
        ctx.group, ctx.gathered = group, None
        ctx.save_for_backward(x, weight)
        return multiply_and_scatter(x, weight.t(), group, Purpose.SEQUENCE_SCATTER)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = is_needed(ctx, 0), is_needed(ctx, 1)
        name = Purpose.SEQUENCE_SCATTER.backward
        # A split backward has gathered the gradient when it ran this node for the input.
        (gathered, ctx.gathered), x_grad = (ctx.gathered, None), None
        if needs_x:
            gathered, (x_grad,) = gather_and_multiply(grad, [weight], ctx.group, name)
            later = ctx.needs_input_grad[2] and not needs_weight
            ctx.gathered = gathered if later else None
        elif needs_weight and gathered is None:
            rows = launch_gather_rows(grad, ctx.group, name, async_op=False)()
            gathered = rows.flatten(0, 1)
        return None, x_grad, gathered.t() @ x if needs_weight else None


class SymmetricTokens(OverlappedTokens):
    """Placeholder for the tokens [B, S, D] of a block, gathered by the first call of `multiply` or `whole`."""

    part: Tensor
    group: ProcessGroup

    def multiply(self, products: Mapping[nn.Module, Projection]) -> None:
        """Compute the products of projections; gather the tokens first if they are not gathered yet."""
        self.is_multiplied = True
        if self._whole is None:
            weights = [p.weight for p in products.values()]
            gathered = _GatherAndMultiply.apply(self.group, self.part[0], *weights)
            self._whole, *results = map(self.without_padding, gathered)
        else:
            results = [F.linear(self._whole, p.weight) for p in products.values()]
        for (module, projection), out in zip(products.items(), results, strict=True):
            self.products[module] = out if projection.bias is None else out + projection.bias

    def whole(self) -> Tensor:
        """Return the gathered tokens; repeated calls return the same tensor."""
        if self._whole is None:
            tokens = gather(self.part, 1, self.group, Purpose.SEQUENCE_GATHER)
            self._whole = self.without_padding(tokens[0])
        return self._whole


@dataclass(frozen=True, slots=True)
class SymmetricExecutor:
    """`TokenExecutor` that uses fused operators over symmetric memory."""

    def fits(self, num_tokens: int) -> bool:
        """Return True, for any number of tokens."""
        return True

    def product(self, weight: Tensor, bias: Tensor | None, adapter: Adapter | None) -> Projection:
        """Return the weight and the bias; adapters are not supported."""
        assert adapter is None, "refused by `check_token_overlap`"
        # The weight is a view, because `is_needed` does not support leaves.
        return Projection(weight.view_as(weight), bias)

    def gather(self, part: Tensor, group: ProcessGroup, batch: tuple[int, int]) -> SymmetricTokens:
        """Return a placeholder for the tokens of all ranks, which are gathered at their first use."""
        tokens = SymmetricTokens.of(part, batch)
        tokens.part, tokens.group = part, group
        return tokens

    def scatter(
        self,
        x: Tensor,
        product: Projection,
        group: ProcessGroup,
        rows: int,
        before_wait: Callable[[], None],
    ) -> Tensor:
        """Multiply and reduce-scatter tokens [..., F]; `before_wait` is not called."""
        tokens = padded(x.reshape(1, -1, x.shape[-1]), rows)[0]
        out: Tensor = _MultiplyAndScatter.apply(group, tokens, product.weight)
        return out.unsqueeze(0)
