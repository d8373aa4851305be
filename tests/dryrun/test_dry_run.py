"""Traces without ranks: any strategy, any number of ranks, and the command."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.memory import CommCounter
from hyper_parallel.config import Training, load_recipe
from hyper_parallel.errors import BadValue, Contradiction, DegreesMismatch
from hyper_parallel.ir import Strategy
from hyper_parallel.planner import plan_recipe
from hyper_parallel.runtime import World
from hyper_parallel.trainer import differences, dry_run, trace_rank
from tests.e2e.runs import command
from tests.parity.universal import EAGER, Setup
from tests.slow import slow_cells

pytestmark = pytest.mark.torch

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def _trace(setup, strategy, **options):
    def build():
        attention = "eager" if setup.family in EAGER else "sdpa"
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(setup.model_config(), attn_implementation=attention).train()

    plan = setup.plan(strategy)
    return trace_rank(build, plan, Training(), 0, **options), plan


@slow_cells(
    "deepseek_v3-dp_shard=2 ep=2",
    "gemma2-dp_shard=2",
    "qwen3_moe-dp_shard=2 tp_x=2 ep=2 recompute=full",
    "qwen3_moe-dp_shard=4 ep=4",
    "llama-cp=4 cp_kind=ulysses",
)
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("gemma2", Strategy(dp_shard=2)),
        ("llama", Strategy(cp=4, cp_kind="ulysses")),
        ("llama", Strategy(dp_shard=2, cp=2, tp_x=2)),
        ("qwen3_moe", Strategy(dp_shard=4, ep=4)),
        ("qwen3_moe", Strategy(dp_shard=2, tp_x=2, ep=2, recompute="full")),
        ("deepseek_v3", Strategy(dp_shard=2, ep=2)),
    ],
    ids=str,
)
def test_collectives_are_those_of_the_formulas(family, strategy):
    """Experts too: the formulas without routing, and the trace, both take tokens to spread evenly."""
    traced, plan = _trace(Setup(family), strategy)
    assert differences(traced, plan) == ()
    assert any(c.sent_bytes for c in traced.collectives)


@slow_cells("dp_shard=2 recompute=full", "pp=2 schedule=1f1b recompute=full")
@pytest.mark.parametrize(
    "strategy",
    [Strategy(dp_shard=2, recompute="full"), Strategy(pp=2, recompute="full")],
    ids=str,
)
def test_attention_that_is_computed_again_is_the_fused_one_of_forward(strategy):
    """Values of latent attention are narrower than its keys: the CPU has no fused kernel for them."""
    setup = Setup("deepseek_v3", sequences=4, seq_len=256, accumulation=2)
    traced, _ = _trace(setup, strategy, accelerator=True)
    assert (256, 256) not in {tuple(t.shape[-2:]) for t in traced.peaks["hbm"].top}
    plain, _ = _trace(setup, replace(strategy, recompute="none"), accelerator=True)
    assert traced.peaks["hbm"].num_bytes < plain.peaks["hbm"].num_bytes


def test_model_code_that_asks_for_values_gets_them():
    """Positions are known although activations are not: the model finds the batch not packed and makes no mask."""
    traced, _ = _trace(Setup("llama", sequences=2, seq_len=512), Strategy(dp_shard=2))
    assert 512 * 512 not in {math.prod(t.shape) for t in traced.peaks["hbm"].top}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}/model.json}}\ndata: {{source: {tmp_path}/no_data_is_read, seq_len: 64}}\n"
        f"training: {{dtype: bfloat16}}\nparallel: {{dp_shard: 2048, tp: 4}}\noutput_dir: {tmp_path}/run\n"
    )
    return path


def _run(*arguments):
    return command("train", *map(str, arguments)).stdout


@pytest.mark.slow
def test_eight_thousand_ranks_of_a_supernode(recipe):
    found = json.loads(_run(recipe, "--dry-run", "--topology", "cloudmatrix384", "--json"))
    assert found["plan"]["topology"] == "cloudmatrix384"
    assert found["device"] == "Ascend 910C die"
    assert found["fits"]
    assert found["differences"] == [[]]
    (rank,) = found["ranks"]
    peak = rank["peaks"]["hbm"]
    assert peak["num_bytes"] == found["peak_bytes"] == sum(peak["breakdown"].values())
    terms = {term["name"]: term["bytes"] for term in found["plan"]["memory"]}
    reserved = terms.pop("device context") + terms.pop("fragmentation")
    assert (found["planned_bytes"], found["reserved_bytes"]) == (sum(terms.values()), reserved)
    assert found["planned_to_traced"] == found["planned_bytes"] / found["peak_bytes"] - 1.0
    assert all(num_bytes % 512 == 0 for num_bytes in peak["breakdown"].values())
    sizes = {c["purpose"]: c["sent_bytes"] for c in rank["collectives"]}
    # A number of every rank, the loss, and how many ranks wish to stop and to save.
    assert sizes["loss and memory of all ranks"] == 2 * (8192 + 3) * 8 * 8191 // 8192
    assert not (recipe.parent / "run").exists()


def test_the_table_names_rank_peak_and_verdict(recipe):
    text = _run(recipe, "parallel.dp_shard=8", "--dry-run", "-t", "cloudmatrix384", "--rank", "31")
    assert "rank 31 (dp_shard=7 tp_x=3)" in text
    assert "plan predicts" in text
    assert "planned / traced" in text
    assert "fits:" in text
    assert "fsdp parameters" in text


def test_what_does_not_fit_is_said(recipe):
    """65,536 tokens keep 4 layers x 4 tensors of width 65,536 in bfloat16: 128 GiB on a device of 64."""
    wide = {**CONFIG, "intermediate_size": 65536}
    (recipe.parent / "model.json").write_text(json.dumps(wide))
    values = ["training.microbatch=1024", "parallel.dp_shard=1", "parallel.tp=1"]
    assert "does NOT fit" in _run(recipe, *values, "--dry-run", "-t", "cloudmatrix384")


def test_a_saved_plan_determines_the_layout_of_the_trace(recipe):
    overrides = ["parallel.dp_shard=2", "parallel.tp=4"]
    saved = recipe.parent / "plan.json"
    plan_recipe(load_recipe(recipe, [*overrides, "topology=cloudmatrix384"]).recipe, 8).save(saved)
    other = recipe.with_name("other.yaml")
    other.write_text(recipe.read_text().replace("dp_shard: 2048, tp: 4", "dp_shard: 8"))
    found = json.loads(_run(other, "--dry-run", "-t", "cloudmatrix384", "--json", "--plan", saved))
    strategy = found["plan"]["strategy"]
    assert (strategy["dp_shard"], strategy["tp_x"] * strategy["tp_y"]) == (2, 4)


def test_mistakes_are_refused(recipe):
    with pytest.raises(Contradiction, match="--topology"):
        _run(recipe, "--topology", "cloudmatrix384")
    with pytest.raises(BadValue, match=r"0\.\.8191"):
        _run(recipe, "--dry-run", "-t", "cloudmatrix384", "--rank", "8192")
    with pytest.raises(DegreesMismatch, match="16"):
        _run(recipe, "--dry-run", "-t", "cloudmatrix384", "--ranks", "16")


@pytest.mark.slow
def test_a_type_that_no_reader_knows_is_planned_and_traced_as_the_module_it_is(recipe):
    """And attention with values narrower than keys is fused, as on the accelerator: nothing is as large as scores."""
    config = {
        **CONFIG, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 2,
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    (recipe.parent / "model.json").write_text(json.dumps(config))
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    values = ["parallel.dp_shard=8", "parallel.tp=1", "data.seq_len=768"]
    shown = json.loads(_run(recipe, *values, "--dry-run", "-t", "dgx-h100", "--json"))
    assert shown["plan"]["model"]["num_params"] == sum(p.numel() for p in plain.parameters())
    assert 768 * 768 not in {math.prod(t["shape"][-2:]) for t in shown["ranks"][0]["peaks"]["hbm"]["top"]}
    planned = json.loads(command("plan", "--recipe", str(recipe), "-t", "dgx-h100", "--json").stdout)
    assert planned["model"]["fingerprint"] == shown["plan"]["model"]["fingerprint"]


def test_a_process_that_is_a_rank_is_refused(recipe):
    with World.fake(0, 4), pytest.raises(Contradiction, match="is initialized"):
        dry_run(load_recipe(recipe, ["topology=cloudmatrix384"]))


def test_a_fake_world_is_closed_and_another_can_be_opened():
    for size in (4, 8):
        with World.fake(1, size) as world:
            assert world.mesh(Strategy(dp_shard=size)).size() == size
            counter = CommCounter(Strategy(dp_shard=size).mesh(), 1)
            with counter:
                torch.distributed.all_reduce(torch.ones(8))
            assert counter.sent_bytes["all_reduce", ("dp_shard",)] == 2 * 32 * (size - 1) // size


@pytest.mark.slow
def test_experts_in_float32_are_traced(tmp_path):
    """torch's shape rule of grouped products knows bfloat16 only."""
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    (tmp_path / "model.json").write_text(json.dumps({**CONFIG, **experts, "hidden_size": 32, "num_hidden_layers": 1}))
    (tmp_path / "recipe.yaml").write_text(
        "model: {path: model.json}\ndata: {seq_len: 32}\nparallel: {dp_shard: 2}\n"
        "training: {dtype: float32, tokens_per_step: 128}\ntopology: local-cpu\n"
    )
    shown = command("train", str(tmp_path / "recipe.yaml"), "--dry-run", "--json").stdout
    assert json.loads(shown)["differences"] == [[]]


@slow_cells("gradients of one layer of experts, not of a mean layer", "saved inputs of experts count once")
@pytest.mark.parametrize(
    ("width", "layers", "every"),
    [
        pytest.param(512, 8, 1, id="saved inputs of experts count once"),
        pytest.param(256, 4, 2, id="gradients of one layer of experts, not of a mean layer"),
    ],
)
def test_experts_that_all_tokens_visit_are_planned_as_traced(tmp_path, width, layers, every):
    config = {
        "model_type": "llama4_text", "hidden_size": width, "intermediate_size": 512, "intermediate_size_mlp": 512,
        "num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": width // 64,
        "head_dim": 64, "vocab_size": 256, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": every,
    }  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(config))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}/model.json}}\ndata: {{seq_len: 4096}}\n"
        "training: {dtype: bfloat16, microbatch: 1}\n"
    )
    options = ("--dry-run", "--topology", "dgx-b200", "--trace", "--json")
    found = json.loads(_run(path, "parallel.dp_shard=8", *options))
    assert -0.02 <= found["planned_to_traced"] <= 0.05
