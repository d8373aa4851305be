"""Peak memory against the published activation formulas and their numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.cost import Candidates, Machine, ModelNumbers, PricingCase, score, stack_card
from hyper_parallel.ir import Workload
from hyper_parallel.model import load_model, read_preset, spec_from_config
from hyper_parallel.planner import plan_recipe
from hyper_parallel.topology import load_topology
from hyper_parallel.trainer.engine.recipe_model import read_spec
from hyper_parallel.units import GiB

pytestmark = pytest.mark.unit

MODELS = {
    "22B": (48, 6144, 64, 4, 1, 1),
    "175B": (96, 12288, 96, 1, 8, 3),
    "530B": (105, 20480, 128, 1, 35, 3),
    "1T": (128, 25600, 160, 1, 64, 1),
}
"""Layers, hidden, heads, microbatch, pipeline stages, virtual stages; Korthikanti et al. 2022, table 3."""


def gpt(layers, hidden, heads):
    return spec_from_config(
        {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048,
         "vocab_size": 51200, "tie_word_embeddings": True, "activation_function": "gelu_new"},
        name="gpt",
    )  # fmt: skip


def terms(name, sequence_parallel, recompute, **columns):
    layers, hidden, heads, microbatch, pp, vpp = MODELS[name]
    stack = dataclasses.replace(stack_card("megatron-2022"), sequence_parallel=float(sequence_parallel))
    machine = Machine.of(load_topology("dgx-a100"), "bfloat16", stack=stack)
    row = {
        "pp": pp,
        "vpp": vpp,
        "tp_x": 8,
        "microbatch": microbatch,
        "accumulation": 4 * pp,
        "zero": 0,
    }
    c = Candidates.of_columns(**(row | {"recompute": recompute} | columns))
    numbers = ModelNumbers.of(gpt(layers, hidden, heads))
    scores = score(PricingCase(numbers, machine, Workload(2048), c))
    return {t.name: float(t.bytes[0]) / GiB for t in scores.memory}


@pytest.mark.parametrize(
    ("name", "none", "both"),
    [("22B", 59.25, 9.56), ("175B", 66.84, 12.35), ("530B", 114.0, 23.1), ("1T", 131.3, 26.6)],
)
def test_published_activations(name, none, both):
    assert terms(name, False, 0)["activations"] == pytest.approx(none, rel=2e-3)
    assert terms(name, True, 1)["activations"] == pytest.approx(both, rel=4e-3)


def test_published_shares_of_175b():
    layers = {"pp": 1, "vpp": 1}
    base = terms("175B", False, 0, **layers)["activations"]
    for sequence_parallel, recompute, share in ((True, 0, 62.0), (False, 1, 56.5), (True, 1, 18.5)):
        found = terms("175B", sequence_parallel, recompute, **layers)["activations"]
        assert 100 * found / base == pytest.approx(share, abs=0.1)
    # Full recomputation keeps the input of every layer on every rank, and one layer in full.
    full = terms("175B", False, 2, **layers)["activations"]
    assert 100 * (full - base / 96) / base == pytest.approx(8.7, abs=0.05)


@pytest.mark.parametrize(("name", "gib"), [("22B", 45.6), ("175B", 45.6), ("530B", 31.6), ("1T", 33.0)])
def test_published_states_of_the_layers(name, gib):
    """Eighteen bytes a parameter: embedding, norms and biases are not in the published numbers."""
    layers, hidden, _, _, pp, _ = MODELS[name]
    numbers = ModelNumbers.of(gpt(*MODELS[name][:3]))
    found = terms(name, True, 0, zero=0)
    states = sum(found[k] for k in ("parameters", "gradients", "optimizer states"))
    vectors = numbers.vector_weights * np.ceil(layers / pp)
    extra = (numbers.embedding_weights / 8 + vectors) * 18 / GiB
    assert states - extra == pytest.approx(gib, rel=4e-3)
    assert 12 * layers * hidden**2 / 8 / pp * 18 / GiB == pytest.approx(gib, rel=2e-3)


def test_zero_stages_shard_more_and_more():
    machine = Machine.of(load_topology("dgx-h100"), "bfloat16")
    numbers = ModelNumbers.of(load_model("llama-3-8b"))
    # Several microbatches: sharded gradients are there in every phase of a step.
    c = Candidates.of_columns(dp_shard=8, accumulation=2, zero=[0, 1, 2, 3])
    found = {t.name: t.bytes for t in score(PricingCase(numbers, machine, Workload(4096), c)).memory}
    n = load_model("llama-3-8b").num_params
    assert found["parameters"] == pytest.approx([2 * n, 2 * n, 4 * n / 8, 4 * n / 8])
    assert found["gradients"] == pytest.approx([4 * n, 4 * n, 4 * n / 8, 4 * n / 8])
    assert found["optimizer states"] == pytest.approx([12 * n, 12 * n / 8, n, n])
    assert found["gathered parameters"][2] > found["gathered parameters"][3] > 0


TRACED = json.loads((Path(__file__).parent / "traced_memory.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", TRACED["cases"], ids=lambda c: f"{c['model']} {' '.join(c['overrides'])}")
def test_predicted_peak_is_that_of_the_traced_program(case, tmp_path):
    """The exact peak of the program that trains, tensors only (`tools/trace_memory.py`)."""
    config = {**read_preset(case["model"]), "num_hidden_layers": case["layers"]}
    (tmp_path / "model.json").write_text(json.dumps(config))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {tmp_path}/model.json}}\ndata: {{seq_len: {case.get('seq_len', 4096)}}}\nparallel: {{}}\n"
        f"topology: {TRACED['topology']}\ntraining: {{dtype: bfloat16, microbatch: 1}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml", tuple(case["overrides"])).recipe
    kept_free = ("device context", "fragmentation")
    predicted = sum(t.bytes for t in plan_recipe(recipe).memory if t.name not in kept_free)
    assert 0.97 < predicted / case["peak_bytes"] < 1.05


ROOT = Path(__file__).resolve().parents[2]
PLANNED = json.loads((ROOT / "benchmarks/results/planned_peak.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", PLANNED["rows"], ids=lambda r: f"{r['model']} {r['layout']}")
def test_planned_peaks_are_those_of_traced_programs_of_twelve_models(row, tmp_path):
    """Traced by `benchmarks/planned_peak.py`: dense, with experts, and with latent attention."""
    (tmp_path / "model.json").write_text(json.dumps(row["config"]))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {tmp_path}/model.json}}\ndata: {{seq_len: {PLANNED['seq_len']}}}\nparallel: {{}}\n"
        f"topology: {PLANNED['topology']}\ntraining: {{dtype: bfloat16, microbatch: 1}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml", tuple(row["overrides"])).recipe
    plan = plan_recipe(recipe, model=read_spec(recipe.model.path))
    assert plan.tensor_bytes == plan.memory_bytes - plan.reserved_bytes
    assert -0.02 <= plan.tensor_bytes / row["traced_bytes"] - 1.0 <= 0.05
