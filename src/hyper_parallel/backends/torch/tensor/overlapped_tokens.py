"""Interface of executors that overlap the collectives of an attention or MLP block with its matrix products.

    serial      no executor: gather, products, scatter
    chunks      `chunked_tokens`: the products of one chunk run while other chunks are in flight
    symmetric   `symmetric_tokens`: an operator of torch runs a collective together with its products

The wrapper of an attention or MLP module (`Region`) passes the input to `gather`, and calls the module with the
resulting `OverlappedTokens`. Column-parallel projections read their products from them. Row-parallel projections call
`scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.stand_in import StandIn

Adapter = Callable[[Tensor], Tensor]
"""Function from tokens to the output of a LoRA adapter."""


class OverlappedTokens(StandIn):
    """Placeholder for gathered tokens [B, S, D]; use of their values outside of projections completes the gather.

    Attributes:
        products: Outputs [B, S, F] that are computed but not yet returned by their projection.
        is_multiplied: True after the first call of `multiply`.
    """

    products: dict[nn.Module, Tensor]
    is_multiplied: bool
    _whole: Tensor | None

    @classmethod
    def of(cls, part: Tensor, batch: tuple[int, int]) -> Self:
        """Return a placeholder [B, S, D] for the tokens of all ranks; arguments as in `TokenExecutor.gather`."""
        x = cls.like(part, (*batch, part.shape[2]))
        x.products, x.is_multiplied, x._whole = {}, False, None
        return x

    def without_padding(self, tokens: Tensor) -> Tensor:
        """Return gathered tokens [T, C] as [B, S, C], without the padding at the end."""
        batch = self.shape[:2]
        return tokens[: math.prod(batch)].view(*batch, -1)

    def multiply(self, products: Mapping[nn.Module, Any]) -> None:
        """Store the outputs of projections in the attribute `products`.

        The argument maps each projection to its `TokenExecutor.product`.
        """
        raise NotImplementedError


class TokenExecutor(Protocol):
    """Executor of the collectives and matrix products of a block, on one tensor-parallel axis of P ranks."""

    def fits(self, num_tokens: int) -> bool:
        """Return whether the executor supports this number of tokens per rank; otherwise the block runs serially."""
        ...

    def product(self, weight: Tensor, bias: Tensor | None, adapter: Adapter | None) -> Any:
        """Return an object for `multiply` or `scatter` that represents a weight [F, C], a bias [F] and an adapter."""
        ...

    def gather(self, part: Tensor, group: ProcessGroup, batch: tuple[int, int]) -> OverlappedTokens:
        """Return a placeholder for the tokens of all ranks; the gather starts now or at the first use.

        Args:
            part: Tokens of this rank, [1, n, D].
            group: Process group of the ranks.
            batch: Number of sequences and their length, (B, S); tokens after the first B * S are padding.
        """
        ...

    def scatter(
        self,
        x: Tensor,
        product: Any,
        group: ProcessGroup,
        rows: int,
        before_wait: Callable[[], None],
    ) -> Tensor:
        """Multiply tokens by a weight and reduce-scatter the result; return this rank's tokens [1, n, D].

        Args:
            x: Tokens [..., F].
            product: Result of `product`.
            group: Process group of the ranks.
            rows: Number of tokens of all ranks, padding included: P * n.
            before_wait: Function that the executor may call while collectives are in flight.
        """
        ...


def is_needed(ctx: Any, number: int) -> bool:
    """Return whether the running backward needs the gradient of a tensor argument of an autograd function.

    Pipeline schedules may run a backward node twice: first for the gradient of the input, later for that of the weight.

    Args:
        ctx: Context of the function.
        number: Position of the tensor among the tensor arguments; the tensor must not be a leaf.
    """
    node = ctx.next_functions[number][0]
    return node is not None and torch._C._will_engine_execute_node(node)
