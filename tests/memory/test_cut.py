"""The cut between forward and backward: the same contents for every operator, and no cheaper set to make again."""

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.ir import MemoryProgram, Operator, Storage, replay
from hyper_parallel.memory import cut_program, identity_actions, order_peak
from hyper_parallel.memory._cut import KEPT_PER_MOVED
from tests.memory.programs import training_chain
from tests.memory.test_random_programs import programs

pytestmark = pytest.mark.unit


def what_each_finds(program, origins, known):
    """By run of an operator: its origin, and the contents it finds, as numbers that are equal for equal contents."""
    contents = {s: known.setdefault(("start", s), len(known)) for s in range(len(program.storages))}
    seen = []
    for op, origin in zip(program.operators, origins, strict=True):
        found = tuple(contents[s] for s in (*op.reads, *op.writes))
        seen.append((origin, found))
        for place, s in enumerate((*op.writes, *op.allocs)):
            contents[s] = known.setdefault((origin, place, found), len(known))
    return seen


@settings(max_examples=300, deadline=None)
@given(programs(), st.data())
def test_every_operator_finds_the_same_contents(program, data):
    """Whatever the order of the parts: several microbatches, an update between two backward passes."""
    if data.draw(st.booleans()):
        phases = st.sampled_from(["forward", "backward", "optimizer"])
        mixed = [replace(op, phase=data.draw(phases)) for op in program.operators]
        program = replace(program, operators=tuple(mixed))
    cut = cut_program(program)
    known = {}
    once = what_each_finds(program, range(len(program.operators)), known)
    runs = what_each_finds(cut.program, cut.origins, known)
    assert set(runs) == set(once)  # second runs find what the first ones found
    assert [run for i, run in enumerate(runs) if run not in runs[:i]] == once
    actions = identity_actions(cut.program, range(len(cut.program.operators)))
    replay(cut.program, cut.program.on_device, actions)
    assert cut.program.storages[: len(program.storages)] == program.storages
    assert not any(s.at_start or s.at_end for s in cut.program.storages[len(program.storages) :])
    for op, origin, names in zip(cut.program.operators, cut.origins, cut.renamed, strict=True):
        was = program.operators[origin]
        assert op.name == was.name
        assert op.allocs == tuple(names.get(s, s) for s in was.allocs)
        assert op.reads == tuple(names.get(s, s) for s in was.reads)


@st.composite
def steps(draw):
    """A forward part of operators on earlier results, and a backward part that reads some of them."""
    storages = [Storage("x", 8, "input", True, True)]
    ops = []
    for i in range(draw(st.integers(2, 7))):
        reads = draw(
            st.lists(st.integers(0, len(storages) - 1), min_size=1, max_size=3, unique=True)
        )
        several = draw(st.integers(1, 2))
        allocs = tuple(range(len(storages), len(storages) + several))
        storages += [Storage(f"s{i}", draw(st.integers(1, 20)), "activation") for _ in allocs]
        flops = float(draw(st.integers(0, 3)) == 0)
        moved = draw(st.integers(0, 100))
        op = Operator(f"f{i}", tuple(reads), (), allocs, flops=flops, access_bytes=moved)
        ops.append(replace(op, repeatable=draw(st.integers(0, 4)) > 0))
    made = range(1, len(storages))
    for i in range(draw(st.integers(1, 4))):
        reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        ops.append(Operator(f"b{i}", tuple(reads), phase="backward"))
    return MemoryProgram("step", tuple(storages), tuple(ops), 1)


def cost(program, again):
    """Bytes kept, and the price of what runs again, when these operators may."""
    maker = {s: i for i, op in enumerate(program.operators) for s in op.allocs}
    todo = [s for op in program.operators if op.phase == "backward" for s in op.reads]
    kept, runs = set(), set()
    while todo:
        s = todo.pop()
        if s not in maker:
            continue
        if maker[s] not in again:
            kept.add(s)
        elif maker[s] not in runs:
            runs.add(maker[s])
            todo += program.operators[maker[s]].reads
    moved = sum(program.operators[i].access_bytes for i in runs)
    return sum(program.sizes[s] for s in kept) + KEPT_PER_MOVED * moved


@settings(max_examples=300, deadline=None)
@given(steps())
def test_no_other_set_of_operators_costs_less(program):
    forward = [i for i, op in enumerate(program.operators) if op.phase == "forward"]
    may = [i for i in forward if program.operators[i].repeatable and not program.operators[i].flops]
    subsets = chain.from_iterable(combinations(may, n) for n in range(len(may) + 1))
    cut = cut_program(program)
    again = {origin for i, origin in enumerate(cut.origins) if origin in cut.origins[:i]}
    assert again <= set(may)
    assert cost(program, again) <= min(cost(program, set(s)) for s in subsets) + 1e-6


def test_a_cheap_result_is_made_again_where_it_is_needed_first():
    program = training_chain(layers=2)
    products = [replace(op, flops=1.0) if "mm" in op.name else op for op in program.operators]
    program = replace(program, operators=tuple(products))
    cut = cut_program(program).program
    assert [op.name for op in cut.operators if op.phase == "backward"] == [
        "pointwise", "mm_dw", "mm_dx", "pointwise", "mm_dw", "mm_dx",
    ]  # fmt: skip
    assert order_peak(cut, range(len(cut.operators))) < order_peak(
        program, range(len(program.operators))
    )


def test_a_step_without_a_backward_part_stays_as_it_is():
    program = training_chain()
    forward = tuple(replace(op, phase="inference") for op in program.operators)
    program = replace(program, operators=forward)
    cut = cut_program(program)
    assert cut.program == program
    assert cut.origins == tuple(range(len(forward)))


@pytest.mark.parametrize(
    ("kind", "last", "more"),
    [
        ("output", False, ()),
        ("activation", True, ()),
        ("activation", False, (Operator("update", (1,), (1,), phase="optimizer"),)),
        ("activation", False, (Operator("change", (0, 1), (0,), phase="backward"),)),
        ("activation", False, (Operator("change", (1, 0), (1,), phase="backward"),)),
    ],
    ids=["never moved", "outlives the step", "updated", "its input changes", "changes"],
)
def test_what_others_see_or_change_is_made_once(kind, last, more):
    x, s = Storage("x", 100, "input", True, True), Storage("s", 100, kind, False, last)
    ops = (
        Operator("cheap", (0,), (), (1,), access_bytes=2, repeatable=True),
        Operator("use", (1,), phase="backward"),
        *more,
    )
    program = MemoryProgram("step", (x, s), ops, 1)
    assert cut_program(program).program == program
    plain = replace(
        program, storages=(x, replace(s, kind="activation", at_end=False)), operators=ops[:2]
    )
    assert len(cut_program(plain).program.operators) == 3


def test_a_chain_of_thousands_of_operators_runs_again():
    """What they move again costs less than to keep the last result."""
    storages = [Storage("x", 1000, "input", True, True)]
    ops = []
    for i in range(3000):
        storages.append(Storage(f"s{i}", 1000, "activation"))
        ops.append(Operator("cheap", (i,), (), (i + 1,), access_bytes=1, repeatable=True))
    ops.append(Operator("use", (3000,), phase="backward"))
    cut = cut_program(MemoryProgram("chain", tuple(storages), tuple(ops), 1))
    assert cut.origins == (*range(3000), *range(3001))
