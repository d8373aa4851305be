"""Choice of the executor of blocks, and models whose blocks it cannot run."""

from __future__ import annotations

from torch import nn

from hyper_parallel.backends.torch.tensor.chunked_tokens import ChunkExecutor
from hyper_parallel.backends.torch.tensor.overlapped_tokens import TokenExecutor
from hyper_parallel.backends.torch.tensor.symmetric_tokens import SymmetricExecutor
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy


def token_executor(overlap: Overlap) -> TokenExecutor | None:
    """Return the executor of blocks; None: they run serially."""
    executors: dict[str, TokenExecutor] = {
        "chunks": ChunkExecutor(overlap.tp_chunks),
        "symmetric": SymmetricExecutor(),
    }
    return executors.get(overlap.block_executor)


def check_token_overlap(model: nn.Module, strategy: Strategy) -> None:
    """Refuse adapters whose products cannot be computed with those of their projection (HP205).

    Chunks of tokens would draw other dropout masks. Operators over symmetric memory multiply by weights alone.
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
