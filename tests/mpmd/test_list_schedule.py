"""List scheduling: legal, within memory, without deadlock, and about as fast as presets that are optimal."""

import random

import pytest

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import StageCost, StageGraph
from hyper_parallel.mpmd import (
    held_bytes,
    in_flight,
    list_schedule,
    lower,
    make_schedule,
    schedule_tasks,
    verify,
)
from hyper_parallel.sim import simulate

pytestmark = pytest.mark.unit


def _chain(stages):
    return StageGraph(tuple((s, s + 1) for s in range(stages - 1)))


def _end(schedule, costs, **options):
    return simulate(schedule_tasks(schedule, costs, **options)).end_s


def _random_case(rng):
    stages, microbatches, world = rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 4)
    edges = [(rng.randrange(t), t) for t in range(1, stages) for _ in range(rng.randint(0, 2))]
    copied = {s for s in range(stages) if rng.random() < 0.4}
    graph = StageGraph(tuple(sorted(set(edges))), copied=frozenset(copied))
    place = [rng.randrange(world) for _ in range(stages)]
    homes = [[rng.randrange(world) if s in copied else place[s] for _ in range(microbatches)] for s in range(stages)]
    costs = []
    for _ in range(stages):
        sizes = [rng.randint(0, 9) for _ in range(microbatches)]
        costs.append(
            [StageCost(n, n, rng.randint(0, 9), activation_bytes=n, weight_grad_input_bytes=n // 2) for n in sizes]
        )
    transfers = {edge: [rng.randint(0, 3)] * microbatches for edge in graph.edges}
    return graph, homes, costs, transfers


def _least_bytes(homes, costs):
    """Return per rank the activations of its largest microbatch."""
    world = 1 + max(map(max, homes))
    need = [[0] * len(homes[0]) for _ in range(world)]
    for row, cost_row in zip(homes, costs, strict=True):
        for i, (rank, cost) in enumerate(zip(row, cost_row, strict=True)):
            need[rank][i] += cost.activation_bytes
    return [max(row) for row in need]


def test_random_problems_give_verified_schedules_within_any_sufficient_memory():
    tighter = 0
    for seed in range(200):
        rng = random.Random(seed)
        graph, homes, costs, transfers = _random_case(rng)
        order = rng.sample(range(len(homes[0])), len(homes[0]))
        options = {"split": rng.random() < 0.5, "order": order, "transfer_s": transfers}
        limits = [n + rng.randint(0, 4) for n in _least_bytes(homes, costs)]
        free = list_schedule(graph, homes, costs, **options)
        tight = list_schedule(graph, homes, costs, max_bytes=limits, **options)
        for schedule, most in ((free, None), (tight, limits)):
            lowered = lower(schedule, costs=costs, transfer_s=transfers)
            verify(lowered, costs=costs, max_bytes=most)
        tighter += held_bytes(free, costs) != held_bytes(tight, costs)
    assert tighter > 20


def test_a_microbatch_that_does_not_fit_is_refused():
    cost = StageCost(1, 1, 1, activation_bytes=8)
    with pytest.raises(ScheduleError, match="exceed the memory of a rank"):
        list_schedule(_chain(2), [[0, 0], [0, 0]], [cost, cost], max_bytes=[15])


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_a_uniform_chain_takes_about_the_time_of_the_presets_with_their_memory(p, m):
    cost = StageCost(1, 1, 1, activation_bytes=1, weight_grad_input_bytes=1)
    homes = [[r] * m for r in range(p)]
    preset = make_schedule("1f1b", p, m)
    limits = held_bytes(preset, [cost] * p)
    ours = list_schedule(_chain(p), homes, [cost] * p, max_bytes=limits, split=False)
    assert _end(ours, [cost] * p) == _end(preset, [cost] * p)
    assert in_flight(ours) == in_flight(preset)

    homes += [[r] * m for r in reversed(range(p))]
    preset = make_schedule("zbv", p, m)
    limits = held_bytes(preset, [cost] * 2 * p)
    ours = list_schedule(_chain(2 * p), homes, [cost] * 2 * p, max_bytes=limits)
    assert _end(ours, [cost] * 2 * p) <= _end(preset, [cost] * 2 * p) + p
