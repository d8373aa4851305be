"""Ranks of one program that compute at varying speed and wait for each other in collectives."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from hyper_parallel.cost.overlap import PassSeconds, pass_span
from hyper_parallel.sim import LaneProgram, Ranks

pytestmark = pytest.mark.unit

COUNT = 40
"""Collectives of a program."""


def chain(transfer):
    """Program of `COUNT` tasks of 1 s, each followed by a collective that the next one waits for, and its durations."""
    tasks = range(2 * COUNT)
    program = LaneProgram(
        tuple(n % 2 for n in tasks),
        tuple((n - 1,) if n else () for n in tasks),
        tuple(n % 2 for n in tasks),
    )
    return program, [np.array([1.0]), np.array([transfer])]


@pytest.mark.parametrize("jitter", [0.05, 0.3])
def test_collectives_wait_for_the_latest_rank(jitter):
    program, durations = chain(0.5)
    # Mean of the larger of two log-normal draws of mean 1.
    latest = 2.0 * NormalDist().cdf(np.sqrt(np.log1p(jitter**2) / 2.0))
    span = program.contended_span(durations, 0.0, Ranks(2, jitter))[0]
    assert span - COUNT * 1.5 == pytest.approx(COUNT * (latest - 1.0), rel=0.05)
    transfers = program.contended_span(durations, 0.0, Ranks(2, jitter, counts_late=False))[0]
    assert transfers == pytest.approx(COUNT * 1.5)


def test_the_first_rank_to_have_its_data_waits_in_the_next_collective():
    program, durations = chain(0.5)
    lockstep = program.contended_span(durations, 0.0)[0]
    assert program.contended_span(durations, 0.0, Ranks(2, 0.0, 0.2))[0] == pytest.approx(lockstep)
    blocked = Ranks(2, 0.0, 0.2, counts_late=False)
    assert program.contended_span(durations, 0.0, blocked)[0] == pytest.approx(COUNT * (1 + 0.45))


@pytest.mark.parametrize("ranks", [Ranks(1, 0.3, 0.2), Ranks(4, 0.0)])
def test_ranks_that_do_not_vary_run_in_lockstep(ranks):
    program, durations = chain(0.5)
    assert program.contended_span(durations, 0.1, ranks) == program.contended_span(durations, 0.1)


def test_an_overlapped_step_is_blocked_where_a_late_rank_issues_late():
    """In lockstep, halves hide all but the first and the last collective; a late rank starts collectives later."""
    half = PassSeconds(*(np.array([x]) for x in (2.0, 2.0, 0.0, 0.9, 0.9, 0.0)))
    busy = 2 * (2.0 + 2.0)
    spans = {
        ranks: pass_span(half, 2, 1, np.zeros(1), 0.0, 3, ranks)[0] - busy
        for ranks in (
            None,
            Ranks(2, 0.3, counts_late=False),
            Ranks(8, 0.3, counts_late=False),
        )
    }
    lockstep, two, eight = spans.values()
    assert lockstep == pytest.approx(2 * 0.9 / 3)
    assert lockstep + 0.1 < two < eight
