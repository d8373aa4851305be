"""A mixture-of-experts model trained from a recipe, experts on two ranks against one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from tests.e2e.runs import rows, train, write_functions
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
RECIPE = """
model: {{path: {root}/model.json}}
data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 384, cache_dir: {root}/cache}}
training:
  {{steps: 3, dtype: float64, tokens_per_step: 256, lr: 1.0e-2, warmup_steps: 1, lr_schedule: constant,
    eval_tokens: 200}}
parallel: {{dp_shard: 1}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    (root / "model.json").write_text(json.dumps(CONFIG))
    write_functions(root / "text.txt", 1500)
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    return root


def _train(place: Path, name: str, *overrides: str, report: bool = False) -> list[dict]:
    train(place, place / name, *overrides, report=report)
    return rows(place / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def one_rank(place: Path) -> list[dict]:
    return _train(place, "one", "checkpoint.export=false")


TWO = ("parallel.dp_shard=2", "parallel.ep=2")


@pytest.mark.slow
def test_experts_on_two_ranks_learn_what_one_rank_learns(place: Path, one_rank: list[dict]) -> None:
    for mine, theirs in zip(_train(place, "two", *TWO, "sample_prompt=def ", report=True), one_rank, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-10)
        assert mine["routing"] == theirs["routing"]
        assert mine["routing"]["max_load"] > 1
    assert (place / "two" / "sample.txt").read_text().startswith("def ")


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_expert_ranks(place: Path, one_rank: list[dict]) -> None:
    _train(place, "parts", *TWO, "checkpoint.export=false", "training.steps=2")
    rest = _train(place, "parts", "checkpoint.export=false", "parallel.tp=2")
    assert [row["step"] for row in rest] == [1, 2, 3]
    assert rest[2]["loss"] == pytest.approx(one_rank[2]["loss"], rel=1e-10)


def test_what_a_model_has_nothing_for_is_refused_before_any_rank(place: Path) -> None:
    with pytest.raises(NotDivisible) as caught:
        _train(place, "no", "parallel.dp_shard=2", "parallel.ep=4")
    assert caught.value.hint == "parallel.ep=2"
    with pytest.raises(UnsupportedSharding) as refused:
        _train(place, "no", "moe.bias_update_rate=0.001")
    assert refused.value.hint == "moe.bias_update_rate=0"
    assert not (place / "no").exists()


@pytest.mark.slow
def test_experts_of_any_width_train_in_bfloat16(place: Path) -> None:
    """Grouped products want rows of whole 16 bytes; with others the model's own loop gives what float32 gives."""
    (place / "odd.json").write_text(json.dumps(CONFIG | {"moe_intermediate_size": 20}))
    given = (f"model.path={place}/odd.json", "checkpoint.export=false")
    wide = _train(place, "odd-float32", *given, "training.dtype=float32")
    for name, ranks in (("odd-one", ()), ("odd-two", TWO)):
        for mine, theirs in zip(_train(place, name, *given, *ranks, "training.dtype=bfloat16"), wide, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)


def _padded(place: Path, name: str, seq_len: int, *overrides: str) -> dict:
    """One step on the same eight conversations of different lengths, each in a row of its own."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"{i}?" * (1 + i % 3)},
                                 {"role": "assistant", "content": f"{i + 1}!" * (1 + i % 4)}]})
        for i in range(8)
    ]  # fmt: skip
    (place / "chat.jsonl").write_text("\n".join(lines))
    (row,) = _train(
        place, name, "stage=sft", f"data.source={place}/chat.jsonl", "data.packing=false", "data.holdout=0",
        f"data.seq_len={seq_len}", "training.tokens_per_step=null", "training.microbatch=4",
        "training.accumulation_steps=2", "checkpoint.resume=never",
        "training.steps=1", "training.warmup_steps=0", "checkpoint.export=false", "training.max_grad_norm=null",
        "moe.aux_loss_coef=0.5", *overrides,
    )  # fmt: skip
    return row


@slow_cells("common0-layout0")
@pytest.mark.parametrize(
    ("common", "layout"),
    [
        ((), ("parallel.tp=2",)),
        pytest.param(("moe.capacity_factor=0.75",), (), marks=pytest.mark.slow),
    ],
)
def test_padding_is_routed_to_no_expert(place: Path, common: tuple[str, ...], layout: tuple[str, ...]) -> None:
    short = _padded(place, "short", 64, *common)
    long = _padded(place, "long", 96, *common, *layout)
    assert short["routing"]["aux_loss"] > 1
    assert (short["routing"]["dropped"] > 0) == bool(common)
    for key in ("loss", "grad_norm"):
        assert long[key] == pytest.approx(short[key], rel=1e-10)
    assert long["routing"] == pytest.approx(short["routing"], rel=1e-10)


@pytest.mark.slow
def test_muon_learns_on_pipelines_and_replicas_what_it_learns_on_one_rank(place: Path) -> None:
    muon = ("training.optimizer=muon", "checkpoint.export=false")
    one = _train(place, "muon", *muon)
    for axis in ("pp", "dp_replicate"):
        for mine, theirs in zip(_train(place, f"muon_{axis}", *muon, f"parallel.{axis}=2"), one, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-10)
