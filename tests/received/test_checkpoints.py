"""Checkpoints that somebody else may have written, with right checksums throughout: read, or damaged in one line."""

import hashlib
import json
import resource
import time

import pytest
import torch
from torch import nn

from hyper_parallel.errors import BadValue, CheckpointCorrupt, CheckpointMismatch
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.extra_state import check_trainer_extra
from hyper_parallel.trainer.checkpoints.index import read_index
from tests.trainer_checkpoint.test_cli import run

pytestmark = pytest.mark.torch

PRINT = {"model": "m", "optimizer": "sgd"}
DATA = {
    "sequences_seen": 4, "sequences_per_step": 2, "num_sequences": 9, "fingerprint": "f", "seed": 1, "shuffle": True,
}  # fmt: skip


def small():
    model = nn.Linear(4, 6)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def extra(step):
    stopping = {"best": None, "waited": 0}
    return {
        "data": {"step": step, **DATA}, "metrics": {"loss": 1.5}, "run": {}, "resumes": [], "early_stopping": stopping,
    }  # fmt: skip


def checkpointer(place, **options):
    options = {"fingerprint": PRINT, "check_extra": check_trainer_extra} | options
    return Checkpointer(place / "checkpoints", keep=3, asynchronous=False, **options)


@pytest.fixture
def saved(tmp_path):
    """A run with the checkpoints of steps 1 and 2."""
    torch.manual_seed(0)
    model, optimizer = small()
    for step in (1, 2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        checkpointer(tmp_path).save(step, model, optimizer, extra(step))
    (tmp_path / "config.yaml").write_text("{}")
    return tmp_path


def rewrite(place, name, value):
    """Replace a JSON file of the newest checkpoint, with the checksums that its writer would have given it."""
    newest = place / "checkpoints" / "step_00000002"
    (newest / name).write_text(value if isinstance(value, str) else json.dumps(value))
    content = (newest / name).read_bytes()
    manifest = json.loads((newest / "manifest.json").read_text())
    entry = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][name] = entry
    manifest.pop("sha256")
    own = hashlib.sha256(files.json_text(manifest).encode()).hexdigest()
    (newest / "manifest.json").write_text(files.json_text(manifest | {"sha256": own}))


