"""The order of the sequences, and the slices that ranks read of it."""

import json

import numpy as np
import pytest

from hyper_parallel.errors import BatchMismatch, CheckpointMismatch, NoData
from hyper_parallel.trainer.data import IGNORE_INDEX, Batches, Order
from hyper_parallel.trainer.data.sequences import JoinedSequences

pytestmark = pytest.mark.torch


@pytest.fixture
def train(corpus, make):
    return make(corpus).train


def whole_step(batches, step, dp, microbatch, accumulation):
    ranks = [batches.microbatches(step, r, dp, microbatch, accumulation) for r in range(dp)]
    assert {len(r) for r in ranks} == {accumulation}
    parts = [b for r in ranks for b in r]
    assert {b.input_ids.shape for b in parts} == {(microbatch, 32)}
    return (
        np.concatenate([b.input_ids for b in parts]),
        np.concatenate([b.shift_labels for b in parts]),
        sum(b.num_valid for b in parts),
    )


@pytest.mark.parametrize("tail", ["wrap", "pad"])
def test_the_content_of_a_step_does_not_depend_on_the_layout(train, tail):
    batches = Batches(train, sequences_per_step=8, tail=tail, order=Order(seed=3))
    for step in (0, 5, batches.steps_per_epoch - 1, batches.steps_per_epoch):
        reference = whole_step(batches, step, 1, 8, 1)
        for dp, microbatch, accumulation in [(1, 1, 8), (2, 2, 2), (4, 1, 2), (8, 1, 1), (2, 4, 1)]:
            other = whole_step(batches, step, dp, microbatch, accumulation)
            assert np.array_equal(reference[0], other[0])
            assert np.array_equal(reference[1], other[1])
            assert reference[2] == other[2] == batches.num_valid(step)
            assert other[2] == int((other[1] != IGNORE_INDEX).sum())


def test_wrapping_visits_every_sequence_once_per_epoch_in_a_new_order(train):
    batches = Batches(train, sequences_per_step=7, order=Order(seed=3))
    count = len(train)
    seen = np.concatenate([batches.step_batch(s) for s in range(2 * count)])[: 2 * count]
    first, second = seen[:count], seen[count:]
    assert sorted(first) == sorted(second) == list(range(count))
    assert not np.array_equal(first, second)
    assert count % 7


