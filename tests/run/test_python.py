"""hp.train and hp.generate are the commands of the same names."""

import json
import math

import pytest

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, Contradiction

pytestmark = pytest.mark.torch
RECIPE = (
    "model: {path: tiny.json}\ndata: {max_bytes: 30000, seq_len: 32, vocab_size: 300}\n"
    "training: {steps: 3, dtype: float32, microbatch: 2, accumulation_steps: 1}\nparallel: {dp_shard: 1}\n"
)
SIZES = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ({"training.lr": 0.5}, "hp.train(\"recipe.yaml\", **{'training.lr': 0.5})"),
        ({"data.source": "x" * 100}, 'hp.train("recipe.yaml", **overrides)'),
        (["x" * 100], 'hp.train("recipe.yaml", *overrides)'),
    ],
)
def test_the_hint_for_overrides_in_a_container_is_a_call(override, hint):
    with pytest.raises(BadValue) as caught:
        hp.train("recipe.yaml", override)
    assert caught.value.hint == hint


@pytest.mark.slow
def test_a_run_from_python_has_metrics_and_paths_and_continues_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(SIZES))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = hp.train(
        "recipe.yaml", "training.seed=3", output_dir=tmp_path / "run", training={"steps": 2}, training__lr=0.01
    )  # fmt: skip
    assert run is not None
    assert run.steps == 2
    assert [record["step"] for record in run.metrics] == [1, 2]
    assert run.metrics[-1]["loss"] == run.loss
    assert math.isclose(max(record["lr"] for record in run.metrics), 0.01)
    assert run.evaluations[-1]["loss"] == run.eval_loss
    assert run.plan.workload.seq_len == 32
    assert (run.export_dir / "model.safetensors").is_file()
    assert run.report.is_file()
    assert list(run.checkpoint_dir.iterdir())
    texts = hp.generate(run, ["def ", "x"], max_new_tokens=4, seed=1, stop="\n\n")
    assert len(texts) == 2
    assert hp.generate(str(run.output_dir), "def ", max_new_tokens=4, seed=1) == texts[0]
    with pytest.raises(BadValue) as caught:
        hp.generate(run, "x", temperature_=1.0)
    assert caught.value.hint == "temperature=..."
    with pytest.raises(Contradiction, match="submitted by the command"):
        hp.train("recipe.yaml", launch__launcher="slurm")
