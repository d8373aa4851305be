import json
import logging
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from torch import nn

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.errors import CheckpointCorrupt, CheckpointMismatch, OutputNotWritable
from hyper_parallel.runtime import launch
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.manifest import steps
from tests.weights.models import assert_same, full_state, join, on_meta, qwen3, shard

PRINT = {"model": "qwen3", "optimizer": "adamw"}


def build(seed, *, dtype=torch.float32, tied=False, **degrees):
    model = shard(on_meta(qwen3, tied=tied).to(dtype), **degrees)
    materialize(model, seed=seed, device="cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def train(model, optimizer, steps=2):
    for step in range(steps):
        tokens = torch.arange(24).view(2, 12) + step
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    """Full tensors of parameters and optimizer state by parameter name."""
    state = full_state(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}/{key}"] = value.clone()
    return state


def checkpointer(directory, *, keep=2, asynchronous=False, fingerprint=PRINT):
    return Checkpointer(directory, keep=keep, asynchronous=asynchronous, fingerprint=fingerprint)


def saved_run(directory, numbers=(1, 2, 3), keep=3):
    model, optimizer = build(1)
    saver = checkpointer(directory, keep=keep)
    states = {}
    for step in numbers:
        train(model, optimizer, 1)
        saver.save(step, model, optimizer, {"step": step})
        states[step] = whole(model, optimizer)
    return states


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_in_one_process_is_bitwise_and_training_continues_identically(tmp_path, tied):
    model, optimizer = build(1, tied=tied)
    train(model, optimizer)
    extra = {"position": 17, "rng": [1, 2, 3], "nested": {"a": None}}
    checkpointer(tmp_path).save(2, model, optimizer, extra)
    other, other_optimizer = build(2, tied=tied)
    loader = checkpointer(tmp_path)
    assert loader.latest() == 2
    assert loader.load(other, other_optimizer) == (2, extra)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))
    train(model, optimizer)
    train(other, other_optimizer)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))


