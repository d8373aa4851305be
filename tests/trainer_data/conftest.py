"""A small corpus, and a shared cache so that its tokenizer is trained once."""

import json

import pytest

from hyper_parallel.config import Data
from hyper_parallel.trainer.data import prepare


@pytest.fixture
def corpus(tmp_path):
    """Forty text files of different lengths; file i counts words of its own."""
    root = tmp_path / "corpus"
    for i in range(40):
        path = root / f"part{i % 3}" / f"doc{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [f"word{i}_{n} \u00fcber" for n in range(20 + 7 * i)]
        path.write_text(" ".join(words) + "\n", encoding="utf-8")
    return root


@pytest.fixture
def conversations(tmp_path):
    """Thirty sharegpt conversations of one to three exchanges."""
    path = tmp_path / "chat.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(30):
            turns = []
            for n in range(1 + i % 3):
                turns.append({"from": "human", "value": f"What is {i} plus {n}?"})
                turns.append({"from": "gpt", "value": f"It is {i + n}, of course."})
            file.write(json.dumps({"conversations": turns, "system": "Be brief."}) + "\n")
    return path


@pytest.fixture
def make(tmp_path):
    """prepare() with a small tokenizer and a cache of this test."""

    def run(source, stage="pt", seed=0, model_path=None, **values):
        vocab_limit = values.pop("vocab_limit", None)
        defaults = {"seq_len": 32, "vocab_size": 320, "holdout": 0.1}
        defaults["cache_dir"] = str(tmp_path / "cache")
        data = Data(source=str(source), **defaults | values)
        return prepare(
            data,
            stage=stage,
            model_path=model_path,
            seed=seed,
            progress=False,
            vocab_limit=vocab_limit,
        )

    return run
