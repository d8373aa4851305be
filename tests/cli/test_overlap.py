"""Recipes whose layers overlap communication: what is refused, and that the hint of a refusal works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Overlap
from hyper_parallel.planner import plan_recipe

pytestmark = pytest.mark.unit

MOE = {
    "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "max_position_embeddings": 512, "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(MOE))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {tmp_path / 'model.json'}, init: random}}\n"
        "data: {source: python-stdlib, seq_len: 64}\n"
        "training: {microbatch: 2, accumulation_steps: 1}\n"
    )
    return path


def planned(recipe: Path, overrides: list[str]) -> Overlap:
    return plan_recipe(load_recipe(recipe, overrides).recipe).strategy.overlap


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tp=2", "overlap.tp=half-batch"], Overlap(half_batch=True)),
        (["parallel.dp_shard=2", "parallel.ep=2", "overlap.ep=chunks"], Overlap(ep_chunks=4)),
        (
            ["parallel.tp=2", "parallel.ep=2", "overlap={tp: half-batch, ep: chunks, chunks: 2}"],
            Overlap(half_batch=True, ep_chunks=2),
        ),
        (["parallel.tp=2", "overlap.tp=chunks"], Overlap(tp_chunks=4)),
        (
            ["parallel.tp=2", "parallel.ep=2", "overlap={tp: chunks, ep: chunks, chunks: 2}"],
            Overlap(ep_chunks=2, tp_chunks=2),
        ),
        (["parallel.tp=2", "overlap=none"], Overlap()),
        (["parallel.tp=2", "overlap=none", "overlap.tp=half-batch"], Overlap(half_batch=True)),
        (["parallel.tp=2", "overlap=auto", "overlap={tp: half-batch}"], Overlap(half_batch=True)),
        # Ranks share the cores of this machine.
        (["parallel.tp=2", "overlap.tp=half-batch", "overlap=auto"], Overlap()),
    ],
)
def test_a_recipe_sets_the_overlap_of_its_plan(recipe: Path, overrides: list[str], expected: Overlap) -> None:
    assert planned(recipe, overrides) == expected


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        (
            "HP205",
            [
                "parallel.pp=2",
                "training.accumulation_steps=2",
                "parallel.tp=2",
                "overlap.tp=half-batch",
            ],
        ),
        ("HP205", ["parallel.tp=2", "parallel.cp=2", "overlap.tp=half-batch"]),
        ("HP205", ["parallel.tp_x=2", "parallel.tp_y=2", "parallel.ep=4", "overlap.tp=half-batch"]),
        ("HP205", ["parallel.tp=2", "overlap.tp=half-batch", "training.microbatch=1"]),
        ("HP205", ["parallel.dp_shard=2", "overlap.tp=half-batch"]),
        ("HP205", ["parallel.dp_shard=2", "overlap.ep=chunks"]),
        ("HP205", ["parallel.dp_shard=2", "overlap.tp=chunks"]),
        ("HP205", ["parallel.tp=2", "overlap.tp=chunks", "overlap.chunks=3"]),
        ("HP205", ["parallel.tp_x=2", "parallel.tp_y=2", "parallel.ep=4", "overlap.tp=chunks"]),
        ("HP205", ["parallel.tp=2", "parallel.ep=2", "overlap={tp: chunks, ep: half-batch}"]),
        ("HP205", ["parallel.tp=2", "overlap.tp=symmetric"]),
        ("HP205", ["parallel.tp=2", "data.seq_len=63", "overlap.tp=symmetric"]),
        ("HP205", ["parallel.tp=2", "parallel.ep=2", "overlap={tp: symmetric, ep: half-batch}"]),
        (
            "HP205",
            [
                "topology=dgx-h100",
                "parallel.tp_x=2",
                "parallel.tp_y=2",
                "parallel.ep=4",
                "overlap.tp=symmetric",
            ],
        ),
        ("HP205", ["topology=cloudmatrix384", "parallel.tp=2", "overlap.tp=symmetric"]),
        ("HP205", ["parallel.tp=2", "parallel.gathered_inputs=re-gather", "overlap.tp=chunks"]),
        ("HP205", ["parallel.dp_shard=4", "parallel.ep=2", "overlap.ep=half-batch"]),
        (
            "HP205",
            ["parallel.tp=2", "parallel.gathered_inputs=re-gather", "overlap.tp=half-batch"],
        ),
    ],
)
def test_what_cannot_overlap_is_refused_with_a_hint_that_plans(recipe: Path, code: str, overrides: list[str]) -> None:
    with pytest.raises(HyperParallelError) as caught:
        planned(recipe, overrides)
    assert caught.value.code == code
    assert caught.value.hint
    planned(recipe, [*overrides, *caught.value.hint.split()])


@pytest.mark.parametrize("setting", ["chunks", "symmetric"])
def test_blocks_that_gather_nothing_are_refused_with_a_hint_that_plans(recipe: Path, setting: str) -> None:
    """Tensor-parallel ranks of GPT-2 hold all tokens."""
    config = {
        "model_type": "gpt2",
        "vocab_size": 1024,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    }
    (recipe.parent / "model.json").write_text(json.dumps(config))
    overrides = ["topology=dgx-h100", "parallel.tp=2", f"overlap.tp={setting}"]
    with pytest.raises(HyperParallelError, match="holds all tokens") as caught:
        planned(recipe, overrides)
    assert caught.value.hint == "overlap.tp=none"
    assert planned(recipe, [*overrides, caught.value.hint]) == Overlap()


def test_a_plan_prices_symmetric_memory_as_chunks_without_fillers(recipe: Path) -> None:
    """A plan for CUDA devices names the setting; its price is that of chunks in which no weight gradient hides."""
    degrees = ["topology=dgx-h100", "parallel.tp=8", "model.path=llama-3-8b", "data.seq_len=4096"]
    batch = ["training.microbatch=4"]
    serial, chunks, symmetric = (
        plan_recipe(load_recipe(recipe, [*degrees, *batch, *overlap]).recipe)
        for overlap in (
            ["overlap=none"],
            ["overlap={tp: chunks, chunks: 8}"],
            ["overlap.tp=symmetric"],
        )
    )
    assert symmetric.strategy.overlap == Overlap(tp_symmetric=True)
    assert chunks.step_s < symmetric.step_s < serial.step_s
    assert symmetric.collectives == serial.collectives
    assert any("has not run on CUDA" in note for note in symmetric.notes)
    assert not any("has not run on CUDA" in note for note in chunks.notes)


def test_a_capacity_excludes_chunks(recipe: Path) -> None:
    overrides = [
        "parallel.ep=2",
        "parallel.dp_shard=2",
        "overlap.ep=chunks",
        "moe.capacity_factor=2",
    ]
    with pytest.raises(HyperParallelError, match="capacity"):
        load_recipe(recipe, overrides)


def test_the_planner_chooses_the_overlap_of_given_degrees(recipe: Path) -> None:
    degrees = ["topology=dgx-h100", "parallel.tp=8", "model.path=llama-3-8b", "data.seq_len=4096"]
    fixed = [*degrees, "training.microbatch=4", "overlap=auto"]
    assert planned(recipe, fixed) == Overlap(half_batch=True)
    loaded = load_recipe(recipe, fixed)
    known = plan_recipe(loaded.recipe, half_batches=False)
    assert known.strategy.overlap == Overlap(tp_chunks=4)
    dropout = load_recipe(recipe, [*fixed, "lora={r: 8, lora_dropout: 0.1}"])
    assert plan_recipe(dropout.recipe, half_batches=False).strategy.overlap == Overlap()
    with pytest.raises(HyperParallelError) as caught:
        load_recipe(recipe, ["overlap={auto: true, tp: half-batch}"])
    assert caught.value.code == "HP102"
