"""Models and tokenizers by their names on the hub, against a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.hub import cached_snapshot, parse_name, stay_offline
from hyper_parallel.hub.download import choose_files
from hyper_parallel.trainer import prepare_job, run_job
from tests.hub.server import running_hub

pytestmark = pytest.mark.torch
SIZES = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A model as people publish it: safetensors, a tokenizer, the pickled copy and a file of code."""
    folder = tmp_path_factory.mktemp("published")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a model has run')\n")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"a copy")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process may download from, and an empty cache."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def call(*words) -> str:
    done = CliRunner().invoke(application(), list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*words) -> HyperParallelError:
    with pytest.raises(HyperParallelError) as caught:
        call(*words)
    return caught.value


def write_recipe(tmp_path, **model) -> Path:
    values = {
        "model": model,
        "data": {"max_bytes": 20_000, "seq_len": 32},
        "training": {"steps": 2, "dtype": "float32", "microbatch": 1, "accumulation_steps": 1},
        "parallel": {"dp_shard": 1},
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slow
def test_a_run_keeps_the_commit_that_it_began_with(hub, tmp_path, published):
    first = hub.push("acme/tiny", published)
    path = write_recipe(tmp_path, path="acme/tiny")
    job = prepare_job(load_recipe(path), progress=False)
    assert job.weights is not None
    assert job.weights.name == first
    names = {file.name for file in job.weights.rglob("*")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"pytorch_model.bin", "modeling_own.py", "original"}
    run_job(job)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["path"] == f"acme/tiny@{first}"
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["model"]["name"] == f"acme/tiny@{first}"
    second = hub.push("acme/tiny", published, **{"README.md": b"a later version"})
    # Continued from either recipe, the run reads the commit that it has begun with.
    for recipe in (path, tmp_path / "run" / "config.yaml"):
        again = prepare_job(load_recipe(recipe, ["training.steps=3"]), progress=False)
        assert again.weights is not None
        assert again.weights.name == first
    other = f"model.path=acme/tiny@{second}", f"output_dir={tmp_path / 'other'}"
    newer = prepare_job(load_recipe(path, other), progress=False)
    assert newer.weights is not None
    assert newer.weights.name == second
    # What is in the cache is read without the hub.
    asked = len(hub.requests)
    prepare_job(load_recipe(tmp_path / "run" / "config.yaml"), progress=False)
    assert len(hub.requests) == asked


def test_commands_fetch_what_they_read(hub, tmp_path, published, capfd):
    commit = hub.push("acme/tiny", published)
    assert f"acme/tiny@{commit}" in call("plan", "acme/tiny", "--devices", "1")
    assert "fetching acme/tiny@" in capfd.readouterr().err
    call("doctor", "--model", "acme/tiny")
    assert "fetching" not in capfd.readouterr().err
    assert {f.name for f in cached_snapshot(parse_name("acme/tiny"), "config").iterdir()} == {"config.json"}
    text = call("generate", f"acme/tiny@{commit}", "--prompt", "a", "--max-new-tokens", "2")
    assert text.startswith("a")


def test_a_tokenizer_is_fetched_alone(hub, tmp_path, published):
    hub.push("acme/words", published)
    path = write_recipe(tmp_path, path="tiny.json", init="random")
    (tmp_path / "tiny.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    job = prepare_job(load_recipe(path, ["data.tokenizer=acme/words"]), progress=False)
    assert Path(job.packed.tokenizer_dir).is_relative_to(tmp_path / "home")
    assert not any("safetensors" in request for request in hub.requests)


def test_refusals_name_the_cause(hub, tmp_path, monkeypatch, published):
    hub.push("acme/pickled", **{"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.push("acme/secret", published)
    hub.gated.add("acme/secret")
    hub.push("acme/tiny", published)
    path = write_recipe(tmp_path, path="acme/tiny")
    for name, what, hint in (
        ("acme/none", "the hub has no model `acme/none`", "hf auth login"),
        ("acme/secret", "is gated", "hf auth login"),
        ("acme/tiny@dev", "has no revision `dev`", "model.path=acme/tiny"),
        ("acme/pickled", "no safetensors", "hf download acme/pickled --local-dir pickled"),
        ("tin.yaml", "neither a path", "check the path"),
        ("models/tiny", "does not exist", "check the path"),
        (
            "runs/sft/export",
            "does not exist",
            "hyper-parallel train RECIPE.yaml output_dir=runs/sft",
        ),
        ("./recipe", "does not exist", "model.path=recipe.yaml"),
    ):
        with pytest.raises(HyperParallelError) as caught:
            prepare_job(load_recipe(path, [f"model.path={name}"]), progress=False)
        assert what in caught.value.what, name
        assert hint in (caught.value.hint or ""), name
    trusted = load_recipe(path, ["model.trust_remote_code=true"])
    with pytest.raises(HyperParallelError, match="Python code is not downloaded"):
        prepare_job(trusted, progress=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    error = refusal("plan", "acme/other")
    assert error.hint == "HF_HUB_OFFLINE=0 hf download acme/other config.json"
    assert "preset" not in (error.hint or "")
    assert len(hub.requests) == asked


def test_libraries_stay_offline_while_names_are_fetched(hub, monkeypatch, published):
    monkeypatch.setenv("HYPER_PARALLEL_DOWNLOADS", "")  # restored afterwards
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HYPER_PARALLEL_DOWNLOADS")
    hub.push("acme/tiny", published)
    stay_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    call("plan", "acme/tiny", "--devices", "1")


@pytest.mark.parametrize(
    ("text", "is_hub"),
    [
        ("Qwen/Qwen2.5-0.5B", True), ("Qwen/Qwen2.5-0.5B@main", True), ("Qwen/Qwen2.5-0.5B@refs/pr/3", True),
        ("qwen3-8b", False), ("data/x.jsonl", False), ("models/Qwen3-8B", False), ("./a/b", False),
        ("/a/b", False), ("here/b", False), ("a/b/c", False), ("org/x.json", False), ("", False),
    ],
)  # fmt: skip
def test_names_and_paths(tmp_path, monkeypatch, text, is_hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert (parse_name(text) is not None) is is_hub


def test_copies_of_weights_pickles_and_code_are_left_out():
    names = [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "consolidated.safetensors", "model.fp16.safetensors", "tokenizer.json",
        "tokenizer_config.json", "pytorch_model.bin", "modeling.py", "onnx/model.onnx", "optimizer.pt", "README.md",
    ]  # fmt: skip
    assert choose_files(names, "model") == [
        "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip


def test_a_partial_snapshot_is_not_taken_for_the_whole(hub, tmp_path, published):
    commit = hub.push("acme/tiny", published)
    path = write_recipe(tmp_path, path=f"acme/tiny@{commit}")
    prepare_job(load_recipe(path), progress=False)
    snapshot = cached_snapshot(parse_name(f"acme/tiny@{commit}"), "model")
    assert snapshot is not None
    (snapshot / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert cached_snapshot(parse_name(f"acme/tiny@{commit}"), "model") is None


@pytest.mark.slow
def test_a_data_set_is_fetched_once(hub, tmp_path, published, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    rows = (json.dumps({"text": f"hello {i} " * 30}).encode() for i in range(40))
    hub.push("datasets/acme/talks", **{"train.jsonl": b"\n".join(rows)})
    folder = str(published)
    path = write_recipe(tmp_path, path=folder)
    with pytest.raises(HyperParallelError, match="the dataset `acme/none` cannot be downloaded"):
        prepare_job(load_recipe(path, ["data.source=acme/none"]), progress=False)
    script = "from hyper_parallel.cli import main; main()"
    words = ["train", str(path), "data.source=acme/talks", "--dry-run", "--no-calibrate"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script, *words], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "acme/talks" in done.stderr
    assert sum("train.jsonl" in r and r.startswith("GET") for r in hub.requests) == 1


@pytest.mark.slow
def test_a_data_set_is_streamed_and_stored_nowhere(hub, tmp_path, published, monkeypatch):
    """Losses are those of a stream of the same file on disk."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    rows = "\n".join(json.dumps({"text": f"hello {i} " * 30}) for i in range(40))
    hub.push("datasets/acme/talks", **{"train.jsonl": rows.encode()})
    (tmp_path / "train.jsonl").write_text(rows)
    recipe = yaml.safe_load(write_recipe(tmp_path, path=str(published)).read_text())
    recipe["data"] = {"seq_len": 32, "streaming": True, "holdout": 0}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    disk = (f"data.source={tmp_path / 'train.jsonl'}", f"output_dir={tmp_path / 'disk'}")
    run_job(prepare_job(load_recipe(path, disk), progress=False))
    # A process of its own: libraries read once whether they are offline.
    script = "from hyper_parallel.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = ["train", str(path), "data.source=acme/talks", f"output_dir={tmp_path / 'hub'}"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--no-calibrate"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    curves = []
    for name in ("hub", "disk"):
        metrics = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        curves.append([(row["loss"], row["grad_norm"]) for row in metrics])
    assert len(curves[0]) == 2
    assert curves[0] == curves[1]
    assert any(r.startswith("GET") and r.endswith("train.jsonl") for r in hub.requests)
    kept = [p for p in tmp_path.rglob("*") if p.is_file() and b"hello 7 hello" in p.read_bytes()]
    assert {p.parent for p in kept} <= {tmp_path, tmp_path / "hub", tmp_path / "disk"}, kept
