"""Exchange between towers and the language part: the ranks that compute features, and the ranks that read them.

    tower      features of microbatches, in rounds    send ->    backward with the gradients received
    language   forward with the features received     <- send    gradients of the features

A tower is an encoder of images, videos or audio. The language part is the rest of the model. A share is a data-parallel
rank of the language part. In a round, each rank of a tower computes the features of one microbatch.

Every microbatch of the language part has one message of features from each tower, empty without media, and one message
of gradients to each tower whose features require them. A rank may have several parts of the model. All ranks derive the
same order of all passes of a step, and run their own passes in this order: before each microbatch of the language part,
the passes of the first tower, then those of the next one. Every pass follows the passes whose results it needs, so
ranks cannot deadlock.

Alternatively, a tower and a pipeline of the language part run under one joint schedule, whose stage 0 is the tower. A
lane is the list of actions of one pipeline rank, or of a rank with a tower only. Copies of the tower on several ranks
use no collectives during the step, and sum their gradients at its end. A sharded tower runs its collectives in the
order of the schedule. With tensor parallelism, several tower ranks may share a lane. They take turns: one of them
encodes a microbatch. The others meanwhile run a sharded tower without a microbatch, for its collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.pipeline.apply import Span
from hyper_parallel.backends.torch.pipeline.stages import StageLayers
from hyper_parallel.backends.torch.submodels.channel import Channel, pack
from hyper_parallel.errors import CollectiveMismatch
from hyper_parallel.ir import Action, Purpose, Schedule
from hyper_parallel.mpmd import (
    JointLayout,
    check_submodel_schedule,
    forward_part,
    submodel_schedule,
)

Source = tuple[int, int] | None
"""Data-parallel rank of the language part and index of its microbatch; None: no microbatch."""


@dataclass(frozen=True, slots=True)
class JointSteps:
    """Joint schedules of a tower and the pipeline of the language part, for one rank.

    All shares run the same schedule, each with its own microbatches. For a sharded tower, the number of microbatches is
    rounded up to whole rounds; the tower's passes of missing microbatches are empty.

    Attributes:
        layout: Lanes of the schedule, and the tower's ranks of each share.
        tower: World ranks of the tower.
        copies: Process group of the tower's ranks; None for one rank, and for a tower that FSDP shards.
        reduce_dtype: Dtype in which the gradients of the tower's copies are summed.
        place: Share and lane of this rank.
        tower_rank: Index of this rank among those of the tower; None on other ranks.
        frozen: Whether the tower is frozen.
        planned: Schedule of the plan, used for steps with its number of microbatches. Other schedules are computed,
            assuming equal costs.
    """

    layout: JointLayout
    tower: tuple[int, ...]
    copies: dist.ProcessGroup | None
    reduce_dtype: torch.dtype
    place: tuple[int, int]
    tower_rank: int | None
    frozen: bool
    planned: Schedule | None = None
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _actions: dict[tuple[int, bool], tuple[Action, ...]] = field(default_factory=dict)

    def schedule(self, count: int) -> Schedule:
        """Return the schedule of a step of `count` microbatches per share; raise HP320 for an invalid planned one."""
        lanes = self.layout.lanes
        count = lanes.padded(count)
        if count not in self._schedules:
            if self.planned is not None and self.planned.microbatches == count:
                schedule = check_submodel_schedule(self.planned, lanes, self.frozen)
            else:
                schedule = submodel_schedule(lanes, count, frozen=self.frozen)
            self._schedules[count] = schedule
        return self._schedules[count]

    def owners(self, count: int) -> list[int]:
        """Return the world rank that computes the features of each microbatch of this rank's share."""
        owners = self.layout.owners(self.schedule(count), self.place[0])
        return [self.tower[owner] for owner in owners[:count]]

    def sources(self, tower_rank: int, count: int) -> list[Source]:
        """Return one entry per microbatch of a tower rank's share: (share, index) if the rank encodes it, else None."""
        return self.layout.sources(self.schedule(count), tower_rank)[:count]

    def actions(self, count: int, train: bool) -> tuple[Action, ...]:
        """Return this rank's actions, forward only unless `train`. The tower is stage -1; language stages are >= 0."""
        if (count, train) not in self._actions:
            schedule, (share, lane) = self.schedule(count), self.place
            owners = self.layout.owners(schedule, share)
            if not train:
                schedule = forward_part(schedule, self.layout.lanes)
            # A tower rank without copies runs all actions of its lane, because its parameters may be sharded.
            joins = self.tower_rank is not None and self.copies is None
            self._actions[count, train] = tuple(
                replace(a, stage=a.stage - 1)
                for a in schedule.ranks[lane]
                if not _crosses(a)
                and ((a.microbatch or 0) < count if a.stage else joins or owners[a.microbatch or 0] == self.tower_rank)
            )
        return self._actions[count, train]


