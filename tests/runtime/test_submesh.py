"""Ranks of a submesh are refused unless they are different ranks of the world, as many as the degrees need."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import Strategy, World
from hyper_parallel.errors import BadValue, DegreesMismatch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("ranks", [[1, 4], [1, 1], [-1, 0]])
def test_ranks_that_are_not_different_ranks_of_the_world_are_refused(ranks: list[int]) -> None:
    with pytest.raises(BadValue, match="a repeated rank, or a rank outside the world"):
        World(0, 4, 0, torch.device("cpu"), "").mesh(Strategy(dp_shard=2), ranks)


@pytest.mark.parametrize(("degree", "hint"), [(4, "ranks=range(4)"), (8, "torchrun --nproc-per-node 8 SCRIPT")])
def test_a_hint_names_ranks_that_exist(degree: int, hint: str) -> None:
    with pytest.raises(DegreesMismatch) as caught:
        World(0, 4, 0, torch.device("cpu"), "").mesh(Strategy(dp_shard=degree), [0, 1])
    assert str(caught.value.hint).startswith(hint)
