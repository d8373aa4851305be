"""A stream gives what packing gives, goes on at any place, and is the same for every layout."""

import itertools
import json
import os

import numpy as np
import pytest

from hyper_parallel.errors import BatchMismatch, CheckpointMismatch, NoData
from hyper_parallel.trainer.data import StreamBatches, load_tokenizer, streaming

pytestmark = pytest.mark.torch

FORMS = {
    "text": {},
    "text apart": {"mask_documents": True},
    "text unpacked": {"packing": False},
    "chat": {"stage": "sft", "seq_len": 128},
}


def steps(batches, which):
    """Inputs and labels of steps, whole."""
    found = [batches.microbatches(s, 0, 1, batches.sequences_per_step, 1)[0] for s in which]
    return [np.stack([b.input_ids, b.shift_labels]) for b in found]


@pytest.fixture(params=FORMS)
def stream(request, corpus, conversations, make, monkeypatch):
    monkeypatch.setattr(streaming, "_BLOCK", 2)
    source = conversations if request.param == "chat" else corpus
    return make(source, streaming=True, max_bytes=6000, **FORMS[request.param]).train


def test_a_stream_goes_on_where_a_checkpoint_stopped_in_a_later_epoch_too(stream):
    whole = StreamBatches(stream, 5, "f")
    reference, states = [], []
    for step in range(40):
        states.append(json.loads(json.dumps(whole.state_dict(step))))
        reference += steps(whole, [step])
    assert states[-1]["place"][0] >= 1  # the first epoch is over
    for done in (0, 1, 7, 39):
        again = StreamBatches(stream, 5, "f")
        again.load_state_dict(states[done])
        (mine,) = steps(again, [done])
        assert np.array_equal(mine, reference[done])
    other = StreamBatches(stream, 3, "f")
    other.load_state_dict(states[6])
    rows = np.concatenate(steps(other, range(6, 11)), axis=1)
    assert np.array_equal(rows, np.concatenate(reference[6:9], axis=1))
    assert other.sequences_seen(8) == 6 * 5 + 2 * 3


def test_a_step_is_the_same_for_every_layout(stream):
    batches = StreamBatches(stream, 8, "f")
    (reference,) = steps(batches, [2])
    for dp, microbatch, accumulation in [(2, 2, 2), (4, 1, 2), (8, 1, 1)]:
        parts = [batches.microbatches(2, r, dp, microbatch, accumulation) for r in range(dp)]
        flat = [b for rank in parts for b in rank]
        mine = np.concatenate([np.stack([b.input_ids, b.shift_labels]) for b in flat], axis=1)
        assert np.array_equal(mine, reference)
        assert sum(b.num_valid for b in flat) == batches.num_valid(2)
        assert all((b.position_ids is not None) == stream.masked for b in flat)
    with pytest.raises(BatchMismatch):
        batches.microbatches(2, 0, 3, 1, 2)


def test_in_the_order_of_the_source_a_stream_is_the_packed_text(corpus, make):
    packed = make(corpus, holdout=0.0, shuffle=False).train
    stream = StreamBatches(make(corpus, streaming=True, shuffle=False).train, 1, "f")
    inputs, labels = packed.read(np.arange(len(packed)))
    mine = np.concatenate(steps(stream, range(len(packed))), axis=1)
    assert np.array_equal(mine, [inputs, labels])


def test_every_document_is_read_once_per_epoch_in_a_new_order(conversations, make):
    packed = make(conversations, streaming=True, stage="sft", seq_len=128)
    tokenizer = load_tokenizer(packed.tokenizer_dir)
    batches = StreamBatches(packed.train, 1, "f")
    text = "".join(tokenizer.decode(steps(batches, [s])[0][0, 0]) for s in range(60))
    asked = text.split("<|im_start|>system")[1:61]
    asked = [a.partition("What is ")[2].partition(" plus")[0] for a in asked]
    assert sorted(map(int, asked[:30])) == sorted(map(int, asked[30:])) == list(range(30))
    assert asked[:30] != asked[30:]