@pytest.mark.torch
def test_weights_only_and_learning_rate(tmp_path):
    model, optimizer = build(1)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    checkpointer(tmp_path).save(2, model, optimizer, {})
    other, other_optimizer = build(2)
    checkpointer(tmp_path).load(other, None)
    assert_same(full_state(other), full_state(model))
    checkpointer(tmp_path).load(other, other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.125
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.torch
def test_the_newest_are_kept_and_an_existing_step_is_replaced(tmp_path):
    states = saved_run(tmp_path, (1, 2, 3), keep=2)
    assert steps(tmp_path) == [2, 3]
    model, optimizer = build(5)
    checkpointer(tmp_path).save(3, model, optimizer, {"again": True})
    other, other_optimizer = build(6)
    assert checkpointer(tmp_path).load(other, other_optimizer)[1] == {"again": True}
    assert not torch.equal(other.lm_head.weight, states[3]["lm_head.weight"])
    assert checkpointer(tmp_path).load(other, other_optimizer, step=2)[0] == 2
    assert_same(whole(other, other_optimizer), states[2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


@pytest.mark.torch
def test_the_first_save_cleans_what_a_killed_run_left(tmp_path):
    saved_run(tmp_path, (1, 2))
    (tmp_path / ".step_00000003.tmp").mkdir()
    (tmp_path / ".step_00000003.tmp" / "rank_00000.safetensors").write_bytes(b"half")
    (tmp_path / "step_00000001").rename(tmp_path / ".step_00000001.old")
    model, optimizer = build(1)
    saver = checkpointer(tmp_path, keep=3)
    assert saver.load(model, optimizer)[0] == 2
    assert len(list(tmp_path.iterdir())) == 3
    saver.save(3, model, optimizer, {})
    names = [f"step_0000000{step}" for step in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


@pytest.mark.torch
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_a_run_killed_while_saving_leaves_an_intact_checkpoint(tmp_path, delay_s):
    model, optimizer = build(1)
    train(model, optimizer, 1)
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        saver = checkpointer(tmp_path, asynchronous=True)
        for step in range(1, 1000):
            with torch.no_grad():
                model.lm_head.weight.fill_(step)
            saver.save(step, model, optimizer, {"step": step})
        os._exit(0)
    deadline = time.monotonic() + 60
    while len(steps(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    loader = checkpointer(tmp_path)
    step, extra = loader.load(model, optimizer)
    assert step == loader.latest() == extra["step"]
    assert torch.equal(model.lm_head.weight, torch.full_like(model.lm_head.weight, step))


@pytest.mark.torch
def test_frozen_parameters_and_parameters_without_gradient(tmp_path):
    def make(seed):
        model, _ = build(seed)
        model.model.embed_tokens.weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=0.1)

    model, optimizer = make(1)
    train(model, optimizer)
    checkpointer(tmp_path).save(2, model, optimizer, {})
    other, other_optimizer = make(2)
    checkpointer(tmp_path).load(other, other_optimizer)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))


@pytest.mark.torch
def test_a_parameter_that_never_got_a_gradient_has_no_state_after_loading_either(tmp_path):
    def make():
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpointer(tmp_path).save(1, model, optimizer, {})
    other, other_optimizer = make()
    checkpointer(tmp_path).load(other, other_optimizer)
    assert model["idle"].weight not in optimizer.state
    assert other["idle"].weight not in other_optimizer.state
    assert_same(whole(other, other_optimizer), whole(model, optimizer))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 7)


@pytest.mark.torch
@pytest.mark.parametrize("damage", [flip, truncate, os.remove])
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "index.json", "extra.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_used(tmp_path, caplog, damage, name):
    states = saved_run(tmp_path, (1, 2))
    damage(tmp_path / "step_00000002" / name)
    model, optimizer = build(9)
    with caplog.at_level(logging.WARNING):
        assert checkpointer(tmp_path).load(model, optimizer) == (1, {"step": 1})
    assert f"step_00000002/{name}" in caplog.text
    assert_same(whole(model, optimizer), states[1])
    with pytest.raises(CheckpointCorrupt, match=name):
        checkpointer(tmp_path).load(model, optimizer, step=2)


@pytest.mark.torch
def test_none_intact_and_none_at_all(tmp_path):
    model, optimizer = build(9)
    with pytest.raises(CheckpointCorrupt, match="got: none"):
        checkpointer(tmp_path).load(model, optimizer)
    saved_run(tmp_path, (1, 2))
    before = full_state(model)
    for step in (1, 2):
        flip(tmp_path / f"step_0000000{step}" / "rank_00000.safetensors")
    with pytest.raises(CheckpointCorrupt, match=r"step_00000001/rank_00000\.safetensors"):
        checkpointer(tmp_path).load(model, optimizer)
    assert_same(full_state(model), before)


@pytest.mark.torch
def test_another_model_is_refused_with_the_first_difference(tmp_path):
    saved_run(tmp_path, (1,))
    model, optimizer = build(1)
    with pytest.raises(CheckpointMismatch, match="another `optimizer`"):
        checkpointer(tmp_path, fingerprint=PRINT | {"optimizer": "sgd"}).load(model, optimizer)
    wider = qwen3(intermediate_size=48)
    with pytest.raises(CheckpointMismatch, match=r"gate_proj.weight.*\n.*\n.*48, 20"):
        checkpointer(tmp_path).load(wider, None)
    deeper = qwen3(num_hidden_layers=3)
    with pytest.raises(CheckpointMismatch, match=r"has no tensor `model.model.layers.2"):
        checkpointer(tmp_path).load(deeper, None)
    with pytest.raises(CheckpointMismatch, match=r"which the model does not have"):
        checkpointer(tmp_path).load(qwen3(num_hidden_layers=1), None)
    with pytest.raises(CheckpointMismatch, match=r"dtype"):
        checkpointer(tmp_path).load(qwen3().double(), None)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"`optimizer\."):
        checkpointer(tmp_path).load(model, plain)


@pytest.mark.torch
def test_an_asynchronous_save_holds_the_state_of_its_step(tmp_path):
    model, optimizer = build(1)
    train(model, optimizer)
    want = whole(model, optimizer)
    saver = checkpointer(tmp_path, asynchronous=True)
    saver.save(2, model, optimizer, {})
    with torch.no_grad():
        for tensor in [*model.parameters(), *optimizer.state[model.lm_head.weight].values()]:
            tensor.fill_(7.0)
    saver.finish()
    other, other_optimizer = build(2)
    checkpointer(tmp_path).load(other, other_optimizer)
    assert_same(whole(other, other_optimizer), want)


@pytest.mark.torch
def test_an_error_of_the_background_save_surfaces_and_leaves_the_older_checkpoint(tmp_path):
    model, optimizer = build(1)
    saver = checkpointer(tmp_path / "c", asynchronous=True)
    saver.save(1, model, optimizer, {})
    saver.finish()
    obstacle = tmp_path / "c" / ".step_00000002.tmp"
    obstacle.write_text("in the way")
    saver.save(2, model, optimizer, {})
    with pytest.raises(OutputNotWritable, match="step_00000002"):
        saver.finish()
    saver.finish()
    assert saver.latest() == 1
    obstacle.unlink()
    saver.save(2, model, optimizer, {})
    saver.finish()
    assert saver.latest() == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-")]


@pytest.mark.torch
def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = build(1)
    with pytest.raises(OutputNotWritable, match="file"):
        checkpointer(tmp_path / "file" / "checkpoints").save(1, model, optimizer, {})


def _chain(rank, source, layouts, root):
    """Load what the previous layout saved, compare, and save it again."""
    join()
    for number, degrees in enumerate(layouts):
        model, optimizer = build(40 + number, **degrees)
        step, extra = checkpointer(source).load(model, optimizer)
        state = whole(model, optimizer)
        if rank == 0:
            assert_same(state, torch.load(root / "want.pt"))
        assert (step, extra) == (2, {"position": 5})
        source = root / f"{len(layouts)}_{number}"
        asynchronous = number % 2 == 1
        saver = checkpointer(source, asynchronous=asynchronous)
        saver.save(2, model, optimizer, extra)
        if asynchronous:  # training goes on while the files are written
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        saver.finish()
    return source


@pytest.mark.dist
def test_state_is_bitwise_the_same_on_every_layout_and_world_size(tmp_path):
    model, optimizer = build(1)
    train(model, optimizer)
    torch.save(whole(model, optimizer), tmp_path / "want.pt")
    checkpointer(tmp_path / "one").save(2, model, optimizer, {"position": 5})
    four = [
        {"tp": 4},
        {"fsdp": 4},
        {"replicate": 2, "fsdp": 2},
        {"fsdp": 2, "tp": 2},
    ]
    source = launch(lambda r: _chain(r, tmp_path / "one", four, tmp_path), 4, timeout_s=100)[0]
    two = [{"tp": 2}, {"fsdp": 2}]
    source = launch(lambda r: _chain(r, source, two, tmp_path), 2, timeout_s=100)[0]
    other, other_optimizer = build(2)
    checkpointer(source).load(other, other_optimizer)
    assert_same(whole(other, other_optimizer), whole(model, optimizer))
    manifest = json.loads((source / "step_00000002" / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert set(manifest["files"]) == {"index.json", "extra.json"}
    names = {p.name for p in (source / "step_00000002").iterdir()}
    pieces = {"rank_00000.safetensors", "rank_00001.safetensors"}
    assert names == {"manifest.json", "index.json", "extra.json"} | pieces


@pytest.mark.dist
def test_ranks_agree_on_the_checkpoint_when_a_file_of_one_of_them_is_damaged(tmp_path):
    def save(rank):
        join()
        model, optimizer = build(1, fsdp=2)
        saver = checkpointer(tmp_path)
        for step in (1, 2):
            train(model, optimizer, 1)
            saver.save(step, model, optimizer, {"step": step})

    def load(rank):
        join()
        model, optimizer = build(2, fsdp=2)
        return checkpointer(tmp_path).load(model, optimizer)

    launch(save, 2, timeout_s=180)
    flip(tmp_path / "step_00000002" / "rank_00001.safetensors")
    assert launch(load, 2, timeout_s=180) == [(1, {"step": 1})] * 2
    shutil.rmtree(tmp_path / "step_00000001")
    with pytest.raises(CheckpointCorrupt, match=r"rank_00001\.safetensors"):
        launch(load, 2, timeout_s=180)


@pytest.mark.torch
def test_buffers_that_are_persistent_are_saved(tmp_path):
    model = nn.BatchNorm1d(3)
    model(torch.randn(8, 3))
    checkpointer(tmp_path).save(1, model, None, {})
    other = nn.BatchNorm1d(3)
    checkpointer(tmp_path).load(other, None)
    assert_same(full_state(other), full_state(model))


@pytest.mark.torch
def test_groups_of_other_members_keep_their_decay_and_refuse_other_differences(tmp_path):
    model, _ = build(1)
    first, *rest = model.parameters()
    for name, key, numbers in (("decay", "weight_decay", (0.1, 0.0)), ("eps", "eps", (1e-8, 1e-6))):
        groups = [{"params": [first], key: numbers[0]}, {"params": rest, key: numbers[1]}]
        saver = torch.optim.AdamW(groups, lr=1e-2)
        train(model, saver)
        checkpointer(tmp_path / name).save(2, model, saver, {})
    loaded = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.3)
    checkpointer(tmp_path / "decay").load(model, loaded)
    assert loaded.param_groups[0]["weight_decay"] == 0.3
    assert loaded.param_groups[0]["lr"] == 1e-2
    with pytest.raises(CheckpointMismatch, match="differ from those of other parameters"):
        checkpointer(tmp_path / "eps").load(model, loaded)
