"""List scheduling: orders the actions of every rank by their costs, for any graph of stages.

Whenever a rank is free, it starts its most urgent action that is ready and fits its memory:

1. B or I whose gradient another stage needs;
2. F, if memory then still suffices for the remaining forwards of its and all earlier microbatches;
3. W, and B or I of stages whose gradient no other stage needs: these fill bubbles. With `reduce_first`, stages with a
   gradient reduction come first, so that other actions overlap the reduction.

Ties go to the earlier microbatch, then to the later stage. A rank that can start an action never waits for a more
urgent one. By rule 2, the earliest unfinished microbatch can always finish, so memory limits cannot cause a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, TypeAlias

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule, StageCost, StageGraph
from hyper_parallel.mpmd._tasks import StageCosts, Transfers, cost_rows, nanoseconds

_F, _B, _W = range(3)
_NEVER: Final = 1 << 62
_Row: TypeAlias = list[tuple[int, int, int]]
"""Actions of a rank as (kind, stage, microbatch); the kinds are F, B or I, and W."""


def list_schedule(
    graph: StageGraph,
    homes: Sequence[Sequence[int]],
    costs: StageCosts,
    *,
    transfer_s: Transfers = MappingProxyType({}),
    max_bytes: Sequence[int] | None = None,
    split: bool = True,
    order: Sequence[int] | None = None,
    reduce_first: bool = False,
) -> Schedule:
    """Return the compute-only schedule that list scheduling produces.

    Args:
        graph: Stages; a stage whose microbatches run on several ranks must be in `graph.copied`.
        homes: Rank of each microbatch, per stage.
        costs: Costs as for `schedule_tasks`.
        transfer_s: Seconds per edge as for `schedule_tasks`.
        max_bytes: Limit of activation bytes per rank; None: no limit.
        split: Whether backwards are split into I and W.
        order: Microbatches, most urgent first; None: 0, 1, 2, ...
        reduce_first: Whether stages with a gradient reduction come first among the actions that fill bubbles.

    Raises:
        ScheduleError: HP320 when one microbatch exceeds the limit of a rank.
    """
    scheduler = ListScheduler(graph, homes, costs, transfer_s, split)
    result = scheduler.run(order or range(len(homes[0])), max_bytes, reduce_first=reduce_first)
    assert result is not None, "without a limit of time, every schedule is finished"
    return result[0]


@dataclass(slots=True)
class _Rank:
    """State of a rank during list scheduling; an action is (index of its microbatch in the order, -stage, kind).

    Attributes:
        left: Nanoseconds of actions that have not started.
        free: Time in nanoseconds at which the last started action ends.
        held: Bytes held in total.
        held_by: Bytes held by each microbatch.
        needed: Bytes that the remaining forwards of each microbatch will allocate.
        coming: Heap of (arrival of the last input, index into `ready`, action), for inputs that are in transfer.
        ready: Heaps of actions whose inputs have arrived: rule 1, rule 2, reductions of rule 3, rest of rule 3.
    """

    left: int
    free: int
    held: int
    held_by: list[int]
    needed: list[int]
    coming: list[tuple[int, int, tuple[int, int, int]]]
    ready: tuple[list[tuple[int, int, int]], ...]


class ListScheduler:
    """Run of list scheduling, by the rules in the module docstring; arguments as for `list_schedule`."""

    def __init__(
        self,
        graph: StageGraph,
        homes: Sequence[Sequence[int]],
        costs: StageCosts,
        transfer_s: Transfers = MappingProxyType({}),
        split: bool = True,
    ) -> None:
        m = self._m = len(homes[0])
        stages = self._stages = range(len(homes))
        form = self._form = Schedule("list", len(homes), m, (), graph)
        self._homes, self._split = homes, split
        self._trained = [form.is_trained(s) for s in stages]
        self._before = [form.before(s) for s in stages]
        self._after = [form.after(s) for s in stages]
        self._producers = [[q for q in self._before[s] if self._trained[q]] for s in stages]
        rows = cost_rows(costs, m)
        # Nanoseconds, indexed by [kind][stage][microbatch]; 0 for actions that do not exist.
        self._duration = [[[self._duration_of(kind, s, c) for c in rows[s]] for s in stages] for kind in range(3)]
        # Nanoseconds per pair of stages and microbatch.
        self._transfer: dict[tuple[int, int], list[int]] = {}
        for s, t in graph.edges:
            ways = ([c.send_forward_s for c in rows[s]], [c.send_backward_s for c in rows[t]])
            both = (transfer_s[s, t],) * 2 if (s, t) in transfer_s else ways
            self._transfer[s, t], self._transfer[t, s] = (list(map(nanoseconds, w)) for w in both)
        # (bytes held from F to the end of B or I, bytes of these held until W ends)
        self._held = [[(c.activation_bytes, c.weight_grad_input_bytes if split else 0) for c in row] for row in rows]
        # Nanoseconds to reduce the gradients of each stage.
        self._reduce = [nanoseconds(rows[s][0].reduce_grad_s) * self._trained[s] for s in stages]

    def _duration_of(self, kind: int, stage: int, c: StageCost) -> int:
        if kind == _F:
            return nanoseconds(c.forward_s) + nanoseconds(c.exposed_forward_s)
        if not self._trained[stage] or (kind == _W and not self._split):
            return 0
        if kind == _W:
            return nanoseconds(c.weight_grad_s)
        own = c.input_grad_s if self._split else c.input_grad_s + c.weight_grad_s
        return nanoseconds(own) + nanoseconds(c.exposed_backward_s)

    def run(
        self,
        order: Sequence[int],
        max_bytes: Sequence[int] | None,
        *,
        reduce_first: bool = False,
        stop: int | None = None,
    ) -> tuple[Schedule, int] | None:
        """Return the compute-only schedule, and the end of the step, gradient reductions included, in nanoseconds.

        Args:
            order: Microbatches, most urgent first.
            max_bytes: Limit of held bytes per rank; None: no limit.
            reduce_first: As for `list_schedule`.
            stop: Nanoseconds; the result is None if the step does not end earlier. None: no limit.

        Raises:
            ScheduleError: HP320 when one microbatch exceeds the limit of a rank.
        """
        stop = _NEVER if stop is None else stop
        self._begin(order, max_bytes, reduce_first)
        actions = sum((1 + (1 + self._split) * trained) * self._m for trained in self._trained)
        starts = [self._start(r) for r in range(len(self._ranks))]
        for _ in range(actions):
            start = min(starts)
            if start == _NEVER:
                raise ScheduleError(
                    "the activations of one microbatch exceed the memory of a rank",
                    got=f"max_bytes={list(self._limits or ())}",
                    hint="raise max_bytes, or use smaller microbatches",
                )
            r = starts.index(start)
            for touched in self._execute(r, start):
                starts[touched] = self._start(touched)
            if self._ranks[r].free + self._ranks[r].left >= stop:
                return None
        end = self._end()
        return None if end >= stop else (self._schedule(), end)

    def _begin(self, order: Sequence[int], max_bytes: Sequence[int] | None, reduce_first: bool) -> None:
        count, m, stages = 1 + max(map(max, self._homes)), self._m, self._stages
        self._order, self._position = order, [0] * m
        for position, i in enumerate(order):
            self._position[i] = position
        self._ranks = [_Rank(0, 0, 0, [0] * m, [0] * m, [], ([], [], [], [])) for _ in range(count)]
        self._limits, self._reduce_first = max_bytes, reduce_first
        self._links: dict[tuple[int, int], int] = {}
        # Indexed by [F or backward][stage][microbatch]: number of missing inputs, arrival of the latest input so far.
        self._missing = [
            [[len(self._before[s])] * m for s in stages],
            [[1 + len(self._after[s])] * m for s in stages],
        ]
        self._arrived = [[[0] * m for _ in stages] for _ in range(2)]
        self._rows: list[_Row] = [[] for _ in range(count)]
        self._last_backward = [0] * len(stages)
        for s in stages:
            for i, home in enumerate(self._homes[s]):
                rank = self._ranks[home]
                rank.left += sum(self._duration[kind][s][i] for kind in range(3))
                rank.needed[self._position[i]] += self._held[s][i][0]
                if not self._before[s]:
                    self._queue(_F, s, i, 0)
        self._most_needed = [max(rank.needed) for rank in self._ranks]

    def _end(self) -> int:
        lanes = [0] * len(self._ranks)
        for ready, s in sorted((self._last_backward[s], s) for s in self._stages if self._reduce[s]):
            for r in set(self._homes[s]):
                lanes[r] = max(lanes[r], ready) + self._reduce[s]
        return max(*(rank.free for rank in self._ranks), *lanes)

    def _schedule(self) -> Schedule:
        kinds = ("F", "I" if self._split else "B", "W")
        ranks = tuple(tuple(Action(s, kinds[k], i) for k, s, i in row) for row in self._rows)  # type: ignore[arg-type]
        return replace(self._form, ranks=ranks)

    def _queue(self, kind: int, stage: int, microbatch: int, time: int) -> None:
        if kind == _B and self._producers[stage]:
            rule = 0
        else:
            rule = 1 if kind == _F else 2 if self._reduce_first and self._reduce[stage] else 3
        action = (self._position[microbatch], -stage, kind)
        heappush(self._ranks[self._homes[stage][microbatch]].coming, (time, rule, action))

    def _arrive(self, kind: int, stage: int, microbatch: int, time: int) -> int:
        """Record that an input of an action arrives at `time`, and return the rank of the action."""
        missing, arrived = self._missing[kind][stage], self._arrived[kind][stage]
        missing[microbatch] -= 1
        if time > arrived[microbatch]:
            arrived[microbatch] = time
        if not missing[microbatch]:
            self._queue(kind, stage, microbatch, arrived[microbatch])
        return self._homes[stage][microbatch]

    def _start(self, r: int) -> int:
        """Return the earliest time at which rank `r` can start an action whose inputs have been sent, or `_NEVER`."""
        rank = self._ranks[r]
        while rank.coming and rank.coming[0][0] <= rank.free:
            _, rule, action = heappop(rank.coming)
            heappush(rank.ready[rule], action)
        backward, forward, early, late = rank.ready
        if backward or early or late or (forward and self._fits(r, forward[0])):
            return rank.free
        first = forward[0] if forward else None
        for time, rule, action in sorted(rank.coming):
            if rule != 1:
                return time
            if first is None or action < first:
                if self._fits(r, action):
                    return time
                first = action
        return _NEVER

    def _fits(self, r: int, action: tuple[int, int, int]) -> bool:
        """Return whether rank `r` has memory for a forward and, after it, for the rest of its microbatch.

        The same must hold for every microbatch of higher priority.
        """
        if self._limits is None:
            return True
        rank, limit = self._ranks[r], self._limits[r]
        position, stage = action[0], -action[1]
        own = self._held[stage][self._order[position]][0]
        total = rank.held + own
        if total + self._most_needed[r] <= limit:
            return True
        if total > limit:
            return False
        for k in range(position + 1):
            needed = rank.needed[k] - (own if k == position else 0)
            if needed and total + needed > limit:
                return False
            total -= rank.held_by[k]
        return True

    def _execute(self, r: int, start: int) -> Iterator[int]:
        """Start the most urgent action of a rank, and yield every rank whose next start may have changed."""
        rank = self._ranks[r]
        while rank.coming and rank.coming[0][0] <= start:
            _, rule, action = heappop(rank.coming)
            heappush(rank.ready[rule], action)
        backward, forward, early, late = rank.ready
        fits = not backward and forward and self._fits(r, forward[0])
        position, stage, kind = heappop(backward or (forward if fits else early or late))
        stage, i = -stage, self._order[position]
        duration = self._duration[kind][stage][i]
        end = rank.free = start + duration
        rank.left -= duration
        self._rows[r].append((kind, stage, i))
        self._hold(rank, kind, stage, i)
        others = self._after[stage] if kind == _F else self._producers[stage] if kind == _B else ()
        for other in others:
            home, time = self._homes[other][i], end
            if home != r and (transfer := self._transfer[stage, other][i]):
                time = self._links[r, home] = max(self._links.get((r, home), 0), end) + transfer
            yield self._arrive(kind, other, i, time)
        if kind == _F and self._trained[stage]:
            self._arrive(_B, stage, i, end)
        elif kind == _B and self._split:
            self._queue(_W, stage, i, end)
        if kind != _F:
            self._last_backward[stage] = max(self._last_backward[stage], end)
        yield r

    def _hold(self, rank: _Rank, kind: int, stage: int, i: int) -> None:
        activation, kept = self._held[stage][i]
        change = (activation if self._trained[stage] else 0, kept - activation, -kept)[kind]
        position = self._position[i]
        rank.held += change
        rank.held_by[position] += change
        if kind == _F:
            rank.needed[position] -= activation
