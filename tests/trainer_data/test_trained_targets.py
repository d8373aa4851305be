"""Targets of data: counts are those of the labels, and nothing is trained as another text than the record has."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, Contradiction, NoData
from hyper_parallel.trainer.data import StreamBatches, load_tokenizer
from hyper_parallel.trainer.data.answer_spans import locate_answers
from hyper_parallel.trainer.data.counts import EMPTY_ANSWERS
from hyper_parallel.trainer.data.document import Conversation
from hyper_parallel.trainer.data.sources import resolve
from hyper_parallel.trainer.data.span_tokens import tokens_of_spans

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}
PAIR = {"prompt": "What is it?", "chosen": "it is this one", "rejected": "no " * 60}
RECORDS = {
    "pt": [{"text": "some words " * n} for n in (1, 3, 9, 30)],
    "sft": [{"messages": [U, A, U, {**A, "content": "more " * n}]} for n in (1, 20, 50)],
    "rm": [PAIR, {**PAIR, "chosen": "this"}],
    "dpo": [PAIR, {**PAIR, "chosen": "this"}],
    "kto": [{"prompt": "q", "completion": "words " * n, "label": n > 2} for n in (1, 2, 3)],
    "grpo": [{"prompt": "What is it?", "answer": "this " * n} for n in (1, 5)],
}


def write(path, records):
    text = records if isinstance(records, str) else "\n".join(map(json.dumps, records))
    path.write_text(text + "\n", encoding="utf-8")
    return path


def labels_of(packed):
    _, labels = packed.train.read(np.arange(len(packed.train)))
    return labels


@pytest.mark.torch
@pytest.mark.parametrize("stage", sorted(RECORDS))
def test_counts_are_the_labels_that_are_trained(tmp_path, make, stage):
    path = write(tmp_path / "a.jsonl", RECORDS[stage] * 3)
    packed = make(path, stage=stage, holdout=0, seq_len=64, packing=False)
    (counts,) = packed.counts
    labels = labels_of(packed)
    if stage == "kto":
        labels = labels[::2]  # each second row is a reference without loss
    wanted = 0 if stage == "grpo" else (labels >= 0).sum()
    assert counts.target_tokens == wanted
    assert counts.used == 3 * len(RECORDS[stage])


@pytest.mark.torch
@pytest.mark.parametrize("stage", sorted(RECORDS))
def test_examples_mark_what_is_counted(tmp_path, make, stage):
    path = write(tmp_path / "a.jsonl", RECORDS[stage][:2])
    packed = make(path, stage=stage, holdout=0, seq_len=128, packing=False)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    texts = [text for e in packed.previews[0].examples for text in e.texts if text.name != "answer"]
    marked = [one.text for text in texts for one in text.segments if one.trained]
    num_marked = sum(len(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in marked)
    assert num_marked == packed.counts[0].target_tokens


@pytest.mark.torch
@pytest.mark.parametrize(("stage", "masked"), [("pt", False), ("pt", True), ("sft", True)])
def test_a_stream_counts_its_epochs_and_what_follows_a_place(tmp_path, make, stage, masked):
    records = RECORDS[stage] * 100
    path = write(tmp_path / "a.jsonl", records)
    values = {
        "stage": stage,
        "seq_len": 64,
        "shuffle": False,
        "mask_documents": masked,
        "packing": masked,
    }
    whole = make(path, holdout=0, **values)
    stream = make(path, streaming=True, holdout=0, **values).train
    batches = StreamBatches(stream, 1, "f")
    total = step = 0
    while batches._place.epoch < 2:
        total += batches.num_valid(step)
        step += 1
        if batches._place.epoch == 1:
            assert stream.counts.target_tokens == whole.counts[0].target_tokens, "of the first epoch"
    assert stream.counts.target_tokens == (labels_of(whole) >= 0).sum()
    assert abs(total - 2 * stream.counts.target_tokens) <= 2 * 64
    # A run that continues counts what it reads, not what it passes over.
    again = make(path, streaming=True, holdout=0, **values).train
    later = StreamBatches(again, 1, "f")
    later.load_state_dict(batches.state_dict(step))
    later.num_valid(step)
    assert 0 < again.counts.used <= again.counts.read


FLAGGED = {**A, "weight": 1}
IN_PROMPT = {
    "sft": {"prompt": [U, FLAGGED, U], "completion": [A]},
    "kto": {"prompt": [U, FLAGGED, U], "completion": [A], "label": True},
    "dpo": {"prompt": [U, FLAGGED, U], "chosen": [A], "rejected": [{**A, "content": "no"}]},
    "orpo": {"chosen": [U, FLAGGED, U, A], "rejected": [U, FLAGGED, U, {**A, "content": "no"}]},
}


@pytest.mark.unit
@pytest.mark.parametrize("stage", sorted(IN_PROMPT))
def test_a_flag_of_the_prompt_is_not_ignored(tmp_path, stage):
    path = write(tmp_path / "a.jsonl", [IN_PROMPT[stage]])
    with pytest.raises(NoData, match="a flag marks a turn of the prompt as trained on") as caught:
        list(resolve(Data(source=str(path)), stage).documents())
    assert caught.value.where == f"{path}:1, turn 2"
    assert caught.value.hint == "data.ignore_keys=[weight]"
    assert list(resolve(Data(source=str(path), ignore_keys=["weight"]), stage).documents())


@pytest.mark.unit
def test_a_flag_behind_the_prompt_is_as_without(tmp_path):
    flagged = {"prompt": [U], "completion": [FLAGGED]}
    path = write(tmp_path / "a.jsonl", [flagged, {"prompt": [U], "completion": [A]}])
    one, other = resolve(Data(source=str(path)), "sft").documents()
    assert one.conversation == other.conversation


@pytest.fixture
def words(tmp_path):
    """A tokenizer of whole words, which knows a few."""
    names = ["<unk>", "</s>", "<pad>", "###", "user", "assistant", ":", "q", "an", "answer", "hm"]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    hf.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


@pytest.mark.torch
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stage", ["pt", "sft"])
def test_answers_with_unknown_words_are_counted(tmp_path, make, words, stage, streaming):
    said = ["an answer", "an \u00fcber answer", "hm"]
    records = [{"text": text} for text in said]
    if stage == "sft":
        records = [{"messages": [{**U, "content": "q what"}, {**A, "content": text}]} for text in said]
    path = write(tmp_path / "a.jsonl", records)
    packed = make(
        path,
        stage=stage,
        tokenizer=words,
        holdout=0,
        seq_len=4 if stage == "pt" else 32,
        streaming=streaming,
    )
    notes = packed.counts[0].notes
    if streaming:
        StreamBatches(packed.train, 4, "f").num_valid(0)
        notes = packed.train.counts.notes
    found = [note for note in notes if "does not know" in note]
    assert len(found) == 1
    assert found[0].startswith("1 "), "unknown words of a question are no targets"


@pytest.mark.torch
@pytest.mark.parametrize("stage", ["sft", "dpo", "orpo", "kto", "rm"])
@pytest.mark.parametrize("empty", ["", " \n "])
def test_a_record_whose_answers_are_empty_is_left_out_with_a_count(tmp_path, make, stage, empty):
    key = "completion" if stage in ("sft", "kto") else "rejected"
    keep = {"prompt": "q", "completion": "r", "label": True}
    if key == "rejected":
        keep = PAIR
    elif stage == "sft":
        keep.pop("label")
    path = write(tmp_path / "a.jsonl", [keep, {**keep, key: empty}, {**keep, key: None}, keep])
    for template in ("auto", "none"):
        packed = make(path, stage=stage, holdout=0, seq_len=128, chat_template=template)
        (counts,) = packed.counts
        assert (counts.read, counts.used, counts.dropped) == (4, 2, {EMPTY_ANSWERS: 2})


@pytest.mark.torch
def test_an_empty_answer_among_others_is_no_target(tmp_path, make):
    turns = [U, {**A, "content": ""}, U, A]
    both = make(write(tmp_path / "a.jsonl", [{"messages": turns}]), stage="sft", holdout=0, seq_len=128)
    one = {"messages": [U, {**A, "content": "", "weight": 0}, U, A]}
    excluded = make(write(tmp_path / "b.jsonl", [one]), stage="sft", holdout=0, seq_len=128)
    assert (labels_of(both) >= 0).sum() == (labels_of(excluded) >= 0).sum()
    assert any("with empty answers" in note for note in both.notes)


SPLITS = {"train": [{"messages": [U, A]}], "test": [{"messages": [U, A]}]}
ROWS = {"prompt": {"0": "q", "1": "z"}, "completion": {"0": "r", "1": "y"}}
COLUMNS = {"prompt": ["q", "z"], "completion": ["r", "y"]}
TO_LINES = 'python -c \'import pandas; pandas.read_json("{}").to_json("lines.jsonl", orient="records", lines=True)\''
CONVERT = "convert the files into a new folder, then set `data.source` to it: mkdir -p converted && "
TO_PARQUET = 'python -c \'import datasets; datasets.Dataset.from_file("{}").to_parquet("converted/A.parquet")\''
OVER_LINES = json.dumps({"prompt": "q", "completion": "r"}, indent=1)


@pytest.mark.unit
def test_turns_that_are_a_text_of_json_are_read(tmp_path):
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "an answer"}]
    records = [{"messages": json.dumps([U, A])}, {"conversations": json.dumps(shared)}]
    path = write(tmp_path / "a.jsonl", records)
    for document in resolve(Data(source=str(path)), "sft").documents():
        assert document.conversation.messages == (U, A)
    with pytest.raises(NoData, match="`messages` is a text that is not JSON"):
        resolve(Data(source=str(write(tmp_path / "b.jsonl", [{"messages": "[oops"}]))), "sft")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "text", "says", "hint"),
    [
        ("a.jsonl", OVER_LINES, "a line ends within a JSON record", "jq -c . {} > lines.jsonl"),
        (
            "a.jsonl",
            json.dumps({"messages": [U, A]}, indent=2),
            "single turn",
            "jq -c . {} > lines.jsonl",
        ),
        ("a.json", json.dumps(SPLITS), "several lists", "jq -c '.[\"train\"][]' {} > train.jsonl"),
        (
            "a.json",
            json.dumps(SPLITS, indent=1),
            "several lists",
            "jq -c '.[\"train\"][]' {} > train.jsonl",
        ),
        ("a.jsonl", json.dumps(SPLITS), "several lists", "jq -c '.[\"train\"][]' {} > train.jsonl"),
        ("a.json", json.dumps([U, A]), "single turn", "jq -c '{{messages: .}}' {} > lines.jsonl"),
        (
            "a.jsonl",
            f"{json.dumps([U, A])}\n" * 2,
            "single turn",
            "jq -c '{{messages: .}}' {} > lines.jsonl",
        ),
        (
            "a.json",
            json.dumps([[U, A]]),
            "not a JSON object",
            "jq -c '.[] | {{messages: .}}' {} > lines.jsonl",
        ),
        ("a.json", json.dumps(ROWS), "columns instead of records", TO_LINES),
        ("a.json", json.dumps(COLUMNS), "columns instead of records", TO_LINES),
        ("a.zip", "PK", "format that is not supported", f"{CONVERT}unzip -d converted {{}}"),
        ("a.tar.gz", "x", "format that is not supported", f"{CONVERT}tar -xf {{}} -C converted"),
        ("a.tar.xz", "x", "format that is not supported", f"{CONVERT}tar -xf {{}} -C converted"),
        ("a.csv.bz2", "x", "format that is not supported", f"{CONVERT}bunzip2 -c {{}} > converted/a.csv"),
        ("A.ARROW", "ARROW1", "format that is not supported", CONVERT + TO_PARQUET),
        ("a.pkl", "x", "format that is not supported", None),
        ("a.jsonl.txt", json.dumps({"messages": [U, A]}), "JSON record", "data.format=sharegpt"),
        ("train", json.dumps({"text": "q"}), "JSON record", "give the files names that end in .jsonl"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_command_that_mends_it(tmp_path, name, text, says, hint):
    path = write(tmp_path / name, text)
    with pytest.raises(NoData, match=says) as caught:
        list(resolve(Data(source=str(path)), "sft").documents())
    assert caught.value.hint == (hint and hint.format(path))


@pytest.mark.unit
@pytest.mark.parametrize("name", ["A.JSONL", "a.jsonlines", "a.NDJSON", "A.Json"])
@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_the_suffix_of_records_may_be_in_capitals(tmp_path, name, stage):
    record = {"messages": [U, A]} if stage == "sft" else {"text": "q"}
    source = resolve(Data(source=str(write(tmp_path / name, [record]))), stage)
    (document,) = source.documents()
    assert document.text == "q" if stage == "pt" else document.conversation.messages == (U, A)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("train", "test"),
        ("train-00000-of-00002", "validation-00000-of-00001"),
        ("train/a", "dev/a"),
    ],
)
def test_a_directory_of_several_splits_is_refused_with_one_of_them(tmp_path, train, other):
    for number, name in enumerate((train, other)):
        path = tmp_path / "d" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [{"prompt": f"q{number}", "completion": "r"}])
    with pytest.raises(NoData, match="several splits") as caught:
        resolve(Data(source=str(tmp_path / "d")), "sft")
    assert caught.value.hint == "data.split=train"
    (document,) = resolve(Data(source=str(tmp_path / "d"), split="train"), "sft").documents()
    assert document.conversation.messages[0]["content"] == "q0"
    (tmp_path / "d" / f"{other}.jsonl").unlink()
    assert len(list(resolve(Data(source=str(tmp_path / "d")), "sft").documents())) == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stage", "record"),
    [
        ("dpo", {"question": "q", "good": "a", "bad": "b"}),
        ("orpo", {"frage": "q", "besser": "a", "schlechter": "b"}),
        ("rm", {"win": [U, A], "lose": [U, {**A, "content": "no"}]}),
        ("sft", {"frage": "q", "antwort": "a", "quelle": "x"}),
        ("sft", {"question": "q", "reply": "a"}),
        ("sft", {"tools": [], "dialog": [{"role": "user", "content": "q"}, A]}),
    ],
)
def test_hints_lead_to_columns_that_are_read(tmp_path, stage, record):
    path = write(tmp_path / "a.jsonl", [record])
    with pytest.raises(NoData) as caught:
        resolve(Data(source=str(path)), stage)
    words = dict(word.removeprefix("data.columns.").split("=") for word in caught.value.hint.split())
    source = resolve(Data(source=str(path), columns=words, ignore_keys=["quelle"]), stage)
    assert list(source.documents())


@pytest.mark.unit
@pytest.mark.parametrize("key", ["closed_book", "badge", "enclosed"])
def test_a_part_of_another_word_names_no_worse_answer(tmp_path, key):
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a", key: "x"}])
    with pytest.raises(Contradiction, match="trains on pairs"):
        resolve(Data(source=str(path)), "dpo")


CALLED = {"name": "look_up", "arguments": {"x": "ab"}}
IDS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}[[{{ c['id'] }}|{{ c['function']['arguments'] | tojson }}]]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes the identifiers of calls alone, as that of Kimi K2 does."""


