"""Accuracy on held-out answers and tokens: beside greedy decoding by plain transformers, and on every layout."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyper_parallel.errors import Contradiction
from tests.e2e.runs import QUESTIONS, make_stage_place, rows, train, write_records
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe that learns some of its sixteen sums by heart, and is asked for all of them."""
    root = tmp_path_factory.mktemp("predictions")
    write_records(root / "all.jsonl", QUESTIONS)
    return make_stage_place(
        root, "sft", QUESTIONS, seq_len=16, training={"steps": 60},
        data={"validation": str(root / "all.jsonl"), "chat_template": "none"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(place):
    train(place, place / "one", "checkpoint.export=true", "sample_answers=16")
    return place / "one"


def test_an_answer_is_right_if_greedy_decoding_gives_it(one):
    export = one / "export"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(export)
    right = 0
    for record in QUESTIONS:
        ids = tokenizer(record["prompt"], return_tensors="pt", add_special_tokens=False)
        out = model.generate(**ids, max_new_tokens=8, do_sample=False, use_cache=False)
        new = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)
        right += new.startswith(record["completion"] + tokenizer.eos_token)
    before, after = (rows(one / "eval.jsonl")[i] for i in (0, -1))
    assert after["answer_accuracy"] == right / len(QUESTIONS)
    assert 0 < after["answer_accuracy"] < after["token_accuracy"] < 1
    assert before["token_accuracy"] < after["token_accuracy"]


def test_the_exported_model_answers_held_out_conversations(one):
    answers = json.loads((one / "answers.json").read_text())
    assert [(a["prompt"], a["expected"]) for a in answers] == [(q["prompt"], q["completion"]) for q in QUESTIONS]
    right = sum(a["answer"] == a["expected"] for a in answers)
    assert right / len(answers) == rows(one / "eval.jsonl")[-1]["answer_accuracy"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("stage=pt", "sample_answers=0"),
        ("data.validation=null", "data.holdout=0.05"),
        ("checkpoint.export=false", "checkpoint.export=true, or sample_answers=0"),
    ],
)
def test_answers_that_nobody_can_give_are_refused(place, override, hint):
    options = ("sample_answers=4", "checkpoint.export=true", override)
    with pytest.raises(Contradiction, match="sample_answers") as caught:
        train(place, place / "refused", *options)
    assert caught.value.hint == hint


@slow_cells("parallel.cp=2", "parallel.pp=2", "parallel.dp_shard=2")
@pytest.mark.parametrize(
    "layout",
    ["parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.dp_shard=2"],
)
def test_every_layout_counts_what_one_rank_does(place, one, layout):
    """The trained model is evaluated on the layout; its one step changes nothing."""
    trained = (f"model.path={one / 'export'}", "model.init=pretrained")
    still = ("training.steps=1", "training.lr=1e-30", "checkpoint.export=false")
    train(place, place / layout, layout, *trained, *still)
    mine, reference = (rows(out / "eval.jsonl")[-1] for out in (place / layout, one))
    assert mine["token_accuracy"] == reference["token_accuracy"]
    expected = None if "cp" in layout else reference["answer_accuracy"]
    assert mine.get("answer_accuracy") == expected


@pytest.mark.slow
def test_rows_of_text_have_no_answers(place):
    (place / "text.txt").write_text("a line of text\n" * 400)
    text = ("stage=pt", f"data.source={place / 'text.txt'}", "data.validation=null")
    out = place / "text"
    train(place, out, *text, "data.packing=true", "data.holdout=0.2", "checkpoint.export=false")
    last = rows(out / "eval.jsonl")[-1]
    assert 0 < last["token_accuracy"] <= 1
    assert "answer_accuracy" not in last
