"""State of tensor parallelism shared by the modules of one model during a forward pass, and its random streams.

With replicated activations, tensor-parallel ranks draw random numbers from two streams:

    replicated activations                           one common stream on all ranks, hence equal dropout masks
    between column- and row-parallel projections     one stream per rank, hence a different mask for every slice

After a column-parallel projection, the rank switches to its own stream, seeded from the common stream. After the
row-parallel projection, it resumes the common stream after that seed. The random state of a layer's forward therefore
determines all masks, and a recomputed layer draws the same ones.

Source: Shoeybi et al. 2019 (Megatron-LM), appendix B.1.

The residual stream of one microbatch is sharded over the tensor-parallel ranks between the blocks of a decoder.
On one axis, the B*S tokens form one list, sharded into P equal pieces of n tokens; the last pieces are padded. A rank
holds [1, n, D], a shape that modules written for [B, S, D] accept. Sharding the list instead of every sequence needs no
copy around a collective and no divisibility. On two axes, with P = x y ranks, rank (i, j) holds

    piece i y + j with all features, [1, n, D], or
    the y pieces i y ... i y + y - 1 with features j, [1, y n, D / y], if the stream is sharded over y.

With `shard_sequences_over_y`, every sequence is first cut into y spans of ceil(S / y) positions. The ranks (., j) hold
span j of all sequences, [1, n, D] each, and compute its attention.

Gathered activations and weights may be gathered again in backward instead of being saved, see `RegatherScope`. In a
scope, autograd saves a handle in place of a tensor that shares the storage of a gathered tensor. Unpacking the first
handle in backward gathers the tensor again; unpacking the last one frees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from hyper_parallel.backends.torch.pass_context import PassShape, RunningPass
from hyper_parallel.backends.torch.tensor.collectives import gather, padded, scatter
from hyper_parallel.backends.torch.tensor.gradients import TpGradients, to_local
from hyper_parallel.backends.torch.tensor.overlapped_tokens import TokenExecutor
from hyper_parallel.ir import Purpose
from hyper_parallel.shard import padded_sizes


@dataclass(slots=True)
class _Gathered:
    """Gathered tensor that autograd does not save.

    Attributes:
        regather: Function that gathers the tensor again.
        unread: Number of handles that backward has not unpacked yet.
        copy: Tensor gathered again; None before the first handle is unpacked and after the last one.
    """

    regather: Callable[[], Tensor]
    unread: int = 0
    copy: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Unpack a handle: return a view of the gathered tensor. The first handle gathers it, the last one frees it."""
        if self.copy is None:
            with torch.no_grad():
                self.copy = self.regather()
        out = self.copy
        self.unread -= 1
        if self.unread <= 0:
            self.copy, self.unread = None, 0
        return out.as_strided(size, stride, offset)


