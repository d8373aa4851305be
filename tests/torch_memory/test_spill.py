"""Steps that run before there is a plan, in less memory than they take."""

import itertools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from benchmarks._model_steps import training_step
from safetensors import safe_open
from safetensors.torch import save_file

from hyper_parallel.backends.torch.memory import (
    LruSpillMode,
    StepCapture,
    model_state,
    optimizer_state,
)
from hyper_parallel.backends.torch.memory.hardware import HostPool
from tests.torch_memory.models import tiny_model, tokens

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def made():
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer


def batch(number):
    return {"input_ids": tokens(number), "labels": tokens(number)}


def recorded(model, optimizer, room):
    """The room is entered last: it brings back what the recorder looks at."""
    inputs = batch(1)
    named = {**model_state(model), **optimizer_state(model, optimizer)}
    named |= {name: (tensor, "input") for name, tensor in inputs.items()}
    recorder = StepCapture(named, training=True, alignment_bytes=512)
    with recorder, room:
        loss = training_step(model, optimizer, inputs, clip_norm=0.5)
    return recorder.captured(loss, inputs, "step")


def test_a_file_is_read_within_the_room(tmp_path, monkeypatch):
    """Its pieces, of growing size, are storages of their own; nobody looks at their bytes one by one."""
    stored = {str(i): torch.full((i, 1000), float(i)) for i in range(1, 12)}
    save_file(stored, tmp_path / "state.safetensors")
    targets = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    looks: list[int] = []
    monkeypatch.setattr(torch.storage._StorageBase, "__repr__", looks.append)
    room = LruSpillMode(100_000, CPU)
    with room, safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        for name, target in targets.items():
            target.copy_(file.get_slice(name)[0:12, 0:1000])
    assert all(torch.equal(targets[name], tensor) for name, tensor in stored.items())
    assert 88_000 <= room.peak_bytes <= 100_000
    assert not looks


def test_a_step_in_less_room_gives_the_same_bits_and_the_same_recording():
    reference, reference_optimizer = made()
    mine, optimizer = made()
    with LruSpillMode(1 << 40, CPU) as all_of_it:
        training_step(reference, reference_optimizer, batch(0), clip_norm=0.5)
    assert not all_of_it.moved_bytes
    room = LruSpillMode(all_of_it.peak_bytes // 2, CPU)
    with room:
        loss = training_step(mine, optimizer, batch(0), clip_norm=0.5)
    assert room.moved_bytes > all_of_it.peak_bytes // 2
    room = LruSpillMode(all_of_it.peak_bytes // 2, CPU)
    plain = recorded(reference, reference_optimizer, nullcontext())
    captured = recorded(mine, optimizer, room)
    assert room.moved_bytes
    assert captured.program == plain.program
    assert loss.isfinite()
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, reference_optimizer.state[b][key])


def test_only_the_operators_own_storages_stay_above_the_limit():
    xs = [torch.full((1000,), float(i)) for i in range(8)]
    with LruSpillMode(12_000, CPU) as room:
        for x in (*xs, *reversed(xs)):
            x.add_(1)
    assert room.peak_bytes <= 12_000 + 4000
    assert [float(x[0]) for x in xs] == [i + 2.0 for i in range(8)]
    assert all(x.untyped_storage().nbytes() == 4000 for x in xs)


def test_pool_buffers_come_back_and_fill_powers_of_two():
    pool = HostPool(512, pin=False)
    first = pool.allocate(1000)
    address = first.data_ptr()
    assert first.nbytes() == 1000
    other = pool.allocate(1000)
    assert other.data_ptr() != address
    del first
    assert pool.allocate(900).data_ptr() == address  # rounded to the same size
    pool = HostPool(512, pin=False)
    wanted = {1024: 7, 4096: 3, 512: 5}
    pool.reserve(Counter(wanted))
    total = sum(size * count for size, count in wanted.items())
    assert total <= pool.reserved_bytes <= 1.25 * total
    held = [pool.allocate(size) for size, count in wanted.items() for _ in range(count)]
    spans = sorted((b.data_ptr(), b.data_ptr() + b.nbytes()) for b in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    before = pool.reserved_bytes
    pool.reserve(pool.buffers)
    assert pool.reserved_bytes == before


def test_lists_are_cut_and_results_fit_as_well():
    """Parameters, gradients and state are four times the limit; without a cut one operator takes them all."""
    with LruSpillMode(1 << 40, CPU) as all_of_it:
        reference, reference_optimizer = made()
        training_step(reference, reference_optimizer, batch(0), clip_norm=0.5)
    limit = 4 * max(p.nbytes for p in reference.parameters()) + 4096
    assert all_of_it.peak_bytes > 4 * limit
    with LruSpillMode(limit, CPU, keep_offloaded=True) as room:
        mine, optimizer = made()
        training_step(mine, optimizer, batch(0), clip_norm=0.5)
    assert room.peak_bytes <= limit
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        assert torch.equal(room.on_current_tier(a), b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(room.on_current_tier(value), reference_optimizer.state[b][key])


def test_bytes_that_lie_elsewhere_come_and_go():
    """Memory that is lent is written back only when an operator has changed it; a file is read whenever it is used."""
    xs = [torch.empty(1000) for _ in range(3)]
    homes = [torch.full((1000,), float(i)).untyped_storage() for i in range(3)]
    reads = []

    def read():
        reads.append(1)
        return homes[2]

    room = LruSpillMode(8000, CPU, keep_offloaded=True)
    for x, home in zip(xs, (*homes[:2], read), strict=True):
        x.untyped_storage().resize_(0)
        room.track_offloaded(x.untyped_storage(), 4000, home)
    with room:
        sums = [float(x.sum()) for x in (*xs, *xs)]
        xs[1].add_(1)
        assert xs[0].tolist()[0] == 0.0  # not an operator, and it may be away
    assert sums == [0.0, 1000.0, 2000.0] * 2
    assert len(reads) == 2
    assert room.peak_bytes <= 8000
    assert float(room.on_current_tier(xs[1])[0]) == 2.0
    room.on_current_tier(xs[0], write=True).fill_(7.0)
    taken = [room.pop_content(x.untyped_storage()) for x in xs]
    assert taken[2] is read
    values = [torch.empty(0).set_(t() if callable(t) else t, 0, (1000,), (1,))[0] for t in taken]
    assert [float(v) for v in values] == [7.0, 2.0, 2.0]


def test_what_its_owner_empties_and_refills_stays():
    room = LruSpillMode(8000, CPU)
    tensor = torch.empty(1000)
    room.owned = lambda: [tensor]
    with room:
        for value in range(3):
            tensor.untyped_storage().resize_(4000)
            tensor.fill_(value)
            others = [torch.ones(1000) for _ in range(4)]
            assert tensor.untyped_storage().nbytes() == 4000
            assert float(tensor[0]) == value
            tensor.untyped_storage().resize_(0)
        (ref,) = room.emptied_storages
    assert ref() is tensor.untyped_storage()
    assert len(others) == 4
