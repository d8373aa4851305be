"""What cannot be repeated is refused, and what breaks during a run stops the step."""

from dataclasses import replace

import pytest
import torch
from benchmarks._model_steps import capture_training, training_step
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.backends.torch.forward_variants import recompute
from hyper_parallel.backends.torch.memory import FileTier, Meter, PlannedDevice, model_state, record
from hyper_parallel.backends.torch.pass_context import RunningPass
from hyper_parallel.errors import (
    CaptureUnsupported,
    MemoryPlanInvalid,
    StepChanged,
    TierFull,
    TransferFailed,
)
from hyper_parallel.ir import MemoryAction, MemoryPlan
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, assign_addresses, plan_memory
from tests.torch_memory.models import tiny_model, tokens

pytestmark = pytest.mark.torch

ROOFLINE = Roofline(1e9, 1e9, 1e-6)
FAST = Channel(1e9, 1e-6)
MACHINE = MemoryMachine(FAST, FAST)


def captured_step(step, inputs, named=()):
    return record(step, inputs, dict(named), name="step", training=False)


def planned(captured, machine=MACHINE, **goal):
    program = ROOFLINE.annotate(captured.program)
    return plan_memory(program, machine, **(goal or {"max_slowdown": 1.0}))


def test_a_branch_on_a_value_is_guarded():
    def step(x):
        return x * 2 if x.sum() > 0 else x * 3

    captured = captured_step(step, {"x": torch.ones(4)})
    with PlannedDevice(captured, planned(captured), MACHINE) as device:
        out, _ = device.step({"x": torch.full((4,), 5.0)})
        assert torch.equal(out, torch.full((4,), 10.0))
        with pytest.raises(StepChanged, match="HP512"):
            device.step({"x": -torch.ones(4)})
        with pytest.raises(StepChanged):  # a failed device does not go on
            device.step({"x": torch.ones(4)})


def test_an_optimizer_that_counts_in_python_is_caught():
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, fused=False)
    data = {"input_ids": tokens(0), "labels": tokens(0)}
    training_step(model, optimizer, data)
    captured = capture_training(model, optimizer, data)
    with (
        PlannedDevice(captured, planned(captured), MACHINE) as device,
        pytest.raises(StepChanged, match="fused=True"),
    ):
        device.step(data)


def test_recomputation_with_dropout_is_refused():
    """Recomputation sets the random generator back in the backward pass; a program would draw other numbers there."""
    data = {"input_ids": tokens(0), "labels": tokens(0)}

    def capture(**dropout):
        model = tiny_model("gpt2", **dropout).train()
        for layer in model.transformer.h:
            recompute(layer, None, False, RunningPass())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        training_step(model, optimizer, data)
        return capture_training(model, optimizer, data)

    with pytest.raises(CaptureUnsupported, match="draws random numbers in the backward pass"):
        capture()
    assert capture(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).program.operators


def test_a_size_that_depends_on_data_is_guarded():
    def step(x):
        return x[x > 0].sum()

    captured = captured_step(step, {"x": torch.tensor([1.0, -1.0, 2.0])})
    with PlannedDevice(captured, planned(captured), MACHINE) as device:
        out, _ = device.step({"x": torch.tensor([-1.0, 4.0, 2.0])})
        assert out == 6
        with pytest.raises(StepChanged):
            device.step({"x": torch.ones(3)})


def test_input_names_and_shapes_are_checked():
    captured = captured_step(lambda x: x + 1, {"x": torch.ones(4)})
    with PlannedDevice(captured, planned(captured), MACHINE) as device:
        with pytest.raises(StepChanged):
            device.step({"y": torch.ones(4)})
        with pytest.raises(StepChanged):
            device.step({"x": torch.ones(5)})
    with pytest.raises(CaptureUnsupported, match="`scale` is not a tensor"):
        captured_step(lambda x, scale: x * scale, {"x": torch.ones(4), "scale": 2.0})


