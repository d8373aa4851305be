"""Load balancing: reorder the sequences of one step so that all data-parallel ranks have about equal work.

    data order             rank 0 | 9 1 | 8 2 |   rank 1 | 1 1 | 1 1 |      cost of the step 20
    balanced               rank 0 | 9 1 | 1 1 |   rank 1 | 8 2 | 1 1 |      cost of the step 12

The numbers are costs of sequences; each bar ends a microbatch. Turn t consists of the t-th microbatch of every rank.
The cost of the step is the largest total of a rank. If ranks wait for each other after every turn, it is the sum of the
largest microbatch costs of all turns. Sequences are assigned to microbatches, largest first, and microbatches to ranks.
Pairwise exchanges then lower the largest sum of costs. A limit on comparisons, not on time, ends the search, so every
rank computes the same order. A step keeps its set of sequences, so its loss and gradients do not change.

Sources: longest processing time first (LPT), Graham 1969; balanced microbatches of data-parallel ranks, DistTrain,
arXiv:2408.04275, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

_MAX_COMPARISONS: Final = 1 << 20
"""Maximum number of pairs of items that a call of `spread` compares."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Assignment of the microbatches of a step to ranks.

    Attributes:
        owners: For each rank, the indices of its microbatches, in order of computation. In data order, microbatches are
            numbered by data-parallel rank, then by position in the rank.
        rows: Number of sequences per microbatch.
        in_turns: True if all ranks wait for each other after every microbatch, as with FSDP; False if they wait only at
            the end of the step.
        seconds: Function from the costs of all microbatches to the predicted seconds of the step. None: the order of
            microbatches on a rank does not affect the time.
    """

    owners: tuple[tuple[int, ...], ...]
    rows: int
    in_turns: bool
    seconds: Callable[[Int64], float] | None = field(default=None, compare=False)

    @classmethod
    def of_data_ranks(cls, ranks: int, turns: int, rows: int, in_turns: bool) -> Grid:
        """Return the grid in which each of `ranks` data-parallel ranks computes its own `turns` microbatches."""
        numbers = np.arange(ranks * turns).reshape(ranks, turns).tolist()
        return cls(tuple(map(tuple, numbers)), rows, in_turns)

    @property
    def turns(self) -> list[list[int]]:
        """For each turn, the indices (in `owners`) of the ranks that compute a microbatch in it."""
        most = max(map(len, self.owners))
        return [[k for k, own in enumerate(self.owners) if t < len(own)] for t in range(most)]

    def microbatch_costs(self, costs: Int64) -> Int64:
        """Return the total cost of each microbatch, given the costs of the sequences in order."""
        return costs.reshape(-1, self.rows).sum(1)

    def largest(self, costs: Int64) -> int:
        """Return the cost of the critical path, given the costs of the sequences in order.

        This is the largest total cost of a rank. With `in_turns`, it is the sum over turns of the largest microbatch
        cost.
        """
        loads = self.microbatch_costs(costs)
        if not self.in_turns:
            return max(int(loads[[*own]].sum()) for own in self.owners)
        return sum(max(int(loads[self.owners[k][t]]) for k in owners) for t, owners in enumerate(self.turns))

    def imbalance(self, costs: Int64) -> float:
        """Return `largest` divided by the mean cost of a rank; 1 if all costs are 0."""
        total = int(costs.sum())
        return self.largest(costs) * len(self.owners) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Balance:
    """Load imbalance of a step before and after balancing; see `Grid.imbalance`.

    Attributes:
        media_tokens: Number of tokens of images and audio in the step.
        in_order: Imbalance in data order.
        balanced: Imbalance in balanced order, in which the step runs.
        predicted_in_order_s: Predicted seconds of the step in data order; None without `Grid.seconds` or if all costs
            are 0.
        predicted_s: Predicted seconds of the step in balanced order; None in the same cases.
    """

    media_tokens: int
    in_order: float
    balanced: float
    predicted_in_order_s: float | None = None
    predicted_s: float | None = None

    @classmethod
    def of(cls, media_tokens: int, in_order: Int64, balanced: Int64, grid: Grid) -> Balance:
        """Return the imbalance of a step from the costs of its sequences in data order and in balanced order."""
        both = in_order, balanced
        seconds = [
            grid.seconds(grid.microbatch_costs(costs)) if grid.seconds and in_order.any() else None for costs in both
        ]
        return cls(media_tokens, *map(grid.imbalance, both), *seconds)


def arrange(costs: Int64, grid: Grid) -> Int64:
    """Return a balanced order of a step's sequences: for each position, the index of its sequence in `costs`.

    Without `grid.seconds`, the result has a lower `grid.largest` than the data order, or an equal one with a lower
    largest microbatch cost; otherwise it is the data order. With `grid.seconds`, it is the fastest of the data order
    and two balanced orders, with largest or smallest microbatches first. Balanced orders count only if they increase
    neither of the two costs above. No microbatch costs more than the largest one in data order.

    Args:
        costs: [N] cost of each sequence in data order, at least 0.
        grid: Assignment of microbatches to ranks.
    """
    data_order = np.arange(len(costs))
    if not costs.any() or (len(grid.owners) == 1 and grid.seconds is None):
        return data_order

    def objective(order: Int64) -> tuple[int, int]:
        return grid.largest(costs[order]), int(grid.microbatch_costs(costs[order]).max())

    orders = []
    for bins in _microbatches(costs, grid):
        loads = np.array([costs[b].sum() for b in bins])
        if loads.max() <= grid.microbatch_costs(costs).max():
            members = (_in_turns if grid.in_turns else _in_sum)(loads, grid)
            smallest_first = [numbers[::-1] for numbers in members]
            orders.append((_placed(bins, members, grid), _placed(bins, smallest_first, grid)))
    balanced = min(orders, key=lambda pair: objective(pair[0]))
    if grid.seconds is None:
        return min(data_order, balanced[0], key=objective)
    candidates = [data_order]
    if objective(balanced[0]) <= objective(data_order):
        candidates += balanced
    seconds = [grid.seconds(grid.microbatch_costs(costs[order])) for order in candidates]
    return candidates[int(np.argmin(seconds))]


def _microbatches(costs: Int64, grid: Grid) -> Iterator[list[Int64]]:
    """Yield up to three divisions into microbatches: as in the data, of about equal cost, and about equal per turn."""
    count = len(costs) // grid.rows
    yield np.split(np.arange(len(costs)), count)
    if grid.rows == 1:
        return
    yield spread(costs, [grid.rows] * count)
    if grid.in_turns:
        sizes = [len(owners) for owners in grid.turns]
        ends = np.cumsum(sizes)[:-1] * grid.rows
        by_turn = np.split(np.argsort(-costs, kind="stable"), ends)
        parts = zip(by_turn, sizes, strict=True)
        yield [part[b] for part, size in parts for b in spread(costs[part], [grid.rows] * size)]


def _placed(bins: Sequence[Int64], members: Sequence[Sequence[int]], grid: Grid) -> Int64:
    """Return the sequence index in each position; `members` has, for each rank, the indices of its `bins`."""
    numbers = np.empty(len(bins), np.int64)
    for own, chosen in zip(grid.owners, members, strict=True):
        numbers[[*own]] = chosen
    return np.concatenate([bins[number] for number in numbers])


def _in_sum(loads: Int64, grid: Grid) -> list[list[int]]:
    """Assign microbatches of cost `loads` to ranks with about equal sums; return them by rank, largest first."""
    parts = spread(loads, [len(own) for own in grid.owners])
    return [sorted(part.tolist(), key=lambda i: -loads[i]) for part in parts]


def _in_turns(loads: Int64, grid: Grid) -> list[list[int]]:
    """Assign microbatches so that their costs `loads` in a turn are about equal; return the microbatches by rank."""
    queue = iter(np.argsort(-loads, kind="stable").tolist())
    order: list[list[int]] = [[] for _ in grid.owners]
    sums = [0] * len(order)
    for owners in grid.turns:
        for owner in sorted(owners, key=sums.__getitem__):
            order[owner].append(number := next(queue))
            sums[owner] += int(loads[number])
    return order


def spread(costs: Int64, sizes: Sequence[int]) -> list[Int64]:
    """Assign items to bins so that the largest total cost of a bin is small; return the indices of each bin's items.

    `costs` [N] has the cost of each item; `sizes` has the number of items in each bin, N in all.
    """
    members: list[list[int]] = [[] for _ in sizes]
    free = [(0, k) for k, count in enumerate(sizes) if count]
    heapify(free)
    for item in np.argsort(-costs, kind="stable").tolist():
        load, k = heappop(free)
        members[k].append(item)
        if len(members[k]) < sizes[k]:
            heappush(free, (load + int(costs[item]), k))
    return _exchange(costs, members)


def _exchange(costs: Int64, members: list[list[int]]) -> list[Int64]:
    """Lower the largest cost by exchanges of items between the most expensive bin and others; return the bins."""
    bins = [np.array(items, np.int64) for items in members]
    loads = np.array([costs[items].sum() for items in bins], np.int64)
    bin_of = np.empty(len(costs), np.int64)
    for k, items in enumerate(bins):
        bin_of[items] = k
    budget = _MAX_COMPARISONS
    while len(bins) > 1:
        top = int(loads.argmax())
        budget -= len(bins[top]) * len(costs)
        if budget < 0:
            break
        # Cost of an exchange: the larger of the two new sums.
        saved = costs[bins[top]][:, None] - costs[None]
        after = np.maximum(loads[top] - saved, loads[bin_of][None] + saved)
        after[:, bin_of == top] = loads[top]
        best = int(after.argmin())
        if after.flat[best] >= loads[top]:
            break
        place, other = divmod(best, len(costs))
        item, target = int(bins[top][place]), int(bin_of[other])
        bins[top][place] = other
        bins[target][bins[target] == other] = item
        bin_of[item], bin_of[other] = target, top
        moved = costs[item] - costs[other]
        loads[top] -= moved
        loads[target] += moved
    return bins
