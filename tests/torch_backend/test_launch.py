"""Ranks that hang say where."""

from __future__ import annotations

import time

import pytest

from hyper_parallel.errors import RankFailed
from hyper_parallel.runtime import launch


def _sleep_forever(_: int) -> None:
    time.sleep(100)


def test_ranks_that_hang_are_stopped_and_say_where_they_stand() -> None:
    with pytest.raises(RankFailed) as failure:
        launch(lambda rank: rank and _sleep_forever(rank), 3, timeout_s=0.5)
    text = str(failure.value)
    assert "rank 1 failed (not finished after 0.5 s)" in text
    assert text.count("in _sleep_forever") == 2  # rank 1 in full, rank 2 in a line
    assert "rank 0" not in text


def test_results_come_in_rank_order() -> None:
    assert launch(lambda rank: rank * rank, 3, timeout_s=30) == [0, 1, 4]