def test_resizing_leaking_and_odd_layouts_are_refused():
    w = torch.ones(4)
    with pytest.raises(CaptureUnsupported, match="resizes"):
        captured_step(lambda x: w.resize_(100).sum() + x, {"x": torch.ones(1)}, {"w": (w, "weight")})
    model = tiny_model("llama").train()
    with pytest.raises(CaptureUnsupported, match="grad"):
        record(
            lambda ids: model(input_ids=ids, labels=ids).loss.backward(),
            {"ids": tokens(0)},
            model_state(model),
            name="no zero_grad",
            training=True,
        )
    with pytest.raises(CaptureUnsupported, match="strided"):
        captured_step(lambda x: x.to_sparse() * 2, {"x": torch.ones(4, 2)})


def test_a_fake_capture_gives_the_same_program():
    """With the mask given from outside, so that transformers makes no other mask for fake tensors."""
    mask = torch.ones(16, 16).tril().log()[None, None].expand(2, 1, 16, 16)
    data = {"input_ids": tokens(0), "labels": tokens(0), "attention_mask": mask}

    def program_of(batch):
        model = tiny_model("llama").train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        training_step(model, optimizer, batch)
        return capture_training(model, optimizer, batch).program

    real = program_of(data)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = program_of({k: mode.from_tensor(v) for k, v in data.items()})
        assert fake.operators == real.operators
        with pytest.raises(CaptureUnsupported, match="fake tensors have no values"):
            captured_step(lambda x: x * 2 if x.sum() > 0 else x, {"x": torch.ones(4)})
    kept = torch.zeros(4)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(CaptureUnsupported, match="changes a tensor that the model keeps"),
    ):
        captured_step(lambda x: kept.add_(x), {"x": torch.ones(4)})


def test_a_plan_for_another_program_is_refused():
    a = captured_step(lambda x: x + 1, {"x": torch.ones(4)})
    b = captured_step(lambda x: x + 1, {"x": torch.ones(8)})
    with pytest.raises(MemoryPlanInvalid):
        PlannedDevice(a, planned(b), MACHINE)


def three_tier_device(folder, copies="at_wait", dram_bytes=120_000, machine_dram=None):
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = {"input_ids": tokens(0), "labels": tokens(0)}
    training_step(model, optimizer, data)
    captured = capture_training(model, optimizer, data)
    machine = MemoryMachine(FAST, FAST, FAST, FAST, dram_bytes=dram_bytes)
    plan = planned(captured, machine, budget_bytes=500_000)
    assert plan.peak_bytes["flash"] > 0
    run_on = MemoryMachine(FAST, FAST, FAST, FAST, dram_bytes=machine_dram)
    return PlannedDevice(captured, plan, run_on, copies=copies, flash=folder), data


@pytest.mark.parametrize("copies", ["at_wait", "threads"])
def test_a_truncated_file_stops_the_step(tmp_path, copies):
    device, data = three_tier_device(tmp_path, copies)
    victim = next(p for p in tmp_path.iterdir() if p.stat().st_size > 8)
    victim.write_bytes(b"short")
    with pytest.raises(TransferFailed, match=r"^error\[HP513\]: a flash file has the wrong size"):
        device.step(data)


@pytest.mark.parametrize("copies", ["at_wait", "threads"])
def test_a_full_disk_stops_the_step(tmp_path, copies):
    """The flash folder disappears, as it does when a disk is unmounted or refuses writes."""
    folder = tmp_path / "flash"
    folder.mkdir()
    device, data = three_tier_device(folder, copies)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(TransferFailed, match="flash"):
        device.step(data)


def test_a_dead_copy_thread_stops_the_step(tmp_path):
    device, data = three_tier_device(tmp_path, "threads")

    def die(*_):
        raise RuntimeError("the lane died")

    device.state.files.read = die
    with pytest.raises(TransferFailed, match="the lane died"):
        device.step(data)


