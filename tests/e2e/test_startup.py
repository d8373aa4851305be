"""How a run starts and what it leaves: which weights, which tokenizer, which checkpoint, which model is exported."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from hyper_parallel.errors import HyperParallelError, TokenizerMissing
from tests.e2e.runs import CONFIG, assert_same_curve, command, curve, rows, train, write_functions

pytestmark = pytest.mark.e2e
PUBLISHED = {**CONFIG, "rope_theta": 5000.0, "rms_norm_eps": 1e-3, "bos_token_id": 1}
DRY = ("--dry-run", "parallel.dp_shard=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe for one step, and `published`: a model as the hub has it, with weights and tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("startup")
    (root / "model.json").write_text(json.dumps(CONFIG))
    write_functions(root / "text.txt", 400)
    (root / "recipe.yaml").write_text(
        f"model: {{path: {root}/model.json}}\n"
        f"data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 300, cache_dir: {root}/cache}}\n"
        "training: {steps: 1, dtype: float32, tokens_per_step: 64, warmup_steps: 0, eval_tokens: 64}\n"
        "parallel: {dp_shard: 1}\n"
    )
    train(root, root / "scratch")
    published = root / "published"
    shutil.copytree(root / "scratch" / "model", published)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED))
    model.generation_config.update(do_sample=True, top_k=7, eos_token_id=[0, 3])
    model.save_pretrained(published)
    return root


def refusal(place, *overrides) -> HyperParallelError:
    with pytest.raises(HyperParallelError) as caught:
        train(place, place / "refused", *overrides)
    assert not (place / "refused").exists()
    return caught.value


def test_a_published_model_without_its_weights_is_refused(place, tmp_path):
    error = refusal(place, "model.path=Qwen/Qwen3-8B", *DRY)
    assert error.code == "HP703"
    assert "hf download Qwen/Qwen3-8B" in error.hint
    shutil.copy(place / "published" / "config.json", tmp_path)
    scratch = train(place, tmp_path / "run", f"model.path={tmp_path}", *DRY)
    assert "from scratch" in scratch.stderr
    shutil.copy(place / "published" / "tokenizer.json", tmp_path)
    assert refusal(place, f"model.path={tmp_path}", *DRY).code == "HP703"
    train(place, tmp_path / "run", f"model.path={tmp_path}", "model.init=random", *DRY)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert refusal(place, f"model.path={tmp_path}", *DRY).code == "HP703"


def test_weights_without_a_tokenizer_are_refused(place, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(place / "published" / name, tmp_path)
    error = refusal(place, f"model.path={tmp_path}", *DRY)
    assert error.code == "HP706"
    with pytest.raises(TokenizerMissing) as caught:
        command("data", str(place / "recipe.yaml"), f"model.path={tmp_path}")
    assert str(caught.value) == str(error)
    command("data", str(place / "recipe.yaml"), f"model.path={tmp_path}", "model.init=random")
    tokenizer = f"data.tokenizer={place / 'published'}"
    shown = train(place, tmp_path / "run", f"model.path={tmp_path}", tokenizer, *DRY).stderr
    assert "pretrained" in shown


def test_pytorch_weights_give_the_run_of_the_safetensors(place, tmp_path):
    from safetensors.torch import load_file

    train(place, place / "tuned", f"model.path={place / 'published'}")
    shutil.copytree(place / "published", tmp_path / "bin")
    state = load_file(tmp_path / "bin" / "model.safetensors")
    (tmp_path / "bin" / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"pytorch_model-1-of-2.bin": names[:5], "pytorch_model-2-of-2.bin": names[5:]}
    for file, held in parts.items():
        torch.save({name: state[name] for name in held}, tmp_path / "bin" / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    train(place, tmp_path / "run", f"model.path={tmp_path / 'bin'}", "checkpoint.export=false")
    assert curve(tmp_path / "run") == curve(place / "tuned")
    assert curve(tmp_path / "run") != curve(place / "scratch")
    (tmp_path / "bin" / "pytorch_model-2-of-2.bin").unlink()
    error = refusal(place, f"model.path={tmp_path / 'bin'}")
    assert (error.code, "pytorch_model-2-of-2.bin" in error.where) == ("HP703", True)


def test_a_checkpoint_is_exported_as_the_model_it_is_of(place, tmp_path):
    """The run keeps its model: what `model.path` names, and what lies beside it, may change or go."""
    from transformers import AutoConfig

    for run, eos in (("scratch", 0), ("tuned", None)):
        out = tmp_path / run
        command("checkpoint", "export", str(place / run), "--out", str(out))
        made = json.loads(command("generate", str(out), "--prompt", "def", "--max-new-tokens", "3", "--json").stdout)
        assert made["num_prompt_tokens"] > 0
        for export in (out, place / run / "export"):
            config = AutoConfig.from_pretrained(export)
            generation = json.loads((export / "generation_config.json").read_text())
            if run == "scratch":
                assert (config.eos_token_id, generation["eos_token_id"]) == (eos, eos)
            else:
                assert (config.rms_norm_eps, config.bos_token_id) == (1e-3, 1)
                assert config.rope_parameters["rope_theta"] == 5000.0
                assert (generation["top_k"], generation["eos_token_id"]) == (7, [0, 3])


@pytest.mark.slow
def test_a_recipe_names_files_beside_itself(place, tmp_path, monkeypatch):
    """And its run is continued from anywhere, here under the topology of another machine."""
    (tmp_path / "here").mkdir()
    folder = tmp_path / "recipes"
    (folder / "models").mkdir(parents=True)
    shutil.copy(place / "model.json", folder / "models")
    shutil.copy(place / "text.txt", folder)
    (folder / "base.yaml").write_text("model: {path: models/model.json}\nparallel: {dp_shard: 1}\n")
    (folder / "recipe.yaml").write_text(
        "extends: base.yaml\ndata: {source: text.txt, seq_len: 32, vocab_size: 300, cache_dir: cache}\n"
        "training: {steps: 1, dtype: float32, tokens_per_step: 64}\ncheckpoint: {export: false}\n"
        "output_dir: out\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    command("train", "../recipes/recipe.yaml", "--no-calibrate")
    assert (tmp_path / "here" / "out" / "metrics.jsonl").is_file()
    with pytest.raises(HyperParallelError, match="HP602"):
        command("train", "../recipes/recipe.yaml", "data.source=text.txt", "--dry-run")
    again = str(tmp_path / "here" / "out" / "config.yaml")
    words = ("train", again, "--no-calibrate", "training.steps=2", "topology=dgx-h100")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *words],
        cwd="/", env=environment, capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert f"resumed from {tmp_path}/here/out/checkpoints, step 1" in shown
    assert "not this machine" in shown
    assert "pred " not in shown
    first, second = rows(tmp_path / "here" / "out" / "metrics.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    assert "pred_step_s" in first
    assert "pred_step_s" not in second
    beyond = ("train", again, "training.steps=1", "--dry-run")
    with pytest.raises(HyperParallelError, match="is of step 2"):
        command(*beyond)


def test_a_start_that_fails_leaves_the_earlier_run(place, tmp_path, monkeypatch):
    shutil.copytree(place / "scratch", tmp_path / "run")
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    over = ("checkpoint.resume=never", "training.lr=1.0e-3")
    monkeypatch.setenv("RANK", "0")
    handler = signal.getsignal(signal.SIGINT)
    for size, code in (("two", "HP315"), ("1", "HP315")):  # no number; no MASTER_ADDR
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(HyperParallelError, match=code):
            train(place, tmp_path / "run", *over)
    # An interrupt reaches this process as before, and those that it starts.
    assert signal.getsignal(signal.SIGINT) is handler
    kept = {p: p.read_bytes() for p in files if p.exists()}
    assert kept == files
    assert "config.yaml" in {p.name for p in files}


def test_a_missing_source_run_is_refused(place, tmp_path):
    error = refusal(place, f"checkpoint.from_dir={tmp_path}", *DRY)
    assert (error.code, error.hint) == ("HP701", "checkpoint.from_dir=null")


def test_a_planned_recipe_names_the_model_by_its_path(place, tmp_path):
    model = str(place / "published")
    text = command("plan", model, "--devices", "1", "--seq-len", "32", "--launch", "ours").stdout
    (tmp_path / "planned.yaml").write_text(text)
    from hyper_parallel.config import load_recipe

    assert load_recipe(tmp_path / "planned.yaml").recipe.model.path == model
    recipe = str(place / "recipe.yaml")
    assert "dgx-h100" in command("plan", "--recipe", recipe, "-t", "dgx-h100").stdout


@pytest.mark.slow
def test_a_scaled_embedding_starts_from_scratch_on_tensor_parallel_ranks(place, tmp_path):
    """Its scale is a buffer of the sharded module, computed on every rank."""
    gemma = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    (tmp_path / "gemma.json").write_text(json.dumps({**gemma, "model_type": "gemma3_text"}))
    common = (
        f"model.path={tmp_path / 'gemma.json'}",
        "training.dtype=float64",
        "checkpoint.export=false",
    )
    train(place, tmp_path / "one", *common)
    train(place, tmp_path / "two", "parallel.tp_x=2", *common)
    assert_same_curve(curve(tmp_path / "two"), curve(tmp_path / "one"))
