"""Order of passes and messages between the ranks of a tower and those of the language part, without processes."""

from __future__ import annotations

import pytest

from hyper_parallel.backends.torch.submodels.exchange import Border


def _border(readers: int, towers: int) -> Border:
    return Border(tuple(range(10, 10 + towers)), tuple(((20 + i,),) for i in range(readers)))


@pytest.mark.parametrize("towers", range(1, 6))
@pytest.mark.parametrize("readers", range(1, 8))
def test_every_pass_comes_after_those_whose_results_it_needs(readers: int, towers: int) -> None:
    border = _border(readers, towers)
    for count in range(1, 8):
        rounds = len(border.sources(0, count))
        # Ranks of a tower know only the number of rounds.
        order = [p for p in border.passes(rounds) if p[0] != "language" or p[1] < count]
        position = {step: place for place, step in enumerate(order)}
        assert len(position) == len(order) == 2 * rounds + count
        for number in range(rounds):
            for rank in range(towers):
                share, index = border.source(rank, number)
                assert share < readers
                if index < count:
                    forward, backward = (position[kind, number] for kind in ("forward", "backward"))
                    assert forward < position["language", index] < backward


def test_a_tower_is_one_microbatch_ahead() -> None:
    assert [*_border(1, 1).passes(3)] == [
        ("forward", 0), ("forward", 1), ("language", 0), ("backward", 0),
        ("forward", 2), ("language", 1), ("backward", 1), ("language", 2), ("backward", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("towers", range(1, 6))
@pytest.mark.parametrize("readers", range(1, 8))
def test_every_microbatch_has_one_owner(readers: int, towers: int) -> None:
    border = _border(readers, towers)
    for count in range(1, 8):
        owned = {
            source: border.tower[rank]
            for rank in range(towers)
            for source in border.sources(rank, count)
            if source is not None
        }
        assert owned == {
            (share, index): border.owner(share, index) for share in range(readers) for index in range(count)
        }
        assert len({len(border.sources(rank, count)) for rank in range(towers)}) == 1
