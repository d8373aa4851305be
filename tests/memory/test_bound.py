"""The lower bound holds for every plan and is exact where the answer is known."""

from dataclasses import replace

import pytest
from benchmarks._reload_bound import reload_bound

from hyper_parallel.ir import MemoryProgram, Operator, Storage
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    plan_memory,
)
from tests.memory.programs import training_chain

pytestmark = pytest.mark.unit


def machine(bytes_s):
    return MemoryMachine(Channel(bytes_s, 0), Channel(bytes_s, 0))


def one_gap(seconds):
    """A 100-byte result that is idle for one operator with 60 bytes of its own."""
    storages = (
        Storage("a", 100, "activation"),
        Storage("b", 60, "activation"),
        Storage("y", 10, "output", False, True),
    )
    ops = (
        Operator("make", (), (), (0,), seconds),
        Operator("other", (), (), (1,), seconds),
        Operator("end", (0,), (), (2,), seconds),
    )
    return MemoryProgram("gap", storages, ops, 1)


def test_what_must_come_back_before_its_use():
    program, order = one_gap(1.0), (0, 1, 2)
    # `a` has 0.4 s of slack to come back after `other` and before `end` starts: 40 bytes.
    assert reload_bound(program, machine(100.0), order, 3.4).num_bytes == pytest.approx(120, abs=1)
    assert reload_bound(program, machine(100.0), order, 3.0).num_bytes == 160
    make = replace(program.operators[0], seconds=0.5, repeatable=True)
    a, b, y = program.storages
    storages = (a, replace(b, num_bytes=120), y)
    repeatable = replace(program, storages=storages, operators=(make, *program.operators[1:]))
    # Or it is made again: 0.25 s give half of it, while 25 bytes are copied.
    bound = reload_bound(repeatable, machine(100.0), order, 2.75, recompute=True)
    assert bound.reloaded_bytes == pytest.approx(25, abs=1)
    assert bound.recomputed_bytes == pytest.approx(50, abs=1)
    assert (bound.position, bound.num_bytes) == (1, pytest.approx(145, abs=2))


@pytest.mark.parametrize("bytes_s", [800.0, 3000.0])
def test_no_plan_is_smaller_than_its_bound(bytes_s):
    program, m = training_chain(layers=2), machine(bytes_s)
    order = tuple(range(len(program.operators)))
    plan = plan_memory(program, m, max_slowdown=0.02, recompute=False, reorder=False)
    assert reload_bound(program, m, order, program.seconds * 1.02).num_bytes <= plan.peak_bytes["device"]
