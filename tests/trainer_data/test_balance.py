"""Balance by cost: properties for any costs and layout, and the optimum of small steps by enumeration."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.trainer.data import Balance, Batches, Grid, Order
from hyper_parallel.trainer.data.balance import arrange, spread
from hyper_parallel.trainer.engine.cost_balance import fitted_costs

pytestmark = pytest.mark.torch


@st.composite
def grids(draw: st.DrawFn, most: int = 96) -> Grid:
    """Draw places of data-parallel ranks, or of a tower whose last round may be shorter."""
    rows = draw(st.integers(1, 3))
    count = draw(st.integers(1, most // rows))
    ranks = draw(st.integers(1, min(8, count)))
    in_turns = draw(st.booleans())
    if draw(st.booleans()):
        owners = tuple(tuple(range(k, count, ranks)) for k in range(ranks))
        return Grid(owners, rows, in_turns)
    return Grid.of_data_ranks(ranks, count // ranks, rows, in_turns)


def num_records(grid: Grid) -> int:
    return sum(map(len, grid.owners)) * grid.rows


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_balanced_step_keeps_its_records_and_never_gets_worse(data: st.DataObject) -> None:
    grid = data.draw(grids())
    count = num_records(grid)
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    tails = data.draw(st.sampled_from((0.3, 1.0, 4.0)))
    costs = (random.pareto(tails, count).clip(max=1e4) * random.integers(0, 20, count)).astype(int)
    order = arrange(costs, grid)
    assert sorted(order) == list(range(count))
    assert np.array_equal(order, arrange(costs.copy(), grid))
    assert grid.largest(costs[order]) <= grid.largest(costs)
    assert grid.imbalance(costs[order]) > 1 - 1e-12
    microbatches = costs.reshape(-1, grid.rows).sum(1), costs[order].reshape(-1, grid.rows).sum(1)
    assert microbatches[1].max() <= microbatches[0].max()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_small_steps_are_within_four_thirds_of_the_optimum(data: st.DataObject) -> None:
    grid = data.draw(grids(most=6))
    count = num_records(grid)
    values = st.one_of(st.integers(0, 3), st.integers(0, 100))
    costs = np.array(data.draw(st.lists(values, min_size=count, max_size=count)), np.int64)
    orders = np.array([*permutations(range(count))])
    loads = costs[orders].reshape(len(orders), -1, grid.rows).sum(2)
    if grid.in_turns:
        turns = ([grid.owners[k][t] for k in owners] for t, owners in enumerate(grid.turns))
        largest = sum(loads[:, turn].max(1) for turn in turns)
    else:
        largest = np.stack([loads[:, [*own]].sum(1) for own in grid.owners]).max(0)
    assert largest[0] == grid.largest(costs)
    # No microbatch may become larger than the largest one in the order of the data.
    allowed = loads.max(1) <= loads[0].max()
    assert 3 * grid.largest(costs[arrange(costs, grid)]) <= 4 * largest[allowed].min()


def test_a_last_turn_of_fewer_ranks_gets_the_smallest_sequences() -> None:
    grid = Grid(((0, 2), (1,)), 2, in_turns=True)
    costs = np.array([0, 0, 0, 1, 1, 2])
    assert grid.largest(costs) == 4
    assert grid.largest(costs[arrange(costs, grid)]) == 2


def test_an_order_that_is_better_than_the_spread_one_stays() -> None:
    grid = Grid.of_data_ranks(2, 2, 2, in_turns=False)
    costs = np.array([16, 16, 16, 0, 14, 15, 12, 9])
    assert grid.largest(costs) == 50
    assert arrange(costs, grid).tolist() == [*range(8)]


def test_the_order_of_microbatches_is_the_fastest_predicted_one() -> None:
    costs = np.array([5, 1, 1, 4, 2, 2])

    def seconds(loads: np.ndarray) -> float:
        """Return the end of two stages in a row, of which the second one takes 3 for every microbatch."""
        ready = end = 0.0
        for load in loads.tolist():
            ready += load
            end = max(end, ready) + 3
        return end

    grid = Grid(((0, 1, 2, 3, 4, 5),), 1, in_turns=False, seconds=seconds)
    order = arrange(costs, grid)
    assert costs[order].tolist() == [1, 1, 2, 2, 4, 5]
    balance = Balance.of(16, costs, costs[order], grid)
    assert balance.predicted_in_order_s == seconds(costs) == 23
    assert balance.predicted_s == 19
    assert arrange(np.sort(costs), grid).tolist() == [*range(6)]


def test_exchanges_improve_on_the_largest_first() -> None:
    costs = np.array([7, 6, 5, 5, 4, 3])
    bins = spread(costs, [3, 3])
    assert sorted(int(costs[items].sum()) for items in bins) == [15, 15]


def test_a_large_step_is_arranged_within_a_number_of_comparisons() -> None:
    costs = np.random.default_rng(0).integers(0, 5000, 8192)
    grid = Grid.of_data_ranks(512, 8, 2, in_turns=False)
    order = arrange(costs, grid)
    assert sorted(order) == list(range(8192))
    assert grid.imbalance(costs) > 1.4
    assert grid.imbalance(costs[order]) < 1.05


class _Sequences:
    """Sequences of which only the costs are read."""

    split = "train"

    def __len__(self) -> int:
        return 64

    def media_costs(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([np.ones_like(indices), (indices * 37) % 64], axis=1)


def test_every_layout_and_a_resumed_run_get_the_same_sequences_in_a_step() -> None:
    order = Order(seed=5, costs=(0, 1))
    batches = Batches(_Sequences(), sequences_per_step=16, order=order)
    resumed = Batches(_Sequences(), sequences_per_step=16, order=order)
    resumed.load_state_dict(batches.state_dict(5))
    for step in (5, 6, 5):
        for ranks, turns, rows in ((4, 4, 1), (2, 2, 4), (8, 1, 2)):
            grid = Grid.of_data_ranks(ranks, turns, rows, in_turns=True)
            arranged = batches._arrange(step, grid)
            assert np.array_equal(arranged, resumed._arrange(step, grid))
            assert sorted(arranged) == sorted(batches.step_batch(step))
            balance = batches.balance(step, grid)
            assert 1 <= balance.balanced < balance.in_order


@pytest.mark.parametrize(("item", "token"), [(0.0, 3e6), (5e9, 0.0), (2e8, 1e6)], ids=["tokens", "windows", "both"])
def test_costs_follow_from_the_operations_of_the_encoder(item: float, token: float) -> None:
    counts = np.array([[1, 40], [1, 400], [3, 300], [2, 900], [4, 100]])
    costs = fitted_costs(counts, (counts @ [item, token]).tolist())
    wanted, found = counts @ [item, token], counts @ np.array(costs)
    assert found / found.sum() == pytest.approx(wanted / wanted.sum(), rel=0.05)
    assert fitted_costs(counts, [0.0] * 5) == (0, 1)