@pytest.mark.slow
def test_dram_that_is_just_enough_and_one_byte_less(tmp_path):
    """The pool takes the bytes of the plan, exactly."""
    device, data = three_tier_device(tmp_path)
    planned = device.plan.dram_bytes
    assert planned <= 120_000
    device.close()
    device, data = three_tier_device(tmp_path, machine_dram=planned)
    for _ in range(2):
        _, measured = device.step(data)
        assert measured.dram_bytes == planned
        assert measured.peak_bytes == device.plan.peak_bytes
    device.close()
    with pytest.raises(TierFull, match="dram") as caught:
        three_tier_device(tmp_path, machine_dram=planned - 1)
    assert f"at least {planned} bytes" in caught.value.hint


def test_files_keep_bytes_and_meters_see_real_lifetimes(tmp_path):
    meter = Meter("flash", 512)
    tier = FileTier(tmp_path, meter)
    source = torch.arange(100, dtype=torch.int32)
    tier.reserve(3, 400)
    tier.write(3, source.untyped_storage())
    target = torch.zeros(100, dtype=torch.int32)
    tier.read(3, target.untyped_storage())
    assert torch.equal(source, target)
    assert meter.live_bytes == 512
    tier.drop(3)
    assert meter.live_bytes == 0
    assert not list(tmp_path.iterdir())
    device = Meter("device", 64)
    x = torch.ones(100)
    view = x[:10]
    device.adopt(x.untyped_storage())
    device.adopt(view.untyped_storage())
    assert device.live_bytes == 448
    del x
    assert device.live_bytes == 448  # the view still holds the storage
    del view
    assert device.live_bytes == 0


def test_a_full_meter_refuses_one_byte_more():
    meter = Meter("flash", 1, capacity_bytes=100)
    meter.add(100)
    with pytest.raises(TierFull, match="flash tier is full"):
        meter.add(1)


def by_hand(program, homes, actions):
    """A plan of these actions (kind, target, tier)."""
    plan = MemoryPlan(program, homes, tuple(MemoryAction(*action) for action in actions), 0.0)
    placed, arena = assign_addresses(plan.replayed.residency, program.spans)
    return replace(plan, addresses=tuple(placed), arena_bytes=arena)


def test_a_plan_with_files_needs_a_folder():
    w = torch.ones(64)
    step = captured_step(lambda x: x + w, {"x": torch.ones(64)}, {"w": (w, "weight")})
    homes = tuple("flash" if s.kind == "weight" else "device" for s in step.program.storages)
    at = homes.index("flash")
    actions = (
        ("copy_in", at), ("wait", at, "dram"), ("prefetch", at), ("wait", at, "device"),
        ("detach", at, "dram"), ("run", 0), ("detach", at, "device"),
    )  # fmt: skip
    plan = by_hand(step.program, homes, actions)
    with pytest.raises(MemoryPlanInvalid, match="no folder"):
        PlannedDevice(step, plan, MACHINE)
    assert torch.equal(w, torch.ones(64))


def test_a_storage_that_ends_while_it_is_in_every_tier_leaves_all_of_them(tmp_path):
    def run(x):
        y = x * 2
        return y + (y + 1)

    step = captured_step(run, {"x": torch.ones(64)})
    y, z = (operator.allocs[0] for operator in step.program.operators[:2])
    actions = (
        ("run", 0), ("store", y), ("wait", y, "dram"), ("copy_out", y), ("wait", y, "flash"),
        ("run", 1), ("run", 2), ("free", z), ("free", y),
    )  # fmt: skip
    plan = by_hand(step.program, ("device",) * len(step.program.storages), actions)
    machine = MemoryMachine(FAST, FAST, FAST, FAST, dram_bytes=512)
    with PlannedDevice(step, plan, machine, flash=tmp_path) as device:
        for number in range(3):
            out, measured = device.step({"x": torch.full((64,), float(number))})
            assert torch.equal(out, torch.full((64,), 4.0 * number + 1))
            assert measured.peak_bytes == plan.peak_bytes
        live = dict(device.hardware.live)
        assert (live["dram"], live["flash"]) == (0, 0)
        assert not list(tmp_path.iterdir())
