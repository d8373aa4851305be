"""Order of messages between the ranks of a tower and those of the language part, without processes."""

from __future__ import annotations

import pytest

from hyper_parallel.backends.torch.submodels.exchange import Border


def _ends(readers: int, towers: int, count: int) -> bool:
    """Return whether every rank ends, if ranks of a part run together and sends never wait."""
    border = Border(tuple(range(towers)), tuple((towers + i,) for i in range(readers)))
    rounds = [border.sources(rank, count) for rank in range(towers)]
    events: list[tuple[str, int]] = []
    for number in range(len(rounds[0])):
        events.append(("forward", number))
        if number >= border.rounds_ahead:
            events.append(("backward", number - border.rounds_ahead))
    done = len(events) - len(rounds[0])
    events += [("backward", number) for number in range(done, len(rounds[0]))]
    sent, trained, position = set(), 0, 0
    while True:
        before = trained, position
        if trained < count and {(share, trained) for share in range(readers)} <= sent:
            trained += 1
        if position < len(events):
            kind, number = events[position]
            sources = [source for rank in rounds if (source := rank[number]) is not None]
            if kind == "forward":
                sent.update(sources)
                position += 1
            elif all(index < trained for _, index in sources):
                position += 1
        if (trained, position) == before:
            return trained == count and position == len(events)


@pytest.mark.parametrize("towers", range(1, 6))
@pytest.mark.parametrize("readers", range(1, 8))
def test_no_rank_waits_in_a_circle(readers: int, towers: int) -> None:
    assert all(_ends(readers, towers, count) for count in range(1, 8))


@pytest.mark.parametrize("towers", range(1, 6))
@pytest.mark.parametrize("readers", range(1, 8))
def test_every_microbatch_has_one_owner(readers: int, towers: int) -> None:
    border = Border(tuple(range(10, 10 + towers)), tuple((20 + i,) for i in range(readers)))
    for count in range(1, 8):
        owned = {
            source: border.tower[rank]
            for rank in range(towers)
            for source in border.sources(rank, count)
            if source is not None
        }
        assert owned == {
            (share, index): border.owner(share, index)
            for share in range(readers)
            for index in range(count)
        }
        assert len({len(border.sources(rank, count)) for rank in range(towers)}) == 1
