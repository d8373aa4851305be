"""A cached plan equals the planned one; a file that is damaged, foreign or forged is planned again, and said."""

import json
import logging
from dataclasses import replace

import pytest

from hyper_parallel.ir import Extent
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    find_overlap,
    order_peak,
    plan_memory,
    plan_memory_cached,
    with_seconds,
)
from tests.memory.programs import training_chain

pytestmark = pytest.mark.unit
MACHINE = MemoryMachine(Channel(800.0, 0), Channel(800.0, 0))


def the_file(directory):
    (path,) = directory.glob("*.json")
    return path


@pytest.fixture
def filled(tmp_path):
    plan = plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9000)
    return plan, the_file(tmp_path)


def test_the_second_call_reads_the_first_ones_plan(filled, tmp_path, monkeypatch):
    plan, path = filled
    assert plan == plan_memory(training_chain(), MACHINE, budget_bytes=9000)
    written = path.stat().st_mtime_ns
    monkeypatch.setattr("hyper_parallel.memory.memory_planner.plan_memory", None)  # planning would fail
    assert plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9000) == plan
    assert path.stat().st_mtime_ns == written


def test_other_arguments_are_another_plan(filled, tmp_path):
    faster = MemoryMachine(Channel(801.0, 0), Channel(800.0, 0))
    plan_memory_cached(training_chain(), faster, cache=tmp_path, budget_bytes=9000)
    plan_memory_cached(training_chain(seconds=1.1), MACHINE, cache=tmp_path, budget_bytes=9000)
    plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9001)
    plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9000, recompute=False)
    plan_memory_cached(training_chain(alignment=4), MACHINE, cache=tmp_path, budget_bytes=9000)
    elsewhere = replace(training_chain(), address_bytes=8)
    plan_memory_cached(elsewhere, MACHINE, cache=tmp_path, budget_bytes=9000)
    assert len(list(tmp_path.glob("*"))) == 7


def test_measured_seconds_are_kept_with_the_plan_and_not_looked_up(tmp_path):
    program = training_chain()
    first, later = ([op.seconds * x for op in program.operators] for x in (1.25, 1.26))
    arguments = {"cache": tmp_path, "budget_bytes": 9000}
    plan = plan_memory_cached(program, MACHINE, measured=first, **arguments)
    assert [op.seconds for op in plan.program.operators] == first
    assert plan == plan_memory(with_seconds(program, first), MACHINE, budget_bytes=9000)
    assert plan_memory_cached(program, MACHINE, measured=later, **arguments) == plan
    # One without measurements is another plan.
    assert plan_memory_cached(program, MACHINE, **arguments).program == program
    assert len(list(tmp_path.glob("*"))) == 2


def test_seconds_that_were_not_measured_stay_as_they_were():
    program = training_chain()
    one, two, *rest = program.operators
    mixed = replace(program, operators=(one, replace(two, group="ranks"), *rest))
    measured = [0.0, 5.0, *(7.0 for _ in rest)]
    seconds = [op.seconds for op in with_seconds(mixed, measured).operators]
    assert seconds == [one.seconds, two.seconds, *(7.0 for _ in rest)]


def _set(key, value):
    def change(document):
        document[key] = value

    return change


def _one_home_more(document):
    document["homes"].append("device")


def _arena_above_the_budget(document):
    document["arena_bytes"] = 9001


def _drop_wait(document):
    actions = document["actions"]
    wait = {"kind": "wait", "tier": "device"}
    del actions[next(i for i, a in enumerate(actions) if a == a | wait)]


def _target_beyond(document):
    document["actions"][0]["target"] = 10**6


def _negative_target(document):
    document["actions"][0]["target"] = -1


def _unknown_tier(document):
    document["actions"][0]["tier"] = "tape"


def _shared_address(document):
    document["offsets"] = [0] * len(document["offsets"])


