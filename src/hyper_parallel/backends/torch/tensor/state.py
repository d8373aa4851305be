"""State of tensor parallelism shared by the modules of one model during a forward pass, and its random streams.

With replicated activations, tensor-parallel ranks draw random numbers from two streams:

    replicated activations               one common stream on all ranks, hence equal dropout masks
    between column- and row-parallel     one stream per rank: every slice of heads or of a width has its own mask

After a column-parallel projection, the rank switches to its own stream, seeded from the common stream. After the
row-parallel projection, it resumes the common stream behind that seed. Both streams are functions of the common one, so
a layer recomputed under the random state of its forward draws the same masks.

Source: Shoeybi et al. 2019 (Megatron-LM), appendix B.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from hyper_parallel.backends.torch.regather import RegatherScope, regather_in_backward
from hyper_parallel.backends.torch.tensor._stream import TokenGrid
from hyper_parallel.backends.torch.tensor.collectives import gather, scatter
from hyper_parallel.backends.torch.tensor.gradients import TpGradients, to_local
from hyper_parallel.ir import Purpose

X, Y = ("tp_x",), ("tp_y",)
TP = (*X, *Y)
_WORD: Final = (1 << 64) - 1
_CUDA_STEP: Final = 4
"""Unit of CUDA generator offsets."""


@dataclass
class RandomStreams:
    """Switch between the common random stream and the rank's own one.

    Attributes:
        rank: Position of this rank in the tensor-parallel group.
    """

    rank: int
    _generator: torch.Generator | None = None
    _common: Tensor | None = None

    def run_column_projection(self, module: nn.Module, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a column-parallel projection; draw from the rank's own stream afterwards."""
        self.join()
        out = inner(x)
        if module.training:
            self.split(out)
        return out

    def run_row_projection(self, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a row-parallel projection; draw from the common stream afterwards."""
        out = inner(x)
        self.join()
        return out

    def split(self, like: Tensor) -> None:
        """Switch to this rank's own stream, on the device of a tensor."""
        if isinstance(like, FakeTensor):
            return
        self._generator = generator = _generator_of(like.device)
        seed = _advance(generator)
        self._common = generator.get_state()
        generator.manual_seed(_hash64(seed + self.rank))

    def join(self) -> None:
        """Switch back to the common stream."""
        if self._common is not None and self._generator is not None:
            self._generator.set_state(self._common)
        self.forget()

    def forget(self) -> None:
        """Make the current stream the common one, after a pass that ended with an error."""
        self._generator = self._common = None


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _advance(generator: torch.Generator) -> int:
    """Return a number derived from the generator's state and advance the state, without a device synchronization."""
    if generator.device.type == "cpu":
        return int(torch.randint(1 << 62, (), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + _CUDA_STEP)
    return _hash64(generator.initial_seed()) ^ offset


def _hash64(x: int) -> int:
    """Return 63 bits of the SplitMix64 hash.

    Source: Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators.
    """
    x = (x + 1) * 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return (x ^ (x >> 31)) >> 1


@dataclass(frozen=True, slots=True)
class PassShape:
    """Shape of a forward pass.

    Attributes:
        batch: Tokens of the pass, (B, S), or of each of its parts.
        parts: Parts of the pass along its sequences, 2 for half-batches; the stream holds one after the other.
    """

    batch: tuple[int, ...] = ()
    parts: int = 1


class Halves(Protocol):
    """Executor of half-batches."""

    def parts(self, batch: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of parts of a pass over (B, S) tokens, given the arguments of its first layer."""
        ...

    def begin(self, calls: Sequence[Callable[[], Any]], dim: int) -> Any:
        """Begin a pass with one call per half; return their results, joined along a dim."""
        ...

    def end(self, call: Callable[[Tensor], Any], x: Tensor, dims: tuple[int, int]) -> Any:
        """Call a function of each half of `x` along the first dim; return the results, joined along the second dim."""
        ...


@dataclass(slots=True)
class TpState:
    """Tensor-parallel state of one model.

    Attributes:
        groups: This rank's process group per axes of the boundary table; without tp_y on one axis.
        shard_hidden_over_y: True if features of the residual stream are sharded over tp_y.
        shard_sequences_over_y: True if sequences are sharded over tp_y before their tokens are sharded over tp_x.
        replicated_activations: True if every rank holds the residual stream of all tokens.
        regather: True if gathered inputs are gathered again in backward instead of being saved.
        gradients: Reducer of the gradients of replicated parameters.
        halves: Executor of half-batches; None: passes run whole.
        shape: Shape of the running forward pass; set at the first decoder layer.
        head_batch: Shape of the head's input tokens, if the head shards them.
        partial_embedding: True if the embedding returned partial sums that are not reduced yet.
        loss_taken: True if the loss function has consumed this pass's logits.
        head: Sharding of the logits: "whole", "vocabulary" or "tokens".
        recomputed: True if the running layer is recomputed in backward, which gathers its inputs anyway.
        same_random: True if the ranks share their random numbers, required to train with replicated activations.
        num_chunks: Chunks in which blocks gather and scatter their tokens; 1: no chunks.
        chunked_blocks: Blocks run in chunks since the last `take_counts`.
        whole_blocks: Blocks whose tokens could not be divided into chunks since the last `take_counts`.
        streams: Random streams for dropout with replicated activations; None: every rank draws its own numbers.
    """

    groups: Mapping[tuple[str, ...], dist.ProcessGroup]
    shard_hidden_over_y: bool = False
    shard_sequences_over_y: bool = False
    replicated_activations: bool = False
    regather: bool = False
    gradients: TpGradients = field(default_factory=TpGradients)
    halves: Halves | None = None
    shape: PassShape = field(default_factory=PassShape)
    head_batch: tuple[int, ...] = ()
    partial_embedding: bool = False
    loss_taken: bool = False
    head: str = "whole"
    recomputed: bool = False
    same_random: bool = False
    num_chunks: int = 1
    chunked_blocks: int = 0
    whole_blocks: int = 0
    streams: RandomStreams | None = None

    def count_block(self, in_chunks: bool) -> None:
        """Count a block that runs in chunks, or whole because its tokens cannot be divided."""
        self.chunked_blocks += in_chunks
        self.whole_blocks += not in_chunks

    def take_counts(self) -> dict[str, int]:
        """Return the blocks run in chunks and whole since the last call, recomputation included."""
        counts = {"chunked_blocks": self.chunked_blocks, "whole_blocks": self.whole_blocks}
        self.chunked_blocks = self.whole_blocks = 0
        return counts if self.num_chunks > 1 else {}

    @property
    def batch(self) -> tuple[int, ...]:
        """Shape of the tokens of the running pass, or of each of its halves."""
        return self.shape.batch

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of all tensor-parallel ranks."""
        return self.groups[TP]

    @property
    def degree(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group.rank()

    @property
    def regathers(self) -> bool:
        """True if the running layer gathers its inputs again in backward."""
        return self.regather and not self.recomputed

    def grid_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """Return the sharding of the residual stream of a batch."""
        y = self.groups[Y].size() if Y in self.groups else 1
        return TokenGrid(
            batch, self.groups[X].size(), y, self.shard_hidden_over_y, self.shard_sequences_over_y
        )

    @property
    def grid(self) -> TokenGrid:
        """Sharding of the residual stream of the running pass."""
        return self.grid_of(self.batch)

    def list_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """Return the sharding of a batch as one list of tokens, independent of the residual stream."""
        return TokenGrid(batch, self.degree, 1, False, False)

    def enter(self, full: Tensor) -> Tensor:
        """Shard the stream [B, S, D] and return this rank's part; reduces the embedding's partial sums, if any."""
        is_summand, self.partial_embedding = self.partial_embedding, False
        calls = [partial(self._enter, x, is_summand) for x in full.chunk(self.shape.parts)]
        if self.halves is None or len(calls) == 1:
            return calls[0]()
        result: Tensor = self.halves.begin(calls, 1)
        return result

    def _enter(self, full: Tensor, is_summand: bool) -> Tensor:
        parts = self.grid.parts(full)
        return (
            scatter(parts, 1, self.group, Purpose.SEQUENCE_SCATTER)
            if is_summand
            else self.local_part(parts)
        )

    def local_part(self, parts: Tensor) -> Tensor:
        """Return this rank's part of the concatenated parts of all ranks."""
        return parts.chunk(self.degree, dim=1)[self.rank].clone()

    def leave(self, norm: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        """Apply the final norm to this rank's part and gather the stream [B, S, D] on every rank."""

        def gathered(piece: Tensor) -> Tensor:
            tokens = gather(norm(piece), 1, self.group, Purpose.SEQUENCE_GATHER)
            return self.grid.whole(tokens)

        if self.halves is None or self.shape.parts == 1:
            return gathered(part)
        result: Tensor = self.halves.end(gathered, part, (1, 0))
        return result

    def local(self, param: Any, rows: slice | None = None) -> Any:
        """Call `to_local` with this state's gradient reducer."""
        return to_local(param, self.gradients, rows)

    def with_gathered(
        self,
        gather: Callable[[Tensor], Tensor],
        piece: Tensor,
        use: Callable[[Tensor], Any],
        scope: RegatherScope | None,
    ) -> Any:
        """Return `use(gather(piece))`; with a scope, backward gathers again instead of saving the result."""
        whole, saved, shape = gather(piece), piece.detach(), self.shape

        def regather() -> Tensor:
            # Backward may run during another forward pass.
            running, self.shape = self.shape, shape
            try:
                return gather(saved)
            finally:
                self.shape = running

        with regather_in_backward(scope, whole, regather):
            return use(whole)