def test_another_order_is_refused_and_an_empty_stream_too(corpus, make, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    assert make("corpus", streaming=True).fingerprint == make(corpus, streaming=True).fingerprint
    state = StreamBatches(make(corpus, streaming=True).train, 5, "f").state_dict(0)
    with pytest.raises(CheckpointMismatch, match="HP702"):
        StreamBatches(make(corpus, streaming=True, seed=1).train, 5, "f").load_state_dict(state)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Q"}]}) + "\n")
    with pytest.raises(NoData, match="no sequence to learn from"):
        make(path, streaming=True, stage="sft")


def test_an_endless_source_is_not_read_to_its_end(tmp_path, make, monkeypatch):
    import hyper_parallel.trainer.data.sources as sources

    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "first"}\n')
    tokenizer = make(path, streaming=True).tokenizer_dir
    endless = ((f"row {n}", {"text": f"number {n}"}) for n in itertools.count())
    monkeypatch.setattr(sources, "read_records", lambda path, most: endless)
    stream = make(path, streaming=True, tokenizer=tokenizer, shuffle=False).train
    assert len(steps(StreamBatches(stream, 5, "f"), range(20))) == 20


def test_a_validation_file_is_what_is_evaluated(corpus, make, tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps({"text": "held out words " * 40}) + "\n")
    packed = make(corpus, validation=str(path), holdout=0.02)
    text = load_tokenizer(packed.tokenizer_dir).decode(packed.holdout.read(np.arange(1))[0][0])
    assert text.startswith("held out words held out")
    alone = make(corpus, holdout=0.0)
    assert packed.fingerprint == alone.fingerprint
    assert len(packed.train) == len(alone.train)
    streamed = make(corpus, validation=str(path), streaming=True)
    assert len(streamed.holdout) == len(packed.holdout)
    assert make(corpus, streaming=True).holdout is None


def test_a_stream_refuses_to_go_on_in_data_that_changed_before_its_place(conversations, make, monkeypatch):
    monkeypatch.setattr(streaming, "_BLOCK", 4)
    tokenizer = make(conversations, stage="sft", seq_len=128).tokenizer_dir

    def opened():
        packed = make(conversations, streaming=True, stage="sft", seq_len=128, tokenizer=tokenizer)
        return StreamBatches(packed.train, 1, packed.fingerprint), packed.files_fingerprint

    batches, files = opened()
    reference, states = [], []
    for step in range(60):
        states.append(json.loads(json.dumps(batches.state_dict(step))))
        reference += steps(batches, [step])
    state, later = states[3], states[59]
    epoch, document, *_ = state["place"]
    assert (epoch, document) < (0, 16)
    assert later["place"][0] >= 1  # in a later epoch
    lines = conversations.read_text().splitlines(keepends=True)
    for changed in (
        [lines[0].replace("0 plus", "9 plus"), *lines[1:]],  # the same length
        [*lines[1:document], lines[0], *lines[document:]],  # another order
        lines[1:],
        lines[: document - 1],  # cut before the place
    ):
        conversations.write_text("".join(changed))
        for saved in (state, later):
            other, _ = opened()
            other.load_state_dict(saved)
            with pytest.raises(CheckpointMismatch, match="streamed data has changed"):
                other.num_valid(saved["step"])
    # What lies behind the block of the place is not known to the checkpoint: only the files are others.
    conversations.write_text("".join([*lines[:20], *lines[:9]]))
    other, other_files = opened()
    other.load_state_dict(state)
    assert np.array_equal(steps(other, [3])[0], reference[3])
    assert other_files != files


def test_the_cache_knows_a_file_of_the_same_size_and_time_by_its_change_time(corpus, make):
    path = sorted(corpus.rglob("*.txt"))[0]
    first = make(corpus)
    before, text = path.stat(), path.read_text()
    path.write_text(text.replace("word", "drow"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    other = make(corpus)
    assert not other.cached
    assert other.fingerprint != first.fingerprint
    path.write_text(text)
    assert make(corpus).fingerprint == first.fingerprint  # the name is another, the content is not
