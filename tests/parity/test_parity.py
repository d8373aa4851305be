"""Every layout repeats the run of one device: loss curve, norms, gradients; and sends the bytes of the formula."""

from __future__ import annotations

import functools

import pytest

from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch
from tests.parity._case import STEPS, Case, Reference, Run, run, strategies
from tests.slow import slow_cells

# One fork runs a whole group of layouts, so its first test takes the time of all of them.
pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]
RTOL = 1e-10

CASES = {
    "llama": Case(),
    "qwen3-tied-accumulated": Case("qwen3", tied=True, sequences=16, accumulation=2),
    # Rows that no dp_shard divides (some ranks get none of a head norm), a vocabulary that tp does not divide, fewer
    # key-value heads than tp ranks, biases, tokens that tp does not divide, a batch whose last half is padding.
    "qwen3-uneven": Case(
        "qwen3", vocab=97, hidden=70, mlp=104, kv_heads=2, head_dim=10, bias=True, seq_len=13, ragged=True
    ),
    "llama-tied-uneven": Case(
        tied=True, vocab=100, hidden=72, mlp=104, kv_heads=1, head_dim=10, bias=True, seq_len=13, ragged=True
    ),
}  # fmt: skip


STEPS_ON_EIGHT = 2
"""Two updates: eight processes are slow."""
ON_EIGHT = (
    Strategy(dp_shard=8),
    Strategy(tp_x=8),
    Strategy(dp_replicate=2, dp_shard=2, tp_x=2),
)
"""On eight ranks: more of them than rows and heads. Products of more axes there are drawn by `test_fuzz.py`."""
ON_FOUR = ("qwen3-uneven",)
"""Cases that run on every layout of four ranks; the others where both axes, or only tensor parallelism, cut them."""


def _matrix() -> list[tuple[str, int, Strategy]]:
    cells = [("qwen3-uneven", 8, s) for s in ON_EIGHT]
    for size in (1, 2, 4):
        for case in CASES:
            every = size < 4 or case in ON_FOUR
            cells += [(case, size, s) for s in strategies(size) if every or s.tp == 4 or s.dp_shard == s.tp]
    cells += [
        ("qwen3-tied-accumulated", 4, s)
        for s in strategies(4, recompute="full", reshard_after_forward=False)
        if s.dp_shard == 2 or s.tp == 4
    ]
    # Only optimizer states are sharded, and one of the two layers is recomputed.
    part = {"recompute": "full", "recompute_layers": 1, "zero": 1}
    cells += [("qwen3-tied-accumulated", 2, s) for s in strategies(2, **part)]
    return cells


MATRIX = _matrix()
PLAIN_OPTIMIZER = {("llama", 1), ("llama", 2)}
SLOW = {
    ("qwen3-uneven", 4),
    ("qwen3-uneven", 8),
    ("llama", 4),
    ("llama-tied-uneven", 4),
    ("qwen3-tied-accumulated", 4),
}


@functools.cache
def _reference(case: str) -> Reference:
    reference = Reference(CASES[case])
    assert reference.gradients  # both runs happen before the ranks are forked
    assert reference.run
    return reference


@functools.cache
def _results(case: str, size: int) -> dict[Strategy, list[Run]]:
    reference = _reference(case)
    wanted = [s for c, n, s in MATRIX if (c, n) == (case, size)]

    def rank(_: int) -> list[Run]:
        with World.join("cpu") as world:
            if size > 4:
                return [run(reference, s, world, gradients=False, fused=True, steps=STEPS_ON_EIGHT) for s in wanted]
            # The plain optimizer on the layouts of one case; see `run` for its cost.
            fused = (case, size) not in PLAIN_OPTIMIZER
            return [run(reference, s, world, fused=fused) for s in wanted]

    ranks = launch(rank, size, timeout_s=280)
    return {s: [r[i] for r in ranks] for i, s in enumerate(wanted)}


@slow_cells(
    "llama-tied-uneven-tp_x=2",
    "qwen3-tied-accumulated-tp_x=2",
    "qwen3-uneven-tp_x=2",
    "qwen3-tied-accumulated-dp_shard=2",
)
@pytest.mark.parametrize(
    ("case", "size", "strategy"),
    [pytest.param(*c, marks=pytest.mark.slow if c[:2] in SLOW else ()) for c in MATRIX],
    ids=[f"{c}-{str(s).replace(' ', '-')}" for c, _, s in MATRIX],
)
def test_layout_repeats_one_device(case: str, size: int, strategy: Strategy) -> None:
    expected = _reference(case).run
    ranks = _results(case, size)[strategy]
    steps = STEPS if size <= 4 else STEPS_ON_EIGHT
    losses = [sum(step) for step in zip(*(r.losses for r in ranks), strict=True)]
    assert losses == pytest.approx(expected.losses[:steps], rel=RTOL, abs=0)
    for found in ranks:
        assert found.norms == pytest.approx(expected.norms[:steps], rel=RTOL, abs=0)
        assert found.gradient_error <= RTOL
    assert ranks[0].counted == ranks[0].planned
