"""A model whose class of tokenizers follows from its config.json: each later reader gives the tokens of training."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hyper_parallel.config import load_recipe
from hyper_parallel.trainer import prepare_job
from tests.e2e.runs import command, rows, train, write_records

pytestmark = pytest.mark.e2e

TEXT = "in 2024 it was 12345 and 2024"
RECORDS = [{"prompt": f"{n} years?", "completion": f"{TEXT} {n}"} for n in range(1990, 2022)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = {
    "vocab_size": 420, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "initializer_range": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, and a random model whose files name the generic class of tokenizers beside its model type."""
    root = tmp_path_factory.mktemp("saved")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(str(n) for n in range(1900, 2100)), TEXT * 20], trainer)
    ends = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **ends).save_pretrained(root / "model")
    path = root / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(root / "model")
    write_records(root / "records.jsonl", RECORDS)
    recipe = {
        "model": {"path": str(root / "model")}, "stage": "sft",
        "data": {
            "source": str(root / "records.jsonl"), "seq_len": 64, "holdout": 0, "cache_dir": str(root / "cache"),
        },
        "training": {
            "steps": 2, "dtype": "float32", "tokens_per_step": 128, "microbatch": 1, "lr": 1e-2,
        },
        "parallel": {"dp_shard": 1},
    }  # fmt: skip
    (root / "recipe.yaml").write_text(json.dumps(recipe))
    return root


def read(directory):
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def ids(directory):
    return read(directory)(TEXT, add_special_tokens=False)["input_ids"]


def trained_rows(place, *words):
    """Return all tokens that a recipe trains on."""
    job = prepare_job(load_recipe(place / "recipe.yaml", words), progress=False)
    return job.packed.train.read(np.arange(len(job.packed.train)))[0]


def holds(found, tokens):
    windows = np.lib.stride_tricks.sliding_window_view(found, len(tokens), axis=-1)
    return bool((windows == np.asarray(tokens)).all(-1).any())


def continued(place, run, model, tokens):
    """Check that the command continues a text as transformers continues these tokens."""
    write_records(place / "prompts.jsonl", [{"prompt": TEXT}])
    out = run / "generated.jsonl"
    words = ("--max-new-tokens=6", "--temperature=0", "--device=cpu")
    command("generate", str(run), "--prompts", str(place / "prompts.jsonl"), "-o", str(out), *words)
    (row,) = rows(out)
    assert row["token_ids"] == greedy(model, tokens)[: len(row["token_ids"])]
    assert row["token_ids"]


@torch.no_grad()
def greedy(model, tokens):
    found = list(tokens)
    for _ in range(6):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


def test_exports_adapters_and_generation_have_the_tokens_of_training(place):
    wanted = ids(place / "model")
    plain = Tokenizer.from_file(str(place / "model" / "tokenizer.json"))
    otherwise = plain.encode(TEXT, add_special_tokens=False).ids
    assert wanted != otherwise, "the class that the config.json chooses splits digits"

    run = place / "full"
    train(place, run)
    first = trained_rows(place)
    assert holds(first, wanted)
    assert not holds(first, otherwise)
    assert ids(run / "export") == wanted
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    (end,) = plain.encode(SPECIAL[2]).ids
    assert end in model.generation_config.eos_token_id, "answers end for other tools too"
    assert greedy(model, wanted) != greedy(model, otherwise), "the check below can fail"
    continued(place, run, model, wanted)
    # A second stage reads the export as its model.
    second = place / "second"
    words = (f"model.path={run / 'export'}", f"output_dir={second}", "training.steps=1")
    train(place, second, *words)
    assert np.array_equal(trained_rows(place, *words), first)
    assert ids(second / "export") == wanted
    # Programs that read the model's tokenizer.json alone have other tokens, and are named.
    shown = command("data", str(place / "recipe.yaml"), "--json").stdout
    for found in (shown, (run / "data.json").read_text()):
        note = json.loads(found)["notes"][-1]
        file = place / "model" / "tokenizer.json"
        assert note.startswith(f"the class Qwen2Tokenizer ignores parts of {file}: in '")
        assert note.endswith("in programs that read this file without transformers")


def test_a_folder_of_adapters_has_the_tokens_of_training(place):
    peft = pytest.importorskip("peft")
    wanted, run = ids(place / "model"), place / "adapters"
    train(place, run, "lora.r=4")
    assert not (run / "export" / "config.json").exists()
    assert ids(run / "export") == wanted
    base = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about transformers
        model = peft.PeftModel.from_pretrained(base, run / "export").eval()
    continued(place, run, model, wanted)
    command("checkpoint", "export", str(run), "--merge")
    assert ids(run / "merged") == wanted
