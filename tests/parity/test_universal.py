"""The universal check itself, on layouts of every axis, in one fork per number of ranks."""

from __future__ import annotations

import pytest

from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch
from tests.parity.universal import Reference, Setup, check

pytestmark = pytest.mark.parity


@pytest.mark.slow
def test_two_layouts_of_four_ranks() -> None:
    references = [Reference(Setup("llama", accumulation=2)), Reference(Setup("qwen3", tied=True))]

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for reference in references:
                check(reference, Strategy(dp_shard=2, tp_x=2), world)
                check(reference, Strategy(tp_x=4, recompute="full"), world)

    launch(rank, 4, timeout_s=100)


def test_a_wrong_gradient_is_found() -> None:
    reference = Reference(Setup("llama"))
    name, grad = next(iter(reference.result.grads.items()))
    reference.result.grads[name] = grad * (1 + 1e-9)
    with World.join("cpu") as world, pytest.raises(AssertionError, match=name):
        check(reference, Strategy(), world)
