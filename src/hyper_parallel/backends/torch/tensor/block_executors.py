"""Choice of the executor that overlaps collectives with matrix products in attention and MLP blocks."""

from __future__ import annotations

from torch import nn

from hyper_parallel.backends.torch.tensor.chunked_tokens import ChunkExecutor
from hyper_parallel.backends.torch.tensor.overlapped_tokens import TokenExecutor
from hyper_parallel.backends.torch.tensor.symmetric_tokens import SymmetricExecutor
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy


def token_executor(overlap: Overlap) -> TokenExecutor | None:
    """Return the executor that overlaps collectives with products; None if the plan runs them serially."""
    executors: dict[str, TokenExecutor] = {
        "chunks": ChunkExecutor(overlap.tp_chunks),
        "symmetric": SymmetricExecutor(),
    }
    return executors.get(overlap.block_executor)


def check_token_overlap(model: nn.Module, strategy: Strategy) -> None:
    """Raise HP205 for adapters that the executor cannot compute together with their projections.

    With dropout, chunks of tokens would draw other masks than all tokens at once. Operators over symmetric memory do
    not support adapters.
    """
    overlap = strategy.overlap
    adapters = [a for m in model.modules() if (a := vars(m).get("adapter")) is not None]
    dropout = any(getattr(adapter, "dropout", 0.0) for adapter in adapters)
    if overlap.block_executor == "symmetric" and adapters:
        problem, other = "adapters", "none" if dropout else "chunks"
    elif overlap.block_executor == "chunks" and dropout:
        problem, other = "dropout on the inputs of adapters", "none"
    else:
        return
    raise UnsupportedSharding(
        f"`overlap.tp={overlap.block_executor}` does not work with {problem}",
        where="overlap",
        got=type(model).__name__,
        changes={"overlap.tp": other},
    )