@pytest.mark.torch
def test_a_template_that_writes_the_ids_of_calls_names_its_need(tmp_path, make):
    corpus = write(tmp_path / "a.jsonl", [{"messages": [U, A]}] * 3)
    hf = load_tokenizer(make(corpus, stage="sft", holdout=0).tokenizer_dir)
    hf.chat_template = IDS

    def spans(**call):
        function = {"type": "function", "function": CALLED, **call}
        turns = (U, {"role": "assistant", "content": "", "tool_calls": [function]})
        text, found = locate_answers(hf, Conversation(turns), [1])
        return [text[a:b] for a, b in found]

    for call in ({}, {"id": "call_1"}):
        with pytest.raises(BadValue, match="writes the `id` of a tool call instead of its name") as caught:
            spans(**call)
        assert "functions.look_up:0" in caught.value.allowed
    assert spans(id="functions.look_up:0") == ['[[functions.look_up:0|{"x": "ab"}]]<|im_end|>']


@pytest.mark.torch
def test_marks_without_the_end_marker_train_it(tmp_path, make):
    corpus = write(tmp_path / "a.jsonl", [{"messages": [U, A]}] * 3)
    template = tmp_path / "marks.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    packed = make(corpus, stage="sft", holdout=0, chat_template=str(template))
    hf = load_tokenizer(packed.tokenizer_dir)
    labels = labels_of(packed)
    assert hf.decode(labels[labels >= 0]) == "an answer<|im_end|>" * 3


@pytest.mark.torch
@pytest.mark.parametrize("words", [3, 90])
@pytest.mark.parametrize("split", [True, False], ids=["words", "whole_text"])
@pytest.mark.parametrize("end", [" \n", "\n", ":", ": ", "\n\n", " \n \n"])
def test_the_tokens_of_a_prompt_are_those_of_generation(words, split, end):
    """The end of a prompt may have other tokens alone than before an answer, also far behind the text's beginning."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = ["word \n", " \n \n", "it is\n\n", "a word: it", "yes it is"] * 20
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    prompt = "it is a word\n" * (words // 3) + "word" + end
    ids, targets = tokens_of_spans(tokenizer, prompt + "yes", [(len(prompt), len(prompt) + 3)], "here")
    alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids[: len(alone)] == alone
    assert targets == [False] * len(alone) + [True] * (len(ids) - len(alone))
