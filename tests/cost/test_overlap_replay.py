"""Replay of steps of the overlap benchmark: order and computation of the step, collectives of the serial link."""

from __future__ import annotations

import pytest
from benchmarks._overlap_replay import Link, replayed_s, replays

pytestmark = pytest.mark.unit


def times(issued, blocked, step, size=1000_000):
    in_flight = [(at, end) for at, (_, end) in zip(issued, blocked, strict=True)]
    sizes = [size] * len(issued)
    return {
        "issued": issued,
        "blocked": blocked,
        "in_flight": in_flight,
        "bytes": sizes,
        "step": step,
    }


# Two collectives of 2 seconds, each after 1 second of computation on rank 0 and 1.5 on rank 1, and 1 second at the end.
SERIAL = (
    times([1.0, 4.5], [(1.0, 3.5), (4.5, 7.0)], (0.0, 8.0)),
    times([1.5, 5.0], [(1.5, 3.5), (5.0, 7.0)], (0.0, 8.0)),
)


def test_a_serial_step_is_reproduced():
    link = Link.of([SERIAL])
    assert link.seconds(2_000_000) == pytest.approx(2.0)
    assert replayed_s(SERIAL, link) == pytest.approx(8.0)


def test_collectives_queue_on_the_link_and_hide_behind_computation():
    # Both are issued within 1 second, then 2.5 seconds of computation precede the waits and 1 second follows them.
    rank = times([0.5, 1.0], [(3.5, 3.5), (3.5, 4.5)], (0.0, 5.5))
    assert replayed_s((rank, rank), Link(0.0, 1e6)) == pytest.approx(0.5 + 2.0 + 2.0 + 1.0)
    # A faster link leaves the computation: 3.5 seconds before the waits and 1 after them.
    assert replayed_s((rank, rank), Link(0.0, 1e7)) == pytest.approx(4.5)


def test_the_durations_of_collectives_are_not_those_of_the_replayed_step():
    # The same step, with waits that took 1 second longer: the replay does not repeat them.
    slow = times([1.0, 5.0], [(1.0, 4.0), (5.0, 8.0)], (0.0, 9.0))
    results = replays({"serial": [SERIAL], "slow": [(slow, slow)]})
    assert results["serial"]["replay_error"] == pytest.approx([0.0])
    assert results["slow"]["replayed_s"] == pytest.approx([3 * 1.0 + 2 * 2.0])
    assert results["slow"]["replay_error"] == pytest.approx([7.0 / 9.0 - 1.0])


def test_latency_is_the_time_of_small_collectives():
    small = times([0.0], [(0.0, 0.25)], (0.0, 1.0), size=8)
    assert Link.of([SERIAL, (small, small)]).seconds(0) == pytest.approx(0.25)
