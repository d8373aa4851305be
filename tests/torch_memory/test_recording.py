"""What a recording makes of storages that come and go, of lists, and of state that is borrowed between steps."""

import pytest
import torch
from benchmarks._model_steps import capture_training, training_step

from hyper_parallel.backends.torch.memory import (
    LruSpillMode,
    PlannedDevice,
    Recorder,
    StepCapture,
    StorageWatch,
    peak_of,
    record,
)
from hyper_parallel.backends.torch.memory.operators import Entry, Storages, count_flops
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    peak_by_kind,
    plan_memory,
    predicted_timeline,
    summarise,
)
from tests.torch_memory.models import tiny_model, tokens

pytestmark = pytest.mark.torch

ROOFLINE = Roofline(1e9, 1e9, 1e-6)
MACHINE = MemoryMachine(Channel(1e9, 1e-6), Channel(1e9, 1e-6))


class Holder:
    """A tensor without bytes for most of the time: printing it would read them."""

    def __init__(self, tensor):
        self.tensor = tensor


def refilling_step(x, room):
    """Twice fills a buffer that it empties again, as FSDP does with gathered parameters."""
    total = torch.zeros(())
    for factor in (2.0, 3.0):
        value = x * factor
        room.tensor.untyped_storage().resize_(4000)
        room.tensor.copy_(value)
        total = total + (room.tensor + 1).sum()
        room.tensor.untyped_storage().resize_(0)
    return total


def test_a_refilled_storage_is_a_fresh_allocation_each_time():
    room = Holder(torch.empty(1000))
    room.tensor.untyped_storage().resize_(0)
    x = torch.arange(1000.0)
    with LruSpillMode(None, torch.device("cpu")) as spill:
        refilling_step(x, room)
        empty = spill.emptied_storages
    inputs = {"x": x.clone()}
    recorder = StepCapture({"x": (inputs["x"], "input")}, training=False, alignment_bytes=1, empty=empty)
    with recorder:
        result = refilling_step(inputs["x"], room)
    captured = recorder.captured(result, inputs, "refill")
    rooms = [s for s in captured.program.storages if s.name == "refilled" and s.num_bytes]
    assert [s.num_bytes for s in rooms] == [4000, 4000]
    assert not any(s.at_start for s in rooms)
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=1.0)
    with PlannedDevice(captured, plan, MACHINE) as device:
        for seed in range(2):
            other = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
            out, measured = device.step({"x": other})
            assert torch.equal(out, refilling_step(other, room))
            assert measured.peak_bytes == plan.peak_bytes


def test_bytes_are_counted_as_a_recorded_program_counts_them():
    torch.manual_seed(0)
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    data = {"input_ids": tokens(0), "labels": tokens(0)}
    watch, recorder = StorageWatch(), Recorder()
    for name, parameter in model.named_parameters():
        watch.track(parameter)
        recorder.name(parameter, name, "weight")
    with watch, recorder:
        training_step(model, optimizer, data)
        room = Holder(torch.empty(1000))
        room.tensor.untyped_storage().resize_(0)
        refilling_step(torch.arange(1000.0), room)
    assert watch.peak_bytes == peak_of(recorder.recording("step")).num_bytes


def test_a_buffer_from_before_the_count_is_counted_while_it_is_filled():
    room, other = Holder(torch.empty(1000)), Holder(torch.empty(1000))
    other.tensor.untyped_storage().resize_(0)
    with StorageWatch() as watch:
        room.tensor.view(10, 100) + 1  # first met through a view
        room.tensor.untyped_storage().resize_(0)
        other.tensor.untyped_storage().resize_(4000)
        other.tensor.copy_(torch.ones(1000))  # first met as what an operator writes
        other.tensor.untyped_storage().resize_(0)
        torch.ones(1500)
    assert watch.peak_bytes == 4000 + 4000  # each buffer beside one result; the last result is smaller


def test_a_refilled_storage_that_nobody_announced_is_no_silent_constant():
    room = Holder(torch.zeros(1000))
    with pytest.raises(CaptureUnsupported, match="resizes"):
        record(
            lambda x: refilling_step(x, room),
            {"x": torch.ones(1000)},
            {"room": (room.tensor, "weight")},
            name="step",
            training=False,
        )


def test_operators_over_lists_that_return_lists_are_cut():
    def step(**parts):
        norms = torch._foreach_norm(list(parts.values()))
        return torch.stack(norms).sum()

    parts = {f"x{i}": torch.randn(10 + i) for i in range(3)}
    captured = record(step, parts, {}, name="norms", training=False)
    cut = [op for op in captured.program.operators if "_foreach_norm" in op.name]
    assert [len(op.allocs) for op in cut] == [1, 1, 1]
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=1.0)
    with PlannedDevice(captured, plan, MACHINE) as device:
        other = {name: torch.randn(len(x)) for name, x in parts.items()}
        out, _ = device.step(other)
    assert torch.equal(out, step(**other))


