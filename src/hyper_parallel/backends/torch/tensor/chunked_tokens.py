"""Products of an attention or MLP block on one chunk of tokens while collectives of other chunks are in flight.

    column-parallel   start all gathers | wait for chunk 0, products of it | wait for chunk 1, products of it | ...
    row-parallel      product of chunk 0, start its scatter | product of chunk 1, start its scatter | ... | wait for all

Every rank divides its n tokens into C equal chunks; gathered chunk c has the tokens of chunk c on all ranks. Backward
overlaps the transposed collectives in the same way (see `in_flight`). The gradient of a weight is computed once, from
all chunks, while later collectives are in flight (see `chunk_product`).

Sources: Wang et al. 2023, "Overlap communication with dependent computation via decomposition"; torchtitan's
asynchronous tensor parallelism, which decomposes the same two products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.in_flight import PendingCollective
from hyper_parallel.backends.torch.tensor.collectives import gather_pair, padded, scatter_pair
from hyper_parallel.backends.torch.tensor.overlapped_tokens import (
    Adapter,
    OverlappedTokens,
    is_needed,
)
from hyper_parallel.ir import Purpose

Product = Callable[[Tensor], Tensor]
"""Function that applies a linear projection to a chunk of tokens [1, T, C]."""


class _Weight(torch.autograd.Function):
    """Identity of a weight; backward computes the gradient from the inputs and output gradients of all chunks."""

    @staticmethod
    def forward(ctx: Any, chunks: list[tuple[Tensor, Tensor]], weight: Tensor) -> Tensor:
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, Tensor | None]:
        total: Tensor | None = None
        while ctx.chunks:
            x, grad = ctx.chunks.pop()
            rows = grad.reshape(-1, grad.shape[-1]).t()
            x = x.reshape(-1, x.shape[-1])
            total = rows @ x if total is None else total.addmm_(rows, x)
        return None, total


class _ChunkProduct(torch.autograd.Function):
    """Product of a chunk with a weight; backward appends (chunk, output gradient) to `chunks`, for `_Weight`."""

    @staticmethod
    def forward(
        ctx: Any,
        chunks: list[tuple[Tensor, Tensor]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.chunks = chunks
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if is_needed(ctx, 1):
            ctx.chunks.append((x, grad))
        bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return None, grad @ weight if is_needed(ctx, 0) else None, None, bias


def chunk_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a function that multiplies chunks [..., C] of one forward pass by a weight [F, C] and adds a bias [F].

    Backward computes the gradient of the weight once, from all chunks. Autograd runs nodes in the reverse order of
    creation. If this function is called between start and finish of a collective, the gradient is therefore computed
    while the transposed collective is in flight.
    """
    chunks: list[tuple[Tensor, Tensor]] = []
    shared = _Weight.apply(chunks, weight)
    return lambda chunk: _ChunkProduct.apply(chunks, chunk, shared, bias)


class ChunkedTokens(OverlappedTokens):
    """Placeholder for the tokens [B, S, D] of a block, which are gathered in chunks.

    Attributes:
        pending: Gather of each chunk.
        chunks: Chunks whose gather is complete, in order.
        num_ranks: Number of ranks whose tokens are gathered.
    """

    pending: list[PendingCollective]
    chunks: list[Tensor]
    num_ranks: int

    def multiply(self, products: Mapping[nn.Module, Product]) -> None:
        """Compute the products of projections chunk by chunk: wait for a chunk, multiply it, wait for the next one."""
        self.is_multiplied = True
        results: dict[nn.Module, list[Tensor]] = {module: [] for module in products}
        for index in range(len(self.pending)):
            chunk = self._chunk(index)
            for module, product in products.items():
                results[module].append(product(chunk))
        self.products.update({module: self._joined(parts) for module, parts in results.items()})

    def whole(self) -> Tensor:
        """Wait for all chunks and return the tokens; repeated calls return the same tensor."""
        if self._whole is None:
            self._whole = self._joined([self._chunk(n) for n in range(len(self.pending))])
        return self._whole

    def _chunk(self, index: int) -> Tensor:
        if index == len(self.chunks):
            self.chunks.append(self.pending[index].finish())
        return self.chunks[index]

    def _joined(self, chunks: list[Tensor]) -> Tensor:
        by_rank = [chunk.view(self.num_ranks, -1, chunk.shape[-1]) for chunk in chunks]
        return self.without_padding(torch.cat(by_rank, 1).view(-1, chunks[0].shape[-1]))


@dataclass(frozen=True, slots=True)
class ChunkExecutor:
    """`TokenExecutor` that runs products and collectives on chunks of tokens.

    Attributes:
        num_chunks: Number of chunks.
    """

    num_chunks: int

    def fits(self, num_tokens: int) -> bool:
        """Return whether the number of tokens per rank is divisible by the number of chunks."""
        return num_tokens % self.num_chunks == 0

    def product(self, weight: Tensor, bias: Tensor | None, adapter: Adapter | None) -> Product:
        """Return a function that multiplies a chunk by a weight, and adds a bias and the output of an adapter."""
        product = chunk_product(weight, bias)
        return product if adapter is None else lambda chunk: product(chunk) + adapter(chunk)

    def gather(self, part: Tensor, group: ProcessGroup, batch: tuple[int, int]) -> ChunkedTokens:
        """Start the gathers of all chunks, and return a placeholder for the gathered tokens."""
        tokens = ChunkedTokens.of(part, batch)
        pair = gather_pair(1, group, Purpose.SEQUENCE_GATHER)
        tokens.pending = [PendingCollective(*pair, x) for x in part.chunk(self.num_chunks, 1)]
        tokens.chunks, tokens.num_ranks = [], group.size()
        return tokens

    def scatter(
        self,
        x: Tensor,
        product: Product,
        group: ProcessGroup,
        rows: int,
        before_wait: Callable[[], None],
    ) -> Tensor:
        """Multiply and reduce-scatter tokens [..., F] in chunks; call `before_wait` while scatters are in flight."""
        width, ranks = x.shape[-1], group.size()
        tokens = padded(x.reshape(1, -1, width), rows).view(ranks, self.num_chunks, -1, width)
        pair = scatter_pair(1, group, Purpose.SEQUENCE_SCATTER)
        pending = [PendingCollective(*pair, product(chunk.reshape(1, -1, width))) for chunk in tokens.unbind(1)]
        before_wait()
        return torch.cat([collective.finish() for collective in pending], 1)