def _crosses(action: Action) -> bool:
    """Return whether an action is a message between tower and language part, which `Tower` or `Reader` sends itself."""
    return action.kind.startswith(("SEND", "RECV")) and 0 in (action.stage, action.peer.stage)


_T = TypeVar("_T")
Pass = Literal["forward", "language", "backward"]


@dataclass(frozen=True, slots=True)
class Border:
    """Ranks on both sides of the border between a tower and the language part, and the order of their passes.

    Attributes:
        tower: World rank of each data-parallel rank of the tower.
        readers: For each share, the world ranks of each pipeline stage that reads features. The first rank of a stage
            sends the gradients.
        ahead: Number of microbatches of each share by which the tower's forward passes run ahead.
        edge: Edge of the features: (number of the tower, number of towers). Language stages are numbered after the
            towers.
    """

    tower: tuple[int, ...]
    readers: tuple[tuple[tuple[int, ...], ...], ...]
    ahead: int = 1
    edge: tuple[int, int] = (0, 1)

    @property
    def gradients_edge(self) -> tuple[int, int]:
        """Edge of the gradients of the features."""
        return self.edge[1], self.edge[0]

    def owner(self, share: int, index: int) -> int:
        """Return the world rank that computes the features of microbatch `index` of a share."""
        return self.tower[(index * len(self.readers) + share) % len(self.tower)]

    def source(self, tower_rank: int, number: int) -> tuple[int, int]:
        """Return (share, index) of the microbatch of a tower rank in round `number`; the inverse of `owner`."""
        index, share = divmod(number * len(self.tower) + tower_rank, len(self.readers))
        return share, index

    def sources(self, tower_rank: int, count: int) -> list[Source]:
        """Return the microbatch of a tower rank, or None, per round of a step with `count` microbatches per share."""
        rounds = range(-(-count * len(self.readers) // len(self.tower)))
        sources = [self.source(tower_rank, number) for number in rounds]
        return [source if source[1] < count else None for source in sources]

    def owners(
        self, count: int, sources: Callable[[int, int], list[Source]] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return, for each tower rank, the numbers of its microbatches in order.

        All microbatches are numbered consecutively: first those of share 0, then those of share 1, and so on.
        `sources` is a function like `Border.sources`; None: that method.
        """
        return tuple(
            tuple(s[0] * count + s[1] for s in (sources or self.sources)(rank, count) if s)
            for rank in range(len(self.tower))
        )

    def passes(self, rounds: int) -> Iterator[tuple[Pass, int]]:
        """Yield (kind of pass, number) in the order of a step of `rounds` rounds.

        The number is the round of a tower pass, or the index of a microbatch of the language part. The last indices may
        exceed the microbatches of the step, if the last round has fewer microbatches than tower ranks.
        """
        shares, towers = len(self.readers), len(self.tower)
        forward = backward = 0
        for index in range(rounds * towers // shares):
            ahead = min(rounds, -(-(index + 1 + self.ahead) * shares // towers))
            yield from (("forward", number) for number in range(forward, ahead))
            yield "language", index
            done = (index + 1) * shares // towers
            yield from (("backward", number) for number in range(backward, done))
            forward, backward = ahead, done
        yield from (("forward", number) for number in range(forward, rounds))
        yield from (("backward", number) for number in range(backward, rounds))


class Tower:
    """Computation of features on a tower rank, and exchange with the readers.

    `rank` is the data-parallel rank in the tower. `outgoing` is the channel of features to the readers, `gradients` the
    channel from them.
    """

    def __init__(self, border: Border, rank: int, outgoing: Channel, gradients: Channel) -> None:
        self.border, self.rank = border, rank
        self.outgoing, self._gradients = outgoing, gradients
        self._running: dict[int, tuple[Source, list[Tensor], Tensor]] = {}

    def serve(
        self,
        model: nn.Module,
        microbatches: Sequence[Mapping[str, Any] | None],
        span: Span,
        train: bool,
        deferred: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> Iterator[int]:
        """Compute the features of the microbatches of a step, and the gradients of the tower if `train`.

        Yield the index of each microbatch of the language part when its turn comes in the order of `Border.passes`. A
        rank with both parts then runs it. `microbatches` are in the order of `Border.sources`. All backward passes
        except the last one run in the context `deferred(model)`.
        """
        trained = train and is_trained(model)
        for kind, number in self.border.passes(len(microbatches)):
            if kind == "language":
                yield number
            elif kind == "forward":
                batch = microbatches[number]
                source = None if batch is None else self.border.source(self.rank, number)
                self.forward(model, batch, number, source, span, trained)
            elif trained:
                with nullcontext() if number + 1 == len(microbatches) else deferred(model):
                    self.backward(number, span)

    def forward(
        self,
        model: nn.Module,
        batch: Mapping[str, Any] | None,
        number: int,
        source: Source,
        span: Span,
        trained: bool,
    ) -> None:
        """Compute the features of a microbatch and send them; if `trained`, keep them for `backward`."""
        with span("tower forward", "compute"), torch.set_grad_enabled(trained):
            structure, tensors, start = model(**(batch or {}))
        if source is not None:
            for stage in self.border.readers[source[0]]:
                for reader in stage:
                    self.outgoing.send((self.border.edge, *source), structure, tensors, reader)
        if trained:
            self._running[number] = source, tensors, start

    def backward(self, number: int, span: Span) -> None:
        """Receive the gradients of the features of a forward pass and run the tower's backward."""
        source, tensors, start = self._running.pop(number)
        outputs = [t for t in tensors if t.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(outputs)
        if outputs:
            assert source is not None
            with span("gradients of features", "communication"):
                stages, edge = self.border.readers[source[0]], self.border.gradients_edge
                received = [self._gradients.receive((edge, *source), r[0]) for r in stages]
            grads = [_sum(parts) for parts in zip(*received, strict=True)]
        used = [(t, g) for t, g in zip(outputs, grads, strict=True) if g is not None]
        # `start` makes FSDP begin its backward pass even on ranks without features.
        with span("tower backward", "compute"):
            torch.autograd.backward([start, *(t for t, _ in used)], [torch.zeros_like(start), *(g for _, g in used)])


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    parts = [g for g in gradients if g is not None]
    return sum(parts[1:], parts[0]) if parts else None


def is_trained(model: nn.Module) -> bool:
    """Return whether any parameter of a model requires gradients."""
    return any(p.requires_grad for p in model.parameters())


class Reader:
    """Receiver of features on a rank of the language part, which sends their gradients back to the towers.

    Args:
        borders: Border to each tower; the readers of all towers are equal.
        share: Data-parallel rank in the language part.
        rank: Rank of this process in the world.
        features: Channel from the towers.
        outgoing: Channel of gradients to the towers.
    """

    def __init__(
        self,
        borders: Sequence[Border],
        share: int,
        rank: int,
        features: Channel,
        outgoing: Channel,
    ) -> None:
        self.borders, self.share = tuple(borders), share
        stages = self.borders[0].readers[share]
        self._reads = any(rank in stage for stage in stages)
        self._sends = any(rank == stage[0] for stage in stages)
        self._features, self.outgoing = features, outgoing
        self._summed_over: dist.ProcessGroup | None = None
        self._index: int | None = None
        self._owner: Callable[[int, int], int] | None = None
        # Messages of the running forward pass, and the tensors in them that need gradients, by number of the tower.
        self._received: dict[int, deque[tuple[str, Any]]] = {}
        self._leaves: dict[int, list[Tensor]] = {}
        # Number of gradients per tower, by index of the microbatch.
        self._counts: dict[int, list[int]] = {}
        self._stages: StageLayers | None = None

    def watch(self, model: nn.Module, summed_over: dist.ProcessGroup | None, stages: StageLayers | None) -> None:
        """Make forward passes of the language part use received features; no effect on stages that read none.

        Gradients of features are summed over the ranks `summed_over`; None: every rank has complete gradients.
        """
        if not self._reads:
            return
        self._summed_over, self._stages = summed_over, stages
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    @contextmanager
    def step(self, owner: Callable[[int, int], int] | None = None) -> Iterator[None]:
        """Allow forward passes in this context; `begin` selects the microbatch of each pass.

        `owner` is a function from (share, index of a microbatch) to the world rank that computes its features; None:
        `Border.owner`.
        """
        self._owner = owner
        self._counts.clear()
        try:
            yield
        finally:
            self._index = None

    def begin(self, index: int) -> None:
        """Set the microbatch of the next forward pass."""
        self._index = index

    def receive(self, label: str, number: int) -> Any:
        """Return the features that tower `number` of `borders` has sent for the model's call named `label`.

        Raise HP622 outside of a step, and if the next features are those of another call.
        """
        received = self._message(number)
        found, output = received.popleft() if received else ("no further features", None)
        if found != label:
            raise mismatch(f"the model calls `{label}`, but the encoder sent {found}")
        return output

    def _tower_rank(self, number: int, index: int) -> int:
        return (self._owner or self.borders[number].owner)(self.share, index)

    def _message(self, number: int) -> deque[tuple[str, Any]]:
        if number not in self._received:
            if self._index is None:
                raise CollectiveMismatch(
                    "the language part was called outside of a step",
                    where=f"rank {dist.get_rank()}",
                    hint="call `hp.forward_backward(model, microbatches)` instead of the model",
                )
            key = (self.borders[number].edge, self.share, self._index)
            message = self._features.receive(key, self._tower_rank(number, self._index))
            tensors = pack(message)[1]
            self._leaves[number] = [t for t in tensors if t.requires_grad]
            if self._stages is not None and self._stages.trace is not None:
                self._stages.trace.mark(tensors)
            self._received[number] = deque(message)
        return self._received[number]

    def _begin(self, *_: Any) -> None:
        self._received.clear()
        self._leaves.clear()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        numbers = range(len(self.borders))
        for number in numbers:
            if rest := self._message(number):
                raise mismatch(f"the encoder sent `{rest[0][0]}`, which the model does not call")
        assert self._index is not None
        index, leaves = self._index, [leaf for n in numbers for leaf in self._leaves[n]]
        self._counts[index] = [len(self._leaves[n]) for n in numbers]
        self._index = None
        if self._stages is not None:  # a pipeline calls `send`
            self._stages.features = leaves
            return
        if not leaves:
            return
        queued = False

        def begin_backward(_: Tensor) -> None:
            nonlocal queued
            if not queued:
                queued = True
                Variable._execution_engine.queue_callback(end_backward)

        def end_backward() -> None:
            grads = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            self.send(index, grads)

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(begin_backward)

    def send(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Send the gradients of the features of one microbatch to the tower ranks that computed the features."""
        if (group := self._summed_over) is not None:
            # Sum copies, because the weight gradients of a pipeline stage may still read these tensors.
            grads = [None if g is None else all_reduce(g.clone(), group, Purpose.WHOLE_PARAMETERS) for g in grads]
        if not self._sends:
            return
        start = 0
        for number, count in enumerate(self._counts.pop(index)):
            if count:
                key = (self.borders[number].gradients_edge, self.share, index)
                message = pack(grads[start : start + count])
                self.outgoing.send(key, *message, self._tower_rank(number, index))
            start += count


@dataclass(frozen=True, slots=True)
class Role:
    """Part of a model on this rank.

    Attributes:
        part: `TowerModel`, or the language part, that passed through `parallelize`.
        side: `Tower` or `Reader` of the part.
        reports: Whether this rank is the first one of the part; only its values count in `sum_over_parts`.
    """

    part: nn.Module
    side: Tower | Reader
    reports: bool


@dataclass(frozen=True, slots=True)
class Submodels:
    """State of one rank of a model that is divided into a language part and towers.

    Attributes:
        group: Ranks of all parts.
        roles: Parts of this rank, the language part first.
        joint: Joint schedules of tower and pipeline; None: the towers compute in rounds.
    """

    group: dist.ProcessGroup
    roles: tuple[Role, ...]
    joint: JointSteps | None = None

    @property
    def language(self) -> tuple[nn.Module, Reader] | None:
        """(Model, `Reader`) of the language part; None on a rank without it."""
        role = self.roles[0]
        return (role.part, role.side) if isinstance(role.side, Reader) else None

    @property
    def towers(self) -> list[tuple[nn.Module, Tower]]:
        """(`TowerModel`, `Tower`) of each tower on this rank."""
        return [(role.part, role.side) for role in self.roles if isinstance(role.side, Tower)]

    @property
    def borders(self) -> tuple[Border, ...]:
        """Borders to all towers, on a rank with the language part; on other ranks, borders to this rank's towers."""
        if self.language is not None:
            return self.language[1].borders
        return tuple(tower.border for _, tower in self.towers)

    def sources(self, count: int) -> list[Source]:
        """Return this rank's microbatches in a step with `count` per share: first those of the language part."""
        own: list[Source] = []
        if self.language is not None:
            own = [(self.language[1].share, index) for index in range(count)]
        for _, tower in self.towers:
            own += (self.joint or tower.border).sources(tower.rank, count)
        return own

    def owners(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return `Border.owners` of the only tower, for a step with `count` microbatches per share."""
        border, *_ = self.borders
        sources = None if self.joint is None else self.joint.sources
        return border.owners(count, sources)

    def divided(self, microbatches: Sequence[_T]) -> tuple[Sequence[_T], list[Sequence[_T]]]:
        """Divide the microbatches of `sources` into those of the language part and of each tower, or raise HP622."""
        given = len(microbatches)
        if self.joint is not None:
            count, rest = divmod(given, len(self.roles))
            if rest or not count:
                raise mismatch(f"{given} microbatches")
            parts = [microbatches[k * count : (k + 1) * count] for k in range(len(self.roles))]
            return ([], parts) if self.language is None else (parts[0], parts[1:])
        most = given * max((len(tower.border.tower) for _, tower in self.towers), default=1)
        count = next((c for c in range(most + 1) if len(self.sources(c)) == given), None)
        if count is None:
            raise mismatch(f"{given} microbatches")
        own = start = 0 if self.language is None else count
        served = []
        for _, tower in self.towers:
            end = start + len(tower.border.sources(tower.rank, count))
            served.append(microbatches[start:end])
            start = end
        return microbatches[:own], served

    def sum_over_parts(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum over all parts of the model; `values` has one value for each part on this rank."""
        pairs = zip(values, self.roles, strict=True)
        reported = [value if role.reports else torch.zeros_like(value) for value, role in pairs]
        return all_reduce(torch.stack(reported).sum(0), self.group, Purpose.SUBMODELS_SUM)


def mismatch(got: str) -> CollectiveMismatch:
    """Return the error for ranks of tower and language part that run different microbatches."""
    return CollectiveMismatch(
        "the ranks of the encoder and of the language part run different microbatches",
        where=f"rank {dist.get_rank()}",
        got=got,
        hint="pass the microbatches of `hp.microbatch_sources` to `hp.forward_backward` on every rank",
    )
