"""Recipes on MindSpore beside the same recipes on torch, through the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
RECIPE = {
    "model": {"path": "model.json"},
    "data": {"source": "text", "seq_len": 32, "vocab_size": 384},
    "training": {
        "steps": 6, "dtype": "float32", "tokens_per_step": 256, "lr": 1e-2, "warmup_steps": 2,
        "eval_tokens": 128, "max_grad_norm": 0.5,
    },
    "parallel": {"dp_replicate": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("mindspore")
    (place / "model.json").write_text(json.dumps(MODEL))
    (place / "recipe.json").write_text(json.dumps(RECIPE))
    (place / "text").mkdir()
    for path in sorted(Path(json.__file__).parent.glob("*.py")):
        (place / "text" / f"{path.stem}.txt").write_text(path.read_text())
    return place


def _train(place, name, *changes):
    command = [
        sys.executable,
        "-m",
        "hyper_parallel",
        "train",
        "recipe.json",
        f"output_dir={name}",
        *changes,
    ]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiling repo" not in done.stdout + done.stderr  # in the line that AKG prints per kernel
    return [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]


SGD = ("training.optimizer=sgd", "training.lr=0.1")


@pytest.fixture(scope="module")
def sgd_on_torch(place):
    return _train(place, "torch", *SGD)


def _same(rows, wanted, loss, norms):
    """Losses agree, and `norms` gradient norms: AdamW turns rounding of tiny gradients into whole steps."""
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in wanted]
    assert [r["loss"] for r in rows] == pytest.approx([w["loss"] for w in wanted], rel=loss)
    theirs = [w["grad_norm"] for w in wanted[:norms]]
    assert [r["grad_norm"] for r in rows[:norms]] == pytest.approx(theirs, rel=1e-5)


def _logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize("changes", [[], ["training.tokens_per_step=512"]], ids=["adamw", "more microbatches"])
def test_adamw_trains_as_on_torch(place, changes, request):
    name = request.node.callspec.id.replace(" ", "_")
    wanted = _train(place, f"torch_{name}", *changes)
    _same(_train(place, f"mindspore_{name}", "backend=mindspore", *changes), wanted, 1e-4, norms=1)


def test_a_memory_plan_trains_as_on_torch(place):
    wanted = _train(place, "torch_kept")
    plan = "offload.max_slowdown=0.5", "offload.bandwidth=100GB/s"
    _same(_train(place, "planned", "backend=mindspore", *plan), wanted, 1e-4, norms=1)
    memory = json.loads((place / "planned" / "run.json").read_text())["program_memory"]
    assert memory["origin"] == "simulated"
    assert memory["peak_bytes"] < memory["unplanned_bytes"]
    assert "peak memory of the program (simulated)" in (place / "planned/report.html").read_text()
    assert "k.to_device(" in (place / "planned/programs/gradients_rank0.py").read_text()


def test_sgd_and_its_export_are_those_of_torch(place, sgd_on_torch):
    _same(_train(place, "sgd", "backend=mindspore", *SGD), sgd_on_torch, 1e-5, norms=6)
    assert (place / "sgd" / "programs" / "gradients" / "program.json").is_file()
    ours, theirs = _logits(place / "sgd" / "export"), _logits(place / "torch" / "export")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    _train(place, "start", "training.steps=1", "training.lr=1e-12", "training.warmup_steps=0")
    start = _logits(place / "start" / "export")
    assert (theirs - start).abs().max() > 1e-3  # training has changed the model


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2",
        "dp_shard=2",
        "tp=2",
        "tp=4",
        "dp_replicate=2 tp=2",
        "dp_replicate=2 dp_shard=2",
        "dp_shard=2 tp=2",
        "pp=2",
        "pp=2 schedule=gpipe",
    ],
)
def test_several_processes_train_as_one(place, sgd_on_torch, layout):
    words = [f"parallel.{degree}" for degree in ("dp_replicate=1", *layout.split())]
    name = layout.replace(" ", "_").replace("=", "")
    rows = _train(place, name, "backend=mindspore", *words, *SGD)
    _same(rows, sgd_on_torch, 1e-5, norms=6)
    torch.testing.assert_close(_logits(place / name / "export"), _logits(place / "torch" / "export"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_kernels_train_as_torch(place, sgd_on_torch, ranks):
    name, words = f"fused{ranks}", ("backend=mindspore", "training.compile=graph-kernel")
    rows = _train(place, name, *words, f"parallel.dp_shard={ranks}", *SGD)
    losses = [row["loss"] for row in rows]
    assert losses == pytest.approx([row["loss"] for row in sgd_on_torch], rel=1e-5)
    kernels = json.loads((place / name / "run.json").read_text())["fused_kernels"]
    assert len(kernels) >= 10
    assert max(len(kernel["operators"]) for kernel in kernels) > 4
    log = place / name / "programs" / "kernels.log"
    assert "tiling repo" in log.read_text()
    page = (place / name / "report.html").read_text()
    assert all(kernel["name"] in page for kernel in kernels)
    assert not [*place.glob("*.log"), *place.glob("akg_kernel_meta")]  # of the compiler


@pytest.mark.parametrize("shards", [2, 4])
def test_experts_on_two_ranks_train_as_on_torch(place, shards):
    """With four shards, two ranks share each half of the experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (place / "experts.json").write_text(json.dumps(MODEL | experts | names))
    options = "model.path=experts.json", "moe.aux_loss_coef=0", "moe.capacity_factor=1", *SGD
    words = f"parallel.dp_shard={shards}", "parallel.ep=2"
    wanted = _train(place, f"experts_torch{shards}", *options, *words)
    rows = _train(place, f"experts{shards}", "backend=mindspore", *options, *words)
    _same(rows, wanted, 1e-5, norms=6)


def test_a_run_changes_the_back_end_twice(place):
    same = "training.lr_schedule=constant", "training.lr=3e-3"
    for steps, backend in ((10, "torch"), (20, "mindspore"), (30, "torch")):
        rows = _train(place, "changing", *same, f"training.steps={steps}", f"backend={backend}")
    wanted = _train(place, "constant", *same, "training.steps=30")
    _same(rows, wanted, 1e-4, norms=1)
    assert rows[0]["loss"] - rows[-1]["loss"] > 0.5
    torch.testing.assert_close(
        _logits(place / "changing" / "export"),
        _logits(place / "constant" / "export"),
        rtol=0,
        atol=1e-3,
    )


def test_exports_of_one_checkpoint_are_equal(place):
    """The back end that goes on without a step exports the weights of the other."""
    for first, second in (("torch", "mindspore"), ("mindspore", "torch")):
        name = f"from_{first}"
        _train(place, name, "training.steps=2", f"backend={first}")
        wanted = _logits(place / name / "export")
        shutil.rmtree(place / name / "export")
        _train(place, name, "training.steps=2", f"backend={second}")
        torch.testing.assert_close(_logits(place / name / "export"), wanted, rtol=0, atol=0)
