"""The executor with streams: on torch's CPU streams for the code path, on logging streams for the order."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from hyper_parallel.backends.torch.memory import FileTier, PlannedDevice, record
from hyper_parallel.backends.torch.memory import arena_state as held_state
from hyper_parallel.backends.torch.memory import streams as streams
from hyper_parallel.backends.torch.memory.arena_state import ArenaState
from hyper_parallel.backends.torch.memory.hardware import Hardware
from hyper_parallel.backends.torch.memory.streams import DeviceApi
from hyper_parallel.errors import TransferFailed
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory, wrong_address
from tests.slow import slow_cells
from tests.torch_memory.ordering import Order, Watch, executor_of

pytestmark = pytest.mark.torch

SIZE = 32
CPU = torch.device("cpu")
FAST = Channel(1e9, 1e-7)


class Net:
    """Six square layers with momentum, trained by hand, so that a step has few operators."""

    def __init__(self, layers=6):
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(SIZE, SIZE, generator=generator) / 6 for _ in range(layers)]
        self.momenta = [torch.zeros_like(w) for w in self.weights]

    @property
    def named(self):
        return {
            **{f"w{i}": (w, "weight") for i, w in enumerate(self.weights)},
            **{f"m{i}": (m, "optimizer") for i, m in enumerate(self.momenta)},
        }

    def step(self, x):
        kept = [x]
        for w in self.weights:
            kept.append(torch.tanh(kept[-1] @ w))
        loss = kept[-1].square().sum()
        grad = 2 * kept[-1]
        for i in reversed(range(len(self.weights))):
            grad = grad * (1 - kept[i + 1].square())
            self.momenta[i].mul_(0.9).add_(kept[i].t() @ grad)
            grad = grad @ self.weights[i].t()
            self.weights[i].sub_(self.momenta[i], alpha=1e-3)
        return loss


def batch(number):
    return {"x": torch.randn(64, SIZE, generator=torch.Generator().manual_seed(number))}


def captured_net():
    net = Net()
    return net, record(net.step, batch(0), net.named, name="net", training=True)


@functools.cache
def planned(flash):
    _, captured = captured_net()
    program = Roofline(1e9, 1e9, 1e-6).annotate(captured.program)
    disk = FAST if flash else None
    machine = MemoryMachine(FAST, FAST, disk, disk, dram_bytes=60_000 if flash else None)
    plan = plan_memory(program, machine, budget_bytes=60_000, recompute=False)
    kinds = {action.kind for action in plan.actions}
    assert {"store", "prefetch"} <= kinds
    assert not flash or {"copy_in", "copy_out"} <= kinds
    return plan, machine


def made(flash):
    """A captured net and a plan through two or three tiers."""
    return *captured_net(), *planned(flash)


@pytest.mark.parametrize("flash", [False, True], ids=["two tiers", "three tiers"])
def test_streams_give_the_bits_and_the_predicted_peaks(tmp_path, flash):
    net, captured, plan, machine = made(flash)
    reference = Net()
    reference.step(**batch(0))
    queues, kinds = DeviceApi.of(CPU), [action.kind for action in plan.actions]
    with PlannedDevice(captured, plan, machine, flash=tmp_path, copies=queues) as device:
        for number in range(1, 5):
            loss, measured = device.step(batch(number), trace=number == 1)
            assert torch.equal(loss, reference.step(**batch(number)))
            assert measured.peak_bytes == plan.peak_bytes
            moved = {kind: copied.num_bytes for kind, copied in measured.copied.items()}
            assert moved == plan.replayed.copied_bytes
            counts = {kind: copied.count for kind, copied in measured.copied.items()}
            assert counts == {kind: kinds.count(kind) for kind in counts}
            assert measured.seconds > 0
            if number == 1:
                lanes = {span.lane for span in measured.timeline.spans}
                assert {"compute", "store", "prefetch"} <= lanes
                made_at_first = dict(device.hardware.pool.buffers)
        assert dict(device.hardware.pool.buffers) == made_at_first  # no step allocates DRAM
    for a, b in zip((*net.weights, *net.momenta), (*reference.weights, *reference.momenta), strict=True):
        assert torch.equal(a, b)


def ordered(folder, monkeypatch, flash, drop=None, anywhere=True, plan=None):
    """Two steps on logging streams; what was found unordered, and the number of waits per agent and step.

    Args:
        anywhere: A range of the arena must be used after everything that was given up before; else its addresses count.
        plan: Run this one, whatever its addresses are.
    """
    order = Order(drop)
    _, captured, known, machine = made(flash)
    monkeypatch.setattr(streams, "ThreadPoolExecutor", executor_of(order))
    read, write = FileTier.read, FileTier.write

    def reading(self, storage, target):
        order.access(target, True, "file read")
        read(self, storage, target)

    def writing(self, storage, source):
        order.access(source, False, "file write")
        write(self, storage, source)

    in_dram, enter, leave = Hardware.in_dram, ArenaState.mark_resident, ArenaState.release

    def entering(self, storage, base):
        enter(self, storage, order.allocated(base))

    def leaving(self, storage):
        order.given_back(self.storages["device"][storage])
        leave(self, storage)

    with monkeypatch.context() as patch:
        if anywhere:
            patch.setattr(ArenaState, "mark_resident", entering)
            patch.setattr(ArenaState, "release", leaving)
        if plan is not None:
            patch.setattr(held_state, "wrong_address", lambda _: None)
        patch.setattr(Hardware, "in_dram", lambda *a: order.allocated(in_dram(*a)))
        patch.setattr(FileTier, "read", reading)
        patch.setattr(FileTier, "write", writing)
        # The order is watched, not the values: a wrong order must not end in another refusal first.
        device = PlannedDevice(captured, plan or known, machine, flash=folder, copies=order.api(), check=False)
        with device:
            with Watch(order):
                device.step(batch(1))
                first = dict(order.waits)
                device.step(batch(2))
            found = list(order.violations)
    return found, first, dict(order.waits)


@pytest.mark.parametrize("flash", [False, True], ids=["two tiers", "three tiers"])
def test_every_copy_and_every_reuse_is_ordered(tmp_path, monkeypatch, flash):
    found, _, waits = ordered(tmp_path, monkeypatch, flash)
    assert not found
    assert {"compute", "store", "prefetch"} <= set(waits)
    assert not flash or {"hyper-copy_in", "hyper-copy_out"} <= set(waits)


@slow_cells("prefetch-1.0", "store-0.75", "compute-1.0")
@pytest.mark.parametrize(("agent", "share"), [("compute", 1.0), ("prefetch", 1.0), ("store", 0.75)])
def test_leaving_out_one_wait_is_found(tmp_path, monkeypatch, agent, share):
    """In the second step, whose state was written by the copies of the first.

    Every wait of the compute stream and of the copies to the device is needed. A store's own wait is not when the wait
    of the store just before it covers what it reads.
    """
    _, first, waits = ordered(tmp_path, monkeypatch, False)
    numbers = range(first[agent] + 1, waits[agent] + 1)
    assert len(numbers) > 8
    found = [n for n in numbers if ordered(tmp_path, monkeypatch, False, (agent, n))[0]]
    assert len(found) >= share * len(numbers), found


@pytest.mark.slow
def test_without_a_wait_addresses_that_are_used_again_are_found(tmp_path, monkeypatch):
    """By the addresses alone: what is unordered lies in the same place of the arena."""
    found, first, waits = ordered(tmp_path, monkeypatch, False, anywhere=False)
    assert not found
    numbers = range(first["compute"] + 1, waits["compute"] + 1)
    found = [n for n in numbers if ordered(tmp_path, monkeypatch, False, ("compute", n), False)[0]]
    assert len(found) >= 0.75 * len(numbers), found


def test_two_stays_at_one_address_are_found(tmp_path, monkeypatch):
    """A reload that lands where an operator still works, as no plan that passes the check has it."""
    plan, _ = planned(False)
    stays = list(plan.addresses)
    loads = {(a.target, at) for at, a in enumerate(plan.actions) if a.kind == "prefetch"}
    at, other = next(
        (i, j)
        for i, a in enumerate(stays)
        if (a.storage, a.start) in loads
        for j, b in enumerate(stays)
        if b.start == a.start + 1 and b.stop > a.start + 2 and plan.program.sizes[b.storage] > 4
    )
    stays[at] = replace(stays[at], offset_bytes=stays[other].offset_bytes)
    forged = replace(plan, addresses=tuple(stays))
    assert wrong_address(forged)
    assert ordered(tmp_path, monkeypatch, False, anywhere=False, plan=forged)[0]


@pytest.mark.parametrize("agent", ["hyper-copy_in", "hyper-copy_out"])
def test_a_file_thread_that_does_not_wait_is_found(tmp_path, monkeypatch, agent):
    _, first, waits = ordered(tmp_path, monkeypatch, True)
    numbers = range(first[agent] + 1, waits[agent] + 1)
    assert any(ordered(tmp_path, monkeypatch, True, (agent, n))[0] for n in itertools.islice(numbers, 8))


def test_a_file_that_is_cut_short_stops_the_step_with_streams(tmp_path):
    _, captured, plan, machine = made(flash=True)
    device = PlannedDevice(captured, plan, machine, flash=tmp_path, copies=DeviceApi.of(CPU))
    next(p for p in tmp_path.iterdir() if p.stat().st_size > 64).write_bytes(b"short")
    with pytest.raises(TransferFailed, match="wrong size"):
        device.step(batch(1))
    device.close()
    assert captured.state[0].isnan().all() or captured.state[1].isnan().all()
