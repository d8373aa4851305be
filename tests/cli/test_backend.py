"""The key `backend`: refusals before any process starts, with hints that work when pasted."""

import json
import re
import sys
from collections import Counter

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BudgetImpossible, DoesNotFit, HyperParallelError, TierFull
from hyper_parallel.trainer import prepare_job
from tests.slow import slow_cells

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
BASE = [
    "training.steps=2", "training.dtype=float32", "training.tokens_per_step=128", "data.seq_len=32",
    "data.vocab_size=384", "parallel.dp_replicate=1", "backend=mindspore",
]  # fmt: skip

LORA = ("lora.r=4", "checkpoint.export=false")
REFUSED = [
    (("training.dtype=bfloat16",), "HP104"),
    (("parallel.pp=2", "parallel.dp_shard=2", "parallel.tp=2"), "HP205"),
    (("training.optimizer=muon",), "HP104"),
    (("training.neftune_noise_alpha=5",), "HP104"),
    (("training.check_ranks_every=2", "training.deterministic=true"), "HP104"),
    (("lora.lora_dropout=0.1", *LORA), "HP104"),
    (("parallel.cp=2",), "HP205"),
    (("parallel.tp_x=2", "parallel.tp_y=2"), "HP205"),
]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "text.txt").write_text("Ranks train a model. " * 200)
    path = tmp_path / "recipe.json"
    data = {
        "model": {"path": "model.json"},
        "data": {"source": "text.txt"},
        "output_dir": str(tmp_path / "run"),
    }
    path.write_text(json.dumps(data))
    return path


def _prepare(recipe, *overrides):
    return prepare_job(load_recipe(recipe, [*BASE, *overrides]), progress=False)


@pytest.fixture
def installed(monkeypatch):
    """The check of the installation passes, as in an environment with MindSpore; nothing of it is imported."""
    from importlib.util import find_spec

    name = "hyper_parallel.trainer.engine.step_programs.find_spec"
    monkeypatch.setattr(name, lambda package: True if package == "mindspore" else find_spec(package))


def test_an_unknown_back_end_is_refused_with_the_names(recipe):
    with pytest.raises(HyperParallelError) as error:
        load_recipe(recipe, ["backend=mindspor"])
    assert error.value.code == "HP102"
    assert "torch, mindspore" in str(error.value.allowed)
    assert "backend=mindspore" in error.value.hint


def test_a_missing_framework_is_named(recipe):
    if "mindspore" in sys.modules:
        pytest.skip("MindSpore is installed")
    with pytest.raises(HyperParallelError) as error:
        _prepare(recipe)
    assert (error.value.code, error.value.hint) == ("HP501", "make setup-mindspore")


def test_a_package_that_fusion_needs_is_named(recipe, installed, monkeypatch):
    from importlib.util import find_spec

    monkeypatch.setattr(
        "hyper_parallel.backends.mindspore.fusion.find_spec",
        lambda package: None if package == "decorator" else find_spec(package),
    )
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HyperParallelError) as error:
        _prepare(recipe, "training.compile=graph-kernel")
    assert error.value.code == "HP501"
    assert "training.compile" in error.value.where
    assert error.value.hint == "pip install decorator && apt-get install g++"


def test_programs_of_the_step_belong_to_the_job(recipe, installed, tmp_path):
    job = _prepare(recipe)
    (programs,) = job.programs
    assert {"loss", "param.model.norm.weight"} <= (programs.gradients.outputs.keys() | programs.gradients.inputs.keys())
    assert "grad_norm" in programs.update.outputs
    (tmp_path / "run").mkdir()
    job.write(job.plan)
    assert (tmp_path / "run" / "programs" / "update" / "program.json").is_file()
    assert _prepare(recipe, "backend=torch").programs is None


@pytest.mark.parametrize("layout", ["parallel.dp_shard=1", "parallel.tp=2", "parallel.pp=2"])
def test_programs_recompute_the_layers_of_the_strategy(recipe, installed, layout):
    words = layout, "parallel.virtual_stages=1", "training.recompute=full"
    for programs in _prepare(recipe, *words, "training.recompute_layers=1").programs:
        repeated = {n.module for n in programs.gradients.nodes if n.residency == "recompute"}
        layers = {module.split(".")[2] for module in repeated}
        assert len(layers) == 1  # of this rank
        assert layers == {"0"} or "batch.received" in programs.gradients.inputs
        assert all(n.residency == "keep" for n in programs.loss.nodes)


