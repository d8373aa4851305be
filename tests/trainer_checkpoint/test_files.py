"""What is on the disk: nothing that runs, nothing that is damaged unseen, nothing removed that is needed."""

import json
import logging
import os
import pickle
import random
import re
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hyper_parallel.errors import (
    BadValue,
    CheckpointCorrupt,
    CheckpointFormat,
    CheckpointMismatch,
    LossNotFinite,
    OutputNotWritable,
)
from hyper_parallel.ir import choose_senders
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.index import INDEX, encode_index, read_index
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.files import Damaged, FileEntry
from tests.owned_folder.test_replacement import listing
from tests.trainer_checkpoint.test_cli import run

pytestmark = pytest.mark.torch


def small(seed=1, momentum=0.9):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def train(model, optimizer):
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


def checkpointer(directory, **options):
    options = {"keep": 2, "asynchronous": False, "fingerprint": {"model": "small"}} | options
    return Checkpointer(directory, **options)


def save(directory, *numbers, metrics=None, **options):
    model, optimizer = small()
    saver = checkpointer(directory, **options)
    for step in numbers:
        train(model, optimizer)
        extra = {"data": {"at": step}, "metrics": {"loss": metrics[step]} if metrics else {}}
        saver.save(step, model, optimizer, extra)
    return model


class Marks:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_in_the_folder_is_named_and_never_opened(tmp_path):
    save(tmp_path / "checkpoints", 1, 2)
    newest, mark = tmp_path / "checkpoints" / "step_00000002", tmp_path / "ran"
    assert not [p for p in newest.iterdir() if p.suffix not in (".json", ".safetensors")]
    for name in (".metadata", "__0_0.distcp", "optimizer.pt"):
        (newest / name).write_bytes(pickle.dumps(Marks(mark)))
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert ".metadata" in result.stdout
    assert "2" in run("inspect", tmp_path).stdout
    model, optimizer = small(5)
    assert checkpointer(tmp_path / "checkpoints").load(model, optimizer)[0] == 2
    for path in newest.glob("*.*"):  # and in place of every file there is
        before = path.read_bytes()
        path.write_bytes(pickle.dumps(Marks(mark)))
        assert run("verify", tmp_path).exit_code == 1
        checkpointer(tmp_path / "checkpoints").load(model, optimizer)
        path.write_bytes(before)
    (newest / "manifest.json").write_text('{"format": 1, "step": 2, "world_size": 1}')
    with pytest.raises(CheckpointFormat, match="pickle"):
        checkpointer(tmp_path / "checkpoints").load(model, optimizer)
    assert "earlier format" in run("list", tmp_path).stdout
    assert not mark.exists()


def test_a_flip_of_any_bit_is_found_by_verify_and_by_load(tmp_path):
    save(tmp_path / "checkpoints", 2)
    draw, newest = random.Random(7), tmp_path / "checkpoints" / "step_00000002"
    model, optimizer = small(5)
    before = [t.clone() for t in model.state_dict().values()]
    for path in sorted(newest.iterdir()):
        good = path.read_bytes()
        for at in [0, len(good) - 1, *(draw.randrange(len(good)) for _ in range(25))]:
            data = bytearray(good)
            data[at] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(data))
            with pytest.raises(CheckpointCorrupt, match=path.name):
                checkpointer(tmp_path / "checkpoints").load(model, optimizer)
            with pytest.raises(Damaged, match=path.name):
                files.check(newest)
            path.write_bytes(good)
    assert run("verify", tmp_path).exit_code == 0
    for old, new in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(old, new)


def test_an_index_that_names_what_cannot_be_is_refused(tmp_path):
    """With right checksums throughout, as somebody writes it who means harm."""
    save(tmp_path, 2)
    newest = tmp_path / "step_00000002"
    good = read_index(newest)
    name = "model.0.weight"
    tensor = good.tensors[name]
    (piece,) = tensor.pieces

    def changed(**changes):
        return replace(tensor, pieces=(replace(piece, **changes),))

    upper, lower = replace(piece, shape=(3, 3)), replace(piece, offset=(2, 0), shape=(3, 3))
    wrong = {
        "are not": changed(begin=piece.begin - 4, end=piece.end - 4),
        "outside": changed(offset=(1, 0)),
        "outside of": changed(offset=(-1, 0)),
        "number of dims": changed(offset=(0,)),
        "do not fill": replace(tensor, pieces=()),
        "overlap|do not fill": replace(tensor, pieces=(upper, lower)),
        "overlap": replace(
            tensor,
            shape=(6, 3),
            pieces=(upper, replace(lower, shape=(3, 3), begin=piece.end, end=piece.end + 36)),
        ),
        "unknown dtype": replace(tensor, dtype="object"),
    }
    for words, entry in wrong.items():
        index = replace(good, tensors=good.tensors | {name: entry})
        (newest / INDEX).write_text(encode_index(index))
        manifest = files.read_manifest(newest)
        entries = manifest.files | {INDEX: FileEntry.of(newest / INDEX)}
        text = files.encode_manifest(replace(manifest, files=entries))
        (newest / "manifest.json").write_text(text)
        with pytest.raises(CheckpointCorrupt, match=words):
            checkpointer(tmp_path).load(*small(5))
    (newest / INDEX).write_text("[" * 100_000)
    with pytest.raises(Damaged, match="not readable as an index"):
        read_index(newest)
    (newest / INDEX).write_text(encode_index(good))
    entries = manifest.files | {INDEX: FileEntry.of(newest / INDEX)}
    text = files.encode_manifest(replace(manifest, files=entries))
    (newest / "manifest.json").write_text(text)
    model, _ = small(5)
    checkpointer(tmp_path).load(model, None)
    with safe_open(newest / piece.file, "pt") as file:  # which is a plain safetensors file
        assert torch.equal(file.get_tensor(f"{name}[0,0]"), model[0].weight)