def test_state_is_real_while_it_is_lent_and_changes_stay(tmp_path):
    """Evaluations and checkpoints borrow the state; what they set is what the next step starts from."""
    data = {"input_ids": tokens(0), "labels": tokens(0)}

    def trained(steps):
        torch.manual_seed(0)
        model = tiny_model("llama").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(steps):
            training_step(model, optimizer, data)
        return model, optimizer

    reference, reference_optimizer = trained(2)
    model, optimizer = trained(1)
    captured = capture_training(model, optimizer, data)
    disk = Channel(5e8, 1e-6)
    machine = MemoryMachine(Channel(1e9), Channel(1e9), disk, disk, dram_bytes=120_000)
    plan = plan_memory(ROOFLINE.annotate(captured.program), machine, budget_bytes=500_000)
    with PlannedDevice(captured, plan, machine, flash=tmp_path) as device:
        assert all(not p.untyped_storage().nbytes() for p in model.parameters())
        with device.materialize_state():
            assert not list(tmp_path.iterdir())
            assert not any(live for _, live in device.hardware.live)
            for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(mine, other)
                with torch.no_grad():
                    mine.mul_(0.5)
                    other.mul_(0.5)
        training_step(reference, reference_optimizer, data)
        _, measured = device.step(data, trace=True)
        assert measured.peak_bytes == plan.peak_bytes
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert sum(peak_by_kind(plan).values()) == plan.peak_bytes["device"]
    predicted = predicted_timeline(plan, machine)
    assert predicted.spans == measured.timeline.spans
    for tier in ("device", "dram", "flash"):
        curves = [
            [c.value for c in summarise(t, plan).counters if c.lane == tier] for t in (predicted, measured.timeline)
        ]
        assert curves[0] == curves[1]
        assert max(curves[0]) == plan.peak_bytes[tier]


def complex_step(x, w, angles):
    """A rotation by complex numbers, as some models turn their queries, and its gradients."""
    w = w.detach().requires_grad_()
    turned = torch.view_as_complex(w * x) * torch.polar(torch.ones_like(angles), angles)
    (grad,) = torch.autograd.grad(torch.view_as_real(turned).square().sum(), w)
    return grad, turned.detach().conj(), turned.detach().conj().imag


def test_conjugate_and_negative_views_are_addresses():
    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        sizes = {"x": (3, 4, 2), "w": (3, 4, 2), "angles": (3, 4)}
        return {k: torch.randn(size, generator=generator) for k, size in sizes.items()}

    captured = record(complex_step, drawn(0), {}, name="complex", training=True)
    plan = plan_memory(ROOFLINE.annotate(captured.program), MACHINE, max_slowdown=1.0)
    with PlannedDevice(captured, plan, MACHINE) as device:
        for seed in (1, 2):
            out, measured = device.step(drawn(seed))
            for mine, plain in zip(out, complex_step(**drawn(seed)), strict=True):
                assert torch.equal(mine, plain)
            assert measured.peak_bytes == plan.peak_bytes


def test_a_storage_may_end_while_others_are_looked_at():
    """Garbage collection or the thread of a collective may free it in the middle of the walk."""
    first, others = Holder(torch.empty(8)), [torch.empty(8)]
    storages = Storages(1, lambda _: others.clear())
    storages.add(first.tensor, Entry("first", 0, "activation"), watch=True)
    storages.add(others[0], Entry("other", 0, "activation"), watch=True)
    first.tensor.untyped_storage().resize_(0)
    ended = [(entry.name, entry.num_bytes) for _, entry, _ in storages.end_resized()]
    assert ended == [("first", 32)]
    assert storages.living == []


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_accelerators_is_counted_with_grouped_heads_and_what_is_masked(kernel):
    """Keys of two heads serve eight; torch 2.11 has a formula for that which raises."""
    q, k = torch.empty(3, 8, 5, 16, device="meta"), torch.empty(3, 2, 5, 16, device="meta")
    rest = () if kernel == "flash" else (None, False)
    aten = torch.ops.aten
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    pairs = {False: 25, True: 15}
    for causal, seen in pairs.items():
        whole = 2 * 2 * 3 * 8 * seen * 16
        assert count_flops(forward, (q, k, k, *rest, 0.0, causal), {}, None) == whole
        given = {a.name: None for a in backward._schema.arguments[4:]} | {"is_causal": causal}
        assert count_flops(backward, (q, q, k, k), given, None) == 2.5 * whole