def test_programs_update_adapters_only(recipe, installed):
    (programs,) = _prepare(recipe, *LORA, "parallel.dp_shard=2").programs
    sums = {n.partition(".")[2] for n in programs.gradients.inputs if n.startswith("sum.")}
    assert len(sums) == 2 * 14  # two factors of seven projections in two layers
    assert all(name.endswith(("lora_A", "lora_B")) for name in sums)
    names = {n.partition(".")[2] for n in programs.update.inputs if n.startswith("exp_avg.")}
    assert names == sums
    base = "model.layers.0.self_attn.q_proj"
    assert programs.gradients.inputs[f"param.{base}.weight"][1].shape == (16, 32)
    assert programs.gradients.inputs[f"sum.{base}.lora_A"][1].shape == (2, 32)
    assert programs.gradients.inputs[f"sum.{base}.lora_B"][1].shape == (16, 4)


def test_programs_of_sharded_parameters_have_the_shapes_of_a_rank(recipe, installed):
    (programs,) = _prepare(recipe, "parallel.dp_shard=2").programs
    name = "model.embed_tokens.weight"
    for program, kind in (
        (programs.loss, "param"),
        (programs.gradients, "sum"),
        (programs.update, "exp_avg"),
    ):
        assert program.inputs[f"{kind}.{name}"][1].shape == (192, 32)
        assert any(op.startswith("_c10d_functional.") for op in {node.op for node in program.nodes})


@pytest.mark.slow
def test_each_tensor_parallel_rank_has_programs(recipe, installed, tmp_path):
    job = _prepare(recipe, "parallel.tp=2", "parallel.dp_replicate=2")
    for programs in job.programs:
        shape = programs.gradients.inputs["param.model.layers.0.self_attn.q_proj.weight"][1].shape
        assert shape == (16, 32)
        assert programs.update.inputs["exp_avg.model.norm.weight"][1].shape == (32,)
        assert {*programs.gradients.groups()} == {*programs.update.groups()} == {"ranks_0_1"}
    (tmp_path / "run").mkdir()
    job.write(job.plan)
    assert (tmp_path / "run/programs/tp_rank1/update/program.json").is_file()


EXPERTS = MODEL | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
CAPACITY = ("moe.aux_loss_coef=0", "moe.capacity_factor=2")


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        ("training.dtype=bfloat16", "HP104", "bfloat16"),
        ("training.dtype=float16", "HP104", "float16"),
        ("training.dtype=float64", "HP104", "float64"),
        ("training.optimizer=muon", "HP104", "muon"),
        ("training.neftune_noise_alpha=5", "HP104", "noise"),
        ("training.check_ranks_every=2 training.deterministic=true", "HP104", "ranks"),
        ("training.compile=true", "HP104", "backend=mindspore"),
        ("offload.budget=100MB offload.flash_dir=files", "HP104", "files"),
        ("parallel.cp=2", "HP205", "cp=2"),
        ("parallel.tp_x=2 parallel.tp_y=2", "HP205", "tp_y=2"),
        ("parallel.pp=2 parallel.dp_shard=2", "HP205", "pp=2"),
        ("parallel.pp=2 parallel.dp_replicate=2", "HP205", "pp=2"),
        ("parallel.pp=2 parallel.tp=2", "HP205", "pp=2"),
        ("model.path={root}/deep.json parallel.pp=4", "HP205", "pp=4"),
        (
            "model.path={root}/experts.json parallel.dp_shard=2 parallel.tp=2 parallel.ep=2",
            "HP205",
            "ep=2",
        ),
    ],
)
def test_a_combination_without_programs_is_refused_by_name(recipe, installed, words, code, cause):
    """The error comes before any process starts."""
    (recipe.parent / "experts.json").write_text(json.dumps(EXPERTS))
    deep = MODEL | {"num_hidden_layers": 4}  # its embeddings are tied
    (recipe.parent / "deep.json").write_text(json.dumps(deep))
    (recipe.parent / "files").mkdir()
    capacity = CAPACITY if "ep=" in words else ()
    with pytest.raises(HyperParallelError) as error:
        _prepare(recipe, *words.format(root=recipe.parent).split(), *capacity)
    assert (error.value.code, cause in str(error.value.got)) == (code, True)
    assert "=" in error.value.hint


