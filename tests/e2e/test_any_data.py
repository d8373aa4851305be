"""Data as strangers bring it, through the command: it trains, or one coded error says where it is wrong."""

import json

import pytest

from hyper_parallel.errors import HyperParallelError
from tests.e2e.runs import command, write_functions

pytestmark = pytest.mark.e2e

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, a text, and a recipe without a source."""
    root = tmp_path_factory.mktemp("any")
    (root / "llama.json").write_text(json.dumps(LLAMA))
    (root / "gpt2.json").write_text(json.dumps(GPT2))
    write_functions(root / "text.txt", 300)
    (root / "recipe.yaml").write_text(
        f"model: {{path: {root / 'llama.json'}}}\n"
        f"data: {{seq_len: 32, vocab_size: 320, cache_dir: {root / 'cache'}}}\n"
        "training: {steps: 2, dtype: float64, tokens_per_step: 256}\n"
        f"parallel: {{dp_shard: 1}}\ncheckpoint: {{export: false}}\noutput_dir: {root / 'out'}\n"
    )
    return root


def dry(place, *overrides):
    return command("train", str(place / "recipe.yaml"), "--dry-run", *overrides)


TURN = {"role": "user", "content": "Q"}
BAD_FILES = {
    "lone surrogate in a text": ("a.jsonl", '{"text": "good"}\n{"text": "\\ud800"}\n', 2),
    "lone surrogate in a key": ("a.jsonl", '{"text": "good"}\n{"\\udfff": "x"}\n', 2),
    "lone surrogate in a turn": ("c.jsonl", '{"messages": [{"role": "user", "content": "\\ud800"}]}\n', 1),
    "truncated array": ("a.json", '[{"text": "good"},\n{"text": "go', 2),
    "nesting": ("a.jsonl", '{"text": "good"}\n' + "[" * 100_000 + "]" * 100_000 + "\n", 2),
    "nesting in an array": ("a.json", "[" * 100_000 + "]" * 100_000, 1),
    "a number of 5000 digits": ("a.jsonl", '{"text": "good"}\n{"n": ' + "1" * 5000 + "}\n", 2),
    "not an object": ("a.jsonl", '{"text": "good"}\n"text"\n', 2),
    "text of another type": ("a.jsonl", '{"text": "good"}\n{"text": ["a"]}\n', 2),
    "turns that are a text": ("c.jsonl", json.dumps({"messages": [TURN]}) + '\n{"messages": "Q"}\n', 2),
    "a turn that is a list": ("c.jsonl", '{"messages": [["user", "Q"]]}\n', 1),
    "a role of another type": ("c.jsonl", '{"messages": [{"role": {"a": []}, "content": "Q"}]}\n', 1),
    "content of another type": ("c.jsonl", json.dumps({"messages": [{**TURN, "content": 3}]}) + "\n", 1),
    "history of another type": ("c.jsonl", '{"instruction": "a", "output": "b", "history": [[1]]}\n', 1),
    "completion of another type": ("c.jsonl", '{"prompt": "a", "completion": 5}\n', 1),
    "a short row": ("a.csv", "text,id\ngood,1\nbad\n", 3),
    "an open quote": ("a.csv", 'text\n"bad\n', 2),
    "empty lines": ("a.jsonl", "\n\n", None),
    "an empty array": ("a.json", "[]", None),
    "a table without rows": ("a.csv", "text,id\n", None),
    "texts without a word": ("a.jsonl", '{"text": ""}\n', None),
    "chats without a turn": ("c.jsonl", '{"messages": []}\n', None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_data_is_refused_with_its_file_and_line(place, tmp_path, name):
    file, content, line = BAD_FILES[name]
    path = tmp_path / file
    path.write_text(content)
    stage = "sft" if file.startswith("c") else "pt"
    with pytest.raises(HyperParallelError) as caught:
        dry(place, f"data.source={path}", f"stage={stage}")
    error = caught.value
    assert error.code == "HP602"
    assert str(path) in error.where
    if line is not None:
        assert error.where.startswith((f"{path}:{line}", f"{path}: record {line}"))
    str(error).encode()  # can be printed