def test_the_order_is_fixed_for_ever(train):
    batches = Batches(train, sequences_per_step=6, limit=10, order=Order(seed=11))
    spread = [i * len(train) // 10 for i in range(10)]
    assert batches.step_batch(0).tolist() == [spread[i] for i in (3, 6, 0, 7, 4, 1)]
    assert batches.step_batch(1)[:4].tolist() == [spread[i] for i in (2, 9, 5, 8)]


def test_a_step_may_hold_several_epochs(train):
    batches = Batches(train, sequences_per_step=10, limit=4, order=Order(seed=0))
    seen, counts = np.unique(batches.step_batch(0), return_counts=True)
    assert seen.tolist() == [i * len(train) // 4 for i in range(4)]
    assert sorted(counts.tolist()) == [2, 2, 3, 3]


def test_padding_visits_every_sequence_once_and_fills_with_rows_without_labels(train):
    batches = Batches(train, sequences_per_step=8, tail="pad", limit=19, order=Order(shuffle=False))
    assert batches.steps_per_epoch == 3
    seen = np.concatenate([batches.step_batch(s) for s in range(3)])
    assert seen.tolist() == [*(i * len(train) // 19 for i in range(19)), *[-1] * 5]
    last = batches.microbatches(2, 1, 2, 2, 2)
    assert [b.num_valid for b in last] == [0, 0]
    assert all((b.shift_labels == IGNORE_INDEX).all() for b in last)
    assert sum(batches.num_valid(s) for s in range(3)) == 19 * 32
    assert np.array_equal(batches.step_batch(3), batches.step_batch(0))


def test_sizes_that_do_not_multiply_to_the_step_are_refused(train):
    batches = Batches(train, sequences_per_step=8)
    with pytest.raises(BatchMismatch, match="HP308") as caught:
        batches.microbatches(0, 0, 3, 1, 2)
    assert caught.value.allowed == 8
    with pytest.raises(BatchMismatch):
        batches.microbatches(0, 2, 2, 4, 1)
    with pytest.raises(BatchMismatch):
        Batches(train, sequences_per_step=0)


def test_nothing_to_read_is_refused(corpus, make):
    with pytest.raises(NoData, match="no sequence"):
        Batches(make(corpus, holdout=0.0).holdout, sequences_per_step=1)


def test_a_position_read_back_continues_the_order(train):
    batches = Batches(train, sequences_per_step=6, fingerprint="abc", order=Order(seed=5))
    state = json.loads(json.dumps(batches.state_dict(4)))
    again = Batches(train, sequences_per_step=6, fingerprint="abc", order=Order(seed=5))
    again.load_state_dict(state)
    for step in (4, 40):
        assert np.array_equal(again.step_batch(step), batches.step_batch(step))


def test_another_number_of_tokens_per_step_continues_after_what_was_seen(train, caplog):
    batches = Batches(train, sequences_per_step=6, order=Order(seed=5))
    order = np.concatenate([batches.step_batch(s) for s in range(6)])
    again = Batches(train, sequences_per_step=4, order=Order(seed=5))
    again.load_state_dict(batches.state_dict(4))
    assert np.array_equal(again.step_batch(4), order[24:28])
    assert np.array_equal(again.step_batch(5), order[28:32])
    assert "6 to 4" in caplog.text
    third = Batches(train, sequences_per_step=6, order=Order(seed=5))
    third.load_state_dict(again.state_dict(5))
    assert np.array_equal(third.step_batch(5), batches.step_batch(4)[4:].tolist() + order[30:34].tolist())


@pytest.mark.parametrize(
    ("where", "change", "hint"),
    [
        ("training.seed", {"order": Order(seed=6)}, "training.seed=5"),
        ("data.shuffle", {"order": Order(seed=5, shuffle=False)}, "data.shuffle=true"),
        ("data", {"fingerprint": "x"}, "checkpoint.from_dir=null checkpoint.resume=never"),
        ("data", {"limit": 9}, "checkpoint.from_dir=null checkpoint.resume=never"),
    ],
)
def test_a_position_in_other_data_is_refused(train, where, change, hint):
    values = {"sequences_per_step": 6, "fingerprint": "abc", "order": Order(seed=5)}
    state = Batches(train, **values).state_dict(4)
    other = Batches(train, **values | change)
    with pytest.raises(CheckpointMismatch, match="HP702") as caught:
        other.load_state_dict(state, "checkpoint.from_dir=null checkpoint.resume=never")
    assert (caught.value.where, caught.value.hint) == (where, hint)


def test_a_mixture_has_exact_shares_in_an_order_of_the_seed(corpus, conversations, make, tmp_path):
    small = make(conversations, stage="pt", max_bytes=600, holdout=0.0).train
    joined = JoinedSequences([make(corpus).train, small])
    weights = (3, 1)
    batches = Batches(joined, sequences_per_step=8, order=Order(seed=3, weights=weights))
    seen = np.concatenate([batches.step_batch(s) for s in range(512)])
    second = seen >= len(joined.parts[0])
    for end in (1024, 2048, 4096):
        assert second[:end].sum() == end / 4
    assert 0 < second[:64].sum() < 64  # mixed, not one after another
    # Every source goes through its own epochs: each of its sequences once before any comes again.
    for part, mine in zip(joined.parts, (seen[~second], seen[second]), strict=True):
        assert len(set(mine[: len(part)].tolist())) == min(len(part), len(mine))
    again = Batches(joined, sequences_per_step=4, order=Order(seed=3, weights=weights))
    again.load_state_dict(batches.state_dict(300))
    assert np.array_equal(again.step_batch(300), batches.step_batch(300)[:4])
    other = Batches(joined, sequences_per_step=8, order=Order(seed=4, weights=weights))
    assert not np.array_equal(other.step_batch(0), batches.step_batch(0))
    # Many sources of small weight: a block is still full, and nobody is owed more than one.
    many = Batches(
        JoinedSequences([small] * 9),
        sequences_per_step=1024,
        order=Order(weights=[1000, *[0.7] * 8]),
    )
    owed = np.zeros(9)
    for step in range(6):
        source = many.step_batch(step) // len(small)
        owed += np.array([1000, *[0.7] * 8]) / 1005.6 * 1024 - np.bincount(source, minlength=9)
        assert np.abs(owed).max() < 8


def test_sequences_of_several_sources_are_read_as_each_alone(corpus, conversations, make):
    parts = [make(corpus).train, make(conversations).train]
    joined = JoinedSequences(parts)
    at = np.array([len(parts[0]) + 1, 0, -1, len(parts[0]), len(parts[0]) - 1])
    inputs, labels = joined.read(at)
    for row, (part, index) in enumerate([(1, 1), (0, 0), (0, -1), (1, 0), (0, len(parts[0]) - 1)]):
        expected = parts[part].read(np.array([index]))
        assert np.array_equal([inputs[row], labels[row]], [expected[0][0], expected[1][0]])
    assert joined.num_valid(at) == 4 * 32