def test_programs_follow_the_memory_plan_of_the_recipe(recipe, installed, tmp_path):
    words = "offload.max_slowdown=0.5", "offload.bandwidth=100GB/s", "offload.recompute=false"
    job = _prepare(recipe, *words)
    (programs,) = job.programs
    memory = programs.memory
    assert memory.peak_bytes < memory.unplanned_bytes
    operators = Counter(node.op for node in programs.gradients.nodes)
    leaving = sum(value.residency == "offload" for value in memory.values)
    assert operators["hyper_parallel.to_device.default"] == leaving
    (tmp_path / "run").mkdir()
    job.write(job.plan)
    file = tmp_path / "run" / "programs" / "gradients" / "memory.json"
    saved = json.loads(file.read_text())
    assert (saved["origin"], saved["peak_bytes"]) == ("simulated", memory.peak_bytes)
    assert [value["value"] for value in saved["values"]] == [v.value for v in memory.values]


@pytest.mark.parametrize(("budget", "dram"), [(1000, "1GiB"), (300_000, "1GiB"), (1_000_000, "1kB")])
def test_the_device_budget_of_a_hint_suffices(recipe, installed, budget, dram):
    with pytest.raises((BudgetImpossible, DoesNotFit, TierFull)) as error:
        _prepare(recipe, f"offload.dram={dram}", f"offload.budget={budget}")
    proposed = re.search(r"offload\.budget=\w+", error.value.hint)[0]
    assert _prepare(recipe, f"offload.dram={dram}", proposed).programs


@slow_cells(*REFUSED[1:])
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused[0][0])
def test_features_without_programs_are_refused(recipe, installed, refused):
    overrides, code = refused
    with pytest.raises(HyperParallelError) as error:
        _prepare(recipe, *overrides)
    assert error.value.code == code
    assert overrides[0].partition("=")[0].rpartition(".")[0] in error.value.where
    pasted = re.findall(r"[a-z_]+(?:\.[a-z_]+)*=\S+", error.value.hint or "")
    assert pasted
    _prepare(recipe, *overrides, *pasted)


@pytest.mark.slow
def test_experts_on_several_ranks_need_a_capacity(recipe, installed):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (recipe.parent / "model.json").write_text(json.dumps(MODEL | experts | names))
    words = "parallel.dp_shard=2", "parallel.ep=2", "moe.aux_loss_coef=0"
    with pytest.raises(HyperParallelError) as error:
        _prepare(recipe, *words)
    assert (error.value.code, error.value.hint) == ("HP104", "moe.capacity_factor=2")
    name = "model.layers.0.mlp.experts.down_proj"
    for programs in _prepare(recipe, *words, error.value.hint).programs:
        operators = Counter(node.op for node in programs.gradients.nodes)
        assert operators["_c10d_functional.all_to_all_single.default"] == 8  # two layers
        inputs = programs.gradients.inputs | programs.update.inputs
        for kind in ("param", "sum", "exp_avg"):
            assert inputs[f"{kind}.{name}"][1].shape == (2, 32, 16)


@pytest.mark.slow
def test_each_stage_of_a_pipeline_has_programs(recipe, installed, tmp_path):
    job = _prepare(recipe, "parallel.pp=2")
    first, last = job.programs
    assert {*first.loss.outputs} == {"sent"}
    assert {*last.loss.outputs} == {"loss"}
    assert "grad.received" in last.gradients.outputs
    assert "batch.gradient" in first.gradients.inputs
    (tmp_path / "run").mkdir()
    job.write(job.plan)
    assert (tmp_path / "run/programs/pp_rank1/update/program.json").is_file()