def test_json_nested_too_deep_is_damage(tmp_path):
    checkpoint = tmp_path / "step_00000001"
    checkpoint.mkdir()
    (checkpoint / files.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(Damaged, match="not readable as a manifest"):
        files.read_manifest(checkpoint)


def test_replicas_are_written_once_and_spread_over_ranks():
    held = [{("a", (0,)): 40, ("b", (0,)): 30, ("c", (0,)): 30, (f"own{r}", (0,)): r} for r in (0, 9)]
    assert choose_senders(held) == {
        ("own0", (0,)): 0, ("own9", (0,)): 1, ("a", (0,)): 0, ("b", (0,)): 1, ("c", (0,)): 1,
    }  # fmt: skip


def test_the_newest_intact_are_kept_and_never_the_damaged_alone(tmp_path, caplog):
    save(tmp_path, 4, 6, keep=9)
    broken = tmp_path / "step_00000006" / "rank_00000.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    model, optimizer = small(3)
    saver = checkpointer(tmp_path, keep=1)
    assert saver.load(model, optimizer)[0] == 4
    saver.save(5, model, optimizer, {})
    assert steps(tmp_path) == [5, 6]  # the damaged one is newer: it stays, and counts for nothing
    assert checkpointer(tmp_path).load(model, optimizer)[0] == 5
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        checkpointer(tmp_path, keep=1).save(7, model, optimizer, {})
    assert "step 6 is damaged" not in caplog.text  # nobody had to look
    assert steps(tmp_path) == [7]
    # One whose contents this process has not seen is read before an older one is removed on its account.
    save(tmp_path, 8, 9, keep=9)
    broken = tmp_path / "step_00000009" / "rank_00000.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        checkpointer(tmp_path, keep=2).save(10, model, optimizer, {})
    assert "step 9 is damaged" in caplog.text
    assert steps(tmp_path) == [8, 10]


def test_the_best_is_kept_beside_the_newest(tmp_path):
    metrics = {1: 5.0, 2: 3.0, 3: 3.5, 4: 9.0, 5: 3.0, 6: 4.0, 7: 8.0}
    save(tmp_path, *range(1, 5), metrics=metrics, keep=1, keep_best="loss")
    assert steps(tmp_path) == [2, 4]
    save(tmp_path, 5, 6, 7, metrics=metrics, keep=1, keep_best="loss")  # a run that goes on
    assert steps(tmp_path) == [5, 7]


@contextmanager
def small_disk():
    """A limit on the size of files, since a file system of few bytes takes more rights than a test may have.

    Only inside: what pytest writes to may be longer already.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_older_checkpoints_and_no_half_one(tmp_path, asynchronous, caplog):
    model, optimizer = small()
    train(model, optimizer)
    place = tmp_path / "c"
    save(place, 1)
    with small_disk():
        stops = checkpointer(place, asynchronous=asynchronous)

        def saves():
            stops.save(2, model, optimizer, {})
            stops.finish()

        with pytest.raises(OutputNotWritable, match="File too large"):
            saves()
        assert [p.name for p in place.iterdir()] == ["step_00000001"]
        goes_on = checkpointer(place, asynchronous=asynchronous, on_error="continue")
        with caplog.at_level(logging.WARNING):
            goes_on.save(2, model, optimizer, {})
            goes_on.save(3, model, optimizer, {})
        # The state of the last step is nowhere: that is no success.
        with pytest.raises(OutputNotWritable):
            goes_on.finish()
    assert "continues without" in caplog.text
    assert [p.name for p in place.iterdir()] == ["step_00000001"]
    assert checkpointer(place).load(model, optimizer)[0] == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_later_save_makes_up_for_a_failed_one(tmp_path, asynchronous):
    model, optimizer = small()
    saver = checkpointer(tmp_path / "c", asynchronous=asynchronous, on_error="continue")
    with small_disk():
        saver.save(1, model, optimizer, {})
        saver.save(2, model, optimizer, {})  # waits for the first one, which failed
    saver.save(3, model, optimizer, {})
    saver.finish()
    assert checkpointer(tmp_path / "c").load(model, optimizer)[0] == 3


def test_numbers_of_schedulers_and_other_kinds_of_optimizers(tmp_path):
    model, optimizer = small()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    checkpointer(tmp_path).save(1, model, optimizer, {})  # before the first step: no state yet
    other, plain = small(2, momentum=0)
    plain.param_groups[0]["lr"] = torch.tensor(3.0)
    checkpointer(tmp_path).load(other, plain)
    assert plain.param_groups[0]["lr"] == pytest.approx(0.1)
    assert (plain.param_groups[0]["momentum"], plain.param_groups[0]["initial_lr"]) == (0.9, 0.1)
    assert not plain.state
    with pytest.raises(CheckpointMismatch, match=r"`optimizer\.momentum` of"):
        checkpointer(tmp_path).load(other, torch.optim.Adagrad(other.parameters()))
    with pytest.raises(CheckpointMismatch, match=r"`optimizer\.1\.weight`"):
        checkpointer(tmp_path).load(other, torch.optim.SGD(other[0].parameters()))
    with pytest.raises(BadValue, match="does not belong to the model"):
        checkpointer(tmp_path).save(2, model, torch.optim.SGD(small()[0].parameters()), {})


def test_adafactor_has_state_of_other_shapes_than_its_parameters(tmp_path):
    model, _ = small()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer)
    checkpointer(tmp_path).save(1, model, optimizer, {})
    other, _ = small(2)
    other_optimizer = torch.optim.Adafactor(other.parameters())
    checkpointer(tmp_path).load(other, other_optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        a, b = optimizer.state[mine], other_optimizer.state[theirs]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert {t.shape for t in other_optimizer.state[other[0].weight].values()} > {(5, 1), (1, 3)}


def test_inspect_says_what_is_there(tmp_path):
    save(tmp_path / "checkpoints", 3)
    found = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert (found["step"], found["extra"]["data"]) == (3, {"at": 3})
    tensors = {entry.pop("name"): entry for entry in found["tensors"]}
    file = ["rank_00000.safetensors"]
    assert tensors["model.0.weight"] == {
        "shape": [5, 3], "dtype": "float32", "cut": [1, 1], "files": file,
    }  # fmt: skip
    assert "optimizer.state.0.weight.momentum_buffer" in tensors
    text = run("inspect", tmp_path).stdout
    assert "model.1.running_mean  5  float32  shards 1\n" in text
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000003")
    save(tmp_path / "checkpoints", 4)
    (tmp_path / "checkpoints" / "step_00000004" / "index.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"index\.json"):
        run("inspect", tmp_path)


def test_folders_of_steps_that_are_no_checkpoints_are_neither_replaced_nor_pruned(tmp_path):
    for name, files_of in {
        "step_00000001": ("weights.bin",), "step_00000002": ("manifest.json",),
        "step_00000009": ("manifest.json", "a.pt"), ".step_00000003.tmp": ("notes.txt",),
        ".step_mine.tmp": ("notes.txt",), ".step_00000004.old": ("notes.txt",),
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        for file in files_of:
            (tmp_path / name / file).write_text('{"mine": 1}')
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    (tmp_path / "step_00000005").symlink_to(outside)
    before = listing(tmp_path)
    save(tmp_path, 6, 7, keep=1)
    after = listing(tmp_path)
    assert before.items() <= after.items()
    assert {n.partition("/")[0] for n in after.keys() - before.keys()} == {"step_00000007"}
    for step in (1, 3, 5, 9):
        with pytest.raises(OutputNotWritable, match="HP105"):
            save(tmp_path, step)
    assert listing(tmp_path) == after


def poison_parameter(model, optimizer):
    model[0].weight.data[1, 1] = float("inf")


def poison_state(model, optimizer):
    optimizer.state[model[0].bias]["momentum_buffer"][0] = float("nan")


@pytest.mark.parametrize("poison", [poison_parameter, poison_state])
def test_weights_and_states_that_are_not_finite_replace_no_checkpoint(tmp_path, poison):
    model, optimizer = small()
    train(model, optimizer)
    saver = checkpointer(tmp_path, keep=1)
    saver.save(1, model, optimizer, {})
    before = listing(tmp_path)
    poison(model, optimizer)
    with pytest.raises(LossNotFinite, match=r"HP604.*nothing is saved") as refused:
        saver.save(2, model, optimizer, {})
    assert re.search(r"`(model\.0\.weight|optimizer\.state\.0\.bias\.momentum_buffer)`", refused.value.what)
    assert "newest checkpoint: step 1" in refused.value.got
    assert listing(tmp_path) == before


def test_values_that_no_update_changes_may_be_infinite(tmp_path):
    model, optimizer = small()
    model.register_buffer("mask", torch.full((2,), float("-inf")))
    model[0].bias.requires_grad_(False).fill_(float("-inf"))
    checkpointer(tmp_path).save(1, model, optimizer, {})
    assert steps(tmp_path) == [1]