@dataclass(slots=True)
class RegatherScope:
    """Scope of forward code in which gathered tensors are not saved but gathered again in backward."""

    _sources: dict[int, _Gathered] = field(default_factory=dict)

    def open(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves handles in place of the tensors of `regather_in_backward`."""
        return saved_tensors_hooks(self._pack, _unpack)

    @contextmanager
    def regather_in_backward(self, gathered: Tensor, regather: Callable[[], Tensor]) -> Iterator[None]:
        """Prevent autograd from saving `gathered` and its views in this context; backward calls `regather` instead.

        The context of `open` must be active. No code may write to `gathered`. Backward calls `regather` without
        gradients, in the same order on every rank.
        """
        key = gathered.untyped_storage()._cdata
        self._sources[key] = _Gathered(regather)
        try:
            yield
        finally:
            del self._sources[key]

    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        source = self._sources.get(saved.untyped_storage()._cdata)
        if source is None:
            return saved
        source.unread += 1
        return partial(source.view, saved.size(), saved.stride(), saved.storage_offset())


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """Sharding of the residual stream of (B, S) tokens over x * y tensor-parallel ranks; see the module docstring.

    y is 1 for one axis. A piece is a list of n tokens. Each rank holds one part: a piece with all features or, with
    `shard_hidden_over_y`, y pieces with 1 / y of the features.
    """

    batch: tuple[int, ...]
    x: int
    y: int
    shard_hidden_over_y: bool  # True: features are sharded over y too
    shard_sequences_over_y: bool  # True: sequences are sharded over y first, then tokens over x

    @property
    def span(self) -> int:
        """Number of positions in a span, ceil(S / y)."""
        return padded_sizes(*self.batch, self.x, self.y, self.shard_sequences_over_y)[0]

    @property
    def rows(self) -> int:
        """Number n of tokens in one piece, padding included."""
        return padded_sizes(*self.batch, self.x, self.y, self.shard_sequences_over_y)[1]

    def part_shape(self, width: int) -> tuple[int, int, int]:
        """Return the shape of a rank's part of a residual stream with `width` features."""
        return (1, self.y * self.rows, width // self.y) if self.shard_hidden_over_y else (1, self.rows, width)

    def parts(self, full: Tensor) -> Tensor:
        """Pad the residual stream [B, S, D] and rearrange it into the concatenated parts of all ranks.

        The result is [1, P n, D], or [1, P y n, D / y] if features are sharded over y; P = x y, n = `rows`.
        """
        x, y, pieces = self.x, self.y, self._pieces(full)
        if self.shard_hidden_over_y:
            pieces = pieces.view(x, y * self.rows, y, -1).transpose(1, 2).flatten(0, 2).unsqueeze(0)
        return pieces

    def whole(self, parts: Tensor) -> Tensor:
        """Rearrange the concatenated parts of all ranks into the residual stream [B, S, D]; inverse of `parts`."""
        x, y, n = self.x, self.y, self.rows
        if self.shard_hidden_over_y:
            parts = parts.view(x, y, y * n, -1).transpose(1, 2).reshape(1, x * y * n, -1)
        if not self.shard_sequences_over_y:
            return self.without_padding(parts, self.batch)
        spans = parts.view(x, y, n, -1).transpose(0, 1).reshape(y, x * n, -1)
        spans = spans[:, : self.batch[0] * self.span]
        return self.from_spans(spans.reshape(1, -1, spans.shape[-1]))

    def without_padding(self, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Drop the padding at the end of [1, T, C] and reshape to [*shape, C]."""
        num_tokens = math.prod(shape)
        if tokens.shape[1] != num_tokens:
            tokens = tokens[:, :num_tokens]
        return tokens.view(*shape, tokens.shape[-1])

    def token_indices(self, rank: int) -> Tensor:
        """Return the index in the list of B * S tokens for each row of a rank's piece; -1 for padding."""
        indices = torch.arange(1, math.prod(self.batch) + 1).view(*self.batch, 1)
        return self._pieces(indices).view(self.x * self.y, -1)[rank] - 1

    def spans(self, full: Tensor) -> Tensor:
        """Rearrange [B, S, C] into the concatenated spans of all sequences, padding included: [1, y B span, C]."""
        batch, y, span = full.shape[0], self.y, self.span
        spans = padded(full, y * span).view(batch, y, span, -1)
        return spans.transpose(0, 1).reshape(1, y * batch * span, -1)

    def from_spans(self, spans: Tensor) -> Tensor:
        """Rearrange concatenated spans [1, y B span, C] into [B, S, C]; inverse of `spans`."""
        batch, length = self.batch
        out = spans.view(self.y, batch, self.span, -1).transpose(0, 1).flatten(1, 2)
        # Copy here: a copy made by code that reads the view would not be recognised as gathered by the regather scope.
        return out[:, :length].contiguous()

    def _pieces(self, full: Tensor) -> Tensor:
        """Rearrange [B, S, C] into the concatenated pieces of all ranks, [1, P n, C]; P = x y, n = `rows`."""
        x, y, n = self.x, self.y, self.rows
        if not self.shard_sequences_over_y:
            return padded(full.reshape(1, -1, full.shape[-1]), x * y * n)
        spans = padded(self.spans(full).view(y, -1, full.shape[-1]), x * n)
        return spans.view(y, x, n, -1).transpose(0, 1).reshape(1, x * y * n, -1)


X, Y = ("tp_x",), ("tp_y",)
TP = (*X, *Y)
_WORD: Final = (1 << 64) - 1
_CUDA_STEP: Final = 4
"""Unit of CUDA generator offsets."""


@dataclass
class RandomStreams:
    """Two random streams of this rank: one common to all tensor-parallel ranks, and one used by this rank only.

    Attributes:
        rank: Position of this rank in the tensor-parallel group.
    """

    rank: int
    _generator: torch.Generator | None = None
    _common: Tensor | None = None

    def run_column_projection(self, module: nn.Module, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a column-parallel projection on the common stream; in training mode, switch to this rank's stream."""
        self.join()
        out = inner(x)
        if module.training:
            self.split(out)
        return out

    def run_row_projection(self, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a row-parallel projection, then switch to the common stream."""
        out = inner(x)
        self.join()
        return out

    def split(self, like: Tensor) -> None:
        """Switch to this rank's own stream on the device of `like`; no effect for a fake tensor."""
        if isinstance(like, FakeTensor):
            return
        self._generator = generator = _generator_of(like.device)
        seed = _advance(generator)
        self._common = generator.get_state()
        generator.manual_seed(_hash64(seed + self.rank))

    def join(self) -> None:
        """Switch to the common stream, if this rank's own stream is in use."""
        if self._common is not None and self._generator is not None:
            self._generator.set_state(self._common)
        self.forget()

    def forget(self) -> None:
        """Treat the current stream as the common one, for example after a pass that ended with an error."""
        self._generator = self._common = None


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _advance(generator: torch.Generator) -> int:
    """Derive a number from the state of a generator and advance the state, without a device synchronization."""
    if generator.device.type == "cpu":
        return int(torch.randint(1 << 62, (), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + _CUDA_STEP)
    return _hash64(generator.initial_seed()) ^ offset


def _hash64(x: int) -> int:
    """Return 63 bits of the SplitMix64 hash (Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Generators)."""
    x = (x + 1) * 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return (x ^ (x >> 31)) >> 1


@dataclass(slots=True)
class TpState:
    """Tensor-parallel state of one model.

    Attributes:
        groups: Process groups of this rank by their mesh axes: `X`, `TP` (all ranks) and, with a second axis, `Y`.
        shard_hidden_over_y: True if the features of the residual stream are sharded over tp_y.
        shard_sequences_over_y: True if sequences are cut into spans over tp_y before tokens are sharded over tp_x.
        replicated_activations: `ShardPlan.whole_stream`: True if every rank holds the residual stream of all tokens.
        regather: True if gathered inputs are gathered again in backward instead of being saved.
        gradients: Reducer of the gradients of replicated parameters.
        halves: Executor of half-batches, a `half_batch.HalfBatch`; None: passes run on whole batches.
        running: The running forward pass.
        same_random: True after all ranks have set the same random seed, for training with replicated activations.
        executor: Executor that overlaps collectives with products in blocks; None: they run serially.
        chunked_blocks: Number of blocks that the executor has run since the last `take_counts`.
        whole_blocks: Number of blocks that ran serially since the last `take_counts`, because the executor does not
            support their number of tokens or the block is compiled.
        streams: Random streams for dropout with replicated activations; None if they are not needed.
    """

    groups: Mapping[tuple[str, ...], dist.ProcessGroup]
    shard_hidden_over_y: bool = False
    shard_sequences_over_y: bool = False
    replicated_activations: bool = False
    regather: bool = False
    gradients: TpGradients = field(default_factory=TpGradients)
    halves: Any = None
    running: RunningPass = field(default_factory=RunningPass)
    same_random: bool = False
    executor: TokenExecutor | None = None
    chunked_blocks: int = 0
    whole_blocks: int = 0
    streams: RandomStreams | None = None

    def take_counts(self) -> dict[str, int]:
        """Return `chunked_blocks` and `whole_blocks` by name and reset them; {} without an executor."""
        counts = {"chunked_blocks": self.chunked_blocks, "whole_blocks": self.whole_blocks}
        self.chunked_blocks = self.whole_blocks = 0
        return {} if self.executor is None else counts

    @property
    def shape(self) -> PassShape:
        """Shape of the running pass."""
        return self.running.context.shape

    @property
    def batch(self) -> tuple[int, ...]:
        """Number of sequences and their length (B, S) in the running pass; with half-batches, in one half-batch."""
        return self.shape.batch

    @property
    def head(self) -> str:
        """Sharding of the logits of the running pass: "whole", "vocabulary" or "tokens"."""
        return self.running.context.head

    @property
    def recomputed(self) -> bool:
        """True if the activations of the running layer are recomputed in backward."""
        return self.running.context.recomputed

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
        """Position of this rank in `group`."""
        return self.group.rank()

    @property
    def regathers(self) -> bool:
        """True if backward gathers the inputs again; False in a recomputed layer, whose recompute gathers them."""
        return self.regather and not self.recomputed

    def grid_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """Return the sharding of the residual stream of a batch of (B, S) tokens."""
        y = self.groups[Y].size() if Y in self.groups else 1
        return TokenGrid(batch, self.groups[X].size(), y, self.shard_hidden_over_y, self.shard_sequences_over_y)

    @property
    def grid(self) -> TokenGrid:
        """Sharding of the residual stream of the running pass."""
        return self.grid_of(self.batch)

    def list_of(self, batch: tuple[int, ...]) -> TokenGrid:
        """Return the sharding of (B, S) tokens as one list over all ranks, with all features on each rank."""
        return TokenGrid(batch, self.degree, 1, False, False)

    def enter(self, full: Tensor) -> Tensor:
        """Return this rank's part of the residual stream `full` [B, S, D].

        Partial sums of the embedding are reduce-scattered. With half-batches, the result is a `HalvedTensor`.
        """
        context = self.running.context
        chunks = full.chunk(context.shape.parts)
        calls = [partial(self._enter, x, context.partial_embedding) for x in chunks]
        if self.halves is None or len(calls) == 1:
            return calls[0]()
        result: Tensor = self.halves.begin(calls, 1)
        return result

    def _enter(self, full: Tensor, is_summand: bool) -> Tensor:
        parts = self.grid.parts(full)
        return scatter(parts, 1, self.group, Purpose.SEQUENCE_SCATTER) if is_summand else self.local_part(parts)

    def local_part(self, parts: Tensor) -> Tensor:
        """Return a copy of this rank's part, from the concatenated parts of all ranks."""
        return parts.chunk(self.degree, dim=1)[self.rank].clone()

    def leave(self, norm: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        """Apply the final norm to this rank's part, and gather the residual stream [B, S, D] on every rank."""

        def gathered(piece: Tensor) -> Tensor:
            tokens = gather(norm(piece), 1, self.group, Purpose.SEQUENCE_GATHER)
            return self.grid.whole(tokens)

        if self.halves is None or self.shape.parts == 1:
            return gathered(part)
        result: Tensor = self.halves.end(gathered, part, (1, 0))
        return result

    def local(self, param: Any, rows: slice | None = None) -> Any:
        """Return the local tensor of a parameter, or `rows` of it; see `gradients.to_local`."""
        return to_local(param, self.gradients, rows)

    def with_gathered(
        self,
        gather: Callable[[Tensor], Tensor],
        piece: Tensor,
        use: Callable[[Tensor], Any],
        scope: RegatherScope | None,
    ) -> Any:
        """Return `use(gather(piece))`; with a scope, the gathered tensor is gathered again in backward, not saved."""
        running = self.running
        whole, saved, context = gather(piece), piece.detach(), running.context

        def regather() -> Tensor:
            # Backward may run during another forward pass.
            now, running.context = running.context, context
            try:
                return gather(saved)
            finally:
                running.context = now

        if scope is None:
            return use(whole)
        with scope.regather_in_backward(whole, regather):
            return use(whole)