@pytest.mark.parametrize(
    "change",
    [
        _set("fingerprint", "of another program"),
        _set("actions", []),
        _set("actions", None),
        _set("homes", ["device"]),
        _set("offsets", []),
        _set("arena_bytes", 1),
        _one_home_more,
        _arena_above_the_budget,
        _drop_wait,
        _target_beyond,
        _negative_target,
        _unknown_tier,
        _shared_address,
    ],
)
def test_a_forged_file_is_ignored_with_a_reason(filled, tmp_path, caplog, change):
    plan, path = filled
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with caplog.at_level(logging.WARNING):
        replanned = plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9000)
    assert replanned == plan
    assert "is ignored" in caplog.text
    caplog.clear()
    plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9000)
    assert not caplog.text  # the good plan took the bad one's place


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x01", '{"fingerprint": 3}'])
def test_a_damaged_file_is_ignored_with_a_reason(filled, tmp_path, caplog, text):
    plan, path = filled
    path.write_text(text)
    replanned = plan_memory_cached(training_chain(), MACHINE, cache=tmp_path, budget_bytes=9000)
    assert replanned == plan
    assert "is ignored" in caplog.text


@pytest.mark.parametrize(
    ("loose", "tight", "reason"),
    [
        ((MACHINE, {"budget_bytes": 9000}), (MACHINE, {"budget_bytes": 8000}), "above the budget"),
        ((MACHINE, {"budget_bytes": 9000}), (MACHINE, {"max_slowdown": 0.0}), "s are allowed"),
        (
            (MACHINE, {"budget_bytes": 9000}),
            (replace(MACHINE, dram_bytes=4096), {"budget_bytes": 21_208}),
            "bytes of dram, the machine has 4096",
        ),
    ],
)
def test_a_legal_plan_that_misses_the_goal_is_ignored(tmp_path, caplog, loose, tight, reason):
    """The file of an easier goal under the name, and with the fingerprint, of a harder one."""
    plans = []
    for folder, (machine, goal) in (("loose", loose), ("tight", tight)):
        cache = tmp_path / folder
        plans.append(plan_memory_cached(training_chain(), machine, cache=cache, **goal))
    easy, path = json.loads(the_file(tmp_path / "loose").read_text()), the_file(tmp_path / "tight")
    easy["fingerprint"] = json.loads(path.read_text())["fingerprint"]
    path.write_text(json.dumps(easy))
    machine, goal = tight
    replanned = plan_memory_cached(training_chain(), machine, cache=tmp_path / "tight", **goal)
    assert replanned == plans[1] != plans[0]
    assert reason in caplog.text


def test_a_directory_that_cannot_be_written_costs_only_the_cache(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    plan = plan_memory_cached(training_chain(), MACHINE, cache=tmp_path / "file" / "plans", budget_bytes=9000)
    assert plan == plan_memory(training_chain(), MACHINE, budget_bytes=9000)
    assert "could not be cached" in caplog.text


def test_the_users_cache_directory_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan_memory_cached(training_chain(), MACHINE, budget_bytes=9000)
    assert the_file(tmp_path / "hyper-parallel" / "plans")


def test_a_large_plan_is_the_same_from_the_cache(tmp_path):
    program = training_chain(layers=300, alignment=8)
    budget = int(0.8 * order_peak(program, range(len(program.operators))))
    args = {"cache": tmp_path, "budget_bytes": budget, "recompute": False, "reorder": False}
    fast = MemoryMachine(Channel(1e5, 0), Channel(1e5, 0))
    plan = plan_memory_cached(program, fast, **args)
    assert plan.choices
    assert plan_memory_cached(program, fast, **args) == plan


def test_overlaps_are_found():
    sizes = (8, 8)
    apart = [Extent(0, 0, 2, 0), Extent(1, 1, 3, 8)]
    assert find_overlap(apart, sizes, 16) is None
    assert find_overlap(apart, sizes, 15)
    assert find_overlap([Extent(0, 0, 2, 0), Extent(1, 1, 3, 7)], sizes, 16)
    assert find_overlap([Extent(0, 0, 2, 0), Extent(1, 1, 3, 0)], sizes, 16)
    assert find_overlap([Extent(0, 0, 2, 0), Extent(1, 2, 3, 0)], sizes, 8) is None
