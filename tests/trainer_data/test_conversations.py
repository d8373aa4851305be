"""What a record's turns are, which of them are the prompt, and which tokens are targets of a stage."""

import json

import numpy as np
import pytest

from hyper_parallel.errors import NoData
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.data.conversations import conversations_of, num_context, shape_of
from hyper_parallel.trainer.data.sequences import JoinedSequences

pytestmark = pytest.mark.unit


def turns(text):
    """Turns of `u:hi a:ho`; s, u and a are system, user and assistant."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[word[0]], "content": word[2:].replace("_", " ")} for word in text.split()]


def words(conversation):
    return " ".join(f"{m['role'][0]}:{m['content']}" for m in conversation.messages)


PREFERENCES = {
    # An explicit prompt is continued, by however many turns.
    "several turns": ("u:q", "a:x u:y a:z", "a:x u:y a:w", ["u:q a:x u:y a:z", "u:q a:x u:y a:w"], 1),
    "several turns on one side": ("u:q", "a:x u:y a:z", "a:w", ["u:q a:x u:y a:z", "u:q a:w"], 1),
    "prompt of several turns": ("s:b u:q a:r u:p", "a:x u:y a:z", "a:w",
                                ["s:b u:q a:r u:p a:x u:y a:z", "s:b u:q a:r u:p a:w"], 4),
    "text prompt": ("q", "a:x u:y a:z", "a:w", ["u:q a:x u:y a:z", "u:q a:w"], 1),
    "text prompt and answer": ("q", "a:x u:y a:z", "w", ["u:q a:x u:y a:z", "u:q a:w"], 1),
    "prompt that ends with an answer": ("u:q a:r", "u:p a:x", "u:o a:y", ["u:q a:r u:p a:x", "u:q a:r u:o a:y"], 2),
    "a turn like the prompt, later": ("u:q", "a:x u:q a:z", "a:w", ["u:q a:x u:q a:z", "u:q a:w"], 1),
    "a turn like a text prompt, later": ("q", "a:x u:q a:z", "a:v u:q a:w", ["u:q a:x u:q a:z", "u:q a:v u:q a:w"], 1),
    # An answer that begins with the prompt's turns is the whole conversation.
    "whole": ("u:q", "u:q a:x", "u:q a:y", ["u:q a:x", "u:q a:y"], 1),
    "whole, text prompt": ("q", "u:q a:x", "u:q a:y", ["u:q a:x", "u:q a:y"], 1),
    "whole, white space": ("q_", "u:q a:x", "u:q a:y", ["u:q a:x", "u:q a:y"], 1),
    "whole, several turns": ("u:q", "u:q a:r u:p a:x", "u:q a:r u:p a:y", ["u:q a:r u:p a:x", "u:q a:r u:p a:y"], 3),
    "whole, text prompt is the last question": ("p", "u:q a:r u:p a:x", "u:q a:r u:p a:y",
                                                ["u:q a:r u:p a:x", "u:q a:r u:p a:y"], 3),
    "whole, white space in answers": ("u:q a:r u:p", "u:q a:r_ u:p a:x", "u:q a:r u:p a:y",
                                      ["u:q a:r  u:p a:x", "u:q a:r u:p a:y"], 3),
    "whole on one side": ("u:q", "u:q a:x", "a:y", ["u:q a:x", "u:q a:y"], 1),
    "system in the prompt": ("s:b u:q", "u:q a:x", "u:q a:y", ["s:b u:q a:x", "s:b u:q a:y"], 2),
    "system in the answers": ("q", "s:b u:q a:x", "s:b u:q a:y", ["s:b u:q a:x", "s:b u:q a:y"], 2),
    "system in both": ("s:b u:q", "s:b u:q a:x", "s:b u:q a:y", ["s:b u:q a:x", "s:b u:q a:y"], 2),
    "system in answers that continue": ("q", "s:b a:x", "s:b a:y", ["s:b u:q a:x", "s:b u:q a:y"], 2),
    "prompt of the system alone": ("s:b", "u:q a:x", "u:q a:y", ["s:b u:q a:x", "s:b u:q a:y"], 2),
    # Without a prompt it is what both have in common.
    "implicit": (None, "u:q a:x", "u:q a:y", ["u:q a:x", "u:q a:y"], 1),
    "implicit, several turns": (None, "u:q a:r u:p a:x", "u:q a:r u:p a:y", ["u:q a:r u:p a:x", "u:q a:r u:p a:y"], 3),
    "implicit, apart early": (None, "s:b u:q a:x u:p a:r", "s:b u:q a:y u:p a:r",
                              ["s:b u:q a:x u:p a:r", "s:b u:q a:y u:p a:r"], 2),
    "implicit, no prompt": (None, "a:x", "a:y", ["a:x", "a:y"], 0),
    "implicit, one is longer": (None, "u:q a:x", "u:q a:x u:p a:y", ["u:q a:x", "u:q a:x u:p a:y"], 1),
    "implicit, equal": (None, "u:q a:x", "u:q a:x", ["u:q a:x", "u:q a:x"], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFERENCES)
def test_an_answer_continues_the_prompt_unless_it_begins_with_it(name):
    prompt, *answers, wanted, count = PREFERENCES[name]
    read = [turns(part) if part and ":" in part else part for part in (prompt, *answers)]
    read = [part.replace("_", " ") if isinstance(part, str) else part for part in read]
    record = dict(zip(("prompt", "chosen", "rejected"), read, strict=True))
    assert shape_of(record, "text", "here") == "preference"
    found = conversations_of(record, "preference", "here", "dpo")
    assert [words(one) for one in found] == wanted
    assert [num_context(one, "dpo") for one in found] == [count, count]
    # The record's own system text comes before, unless it is there already.
    named = conversations_of({**record, "system": "b"}, "preference", "here", "dpo")
    assert [words(one) for one in named] == [text if text.startswith("s:b") else f"s:b {text}" for text in wanted]


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"instruction": "q", "input": "i", "history": [["h", "g"]]}, "u:h a:g u:q\ni"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "u:q"),
        ({"prompt": "q", "instruction": "", "input": ""}, "u:q"),
    ],
    ids=["alpaca", "sharegpt", "empty keys"],
)
def test_the_prompt_of_a_pair_may_be_in_other_keys(record, wanted):
    record |= {"chosen": turns("a:x u:y a:z"), "rejected": "w"}
    found = conversations_of(record, "preference", "here", "dpo")
    assert [words(one) for one in found] == [f"{wanted} a:x u:y a:z", f"{wanted} a:w"]
    assert {one.num_prompt for one in found} == {len(found[1].messages) - 1}


@pytest.mark.parametrize("value", [3, "q", {"role": "user", "content": "q"}])
def test_turns_that_are_no_list_are_named(value):
    with pytest.raises(NoData, match="`messages` of a record is not a list of turns") as caught:
        shape_of({"messages": value}, "text", "chat.jsonl:1", "sft")
    assert caught.value.got.startswith("messages: ")


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"chosen": "x", "rejected": "y"}, "a text needs the prompt under a key of its own"),
        ({"prompt": "q", "chosen": turns("u:p a:x"), "rejected": turns("u:p a:y")}, "differs from the prompt"),
        ({"prompt": "q", "chosen": turns("a:x"), "rejected": turns("u:p a:y")}, "differs from the prompt"),
        ({"instruction": "q", "chosen": turns("u:p a:x"), "rejected": turns("u:p a:y")}, "differs from the prompt"),
    ],
)  # fmt: skip
def test_a_pair_whose_prompt_cannot_be_told_is_refused(record, match):
    with pytest.raises(NoData, match=match) as caught:
        conversations_of(record, "preference", "pairs.jsonl:3", "dpo")
    assert caught.value.where == "pairs.jsonl:3"
    assert "begin with the prompt" in caught.value.allowed


@pytest.mark.parametrize(
    ("record", "contexts"),
    [
        ({"prompt": turns("u:h a:g u:q"), "completion": "x"}, {"sft": 3, "kto": 3, "grpo": 3}),
        ({"prompt": turns("u:q"), "completion": turns("a:x u:y a:z")}, {"sft": 1, "kto": 1, "grpo": 3}),
        ({"prompt": turns("s:b u:q"), "completion": turns("u:q a:x")}, {"sft": 2, "kto": 2, "grpo": 2}),
        ({"prompt": "q", "completion": "x", "system": "b"}, {"sft": 2, "kto": 2, "grpo": 2}),
        ({"messages": turns("s:b u:h a:g u:q a:x")}, {"sft": 0, "kto": 4, "grpo": 4}),
        ({"messages": turns("u:h a:g u:q a:x a:y")}, {"sft": 0, "kto": 4, "grpo": 3}),
        ({"messages": turns("a:hello u:q")}, {"sft": 0, "kto": 0, "grpo": 2}),
        ({"instruction": "q", "output": "x", "history": [["h", "g"]]}, {"sft": 0, "kto": 3, "grpo": 3}),
        ({"prompt": turns("u:h a:g u:q")}, {"grpo": 3}),
        ({"prompt": turns("u:h a:g u:q a:x"), "text": "no text of its own"}, {"grpo": 3}),
    ],
    ids=lambda value: "-".join(value),
)  # fmt: skip
def test_what_is_context_depends_on_prompt_and_stage(record, contexts):
    for stage, wanted in contexts.items():
        shape = shape_of(record, "text", "here", stage)
        (one,) = conversations_of(record, shape, "here", stage)
        assert num_context(one, stage) == wanted, stage


def test_the_system_text_of_a_record_is_not_said_twice():
    (one,) = conversations_of({"messages": turns("s:b u:q a:x"), "system": "b"}, "sharegpt", "here")
    assert words(one) == "s:b u:q a:x"
    (one,) = conversations_of({"messages": turns("u:q a:x"), "system": "b"}, "sharegpt", "here")
    assert words(one) == "s:b u:q a:x"


def packed_texts(make, path, stage, **values):
    """Text and decoded targets of every row."""
    packed = make(path, stage=stage, seq_len=160, packing=False, holdout=0, **values)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    ids, labels = packed.train.read(np.arange(len(packed.train)))
    texts = [tokenizer.decode(row).replace("<|pad|>", "") for row in ids]
    return packed, texts, [tokenizer.decode(row[row >= 0]) for row in labels]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.torch
def test_rows_hold_the_prompt_and_their_targets_are_the_answers_behind_it(tmp_path, make):
    asked = {"prompt": turns("s:brief u:one a:two u:three")}
    pair = {"chosen": turns("a:four u:five a:six"), "rejected": "seven"}
    path = write(tmp_path / "pairs.jsonl", [asked | pair] * 4)
    _, texts, targets = packed_texts(make, path, "dpo")
    assert all("one" in text and "two" in text and "three" in text for text in texts)
    end = "<|im_end|>"
    assert targets == [f"four{end}six{end}", f"seven{end}"] * 4
    path = write(tmp_path / "answers.jsonl", [asked | {"completion": "four"}] * 4)
    _, texts, targets = packed_texts(make, path, "sft")
    assert targets == [f"four{end}"] * 4, "not the answer in the prompt"
    assert all("two" in text for text in texts)


@pytest.mark.torch
def test_a_label_compares_a_prompt_with_the_whole_answer_of_another_record(tmp_path, make):
    records = [
        {"prompt": turns("u:p"), "completion": turns("a:one u:y a:two"), "label": True},
        {"prompt": turns("u:q a:r u:s"), "completion": "three", "label": False},
    ]
    _, texts, targets = packed_texts(make, write(tmp_path / "a.jsonl", records), "kto")
    end = "<|im_end|>"
    assert targets == [f"one{end}two{end}", f"three{end}", f"three{end}", f"one{end}two{end}"]
    assert ["user\np" in text for text in texts] == [True, True, False, False]


@pytest.mark.torch
def test_margins_are_kept_beside_both_rows_of_a_pair_through_the_hold_out(tmp_path, make):
    records = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": "b", "margin": i / 4} for i in range(12)]
    values = {"seq_len": 64, "packing": False, "holdout": 0.25}
    packed = make(write(tmp_path / "pairs.jsonl", records), stage="rm", **values)
    tokenizer, seen = load_tokenizer(packed.tokenizer_dir), []
    for part in (packed.train, packed.holdout):
        at = np.arange(len(part))
        margins = part.margins(at)
        texts = [tokenizer.decode(row) for row in part.read(at)[0]]
        assert (margins[0::2] == margins[1::2]).all()
        for margin, text in zip(margins, texts, strict=True):
            assert f"q{margin * 4:.0f}<|im_end|>" in text
        seen += margins[0::2].tolist()
        assert part.margins(np.array([-1])).tolist() == [0.0]
    assert sorted(seen) == [i / 4 for i in range(12)]
    assert not make(tmp_path / "pairs.jsonl", stage="dpo", **values).train.has_margins
    none = write(tmp_path / "none.jsonl", [{**r, "margin": None} for r in records])
    assert not make(none, stage="rm", **values).train.has_margins


@pytest.mark.torch
@pytest.mark.parametrize("margin", [float("nan"), float("inf"), True, "much", [1.0], None])
def test_a_margin_that_is_no_finite_number_is_refused_by_its_line(tmp_path, make, margin):
    records = [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": m} for m in (1, margin)]
    with pytest.raises(NoData, match="margin") as caught:
        make(write(tmp_path / "a.jsonl", records), stage="rm", packing=False)
    assert caught.value.where.endswith("a.jsonl:2")


@pytest.mark.torch
def test_prompts_of_rollouts_end_before_the_last_answer_and_keep_the_columns(tmp_path, make):
    records = [
        {"prompt": turns("u:one a:two u:three"), "completion": "", "ground_truth": "x"},
        {"prompt": "five", "ground_truth": ["y", 1.5], "text": "t"},
        {"prompt": "six", "completion": "<b> 7 ", "ground_truth": None},
        {"prompt": turns("s:b u:eight"), "answer": 9},
    ]
    path = write(tmp_path / "a.jsonl", records * 2)
    packed, texts, targets = packed_texts(make, path, "grpo")
    end = "<|endoftext|>"
    assert targets == [end, end, f"<b> 7 {end}", f"9{end}"] * 2
    said = ("user\none", "assistant\ntwo", "user\nthree")
    asked = "".join(f"<|im_start|>{text}<|im_end|>\n" for text in said)
    assert texts[0] == asked + "<|im_start|>assistant\n"
    assert packed.train.columns == ("ground_truth", "text", "answer")
    assert packed.train.records(np.array([3, 2, 1, 0])) == [
        {"answer": 9},
        {"ground_truth": None, "answer": "<b> 7 "},
        {"ground_truth": ["y", 1.5], "text": "t"},
        {"ground_truth": "x"},
    ]


@pytest.mark.torch
def test_columns_of_several_sources_are_read_as_each_alone(tmp_path, make):
    first = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "level": i} for i in range(3)])
    second = write(tmp_path / "b.jsonl", [{"prompt": f"q{i}", "truth": str(i)} for i in range(2)])
    values = {"stage": "grpo", "seq_len": 64, "packing": False, "holdout": 0}
    parts = [make(path, **values).train for path in (first, second)]
    joined = JoinedSequences(parts)
    assert joined.columns == ("level", "truth")
    assert joined.records(np.array([4, 1])) == [{"truth": "1"}, {"level": 1}]
    assert not joined.has_margins
