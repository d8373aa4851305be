"""Packed arrays: nothing lost, nothing learnt twice, hold-out apart, and a cache that notices damage."""

import json
import os
import pickle
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, NoData, OutputNotWritable
from hyper_parallel.owned_folder import Marker, write_marker
from hyper_parallel.runtime import launch
from hyper_parallel.trainer.data import IGNORE_INDEX, load_tokenizer, prepare
from hyper_parallel.trainer.data.packing import first_fit, token_dtype

pytestmark = pytest.mark.torch


def stream(sequences):
    return np.load(sequences.directory / f"{sequences.split}.npy").astype(np.int64)


def test_labels_are_the_next_tokens_and_every_token_is_learnt_once(corpus, make):
    packed = make(corpus)
    inputs, labels = packed.train.read(np.arange(len(packed.train)))
    tokens = stream(packed.train)
    used = len(packed.train) * 32
    assert inputs.shape == (len(packed.train), 32)
    assert np.array_equal(inputs.ravel(), tokens[:used])
    assert np.array_equal(labels.ravel(), tokens[1 : used + 1])
    assert len(tokens) - 1 - used < 32
    assert packed.train.num_valid(np.arange(len(packed.train))) == used


def test_documents_come_back_word_for_word_and_are_either_trained_on_or_held_out(corpus, make):
    packed = make(corpus)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    parts = {}
    for sequences in (packed.train, packed.holdout):
        text = tokenizer.decode(stream(sequences))
        parts[sequences.split] = text.split("<|endoftext|>")[:-1]
    files = {p.read_text(encoding="utf-8") for p in corpus.rglob("*.txt")}
    assert set(parts["train"]) | set(parts["holdout"]) == files
    assert not set(parts["train"]) & set(parts["holdout"])
    assert len(parts["holdout"]) == 4


def test_the_seed_draws_the_held_out_documents(corpus, make):
    first, again, other = make(corpus), make(corpus), make(corpus, seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (first.cached, again.cached, other.cached) == (False, True, False)


def test_one_long_document_gives_its_tail(tmp_path, make):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {n}\n" for n in range(2000)))
    packed = make(path, holdout=0.05)
    text = load_tokenizer(packed.tokenizer_dir).decode(stream(packed.holdout))
    assert path.read_text().endswith(text.removesuffix("<|endoftext|>"))
    share = len(stream(packed.holdout)) / (len(stream(packed.holdout)) + len(stream(packed.train)))
    assert share == pytest.approx(0.05, abs=1e-3)


def test_without_holdout_everything_is_trained_on(corpus, make):
    assert len(make(corpus, holdout=0.0).holdout) == 0


def test_text_shorter_than_one_sequence_is_refused_with_the_numbers(tmp_path, make):
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(NoData, match="shorter than one sequence") as caught:
        make(tmp_path / "a.txt", seq_len=4096)
    assert "seq_len=4096" in caught.value.got


def test_a_tokenizer_larger_than_the_model_is_refused(corpus, make):
    with pytest.raises(BadValue, match="tokenizer=320, model=300") as caught:
        make(corpus, vocab_limit=300)
    assert caught.value.hint == "data.vocab_size=300"
    assert make(corpus, vocab_limit=300, vocab_size=300).vocab_size == 300
    assert make(corpus, vocab_limit=300, vocab_size=None).vocab_size == 300


def test_the_models_own_tokenizer_is_used_and_named(corpus, make):
    first = make(corpus)
    second = make(corpus, model_path=first.tokenizer_dir, vocab_size=4096)
    assert second.tokenizer_dir == first.tokenizer_dir
    assert second.fingerprint == first.fingerprint


def test_a_directory_without_tokenizer_is_refused(corpus, make, tmp_path):
    with pytest.raises(NoData, match="no tokenizer"):
        make(corpus, tokenizer=str(tmp_path))


def test_a_damaged_tokenizer_is_refused(corpus, make, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(NoData, match="cannot be loaded"):
        make(corpus, tokenizer=str(tmp_path))


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: os.truncate(d / "train.npy", 100),
        lambda d: (d / "holdout.npy").unlink(),
        lambda d: (d / "meta.json").write_text("{"),
        lambda d: (d / "meta.json").unlink(),
        lambda d: flip_byte(d / "train.npy"),
    ],
    ids=["truncated", "missing", "broken meta", "no meta", "one bit"],
)
def test_a_damaged_cache_entry_is_built_again(corpus, make, damage, caplog):
    packed = make(corpus)
    fingerprint, tokens = packed.fingerprint, stream(packed.train)
    damage(packed.train.directory)
    again = make(corpus)
    assert not again.cached
    assert "rebuilt" in caplog.text
    assert again.fingerprint == fingerprint
    assert np.array_equal(stream(again.train), tokens)


def test_a_killed_build_leaves_nothing_that_is_taken_for_data(corpus, make):
    packed = make(corpus)
    target = packed.train.directory
    partial = target.with_name(f".{target.name}.tmp")
    target.rename(partial)
    (partial / "meta.json").unlink()
    (partial / "media.bin").write_bytes(b"images of the records")
    write_marker(partial, Marker("cache"))
    again = make(corpus)
    assert not again.cached
    assert again.fingerprint == packed.fingerprint
    assert not list(target.parent.glob("*.tmp"))


def test_everything_that_matters_is_in_the_key(corpus, make):
    keys = [make(corpus).train.directory.name, make(corpus, seq_len=16).train.directory.name]
    keys.append(make(corpus, max_bytes=9000).train.directory.name)
    changed = corpus / "part0" / "doc00.txt"
    os.utime(changed, (1, 1))
    keys.append(make(corpus).train.directory.name)
    assert len(set(keys)) == 4


