"""A table of wrong inputs to every command: each hint is pasted, and leads to success or to another error.

Hints come in five forms: a command, overrides in backticks or bare, options that are added, `did you mean`, and a
command of another program. Words in capitals stand for something that only the user knows.
"""

import json
import shlex

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.errors import HyperParallelError
from tests.hints import pasted, read_only

MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 272,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
RECIPE = """
model: {path: model.json}
stage: sft
data: {source: my_data.jsonl, seq_len: 64, vocab_size: 272, holdout: 0}
training: {steps: 2, dtype: float32, tokens_per_step: 128}
parallel: {dp_shard: 1}
"""
TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is it."}]
KEYS = (
    "lora.rank=8", "lora.alpha=8", "lora=true", "lora=8", "parallel.dp=2", "parallel.data_parallel_size=2",
    "parallel=dp2", "parallel=tp2", "parallel=tp=2,pp=2", "parallel=tp2xpp2", "parallel.TP=2", "training.LR=1e-3",
    "training.neftune=5", "training.neftune_noise=5", "training.learning_rate=1e-3", "training.lr 1e-3",
    "training.lr", "training.lr:1e-3", "training.steps=many", "training.report_to=wandb", "training.report_to=[wanb]",
    "training.report_to=none", "training.dtype=BF16", "training.dtype=half", "training.recompute=selective",
    "training.lr_schedule=Cosine", "training.optimizer.name=adamw", "training.deterministic=ture",
    "stage=SFT", "stage=ppo", "stage=pretrain", "stage=dpo_offline", "stage=reward", "stage=rlhf", "stage=dop",
    "'data.columns={question: ask}'", "'data.columns={promt: a}'", "'data.columns={ask: prompt}'",
    "'data.roles={human: user}'", "'data.source=[{source: my_data.jsonl, wieght: 2}]'",
    "data.format=sharegp", "data.max_length=64", "data.packing_=true", "parallel.schedule=GPIPE",
    "parallel.schedule=1F1B", "checkpoint.resume=neve", "checkpoint.save_steps=3", "launch.launcher=Slurm",
    "launch.launcher=k8s launch.nnodes=2", "offload.budget=lots", "training.warmup_steps=50",
    "'lora={r:8}'", "'training.lr_schedule_args={power:2.0}' training.lr_schedule=polynomial",
    "datasets.0.path=my_data.jsonl", "training.warmup_ratio=0.5 training.warmup_steps=1",
    "training.epochs=1 training.steps=5", "data.validation_split=x", "parallel.world_size=3",
)  # fmt: skip
"""Words behind `hyper-parallel config show my.yaml`."""
WITH_DATA = (
    "data my.yaml -n 0 data.source=my_dta.jsonl", "data my.yaml -n 0 data.validation=my_dta.jsonl",
    "data my.yaml -n 0 data.source=prefs.jsonl", "data my.yaml -n 0 stage=dpo", "train my.yaml --trace",
    "train my.yaml --rank 0",
    "train my.yaml --dry-run training.report_to=[wandb]", "generate runs/run --dram 4GiB --prompt x",
    "generate my.yaml --prompt x",
)  # fmt: skip
"""Commands that read data or build a model."""
COMMANDS = (
    "train my.yam", "train mi.yaml --dry-run", "train folder/kept.yml --dry-run", "train keept.yaml --dry-run",
    "train my_data.jsonl", "train my.yaml -training.lr=1",
    "data my_data.jsonl", "data my_dta.jsonl", "data my.yml",
    "plan my_data.jsonl", "plan my.yaml", "plan --recipe my_data.jsonl", "plan --recipe my.yam",
    "plan", "plan modell.json",
    "plan lama-3-8b -t dgx-h100", "plan llama-3-8b -t dgxh100", "plan llama-3-8b -t dgx-h100 --objective fast",
    "plan llama-3-8b -t dgx-h100 --pin tp=3", "plan folder",
    "report my.yaml", "report runs/rum", "report absent", "checkpoint list my.yaml", "checkpoint list runs/rum",
    "checkpoint export absent", "checkpoint verify my_data.jsonl", "config show my_data.jsonl", "config show my.yam",
    "parity my_data.jsonl", "parity mi.yaml", "init quikstart", "init my.yaml",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HYPER_PARALLEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "my.yaml").write_text(RECIPE)
    for folder in ("folder", "recipes", "runs/run"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "recipes/kept.yaml").write_text(RECIPE)
    (tmp_path / "folder/kept.yaml").write_text(RECIPE)
    (tmp_path / "my_data.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n" * 40)
    (tmp_path / "my_prefs.jsonl").write_text(
        f"{json.dumps({'prompt': 'a', 'chosen': 'good', 'rejected': 'bad'})}\n" * 40
    )
    return tmp_path


def outcome(words):
    """Return the coded error of a command, the usage error as a text, or None where it succeeds."""
    try:
        done = CliRunner().invoke(application(words[0]), words, catch_exceptions=False)
    except HyperParallelError as error:
        return error
    return None if done.exit_code == 0 else done.output


def assert_leads_on(words, whole=False):
    first = outcome(words)
    assert isinstance(first, HyperParallelError), first
    assert first.hint, first.render()
    again = pasted(words, first)
    if again is None:
        return
    if not whole and again[0] in ("train", "data", "parity"):
        again = read_only(again)
    elif again[0] == "train" and "--dry-run" not in again:
        again = [*again, "--dry-run"]
    second = outcome(again)
    assert not isinstance(second, str), (first.hint, again, second)
    told = (first.what, first.where, first.got)
    assert second is None or (second.what, second.where, second.got) != told, second.render()


@pytest.mark.parametrize("written", KEYS)
def test_a_pasted_override_leads_on(place, written):
    assert_leads_on(["config", "show", "my.yaml", *shlex.split(written)])


@pytest.mark.parametrize("written", COMMANDS)
def test_a_pasted_command_leads_on(place, written):
    assert_leads_on(shlex.split(written))


@pytest.mark.slow
@pytest.mark.parametrize("written", WITH_DATA)
def test_a_pasted_hint_on_data_leads_on(place, written):
    assert_leads_on(shlex.split(written), whole=True)
