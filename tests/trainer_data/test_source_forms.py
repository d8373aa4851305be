"""Files as people have them: compressed, with an object around the records, beside a README; counts of what is read."""

import gzip
import json

import numpy as np
import pytest

from hyper_parallel.config import Data
from hyper_parallel.errors import MissingDependency, NoData
from hyper_parallel.trainer.data import StreamBatches, load_tokenizer
from hyper_parallel.trainer.data.counts import (
    ALL_UNTRAINED,
    EMPTY_ANSWERS,
    NO_ANSWER,
    NO_TARGET,
)
from hyper_parallel.trainer.data.sources import resolve

RECORDS = [{"text": f"text {i}"} for i in range(3)]
TEXTS = [record["text"] for record in RECORDS]
U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}


def texts(path, **data):
    return [d.text for d in resolve(Data(source=str(path), **data), "pt").documents()]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.unit
@pytest.mark.parametrize("key", ["data", "train", "rows", "conversations"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_around_the_records_is_passed(tmp_path, key, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "1.0", key: RECORDS, "count": 3}, indent=indent))
    assert texts(path) == TEXTS
    long = [{"text": "long " * 2000}] * 3
    path.write_text(json.dumps({key: long}, indent=indent))
    assert texts(path) == [record["text"] for record in long]


@pytest.mark.unit
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [1, 9000])
def test_a_record_that_begins_with_a_list_is_a_record(tmp_path, count, size):
    tools = [{"name": "f", "description": "x" * size}]
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"tools": tools, "messages": [U, A]}] * count))
    documents = list(resolve(Data(source=str(path)), "sft").documents())
    assert [d.conversation.messages for d in documents] == [(U, A)] * count


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", lines(RECORDS)),
        ("a.json.gz", json.dumps({"data": RECORDS})),
        ("a.csv.gz", "text,id\n" + "".join(f"{text},1\n" for text in TEXTS)),
        ("a.txt.gz", TEXTS[0]),
    ],
)
def test_compressed_files_are_read_and_damaged_ones_are_named(tmp_path, name, content):
    path = tmp_path / name
    packed = gzip.compress(content.encode())
    path.write_bytes(packed)
    assert texts(path) == (TEXTS[:1] if "txt" in name else TEXTS)
    for damaged in (packed[:-9], packed[:12] + b"\xff\xff" + packed[14:], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(NoData) as caught:
            texts(path)
        assert str(path) in caught.value.where


@pytest.mark.unit
def test_a_compressed_file_is_bounded_by_what_it_expands_to(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"a" * 50_000_000 + b'"}\n'))
    assert path.stat().st_size < 100_000
    with pytest.raises(NoData, match="longer than"):
        texts(path, max_record_bytes=1_000_000)


@pytest.mark.unit
def test_zstd_needs_its_package(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    try:
        import zstandard
    except ImportError:
        path.write_bytes(b"(\xb5/\xfd")
        with pytest.raises(MissingDependency) as caught:
            texts(path)
        assert caught.value.hint == "pip install zstandard"
        return
    path.write_bytes(zstandard.compress(lines(RECORDS).encode()))
    assert texts(path) == TEXTS


@pytest.mark.unit
@pytest.mark.parametrize("name", ["README.md", "LICENSE", "dataset_info.json"])
def test_files_that_describe_the_records_beside_them_are_not_read(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(lines(RECORDS))
    (tmp_path / name).write_text("{}")
    source = resolve(Data(source=str(tmp_path)), "pt")
    assert [d.text for d in source.documents()] == TEXTS
    assert source.counts.notes == [f"1 files that describe the data are skipped ({name})"]


@pytest.mark.unit
def test_a_missing_file_is_looked_for_near_and_never_on_a_hub(tmp_path, monkeypatch):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "chats.jsonl").write_text(lines(RECORDS))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoData, match="does not exist") as caught:
        texts("data/chat.jsonl")
    assert caught.value.hint == "data.source=sets/chats.jsonl"
    assert texts(caught.value.hint.partition("=")[2]) == TEXTS
    with pytest.raises(NoData, match="does not exist") as caught:
        texts("other/nothing.parquet")
    assert caught.value.hint is None
    with pytest.raises(NoData, match="does not exist") as caught:
        texts("sets/nothing.parquet")
    assert caught.value.hint == "ls sets"


CONVERSATIONS = [
    {"messages": [U, {"role": "assistant", "content": "an answer"}], "id": 1},
    {"messages": [U]},
    {"messages": [U, {"role": "assistant", "content": "so many words " * 40}]},
    {"messages": [{"role": "user", "content": "so many words " * 60}, A]},
]