def test_an_unwritable_cache_is_refused(corpus, make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputNotWritable, match="HP105"):
        make(corpus, cache_dir=str(tmp_path / "file" / "cache"))


def test_sequences_survive_a_pickle(corpus, make):
    train = make(corpus).train
    copy = pickle.loads(pickle.dumps(train))
    assert np.array_equal(copy.read(np.array([0, 1]))[0], train.read(np.array([0, 1]))[0])


@pytest.mark.dist
def test_ranks_forked_after_tokenising_can_use_the_tokenizer(corpus, make, tmp_path):
    packed = make(corpus)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    expected = tokenizer(["word1_1 word2"] * 50)["input_ids"]
    results = launch(
        lambda rank: tokenizer(["word1_1 word2"] * 50)["input_ids"],
        2,
        log_dir=tmp_path / "logs",
        timeout_s=30,
    )
    assert results == [expected, expected]
    assert [(tmp_path / "logs" / f"rank_{r}.log").read_text() for r in range(2)] == ["", ""]


@pytest.mark.dist
def test_processes_that_prepare_together_build_once(corpus, make):
    def one(rank):
        packed = make(corpus)
        return packed.cached, packed.fingerprint

    cached, fingerprints = zip(*launch(one, 3, timeout_s=180), strict=True)
    assert sorted(cached) == [False, True, True]
    assert len(set(fingerprints)) == 1


@given(st.lists(st.integers(0, 50), max_size=300))
def test_first_fit_puts_every_item_in_one_row_that_holds_it(lengths):
    rows = first_fit(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)


def test_tokens_are_kept_in_the_narrowest_type():
    assert token_dtype(65536) is np.uint16
    assert token_dtype(65537) is np.uint32


def test_conversations_teach_only_the_assistants_words(conversations, make):
    packed = make(conversations, stage="sft", seq_len=128)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    answers = 0
    for sequences in (packed.train, packed.holdout):
        inputs, labels = sequences.read(np.arange(len(sequences)))
        learnt = labels[labels != IGNORE_INDEX]
        assert sequences.num_valid(np.arange(len(sequences))) == len(learnt)
        text = tokenizer.decode(learnt)
        pieces = text.split("<|im_end|>")[:-1]
        assert all(p.startswith("It is ") and p.endswith(", of course.") for p in pieces)
        answers += len(pieces)
        # Where there is a label it is the token that follows in the same row.
        row, at = np.nonzero(labels[:, :-1] != IGNORE_INDEX)
        same = labels[row, at] == inputs[row, at + 1]
        ends = labels[row, at] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert np.all(same | ends)
    assert answers == 10 * (1 + 2 + 3)


def test_conversations_are_not_split_over_rows(conversations, make):
    packed = make(conversations, stage="sft", seq_len=128, holdout=0.0)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    inputs, _ = packed.train.read(np.arange(len(packed.train)))
    texts = [tokenizer.decode(row) for row in inputs]
    assert all(t.startswith("<|im_start|>system\nBe brief.") for t in texts)
    assert sum(t.count("Be brief.") for t in texts) == 30
    assert packed.notes == ()


def test_conversations_that_are_cut_or_left_out_are_counted(conversations, make, caplog):
    packed = make(conversations, stage="sft", seq_len=64, holdout=0.0)
    assert any("conversations cut to seq_len=64" in note for note in packed.notes)
    assert packed.notes[0] in caplog.text
    assert make(conversations, stage="sft", seq_len=64, holdout=0.0).notes == packed.notes


def test_conversations_without_room_for_an_answer_are_refused(conversations, make):
    with pytest.raises(NoData, match="no conversation"):
        make(conversations, stage="sft", seq_len=4)


def test_pretraining_reads_conversations_as_text(conversations, make):
    packed = make(conversations, stage="pt")
    text = load_tokenizer(packed.tokenizer_dir).decode(stream(packed.train))
    assert "<|im_start|>user\nWhat is" in text


def test_two_processes_train_the_same_tokenizer(corpus, make, tmp_path):
    def one(rank):
        return make(corpus, cache_dir=str(tmp_path / f"cache{rank}")).fingerprint

    assert len(set(launch(one, 3, timeout_s=180))) == 1


def test_nothing_is_fetched(conversations, make, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert len(make(conversations, stage="sft", seq_len=128).train) > 0


def test_conversations_in_parquet_are_those_in_json(conversations, make, tmp_path):
    pandas = pytest.importorskip("pandas")
    records = [json.loads(line) for line in conversations.read_text().splitlines()]
    pandas.DataFrame(records).to_parquet(tmp_path / "chat.parquet")
    packed = [make(path, stage="sft", seq_len=128) for path in (conversations, tmp_path / "chat.parquet")]
    assert packed[0].fingerprint == packed[1].fingerprint


def test_bars_go_to_stderr_and_only_when_there_is_work(corpus, tmp_path, capsys):
    data = Data(source=str(corpus), seq_len=32, vocab_size=320, cache_dir=str(tmp_path / "cache"))
    prepare(data, stage="pt", model_path=None, seed=0)
    first = capsys.readouterr()
    prepare(data, stage="pt", model_path=None, seed=0)
    second = capsys.readouterr()
    assert "train tokenizer" in first.err
    assert "tokenise" in first.err
    assert (first.out, second.out, second.err) == ("", "", "")
