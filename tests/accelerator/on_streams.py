"""The device itself, and the executor on its streams with a step of few operators."""

import functools

import pytest
import torch

from hyper_parallel.backends.torch.memory import FileTier, PlannedDevice, record
from hyper_parallel.backends.torch.memory.streams import DeviceApi, StreamLanes
from hyper_parallel.errors import TierFull, TransferFailed
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory
from tests.torch_memory.test_streams import FAST, Net, batch

EMU = torch.device("emu", 0)
SLOW_US = 300


class There(Net):
    """The net on the device."""

    def __init__(self):
        super().__init__()
        self.weights = [w.to(EMU) for w in self.weights]
        self.momenta = [m.to(EMU) for m in self.momenta]


def given(number):
    return {"x": batch(number)["x"].to(EMU)}


def captured():
    net = There()
    return net, record(net.step, given(0), net.named, name="net", training=True)


@functools.cache
def planned(flash):
    program = Roofline(1e9, 1e9, 1e-6).annotate(captured()[1].program)
    disk = FAST if flash else None
    machine = MemoryMachine(FAST, FAST, disk, disk, dram_bytes=65_536 if flash else None)
    return plan_memory(program, machine, budget_bytes=60_000, recompute=False), machine


@functools.cache
def losses():
    """Losses of the plain steps on the device."""
    net = There()
    return [float(net.step(**given(n))) for n in range(4)], net


def same_as_plain(folder, flash, steps=4):
    """Planned steps give the plain ones' bits, and exactly the predicted bytes; a wrong bit raises."""
    expected, reference = losses()
    net, step = captured()
    plan, machine = planned(flash)
    with PlannedDevice(step, plan, machine, flash=folder) as device:
        for number in range(1, steps):
            loss, measured = device.step(given(number), trace=number == 1)
            assert float(loss) == expected[number]
            assert measured.peak_bytes == plan.peak_bytes
            assert measured.device_bytes == plan.device_bytes
            if number == 1:
                lanes = {span.lane for span in measured.timeline.spans}
                assert {"compute", "store", "prefetch"} <= lanes
                first = dict(device.hardware.pool.buffers)
        assert dict(device.hardware.pool.buffers) == first
    if steps == 4:
        for a, b in zip((*net.weights, *net.momenta), (*reference.weights, *reference.momenta), strict=True):
            assert torch.equal(a, b)
    return measured


def on_what_the_device_promises(knobs, folder):
    """Asynchronous streams, poison, counted bytes, and no copy without the host but for pinned memory."""
    before = torch.emu.memory_allocated()
    x = torch.ones(1000, device=EMU)
    assert torch.emu.memory_allocated() - before == 4096
    assert x[:10].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    knobs.set_copy_delay_us(500_000)
    pinned, pageable = torch.zeros(1000, pin_memory=True), torch.zeros(1000)
    pinned.copy_(x, non_blocking=True)
    assert float(pinned.sum()) == 0  # nobody has waited
    torch.emu.synchronize()
    assert float(pinned.sum()) == 1000
    pageable.copy_(x, non_blocking=True)
    assert float(pageable.sum()) == 1000
    side, begin, end = torch.emu.Stream(), torch.emu.Event(True), torch.emu.Event(True)
    y = torch.empty(1000, device=EMU)
    begin.record(side)
    with torch.emu.stream(side):
        y.copy_(pinned, non_blocking=True)
    end.record(side)
    assert y.isnan().all()  # the compute stream has not waited
    torch.emu.current_stream().wait_event(end)
    assert float(y.sum()) == 1000
    end.synchronize()
    assert begin.elapsed_time(end) >= 500
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device=EMU)
    assert again.data_ptr() == address
    assert again.isnan().all()
    knobs.set_capacity(0, torch.emu.memory_allocated() + 1024, 0)
    with pytest.raises(torch.OutOfMemoryError, match="emu out of memory"):
        torch.empty(1000, device=EMU)


def on_two_tiers(knobs, folder):
    same_as_plain(None, False)


def on_two_tiers_with_slow_copies(knobs, folder):
    knobs.set_copy_delay_us(SLOW_US)
    measured = same_as_plain(None, False)
    assert measured.wait_s > SLOW_US * 1e-6
    copied = measured.copied["prefetch"]
    assert copied.seconds >= copied.count * SLOW_US * 1e-6


def on_two_tiers_with_slow_operators(knobs, folder):
    knobs.set_operator_delay_us(SLOW_US)
    same_as_plain(None, False)


def on_three_tiers(knobs, folder):
    same_as_plain(folder, True)
    knobs.set_copy_delay_us(SLOW_US)
    same_as_plain(folder, True)
    knobs.set_copy_delay_us(0)
    knobs.set_operator_delay_us(SLOW_US)
    same_as_plain(folder, True)


