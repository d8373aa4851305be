"""Hints for a missing path name the file that the user has, and come before the seconds that torch needs."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.errors import HyperParallelError

RECIPE = "model: {path: tiny-llama}\ndata: {source: words.jsonl}\nparallel: {dp_shard: 1}\n"


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("tiny-llama", "runs/sft"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tiny-llama/config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "own.yaml").write_text(RECIPE)
    (tmp_path / "another.yaml").write_text(RECIPE.replace("words", "pairs"))
    for name in ("words.jsonl", "pairs.jsonl"):
        (tmp_path / name).write_text("{}\n")


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("plan tiny-lama -t dgx-h100", "did you mean `tiny-llama`?"),
        ("plan lama-3-8b -t dgx-h100", "did you mean `llama-3-8b`?"),
        ("report runs/stf", "did you mean `runs/sft`?"),
        ("checkpoint list runs/stf", "did you mean `runs/sft`?"),
        ("data words.jsonl", "hyper-parallel data own.yaml data.source=words.jsonl"),
        ("data pairs.jsonl", "hyper-parallel data another.yaml data.source=pairs.jsonl"),
    ],
)
def test_the_hint_names_what_is_there(written, hint):
    with pytest.raises(HyperParallelError) as caught:
        CliRunner().invoke(application(), written.split(), catch_exceptions=False)
    assert caught.value.hint == hint


def test_train_refuses_a_missing_model_without_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from hyper_parallel.cli import application\n"
        "words = ['train', 'own.yaml', 'model.path=tiny-lama']\n"
        "print(CliRunner().invoke(application(), words).exception.hint, 'torch' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "did you mean `tiny-llama`? False\n"
