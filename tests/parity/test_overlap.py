"""Layers whose communication overlaps with computation, against one device: loss, every gradient, calls and bytes."""

from __future__ import annotations

import pytest

from hyper_parallel.ir import Overlap, Strategy
from hyper_parallel.runtime import World, launch
from tests.parity.universal import FAMILIES, Setup, check, reference
from tests.slow import slow_cells

pytestmark = pytest.mark.parity

S = Strategy
HALVES = Overlap(half_batch=True)
CHUNKS = Overlap(ep_chunks=3)
BOTH = Overlap(half_batch=True, ep_chunks=2)
QWEN, DEEPSEEK = Setup("qwen3_moe", sequences=4), Setup("deepseek_v3", sequences=4)
GPT_OSS = Setup("gpt_oss", sequences=4)
TIED_UNITS = Setup("qwen3", sequences=16, accumulation=2, tied=True, config=(("num_hidden_layers", 3),))
ODD = Setup("llama", sequences=3)
"""Cannot be halved: runs whole."""
TOKEN_CHUNKS = Overlap(tp_chunks=4)
FEW_TOKENS = Setup("qwen3_moe", sequences=2, seq_len=3)
"""Three tokens on a rank in five chunks, so that some are empty."""

TWO: dict[Setup, tuple[Strategy, ...]] = {
    QWEN: (
        S(dp_shard=2, ep=2, overlap=CHUNKS),
        S(dp_shard=2, ep=2, overlap=HALVES),
        S(tp_x=2, ep=2, overlap=BOTH),
        S(tp_x=2, ep=2, recompute="full", overlap=BOTH),
    ),
    Setup("qwen3_moe", sequences=8, accumulation=2): (S(dp_shard=2, ep=2, zero=1, overlap=HALVES),),
    DEEPSEEK: (
        S(dp_shard=2, ep=2, overlap=BOTH),
        S(dp_shard=2, ep=2, recompute="full", overlap=HALVES),
    ),
    GPT_OSS: (S(tp_x=2, ep=2, overlap=BOTH),),
    Setup("gemma3_text", sequences=2): (S(tp_x=2, overlap=TOKEN_CHUNKS),),
    FEW_TOKENS: (S(dp_shard=2, ep=2, overlap=Overlap(ep_chunks=5)),),
    ODD: (S(tp_x=2, overlap=HALVES),),
    Setup("llama", sequences=4, tied=True): (
        S(tp_x=2, recompute="full", overlap=HALVES),
        S(tp_x=2, recompute="full", overlap=TOKEN_CHUNKS),
    ),
    Setup("llama", sequences=8, accumulation=2): (S(tp_x=2, overlap=HALVES),),
    Setup("llama", sequences=4, seq_len=15): (S(tp_x=2, overlap=HALVES),),
    **{Setup(family, sequences=4): (S(tp_x=2, overlap=HALVES),) for family in ("gemma3_text", "glm4")},
}
DENSE = {
    Setup(family, sequences=4): (S(tp_x=2, overlap=HALVES),)
    for family in FAMILIES
    if family not in ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "glm4")
}
"""Families whose layers run on halves as those of llama, gemma3_text (four norms, two masks) and glm4 (packed)."""
TOKENS = {
    **{
        Setup(family, sequences=4): (S(tp_x=2, overlap=TOKEN_CHUNKS),) for family in FAMILIES if family != "gemma3_text"
    },
    QWEN: (S(tp_x=2, ep=2, overlap=Overlap(tp_chunks=2, ep_chunks=3)),),
    Setup("llama", sequences=3, seq_len=15): (S(tp_x=2, overlap=Overlap(tp_chunks=23)),),
}
"""Chunks of tokens in every family; the last batch has 23 tokens on each rank, of which one is padding."""
TOKENS_ON_FOUR = {
    Setup("llama", sequences=8, accumulation=2): (
        S(pp=2, tp_x=2, overlap=TOKEN_CHUNKS, schedule="zb-h1"),
        S(tp_x=2, dp_shard=2, overlap=TOKEN_CHUNKS, recompute="selective"),
        S(tp_x=2, cp=2, overlap=TOKEN_CHUNKS),
        S(tp_x=4, overlap=TOKEN_CHUNKS),
    ),
}
FOUR = {
    Setup("qwen3_moe", sequences=8): (S(tp_x=2, dp_shard=2, ep=4, overlap=BOTH),),
    Setup("qwen3_moe", sequences=8, accumulation=2): (S(pp=2, dp_shard=2, ep=2, overlap=CHUNKS, schedule="zb-h1"),),
}
MORE = {
    QWEN: (S(dp_shard=4, ep=4, overlap=CHUNKS), S(dp_shard=4, ep=2, overlap=CHUNKS)),
    Setup("qwen3_moe", sequences=8, accumulation=2): (S(cp=2, dp_shard=2, ep=2, overlap=CHUNKS),),
    Setup("qwen3", sequences=8): (S(tp_x=2, dp_shard=2, overlap=HALVES),),
    TIED_UNITS: (
        S(tp_x=2, dp_shard=2, overlap=HALVES),
        S(tp_x=2, dp_shard=2, overlap=HALVES, zero=1),
        S(tp_x=2, dp_shard=2, overlap=HALVES, reshard_after_forward=False),
        S(tp_x=2, dp_shard=2, overlap=HALVES, recompute="full"),
        S(tp_x=2, dp_replicate=2, overlap=HALVES),
    ),
}
"""Foldings that TWO chunks on two ranks and FOUR on four, and halves under FSDP as FOUR."""


@slow_cells("2-cases0", "4-cases1")
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, TWO),
        (4, FOUR),
        pytest.param(2, DENSE, marks=pytest.mark.slow),
        pytest.param(2, TOKENS, marks=pytest.mark.slow),
        pytest.param(4, TOKENS_ON_FOUR, marks=pytest.mark.slow),
        pytest.param(4, MORE, marks=pytest.mark.slow),
    ],
)
def test_an_overlapped_step_equals_one_device(ranks: int, cases: dict[Setup, tuple[Strategy, ...]]) -> None:
    for setup in cases:
        reference(setup)

    def rank(_: int) -> list[str]:
        failures = []
        with World.join("cpu") as world:
            for setup, strategies in cases.items():
                for strategy in strategies:
                    try:
                        check(reference(setup), strategy, world)
                    except AssertionError as error:
                        failures.append(f"{setup.family}: {error}")
        return failures

    failures = [text for texts in launch(rank, ranks, timeout_s=200) for text in texts]
    assert not failures, "\n".join(failures)
