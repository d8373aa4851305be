"""Addresses: an arena close to what lives at the same time, or a proof that there is none."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import BudgetImpossible, TierFull
from hyper_parallel.ir import Extent
from hyper_parallel.offload import (
    Channel,
    MemoryMachine,
    assign_addresses,
    can_fit,
    find_overlap,
    order_peak,
    plan_memory,
)
from hyper_parallel.offload._arena_repair import Repair
from hyper_parallel.offload._exact import search
from tests.offload.programs import headed_step, training_chain
from tests.offload.test_random_programs import machines, programs

pytestmark = pytest.mark.unit
ALLOWED = 1.02
HARD = (
    (1, 9, 18), (4, 17, 33), (7, 13, 24), (20, 24, 25), (30, 34, 6), (26, 36, 20), (26, 39, 22), (16, 24, 38),
    (9, 10, 24), (21, 33, 23), (3, 5, 30), (3, 4, 9),
)  # fmt: skip
"""(first action, last action, bytes): repeated first fit ends 9 % above what lives at the same time."""


def six_goals(program):
    peak = order_peak(program, range(len(program.operators)))
    yield from ({"max_slowdown": s} for s in (0.0, 0.1, 0.5))
    yield from ({"budget_bytes": int(peak * share)} for share in (0.9, 0.7, 0.5))


def planned(program, machine):
    for goal in six_goals(program):
        try:
            yield plan_memory(program, machine, **goal)
        except (BudgetImpossible, TierFull):
            continue


def within(plan):
    return plan.arena_bytes <= ALLOWED * plan.peak_bytes["device"]


@settings(max_examples=3, deadline=None, derandomize=True)
@given(programs(), machines())
def test_an_arena_is_within_2_percent_where_the_search_finds_one(program, machine):
    """What the search gives up on may be possible or not."""
    for plan in planned(program, machine):
        limit = int(ALLOWED * plan.peak_bytes["device"])
        assert within(plan) or can_fit(plan.replayed.residency, program.spans, limit) is not True


def test_a_chain_is_within_2_percent():
    program = training_chain(4)
    plans = list(planned(program, MemoryMachine(Channel(800.0), Channel(800.0))))
    assert len(plans) > 3
    assert all(map(within, plans))


def test_what_a_selection_cannot_reach_waiting_does():
    """Two wide storages at the head are what any plan needs; all else waits until it fits beside them, without gaps."""
    program = headed_step()
    machine = MemoryMachine(Channel(2600.0), Channel(2600.0))
    plan = plan_memory(program, machine, max_slowdown=0.05, bandwidth_margin=0.0, recompute=False)
    largest = max(sum(program.sizes[s] for s in op.touched) for op in program.operators)
    assert plan.arena_bytes == plan.peak_bytes["device"] == largest
    assert plan.seconds <= 1.05 * program.seconds


@st.composite
def stays(draw):
    found = []
    for storage in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 7))
        found.append(Extent(storage, start, draw(st.integers(start + 1, 8))))
    return found, [draw(st.integers(1, 6)) for _ in found]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(stays())
def test_the_search_agrees_with_trying_every_order(drawn):
    """Every packing that cannot be pushed down is made by placing its items in the order of their offsets."""
    found, sizes = drawn

    def height(order):
        placed = []
        for i in order:
            clash = [
                t
                for j, t in placed
                if found[j].start < found[i].stop and found[i].start < found[j].stop
            ]
            placed.append((i, max(clash, default=0) + sizes[i]))
        return max(top for _, top in placed)

    least = min(map(height, itertools.permutations(range(len(found)))))
    intervals = [[(e.start, e.stop)] for e in found]
    assert search(intervals, sizes, least - 1, 100_000).ended
    packing = search(intervals, sizes, least, 100_000)
    assert int((packing.offsets + np.array(sizes)).max()) == least
    placed = [
        Extent(e.storage, e.start, e.stop, int(at))
        for e, at in zip(found, packing.offsets, strict=True)
    ]
    assert find_overlap(placed, sizes, least) is None


def many_stays(seed, count, short, sizes):
    """Short and long stays at any time; `short` is the share of the former."""
    rng = np.random.default_rng(seed)
    size = rng.choice(sizes, count)
    start = rng.integers(0, 4000, count)
    brief = rng.random(count) < short
    stop = start + np.where(brief, rng.integers(1, 8, count), rng.integers(20, 400, count))
    return [Extent(i, int(a), int(b)) for i, (a, b) in enumerate(zip(start, stop, strict=True))], [
        int(n) for n in size
    ]


@pytest.mark.parametrize(
    ("seed", "count", "short", "sizes"),
    [(0, 1600, 0.3, 7), (2, 1600, 0.3, 7), (2, 2000, 0.7, 255), (2, 1600, 0.3, 255)],
)
def test_what_ends_too_high_takes_the_place_of_others(seed, count, short, sizes):
    """Too many stays for the search; the best first fit ends 2.3 to 4 % above what lives at the same time."""
    of = [16, 28, 32, 64, 112, 128, 224] if sizes == 7 else list(range(1, 256))
    stays, nums = many_stays(seed, count, short, of)
    change = np.zeros(5000, np.int64)
    for stay in stays:
        change[stay.start] += nums[stay.storage]
        change[stay.stop] -= nums[stay.storage]
    placed, arena = assign_addresses(stays, nums)
    assert find_overlap(placed, nums, arena) is None
    assert arena <= ALLOWED * change.cumsum().max()


def test_a_repair_ends():
    at_once = [np.arange(3)] * 3
    size, time, start = np.array([4, 4, 3]), np.full(3, 2), np.array([0, 4, 8])
    repair = Repair(at_once, size, time, start, 10)
    assert repair.offsets(50) is None
    assert repair.moves == 50
    found = Repair(at_once, size, time, start + np.array([0, 0, 5]), 11).offsets(50)
    ends = sorted((at, at + num_bytes) for at, num_bytes in zip(found, size, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] <= 11
    assert Repair(at_once, np.array([4, 4, 12]), time, start, 11).offsets(50) is None


def test_first_fit_is_too_high_here_and_neither_repair_nor_search_is():
    stays = [Extent(i, start, stop) for i, (start, stop, _) in enumerate(HARD)]
    sizes = [size for *_, size in HARD]
    live = max(sum(size for start, stop, size in HARD if start <= t < stop) for t in range(40))
    placed, arena = assign_addresses(stays, sizes)
    assert find_overlap(placed, sizes, arena) is None
    assert arena <= ALLOWED * live
    assert can_fit(stays, sizes, int(ALLOWED * live)) is True


def test_a_storage_that_goes_around_has_one_address():
    """It is there at both ends and away in between, when it would fit lower."""
    stays = [Extent(0, 0, 2), Extent(0, 6, 8), Extent(1, 0, 3), Extent(2, 5, 8)]
    sizes = [4, 3, 5]
    placed, arena = assign_addresses(stays, sizes)
    assert placed[0].offset_bytes == placed[1].offset_bytes
    assert arena == 9
    assert can_fit(stays, sizes, 8) is False