def on_one_wait_left_out(knobs, folder):
    """A missing wait of the compute stream shows as wrong bits with slow copies, one of a copy with slow operators."""
    net, step = captured()
    plan, machine = planned(False)
    expected, reference = losses()
    for slow in ("copy_delay_us", "operator_delay_us"):
        wrong, waits = [], None
        number = 0
        while waits is None or number < waits:
            net, step = captured()
            getattr(knobs, f"set_{slow}")(SLOW_US)
            # The bits are compared here, after more steps than the device compares itself.
            with PlannedDevice(step, plan, machine, check=False) as device:
                knobs.set_stream_waits(0)
                knobs.set_skip_stream_wait(number)
                got = [float(device.step(given(n))[0]) for n in (1, 2)]
                knobs.set_skip_stream_wait(-1)
                waits = knobs.stream_waits() // 2
                got.append(float(device.step(given(3))[0]))
            getattr(knobs, f"set_{slow}")(0)
            state = zip((*net.weights, *net.momenta), (*reference.weights, *reference.momenta), strict=True)
            if got != expected[1:] or not all(torch.equal(a, b) for a, b in state):
                wrong.append(number)
            number += max(1, waits // 12)
        assert len(wrong) >= 3, (slow, wrong, waits)


def on_a_full_device(knobs, folder):
    """No room for the arena: the state is where it was, and the error says what is missing."""
    net, step = captured()
    plan, machine = planned(False)
    before = [t.cpu() for t in (*net.weights, *net.momenta)]
    assert plan.arena_bytes > sum(t.nbytes for t in (*net.weights, *net.momenta)) + 4096
    knobs.set_capacity(0, torch.emu.memory_allocated() + 4096, 0)
    with pytest.raises(TierFull, match="too little free memory for the buffer"):
        PlannedDevice(step, plan, machine)
    knobs.set_capacity(0, 1 << 32, 0)
    for tensor, old in zip((*net.weights, *net.momenta), before, strict=True):
        assert torch.equal(tensor.cpu(), old)
    with PlannedDevice(step, plan, machine) as device:
        device.step(given(1))


def on_state_that_moves_with_and_without_room(knobs, folder):
    """Lent state waits on the device where it has room for both, else in host memory; the bits are the same."""
    expected, _ = losses()
    net, step = captured()
    plan, machine = planned(False)
    here = sum(
        storage.num_bytes
        for storage, home in zip(plan.program.storages, plan.homes, strict=True)
        if storage.at_start and storage.at_end and home == "device"
    )
    assert here > 4096
    with PlannedDevice(step, plan, machine) as device:
        for number, free in ((1, 1 << 30), (2, 4096)):
            assert float(device.step(given(number))[0]) == expected[number]
            start = torch.emu.memory_allocated()
            knobs.set_capacity(0, start + free, 0)
            torch.emu.reset_peak_memory_stats()
            with device.materialize_state():
                assert all(w.isfinite().all() for w in net.weights)
            twice = torch.emu.max_memory_allocated() - start >= here
            assert twice == (free > here)
        knobs.set_capacity(0, 1 << 32, 0)
        assert float(device.step(given(3))[0]) == expected[3]


def on_dram_too_small(knobs, folder):
    net, step = captured()
    plan, machine = planned(False)
    from dataclasses import replace

    with pytest.raises(TierFull, match="DRAM buffers"):
        PlannedDevice(step, plan, replace(machine, dram_bytes=plan.peak_bytes["dram"] // 4))
    assert all(t.isfinite().all() for t in net.weights)


def on_a_truncated_file(knobs, folder):
    net, step = captured()
    plan, machine = planned(True)
    device = PlannedDevice(step, plan, machine, flash=folder)
    next(p for p in folder.iterdir() if p.stat().st_size > 64).write_bytes(b"short")
    with pytest.raises(TransferFailed, match="wrong size"):
        device.step(given(1))
    device.close()
    assert any(t.isnan().all() for t in (*net.weights, *net.momenta))


def on_a_full_disk(knobs, folder):
    _, step = captured()
    plan, machine = planned(True)
    device = PlannedDevice(step, plan, machine, flash=folder)
    write = FileTier.write

    def full(self, storage, source):
        raise TransferFailed("cannot write a storage to the flash tier", got="No space left on device")

    FileTier.write = full
    try:
        with pytest.raises(TransferFailed, match="cannot write a storage"):
            device.step(given(1))
    finally:
        FileTier.write = write
    device.close()


def on_a_copy_that_fails(knobs, folder):
    """An error of asynchronous work shows at a later call, and the state does not pass for a good one."""
    net, step = captured()
    plan, machine = planned(False)
    device = PlannedDevice(step, plan, machine)
    knobs.set_copies(0)
    knobs.set_fail_copy(5)
    with pytest.raises(Exception, match="copy failed"):
        device.step(given(1))
    device.close()
    assert all(t.isnan().all() for t in (*net.weights, *net.momenta))


def on_a_dead_copy_thread(knobs, folder):
    _, step = captured()
    plan, machine = planned(True)
    device = PlannedDevice(step, plan, machine, flash=folder)
    for thread in device.hardware.lanes._threads.values():
        thread.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        device.step(given(1))
    device.close()


def on_threads_of_the_second_device(knobs, folder):
    """A new thread begins on the first device; what it does for another one must not touch the first."""
    knobs.set_devices(2)
    lanes = StreamLanes(DeviceApi.of(torch.device("emu", 1)))
    here = lanes._threads["copy_in"].submit(torch.emu.current_device).result()
    lanes.close()
    assert here == 1


def on_pages_of_large_blocks(knobs, folder):
    """An arena of 10 MiB and more takes the rest of its pages as well: at most 1 MiB, and it is counted."""
    knobs.set_large_blocks(True)
    x = torch.zeros(12 * 2**20, dtype=torch.uint8, device=EMU)
    y = torch.zeros(2**18, device=EMU)
    named = {"x": (x, "weight"), "y": (y, "weight")}

    def step(a):
        y.add_(a)
        return (x[: 2**20] + 1).sum()

    a = torch.ones(2**18, device=EMU)
    taken = record(step, {"a": a}, named, name="large", training=False)
    plan = plan_memory(
        Roofline(1e9, 1e9).annotate(taken.program),
        MemoryMachine(Channel(1e9), Channel(1e9)),
        max_slowdown=0.0,
    )
    with PlannedDevice(taken, plan, MemoryMachine(Channel(1e9), Channel(1e9))) as device:
        _, measured = device.step({"a": a})
    assert 0 <= measured.device_bytes - plan.device_bytes <= 2**20