def refused(place, says, caplog):
    """The newest is damaged, in `list`, `verify` and for a load, which goes on from the older one, at little cost."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command in ("list", "verify"):
        newest = run(command, place).stdout.splitlines()[-1]
        assert newest.startswith("step        2  DAMAGED"), newest
        assert says in newest
        assert len(newest) < 1000
    caplog.clear()
    assert checkpointer(place).load(*small())[0] == 1
    (record,) = caplog.records
    assert record.message.startswith("checkpoint of step 2 is damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert time.process_time() - start < 15  # three readings of 5 s


def with_tensor(place, shape, pieces):
    """An index whose weight has this shape and these pieces (offset, shape)."""
    index = json.loads((place / "checkpoints" / "step_00000002" / "index.json").read_text())
    first = index["tensors"]["model.weight"]["pieces"][0]
    index["tensors"]["model.weight"] |= {
        "shape": shape, "pieces": [first | {"offset": offset, "shape": size} for offset, size in pieces],
    }  # fmt: skip
    return index


@pytest.mark.parametrize(
    ("shape", "pieces", "says"),
    [
        ([1] * 70, [([0] * 70, [1] * 70)], "70 dims"),
        ([2] * 30, [([i] * 30, [1] * 30) for i in (0, 1)], "do not fill"),
        ([2500] * 3, [([i] * 3, [1] * 3) for i in range(2500)], "do not fill"),
        ([2] * 10 + [2**50], [([0] * 10 + [i * 2**10], [1] * 10 + [2**10]) for i in range(1 << 10)], "do not fill"),
        ([4, 4], [([0, 0], [2, 4]), ([1, 0], [2, 4])], "overlap"),
        ([4, 4], [([0, 0], [3, 3]), ([1, 1], [3, 3]), ([0, 0], [1, 1]), ([3, 3], [1, 1])][:2], "do not fill"),
        ([4, 4], [([0, 0], [4, 2]), ([0, 0], [4, 2])], "overlap"),
        ([4, 4], [([0, 0], [4, 5])], "outside"),
        ([4, 4], [([-1, 0], [4, 4])], "outside"),
        ([0, -5], [], "do not fill"),
        ([2**62, 2**62], [([0, 0], [2**62, 2**62])], "are not"),
    ],
)  # fmt: skip
def test_pieces_that_do_not_fill_a_tensor_cost_little(saved, caplog, shape, pieces, says):
    rewrite(saved, "index.json", with_tensor(saved, shape, pieces))
    refused(saved, says, caplog)


def test_pieces_of_many_dims_that_fill_a_tensor_in_two_ways_are_told_apart(saved):
    """Boxes of equal volume: a spiral that fills a square once, and one with a hole and an overlap."""
    newest = saved / "checkpoints" / "step_00000002"
    spiral = [
        ([0, 0], [1, 3]),
        ([0, 3], [3, 1]),
        ([3, 1], [1, 3]),
        ([1, 0], [3, 1]),
        ([1, 1], [2, 2]),
    ]
    rewrite(saved, "index.json", with_tensor(saved, [4, 4], spiral))
    with pytest.raises(files.Damaged, match="are not `model"):  # the boxes are right, their bytes are not
        read_index(newest)
    rewrite(saved, "index.json", with_tensor(saved, [4, 4], [*spiral[:-1], ([0, 1], [2, 2])]))
    with pytest.raises(files.Damaged, match="overlap"):
        read_index(newest)


def without(value, *path):
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "no JSON object"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "nested deeper"),
        ('{"a": 1' + "0" * 400 + "}", "64 bits"),
        ({}, "$.data: missing"),
        (without(extra(2), "data", "sequences_seen"), "$.data.sequences_seen: missing"),
        (extra(2) | {"run": []}, "$.run"),
        (extra(2) | {"data": {"step": -5, **DATA}}, "$.data.step"),
        (extra(2) | {"data": {"step": 1, **DATA}}, "$.data.step: 1 in the checkpoint of step 2"),
        (extra(2) | {"data": {"step": "2", **DATA}}, "$.data.step"),
        (extra(2) | {"data": {"step": 2, **DATA, "sequences_per_step": 0}}, "sequences_per_step"),
        (extra(2) | {"data": {"step": 2, **DATA, "place": [-1, 0]}}, "place"),
        (extra(2) | {"resumes": [3]}, "$.resumes[0]"),
        (extra(2) | {"early_stopping": {"best": "x", "waited": 0}}, "early_stopping.best"),
        (extra(2) | {"loss_scale": {"value": -1.0, "good_steps": 0}}, "loss_scale.value"),
        (extra(2) | {"metrics": {"loss": float("nan")}}, "metrics.loss"),
    ],
)
def test_values_beside_the_tensors_have_types_and_ranges(saved, caplog, value, says):
    rewrite(saved, "extra.json", value)
    refused(saved, says, caplog)


@pytest.mark.parametrize("value", [extra(2) | {"later": {"a": 1}}, {"data": extra(2)["data"]}])
def test_values_of_later_and_earlier_versions_are_read(saved, value):
    rewrite(saved, "extra.json", value)
    assert checkpointer(saved).load(*small())[0] == 2
    assert "verified" in run("verify", saved).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i | {"groups": []}, "belongs to no group"),
        (lambda i: {"tensors": {k: v for k, v in i["tensors"].items() if k[:6] == "model."}}, "are not"),
        (lambda i: i | {"groups": [*i["groups"], i["groups"][0]]}, "two groups"),
        (lambda i: i | {"groups": [{"parameters": ["x"], "values": {}}]}, "`x`, which is not stored"),
        (lambda i: i | {"tensors": {"model.weight": [1]}}, "$.tensors.model.weight"),
        (lambda i: '{"tensors": {}, "values": {"a": [' + "[]," * 3_000_000 + "[]]}}", "elements"),
        (lambda i: '{"tensors": {' + ",".join(f'"{n}": 1' for n in range(20_000)) + "}}", "values do not fit"),
        (lambda i: '{"tensors": ' + " " * (20 << 20) + "{}}", "bytes, more than"),
    ],
    ids=["no-groups", "weights-only", "twice", "unknown", "shape", "elements", "problems", "bytes"],
)  # fmt: skip
def test_an_index_of_another_shape_is_damaged(saved, caplog, change, says):
    index = json.loads((saved / "checkpoints" / "step_00000002" / "index.json").read_text())
    rewrite(saved, "index.json", change(index))
    refused(saved, says, caplog)


def test_an_index_without_the_groups_of_a_plain_optimizer_is_damaged(tmp_path, caplog):
    """Nothing else of it is in the files: without this, the optimizer would silently begin anew."""
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        checkpointer(tmp_path).save(step, model, optimizer, extra(step))
    index = json.loads((tmp_path / "checkpoints" / "step_00000002" / "index.json").read_text())
    rewrite(tmp_path, "index.json", index | {"groups": []})
    assert checkpointer(tmp_path).load(model, optimizer)[0] == 1
    assert "no state of the optimizer" in caplog.text


@pytest.mark.parametrize("value", ["x", None, [0.1], True, float("inf")])
def test_a_number_of_the_optimizer_of_another_kind_is_refused(saved, value):
    index = json.loads((saved / "checkpoints" / "step_00000002" / "index.json").read_text())
    index["groups"][0]["values"]["momentum"] = value
    rewrite(saved, "index.json", index)
    if value is None:  # torch's own optimizers have numbers that are not set
        assert checkpointer(saved).load(*small())[0] == 2
        return
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.momentum"):
        checkpointer(saved).load(*small())


@pytest.mark.parametrize(
    ("key", "value"), [("world_size", -1), ("size_bytes", "x"), ("step", 2**80), ("metrics", {"a": []})]
)  # fmt: skip
def test_a_manifest_of_other_types_is_damaged(saved, caplog, key, value):
    path = saved / "checkpoints" / "step_00000002" / "manifest.json"
    manifest = json.loads(path.read_text()) | {key: value}
    manifest.pop("sha256")
    own = hashlib.sha256(files.json_text(manifest).encode()).hexdigest()
    path.write_text(files.json_text(manifest | {"sha256": own}))
    refused(saved, "not readable as a manifest", caplog)


def test_without_an_intact_checkpoint_the_load_is_refused(saved):
    for step in ("step_00000001", "step_00000002"):
        (saved / "checkpoints" / step / "extra.json").write_text("[]")
    with pytest.raises(CheckpointCorrupt, match=r"extra\.json"):
        checkpointer(saved).load(*small())


def test_values_that_could_not_be_read_back_are_not_saved(tmp_path):
    model, optimizer = small()
    with pytest.raises(BadValue, match="too large"):
        checkpointer(tmp_path).save(1, model, optimizer, {"states": "x" * (17 << 20)})
    assert not (tmp_path / "checkpoints").exists()
