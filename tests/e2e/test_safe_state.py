"""Checkpoints and models of strangers through the command: what is kept, what goes on, and whose code runs."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.errors import Contradiction, ModelUnreadable, WeightsUnreadable
from hyper_parallel.trainer.checkpoints.manifest import read_manifest, step_name, steps
from tests.e2e.runs import CONFIG, command, curve, rows, train, write_functions

pytestmark = pytest.mark.e2e

STRANGER = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

(Path({mark!r})).touch()

class StrangeConfig(LlamaConfig):
    model_type = "strange"

class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights, a config, a text and a recipe."""
    root = tmp_path_factory.mktemp("state")
    (root / "model.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    model.save_pretrained(root / "hf")
    write_functions(root / "text.txt", 2000)
    (root / "recipe.yaml").write_text(
        f"""
model: {{path: {root}/model.json}}
data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 384, cache_dir: {root}/cache}}
training: {{steps: 4, tokens_per_step: 256, lr: 1.0e-2, lr_schedule: constant, eval_every: 2, eval_tokens: 200}}
parallel: {{dp_shard: 1}}
checkpoint: {{every: 2, keep: 1, keep_best: true, export: false}}
"""
    )
    return root


@pytest.mark.slow
def test_an_imported_model_starts_a_run_that_goes_on_with_its_own_checkpoints(place):
    command("checkpoint", "import", str(place / "hf"), str(place / "base"))
    out, start = place / "out", f"checkpoint.from_dir={place / 'base'}"
    train(place, out, start)
    direct = (
        "model.init=pretrained",
        f"data.tokenizer={out / 'model'}",
        "checkpoint.keep_best=false",
    )
    train(place, place / "direct", f"model.path={place / 'hf'}", *direct)
    assert curve(out) == curve(place / "direct")
    losses = {row["step"]: row["loss"] for row in rows(out / "eval.jsonl")}
    assert losses[4] < losses[2]
    assert steps(out / "checkpoints") == [4]  # newest and best
    # The same command again, for more steps: it does not begin at step 0 anew. Now evaluations get worse.
    train(place, out, start, "training.steps=8", "training.lr=1.0")
    found = [(row["step"], row["lr"]) for row in rows(out / "metrics.jsonl")]
    assert found == [(step, 0.01 if step <= 4 else 1.0) for step in range(1, 9)]
    losses = {row["step"]: row["loss"] for row in rows(out / "eval.jsonl")}
    assert min(losses, key=losses.get) == 4
    assert steps(out / "checkpoints") == [4, 8]
    best = read_manifest(out / "checkpoints" / step_name(4))
    assert best.metrics == {"loss": losses[4]}
    assert "verified" in command("checkpoint", "verify", str(out)).output
    with pytest.raises(Contradiction, match="not every saved step is evaluated"):
        train(place, out, "checkpoint.every=3")


def test_code_of_a_stranger_runs_only_where_the_recipe_says_so(place, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder, mark = tmp_path / "strange", tmp_path / "ran"
    folder.mkdir()
    classes = {"AutoConfig": "code.StrangeConfig", "AutoModelForCausalLM": "code.StrangeModel"}
    config = CONFIG | {
        "model_type": "strange",
        "architectures": ["StrangeModel"],
        "auto_map": classes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(STRANGER.format(mark=str(mark)))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    mine = (f"model.path={folder}", "model.init=random", "checkpoint.keep_best=false")
    with pytest.raises(ModelUnreadable, match=r"set `model\.trust_remote_code=true`"):
        train(place, tmp_path / "run", *mine)
    train(place, place / "tok", "training.steps=1", "checkpoint.keep_best=false")
    for file in (place / "tok" / "model").glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes((place / "hf" / "model.safetensors").read_bytes())
    with pytest.raises(WeightsUnreadable, match="hint: --trust-remote-code"):
        command("generate", str(folder), "--prompt", "def")
    assert not mark.exists()
    words = ("--max-new-tokens", "2", "--trust-remote-code")
    assert command("generate", str(folder), "--prompt", "def", *words).output.startswith("def")
    assert mark.exists()
    train(place, tmp_path / "run", *mine, "model.trust_remote_code=true", "training.steps=1")
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["architectures"] == ["StrangeModel"]