@pytest.mark.unit
@pytest.mark.parametrize("text", ["a-0.jsonl,a-1.jsonl", "a-0.jsonl, a-1.jsonl", "a-*.jsonl"])
def test_several_files_in_one_text_are_refused_with_their_list(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        (tmp_path / f"a-{number}.jsonl").write_text(lines([{"messages": [U, A]}]))
    with pytest.raises(NoData, match="does not exist") as caught:
        resolve(Data(source=text), "sft")
    assert caught.value.hint == "'data.source=[a-0.jsonl, a-1.jsonl]'"
    with pytest.raises(NoData, match="does not exist") as caught:
        resolve(Data(source="b-*.jsonl"), "sft")
    assert "[" not in (caught.value.hint or "")


@pytest.mark.torch
@pytest.mark.parametrize("streaming", [False, True])
def test_prepared_data_and_streams_count_alike(tmp_path, make, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(CONVERSATIONS * 4))
    values = {"stage": "sft", "seq_len": 32, "holdout": 0, "shuffle": False}
    packed = make(path, streaming=streaming, **values)
    (counts,) = packed.counts
    if streaming:
        batches = StreamBatches(packed.train, 1, "f")
        for step in range(20):
            batches.num_valid(step)
        counts = packed.train.counts
    assert (counts.format, counts.read, counts.used, counts.cut) == ("sharegpt", 16, 8, 4)
    reasons = {NO_ANSWER: 4, "no answer begins within data.seq_len tokens": 4}
    assert counts.dropped == reasons
    assert counts.ignored_keys == {"id": 4}
    if not streaming:
        assert packed.notes == tuple(counts.losses)
        assert counts.notes == [*counts.losses, "ignored keys: id (4)"]
        _, labels = packed.train.read(np.arange(len(packed.train)))
        assert counts.target_tokens == (labels >= 0).sum()
        again = make(path, **values)
        assert (again.cached, again.counts) == (True, packed.counts)


@pytest.mark.torch
@pytest.mark.parametrize("streaming", [False, True])
def test_data_without_a_target_is_refused_by_its_cause(tmp_path, make, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"messages": [U, U]}] * 3))
    with pytest.raises(NoData, match=NO_ANSWER) as caught:
        make(path, stage="sft", streaming=streaming)
    assert caught.value.hint is None
    assert "3 left out" in caught.value.got


@pytest.mark.unit
def test_the_reason_for_which_a_conversation_has_no_target_is_its_own(tmp_path):
    answers = {
        ALL_UNTRAINED: {**A, "weight": 0},
        EMPTY_ANSWERS: {**A, "content": ""},
        NO_ANSWER: U,
        NO_TARGET: A,
    }
    for reason, turn in answers.items():
        path = tmp_path / "a.jsonl"
        path.write_text(lines([{"messages": [U, turn]}]))
        source = resolve(Data(source=str(path)), "sft")
        for document in source.documents():  # one with empty answers is left out by the reader
            source.counts.add([document], [([1, 2, 3], [False] * 3)], "sft")
        assert source.counts.dropped == {reason: 1}


@pytest.mark.torch
def test_pairs_of_texts_are_joined_without_a_template(tmp_path, make):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"prompt": "The sky is", "completion": " blue."}] * 4))
    values = {"stage": "sft", "seq_len": 64, "holdout": 0, "packing": False}
    templated = make(path, **values)
    tokenizer = load_tokenizer(templated.tokenizer_dir)
    assert "<|im_start|>user\nThe sky is" in tokenizer.decode(templated.train.read(np.arange(1))[0][0])
    assert any("through the chat template" in note for note in templated.notes)
    plain = make(path, chat_template="none", **values)
    ids, labels = plain.train.read(np.arange(1))
    end = tokenizer.eos_token_id
    asked, said = (tokenizer(text)["input_ids"] for text in ("The sky is", " blue."))
    assert ids[0][: len(asked) + len(said)].tolist() == [*asked, *said]
    assert labels[0][labels[0] >= 0].tolist() == [*said, end]
    path.write_text(lines([{"messages": [U, A]}]))
    with pytest.raises(NoData, match="joins pairs of texts") as caught:
        make(path, chat_template="none", **values)
    assert caught.value.hint == "data.chat_template=auto"
    path.write_text(lines([{"instruction": "q", "output": "r"}]))
    with pytest.raises(NoData, match="a record has an instruction"):
        make(path, chat_template="none", **values)


@pytest.mark.torch
def test_pairs_are_plain_text_where_the_tokenizer_has_no_template(tmp_path, make):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"prompt": "The sky is", "completion": " blue."}] * 4))
    trained = load_tokenizer(make(path, stage="sft", holdout=0).tokenizer_dir)
    trained.chat_template = None
    trained.save_pretrained(tmp_path / "base")
    for found in (tmp_path / "base").glob("chat_template*"):
        found.unlink()
    values = {"stage": "sft", "holdout": 0, "packing": False, "tokenizer": str(tmp_path / "base")}
    packed = make(path, **values)
    assert trained.decode(packed.train.read(np.arange(1))[0][0]).startswith("The sky is blue.")
    path.write_text(lines([{"question": "The sky is", "answer": " blue."}] * 4))
    text = trained.decode(make(path, **values).train.read(np.arange(1))[0][0])
    assert text.startswith("### user:\nThe sky is")
