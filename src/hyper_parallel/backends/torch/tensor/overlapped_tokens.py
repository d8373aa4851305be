"""Interface of the executors that overlap the collectives of a block with its products.

    serial      no executor: gather, products, scatter
    chunks      `chunked_tokens`: the products of one chunk run while other chunks are in flight
    symmetric   `symmetric_tokens`: one operator of torch runs a collective and its products

A region passes its input to `gather` and calls the module with the result, an `OverlappedTokens`. Column-parallel
projections read their products from this object, row-parallel projections call `scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.stand_in import StandIn

Adapter = Callable[[Tensor], Tensor]
"""Function that returns the product of an adapter with tokens."""


class OverlappedTokens(StandIn):
    """Tokens [B, S, D] of a block that are still being gathered; any use except a product waits for all of them.

    Attributes:
        products: Complete products of projections that have not been called yet, [B, S, F].
        is_multiplied: True after the first call of `multiply`.
    """

    products: dict[nn.Module, Tensor]
    is_multiplied: bool

    def multiply(self, products: Mapping[nn.Module, Any]) -> None:
        """Compute the products of projections, given `TokenExecutor.product` of each, and store them in `products`."""
        raise NotImplementedError


class TokenExecutor(Protocol):
    """Executor of the collectives and the products of a block, on one tensor-parallel axis."""

    def fits(self, num_tokens: int) -> bool:
        """Return whether the executor can run a block with this number of tokens per rank; else it runs serially."""
        ...

    def product(self, weight: Tensor, bias: Tensor | None, adapter: Adapter | None) -> Any:
        """Return the product with a weight [F, C], a bias [F] and an adapter, for `multiply` or `scatter`."""
        ...

    def gather(self, part: Tensor, group: ProcessGroup, batch: tuple[int, int]) -> OverlappedTokens:
        """Start to gather the tokens [1, n, D] of every rank.

        Args:
            part: Tokens of this rank.
            group: Process group of the ranks.
            batch: Sequences and their length, (B, S); tokens behind B * S are padding.
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
        """Reduce-scatter the product of tokens; return this rank's part [1, n, D].

        Args:
            x: Tokens [..., F].
            product: Result of `product`.
            group: Process group of P ranks.
            rows: Tokens of all ranks with padding, P * n.
            before_wait: May be called while collectives are in flight.
        """
        ...


def is_needed(ctx: Any, number: int) -> bool:
    """Return whether the running backward needs the gradient of a tensor argument of an autograd function.

    A split backward runs a node twice: for the input, later for the weight.

    Args:
        ctx: Context of the function.
        number: Position of the tensor among the tensor arguments; it must not be a leaf.
    """
    node = ctx.next_functions[number][0]
    return node is not None and torch._C._will_engine_execute_node(node)
