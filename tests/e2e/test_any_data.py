"""Data as strangers bring it, through the command: it trains, or one coded error says where it is wrong."""

import json
import math
import re
from pathlib import Path

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BadValue, Contradiction, HyperParallelError, UnknownKey
from hyper_parallel.trainer.data import prepare
from tests.e2e.runs import (
    assert_same_curve,
    command,
    curve,
    rows,
    train,
    write_functions,
    write_records,
)
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 64}  # fmt: skip


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


def conversations(place, count=24):
    """Conversations of one to three short exchanges, none longer than a row."""
    path = place / "chat.jsonl"
    with path.open("w") as file:
        for i in range(count):
            turns = [
                {"role": role, "content": text}
                for n in range(1 + i % 3)
                for role, text in (("user", f"{i}+{n}?"), ("assistant", f"{i + n}!"))
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def whole(place, out, *overrides):
    """Loss summed over all documents, gradient norm and number of labels of one step over the whole data."""
    train(place, place / out, "training.steps=1", "data.holdout=0", "training.max_grad_norm=null",
          "training.warmup_steps=0", *overrides)  # fmt: skip
    (row,) = rows(place / out / "metrics.jsonl")
    count = row["valid_tokens"]
    return row["loss"] * count, row["grad_norm"] * count, count


@slow_cells("sft")
@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_documents_in_one_row_learn_what_they_learn_alone(place, stage):
    source = conversations(place, 12)
    if stage == "pt":
        source = place / "texts.jsonl"
        texts = [f"text {'ab' * i}." for i in range(12)]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    common = (f"stage={stage}", f"data.source={source}", "data.seq_len=128")
    blocked = ("data.mask_documents=true",) if stage == "pt" else ()

    def learnt(out, *overrides):
        """Train a step over all rows, so that each document is read once."""
        num_rows = rows_of(place, *common, *overrides)
        step = f"training.tokens_per_step={num_rows * 128}"
        return num_rows, whole(place, f"{stage}-{out}", *common, step, *overrides)

    count, reference = learnt("alone", "data.packing=false")
    num_rows, packed = learnt("packed", *blocked)
    assert count == 12 > num_rows
    assert packed == pytest.approx(reference, rel=1e-10)
    if stage == "pt":
        return
    for out, *choice in (("cp", "parallel.cp=2"), ("tp", "parallel.tp=2", "data.packing=false")):
        assert learnt(out, *choice)[1] == pytest.approx(reference, rel=1e-10)
    crossing = learnt("crossing", "data.mask_documents=false")[1]
    assert crossing[2] == reference[2]
    assert crossing[0] != pytest.approx(reference[0], rel=1e-6)


def rows_of(place, *overrides):
    """Number of training sequences of a recipe."""
    recipe = load_recipe(place / "recipe.yaml", ["data.holdout=0", *(o for o in overrides if "epochs" not in o)]).recipe
    return len(prepare(recipe.data, stage=recipe.stage, model_path=None, seed=0).train)


def test_positions_that_a_model_has_no_row_for_are_refused(place, caplog):
    source = f"data.source={place / 'text.txt'}"
    with pytest.raises(BadValue, match=r"wpe\.weight has 64 positions") as caught:
        dry(place, source, f"model.path={place / 'gpt2.json'}", "data.seq_len=128")
    assert caught.value.hint == "data.seq_len=64"
    dry(place, source, f"model.path={place / 'gpt2.json'}", "data.seq_len=64")
    assert "max_position_embeddings" not in caplog.text
    dry(place, source, "data.seq_len=256")
    assert "data.seq_len=256 exceeds the model's max_position_embeddings=128" in caplog.text


@pytest.mark.parametrize("family", ["opt", "mamba"])
def test_a_model_that_cannot_tell_documents_apart_is_refused(place, family):
    (place / f"{family}.json").write_text(
        json.dumps({"model_type": family, "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "state_size": 4})
    )  # fmt: skip
    words = (
        "stage=sft",
        f"data.source={conversations(place)}",
        f"model.path={place / family}.json",
    )
    with pytest.raises(Contradiction, match="same sequence attend to each other") as caught:
        dry(place, *words)
    dry(place, *words, *caught.value.hint.split())
    dry(place, *words, "data.mask_documents=false")


def test_epochs_become_steps_and_each_reads_all_in_another_order(place):
    source = (f"data.source={place / 'text.txt'}", "training.epochs=2.5")
    (place / "epochs.yaml").write_text((place / "recipe.yaml").read_text().replace("steps: 2, ", ""))
    words = ("train", str(place / "epochs.yaml"), "--dry-run", *source)
    said = " ".join(re.sub("[^\\w.,;]+", " ", command(*words).stderr).split())
    count = rows_of(place, source[0], "data.holdout=0.02")
    steps = math.ceil(2.5 * count / 8)
    epochs = f"epochs {steps * 8 / count:.4g} in {steps} steps; 8 sequences per step, {count:,} in the data"
    assert epochs in said
    with pytest.raises(Contradiction, match="length of the run"):
        dry(place, *source, "training.steps=2")
    with pytest.raises(Contradiction, match="warm-up is longer"):
        command(*words, "training.warmup_steps=5000")
    # Few rows: the run is short, and what it wrote is a recipe with steps.
    few = ("data.max_bytes=900", "data.holdout=0", "training.tokens_per_step=64", "--no-calibrate")
    command("train", str(place / "epochs.yaml"), *source, *few, f"output_dir={place / 'epochs'}")
    resolved = load_recipe(place / "epochs" / "config.yaml").recipe.training
    count = rows_of(place, source[0], "data.max_bytes=900")
    assert (resolved.epochs, resolved.steps) == (None, math.ceil(2.5 * count / 2))
    assert len(rows(place / "epochs" / "metrics.jsonl")) == resolved.steps
    assert resolved.warmup_steps <= resolved.steps


@pytest.mark.parametrize(
    ("name", "record", "most"),
    [
        ("sft", {"prompt": "Q", "completion": "some words"}, 4),
        ("dpo", {"prompt": "Q", "chosen": "good words", "rejected": "no"}, 2),
    ],
)
def test_a_shipped_recipe_reads_a_hundred_records_a_few_times(place, name, record, most):
    write_records(place / f"{name}.jsonl", [record] * 100)
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    said = command(
        "train", str(recipe), "--dry-run", f"model.path={place / 'llama.json'}", "model.init=random",
        f"data.source={place / f'{name}.jsonl'}", "data.seq_len=64", f"data.cache_dir={place / 'cache'}",
        "data.vocab_size=320", "training.tokens_per_step=512", "training.dtype=float32", "parallel.dp_shard=1",
    ).stderr  # fmt: skip
    assert 1 <= float(re.search(r"epochs\s+([\d.]+) in", said)[1]) <= most


def test_a_memory_plan_does_not_keep_documents_apart(place):
    words = ("stage=sft", f"data.source={conversations(place)}", "offload.max_slowdown=0.5")
    with pytest.raises(Contradiction, match="replays one recorded step"):
        dry(place, *words)
    dry(place, *words, "data.packing=false")


@pytest.mark.slow
def test_a_stream_is_resumed_on_other_ranks_and_judged_by_a_validation_file(place):
    write_functions(place / "valid.txt", 40)
    words = ("data.streaming=true", f"data.source={place / 'text.txt'}", "training.lr_schedule=constant",
             "training.warmup_steps=0", f"data.validation={place / 'valid.txt'}")  # fmt: skip
    train(place, place / "stream", *words, "training.steps=6")
    train(place, place / "resumed", *words, "training.steps=3")
    train(place, place / "resumed", *words, "training.steps=6", "parallel.dp_shard=2")
    assert_same_curve(curve(place / "resumed"), curve(place / "stream"))
    assert load_recipe(place / "stream" / "config.yaml").recipe.data.holdout == 0
    first, last = (r["loss"] for r in rows(place / "stream" / "eval.jsonl"))
    assert last < first
    assert rows(place / "resumed" / "eval.jsonl")[-1]["loss"] == pytest.approx(last, rel=1e-10)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("data.streaming=true", "data.holdout=0.1"), "source are held out"),
        (("data.validation=x.txt", "data.holdout=0.1"), "source are held out"),
        (("data.streaming=true", "training.eval_every=1"), "none is held out"),
        (("data.validation_split=test",), "no validation dataset is given"),
        (("data.packing=false", "data.mask_documents=true"), "a sequence contains one document"),
    ],
)
def test_keys_that_cannot_hold_together_are_refused(place, words, match):
    with pytest.raises(Contradiction, match=match):
        dry(place, *words)


