"""Two sides of the border of a tower: the ranks that compute its features, and the ranks that read them.

    tower      features of microbatches, in rounds    send ->    backward with the gradients received
    language   forward with the features received     <- send    gradients of the features

Every microbatch of the language part has one message of features, empty without media, and one message of gradients if
its features require them. Both sides derive the sender and the order of messages from the number of ranks, so no
schedule is exchanged, and a tower rank runs ahead of its backward passes by enough rounds that no rank waits in a
circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.submodels.channel import Channel, pack
from hyper_parallel.errors import CollectiveMismatch
from hyper_parallel.ir import Purpose

Span = Callable[[str, str], AbstractContextManager[Any]]
Source = tuple[int, int] | None
"""Data-parallel rank of the language part and index of its microbatch; None: no microbatch."""


@dataclass(frozen=True, slots=True)
class Border:
    """Ranks on both sides of a border.

    Attributes:
        tower: Rank of the world by data-parallel rank of the tower.
        readers: Ranks of the world with the data of each data-parallel rank of the language part; the first sends the
            gradients.
    """

    tower: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]

    @property
    def rounds_ahead(self) -> int:
        """Rounds of forward passes before the first backward pass.

        The backward pass of a microbatch begins once all readers have its features.
        """
        return -(-len(self.readers) // len(self.tower))

    def owner(self, share: int, index: int) -> int:
        """Return the tower rank, in the world, that computes the features of a microbatch."""
        return self.tower[(index * len(self.readers) + share) % len(self.tower)]

    def source(self, tower_rank: int, number: int) -> tuple[int, int]:
        """Return the microbatch of a tower rank in a round, the inverse of `owner`."""
        index, share = divmod(number * len(self.tower) + tower_rank, len(self.readers))
        return share, index

    def sources(self, tower_rank: int, count: int) -> list[Source]:
        """Return the microbatches of a tower rank, one per round, of a step with `count` microbatches per share."""
        rounds = range(-(-count * len(self.readers) // len(self.tower)))
        sources = [self.source(tower_rank, number) for number in rounds]
        return [source if source[1] < count else None for source in sources]


class Submodel:
    """State of one rank of a model whose parts are on different ranks.

    Args:
        border: Ranks of both parts.
        group: All of these ranks.
        is_first: Whether this rank is the first of its part.
    """

    def __init__(self, border: Border, group: dist.ProcessGroup, is_first: bool) -> None:
        self.border, self._group, self._is_first = border, group, is_first

    def sum_over_parts(self, value: Tensor, name: Purpose) -> Tensor:
        """Return the sum over the parts of a value that is equal on all ranks of a part."""
        return all_reduce(value if self._is_first else torch.zeros_like(value), self._group, name)


class Tower(Submodel):
    """Service of a tower rank.

    Args:
        border: See `Submodel`.
        group: See `Submodel`.
        rank: Data-parallel rank in the tower.
        features: Messages to the readers.
        gradients: Messages from the readers.
    """

    def __init__(
        self,
        border: Border,
        group: dist.ProcessGroup,
        rank: int,
        features: Channel,
        gradients: Channel,
    ) -> None:
        super().__init__(border, group, rank == 0)
        self.rank, self._features, self._gradients = rank, features, gradients

    def serve(
        self,
        model: nn.Module,
        microbatches: Sequence[Mapping[str, Any] | None],
        span: Span,
        train: bool,
        deferred: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> None:
        """Compute the features of the microbatches of a step, and the gradients of the tower if `train`.

        Args:
            model: `TowerModel` that passed through `parallelize`.
            microbatches: Microbatches of `Border.sources`, on their ranks' devices.
            span: See `forward_backward`.
            train: Whether readers run backward passes.
            deferred: Context of the backward passes of all microbatches but the last.
        """
        trained = train and any(p.requires_grad for p in model.parameters())
        running: deque[tuple[Source, list[Tensor], Tensor]] = deque()
        for number, batch in enumerate(microbatches):
            with span("forward", "compute"), torch.set_grad_enabled(trained):
                structure, tensors, start = model(**(batch or {}))
            source = None if batch is None else self.border.source(self.rank, number)
            if source is not None:
                for reader in self.border.readers[source[0]]:
                    self._features.send(structure, tensors, reader)
            if trained:
                running.append((source, tensors, start))
            if len(running) > self.border.rounds_ahead:
                with deferred(model):
                    self._backward(*running.popleft(), span)
        while running:
            last = len(running) == 1
            with nullcontext() if last else deferred(model):
                self._backward(*running.popleft(), span)
        self._features.flush()

    def _backward(self, source: Source, tensors: list[Tensor], start: Tensor, span: Span) -> None:
        outputs = [t for t in tensors if t.requires_grad]
        grads: list[Tensor | None] = [None] * len(outputs)
        if outputs:
            assert source is not None
            with span("gradients of features", "communication"):
                grads = self._gradients.receive(self.border.readers[source[0]][0])
        used = [(t, g) for t, g in zip(outputs, grads, strict=True) if g is not None]
        # `start` begins FSDP's backward pass on ranks without features too.
        with span("backward", "compute"):
            torch.autograd.backward(
                [start, *(t for t, _ in used)], [torch.zeros_like(start), *(g for _, g in used)]
            )


class Reader(Submodel):
    """Features on a rank of the language part.

    Args:
        border: See `Submodel`.
        group: See `Submodel`.
        rank: Rank of this process in the world.
        features: Messages from the tower.
        gradients: Messages to the tower.
    """

    def __init__(
        self,
        border: Border,
        group: dist.ProcessGroup,
        rank: int,
        features: Channel,
        gradients: Channel,
    ) -> None:
        super().__init__(border, group, rank == border.readers[0][0])
        self.share = next(i for i, ranks in enumerate(border.readers) if rank in ranks)
        self._sends = border.readers[self.share][0] == rank
        self._features, self._gradients = features, gradients
        self._summed_over: dist.ProcessGroup | None = None
        self._index: int | None = None
        self._received: deque[tuple[str, Any]] | None = None
        self._leaves: list[Tensor] = []

    def watch(self, model: nn.Module, summed_over: dist.ProcessGroup | None) -> None:
        """Read features in the forward passes of a model.

        Args:
            model: Language part that passed through `parallelize`.
            summed_over: Ranks whose gradients of one feature are summands; None: every rank has complete gradients.
        """
        self._summed_over = summed_over
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the forward passes in this context as the microbatches of one step."""
        self._index = 0
        try:
            yield
        finally:
            self._index = None
        self._gradients.flush()

    def receive(self, label: str) -> Any:
        """Return the result of a call that crosses the border."""
        received = self._message()
        found, output = received.popleft() if received else ("no further features", None)
        if found != label:
            raise self._mismatch(f"the model calls `{label}`, the tower sent {found}")
        return output

    def _message(self) -> deque[tuple[str, Any]]:
        if self._received is None:
            if self._index is None:
                raise self._mismatch("a forward pass outside of a step")
            message = self._features.receive(self.border.owner(self.share, self._index))
            self._leaves = [t for t in _tensors(message) if t.requires_grad]
            self._received = deque(message)
        return self._received

    def _begin(self, *_: Any) -> None:
        self._received = None

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if rest := self._message():
            raise self._mismatch(f"the tower sent `{rest[0][0]}`, which the model does not call")
        assert self._index is not None
        target, leaves = self.border.owner(self.share, self._index), self._leaves
        self._index += 1
        if not leaves:
            return
        queued: list[bool] = []

        def begin_backward(_: Tensor) -> None:
            if not queued:
                queued.append(True)
                Variable._execution_engine.queue_callback(lambda: self._send(leaves, target))

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(begin_backward)

    def _send(self, leaves: Sequence[Tensor], target: int) -> None:
        """Send the gradients of the features of one microbatch."""
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if self._summed_over is not None:
            for grad in grads:
                if grad is not None:
                    all_reduce(grad, self._summed_over, Purpose.WHOLE_PARAMETERS)
        if self._sends:
            self._gradients.send(*pack(grads), target)

    def _mismatch(self, got: str) -> CollectiveMismatch:
        return CollectiveMismatch(
            "the ranks of the tower and of the language part run different microbatches",
            where=f"rank {dist.get_rank()}",
            got=got,
            hint="pass the microbatches of `hp.microbatch_sources` to `hp.forward_backward` on every rank",
        )


def _tensors(value: Any) -> list[Tensor]:
    return pack(value)[1]
