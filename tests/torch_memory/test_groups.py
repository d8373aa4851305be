"""Collectives of a plan: begun and joined apart, written where the plan wants them, with the bits of a plain step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.backends.torch.memory import PlannedDevice, record
from hyper_parallel.backends.torch.memory.action_binder import Prepared
from hyper_parallel.backends.torch.memory.operators import wait_finished
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Strategy
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory
from hyper_parallel.runtime import CommCounter, World, launch

pytestmark = pytest.mark.torch

MACHINE = MemoryMachine(Channel(1e9, 1e-6), Channel(1e9, 1e-6))


def wait(tensor):
    return torch.ops._c10d_functional.wait_tensor(tensor)


def step(w, x):
    """Every functional collective and an older one; what one makes the next one needs."""
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    whole = ops.all_gather_into_tensor(w, 2, name)
    beside = x @ x  # meanwhile
    h = wait(whole) @ x + beside[:1]
    part = wait(ops.reduce_scatter_tensor(h, "sum", 2, name))
    total = wait(ops.all_reduce(part * 2, "sum", name))
    swapped = wait(ops.all_to_all_single(total, [2, 2], [2, 2], name))
    same = wait(ops.broadcast(swapped + dist.get_rank(), 1, name))
    old = torch.empty(2 * same.shape[0], same.shape[1])
    work = dist.group.WORLD._allgather_base(old, same)
    beside = (beside @ x).sum()
    work.wait()
    with torch.no_grad():
        w.add_(old[: w.shape[0]] * 1e-3)
    return old.sum() + beside


def inputs(number):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(number))


class Late(dist.Work):
    """A collective that takes place when it is waited for."""

    def __init__(self, run):
        super().__init__()
        self._run = run

    def wait(self, timeout=None):
        wait_finished(self._run())
        return True


def late(action):
    ready, *rest = action.args
    if isinstance(ready, Prepared) and ready.communicates:
        return partial(action.func, replace(ready, run=lambda: Late(ready.run)), *rest)
    return action


def rank_body(_):
    with World.join("cpu"):
        w = torch.randn(4, 8, generator=torch.Generator().manual_seed(9 + dist.get_rank()))
        plain = w.clone()
        expected = [step(plain, inputs(i)) for i in range(5)]
        assert torch.equal(step(w, inputs(0)), expected[0])
        captured = record(lambda x: step(w, x), {"x": inputs(1)}, {"w": (w, "weight")}, name="talk", training=True)
        talks = [op for op in captured.program.operators if op.group]
        assert len(talks) == 6
        with CommCounter(Strategy(dp_shard=2).mesh(), dist.get_rank()) as counter:
            step(w.clone(), inputs(1))
        assert sum(op.access_bytes for op in talks) == sum(counter.sent_bytes.values())
        assert not any(op.scratch_bytes for op in talks)
        assert not any("wait_tensor" in op.name for op in captured.program.operators)
        program = Roofline(1e9, 1e9, 1e-6).annotate(captured.program)
        operators = [replace(op, seconds=0.0, comm_s=3e-6) if op.group else op for op in program.operators]
        program = replace(program, operators=tuple(operators))
        plan = plan_memory(program, MACHINE, budget_bytes=10**6)
        kinds = [(a.kind, a.target) for a in plan.actions]
        apart = [
            kinds.index(("join", i)) - kinds.index(("run", i)) for i, op in enumerate(program.operators) if op.group
        ]
        assert max(apart) > 1
        with PlannedDevice(captured, plan, MACHINE) as device:
            for i in (2, 3, 4):
                if i == 4:  # at the last moment: what was changed or dropped too early would show
                    device.state.actions = [late(a) for a in device.state.actions]
                loss, measured = device.step({"x": inputs(i)})
                assert torch.equal(loss, expected[i])
                assert measured.peak_bytes == plan.peak_bytes
                assert measured.device_bytes == plan.device_bytes
                assert measured.seconds == pytest.approx(plan.seconds)
        assert torch.equal(w, plain)
        with pytest.raises(CaptureUnsupported, match="coalesced"):
            record(several, {"x": inputs(1)}, {}, name="talk", training=False)


def several(x):
    name = dist.group.WORLD.group_name
    found = torch.ops._c10d_functional.all_gather_into_tensor_coalesced([x, x], 2, name)
    return wait(found[0]).sum() + wait(found[1]).sum()


def test_a_step_without_bytes_may_talk():
    """torch numbers such collectives with random numbers of Python, which are not the step's."""

    def step(x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    with World.fake(1, 4), FakeTensorMode():
        captured = record(step, {"x": torch.ones(8)}, {}, name="talk", training=False)
    assert [op.name for op in captured.program.operators if op.group] == ["c10d.allreduce_"]


def test_lists_send_what_single_tensors_send():
    """Outputs that are given beside inputs are not sent."""
    ops = torch.ops._c10d_functional
    with World.fake(1, 4):
        name, mesh = dist.group.WORLD.group_name, Strategy(dp_shard=4).mesh()
        part, whole = torch.ones(8), torch.ones(32)
        parts = list(torch.ones(4, 8))
        for kind, *ways in (
            (
                "all_gather",
                lambda: dist.all_gather(parts, part),
                lambda: dist.group.WORLD._allgather_base(whole, part),
                lambda: ops.all_gather_into_tensor(part, 4, name),
                lambda: ops.all_gather_into_tensor_coalesced([part[:4], part[4:]], 4, name),
            ),
            (
                "reduce_scatter",
                lambda: dist.reduce_scatter(part, parts),
                lambda: dist.group.WORLD._reduce_scatter_base(part, whole),
                lambda: ops.reduce_scatter_tensor(whole, "sum", 4, name),
            ),
        ):
            for way in ways:
                with CommCounter(mesh, 1) as counter:
                    for tensor in tensors_in(way()):
                        wait(tensor)
                assert counter.sent_bytes == {(kind, ("dp_shard",)): 3 * part.nbytes}


@pytest.mark.dist
def test_collectives_write_at_their_addresses_and_are_joined_later():
    launch(rank_body, 2, timeout_s=100)