@pytest.mark.slow
def test_a_mixture_is_the_same_on_two_ranks_and_says_its_shares(place):
    write_functions(place / "other.txt", 100)
    mixed = (f"data.source=[{{source: {place / 'text.txt'}, weight: 3}}, "
             f"{{source: {conversations(place)}}}]")  # fmt: skip
    one = train(place, place / "mix1", mixed, "training.steps=3")
    said = " ".join(re.sub("[^\\w.,;+/]+", " ", one.stderr).split())
    assert "0.75 of" in said
    assert "+ 0.25 of" in said
    train(place, place / "mix2", mixed, "training.steps=3", "parallel.dp_shard=2")
    assert_same_curve(curve(place / "mix2"), curve(place / "mix1"))
    first, second = load_recipe(place / "mix1" / "config.yaml").recipe.data.source
    assert (first.source, first.weight, second.weight) == (str(place / "text.txt"), 3, 1)
    # Paths of a recipe are looked for beside it, in a list too.
    beside = "data: {source: [{source: text.txt, weight: 3}, {source: chat.jsonl}], "
    text = (place / "recipe.yaml").read_text().replace("data: {", beside)
    (place / "mixed.yaml").write_text(text)
    command("train", str(place / "mixed.yaml"), "--dry-run")
    with pytest.raises(UnknownKey, match=r"data.source\[0\].weights") as caught:
        dry(place, "data.source=[{source: a.txt, weights: 3}]")
    assert "weight" in caught.value.hint
    with pytest.raises(BadValue, match=r"data.source\[1\].weight"):
        dry(place, "data.source=[{source: a.txt}, {source: b.txt, weight: 0}]")
    with pytest.raises(Contradiction, match="one source only"):
        dry(place, mixed, "data.streaming=true")


@pytest.mark.slow
def test_a_tokenizer_larger_than_the_model_is_refused_for_presets_too(place):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, **{f"w{i}": i + 1 for i in range(130_000)}}
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<eos>")), eos_token="<eos>")
    hf.save_pretrained(str(place / "large"))
    words = (f"data.source={place / 'text.txt'}", f"data.tokenizer={place / 'large'}")
    for path, size in ((place / "llama.json", 384), ("llama-3-8b", 128256)):
        with pytest.raises(BadValue, match="more tokens than the model") as caught:
            dry(place, *words, f"model.path={path}", "topology=h100-8")
        assert caught.value.got.startswith(f"tokenizer=130001, model={size}; ")
        assert caught.value.hint == "data.tokenizer=null"
