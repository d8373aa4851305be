"""Local ranks: what they inherit, what they say when they hang."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_parallel.errors import ForkUnsafe, RankFailed
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch


def _sleep_forever(_: int) -> None:
    time.sleep(100)


def test_ranks_that_hang_are_stopped_and_say_where_they_stand() -> None:
    with pytest.raises(RankFailed) as failure:
        launch(lambda rank: rank and _sleep_forever(rank), 3, timeout_s=3)
    text = str(failure.value)
    assert "rank 1 failed (not finished after 3 s)" in text
    assert text.count("in _sleep_forever") == 2  # rank 1 in full, rank 2 in a line
    assert "rank 0" not in text


def test_the_rank_that_raised_is_named_first_though_its_group_closes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others fail when its connections close, and may have said so before it has written its own failure."""
    leave = World.leave

    def slowly(world: World) -> None:
        leave(world)
        time.sleep(0.5 * world.rank)

    monkeypatch.setattr(World, "leave", slowly)

    def body(rank: int) -> None:
        with World.join("cpu"):
            torch.distributed.barrier()
            if rank == 1:
                raise ArithmeticError("the cause")
            torch.distributed.barrier()

    with pytest.raises(RankFailed, match="rank 1 failed") as failure:
        launch(body, 2, timeout_s=60)
    assert "ArithmeticError: the cause" in failure.value.what.partition("rank 0:")[0]


def test_results_come_in_rank_order() -> None:
    assert launch(lambda rank: rank * rank, 3, timeout_s=30) == [0, 1, 4]


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, started = os.fork, []

    def failing_fork() -> int:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", failing_fork)
    with pytest.raises(RankFailed, match="rank 2 of 4 could not be started"):
        launch(_sleep_forever, 4)
    for pid in started:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def test_a_closed_world_leaves_no_threads_to_forked_ranks() -> None:
    """Its groups hang in torch's caches; a rank that inherits one hangs when it drops it."""
    with World.join("cpu") as world:
        mesh = world.mesh(Strategy())["dp_shard"]
        weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        total = (weight @ weight).full_tensor().sum()
        with pytest.raises(ForkUnsafe, match="rank 0 of 1"):
            launch(lambda rank: rank, 1)
    assert total == 64
    del world, mesh, weight
    assert launch(lambda rank: rank, 1, timeout_s=30) == [0]
    assert not [name for name in _threads() if "gloo" in name]


def test_ranks_compute_with_threads_after_a_parent_that_did() -> None:
    """OpenMP's pool of the parent has no threads in a rank, which would wait for them for ever."""
    values = torch.arange(1 << 20, dtype=torch.float64)  # enough that a sum is divided
    before = torch.get_num_threads(), len(_threads())
    try:
        torch.set_num_threads(3)
        total = values.sum()
        assert len(_threads()) > before[1]
        found = launch(
            lambda rank: (float(values.sum()), len(_threads()) > 2), 2, threads=3, timeout_s=180
        )
        assert found == [(float(total), True)] * 2
        assert values.sum() == total
    finally:
        torch.set_num_threads(before[0])


def test_ranks_tokenize_after_a_parent_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    def ids(_: int) -> list[list[int]]:
        return [found.ids for found in words.encode_batch(["a b", "b c"] * 50)]

    assert launch(ids, 2, timeout_s=180) == [ids(0)] * 2
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert launch(ids, 1, timeout_s=180) == [[[0, 1], [1, 2]] * 50]
