"""Search of an assignment of sub-models: its value is that of the simulation, and no pinned sub-space is better."""

import contextlib
import io
import random
import re
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hyper_parallel.errors import ScheduleError
from hyper_parallel.mpmd import (
    Choice,
    Devices,
    SubModel,
    assign_submodels,
    bubble_fraction,
    lower,
    schedule_tasks,
    verify,
)
from hyper_parallel.sim import simulate
from tests.slow import slow_cells

pytestmark = pytest.mark.unit

GIB = 2**30


def _encoder(rng, name, microbatches, mean_s, **options):
    seconds = tuple(rng.choice((0.0, rng.uniform(0.2, 2.5))) * mean_s for _ in range(microbatches))
    held = tuple(round(s / mean_s * GIB) for s in seconds)
    return SubModel(name, 24, seconds, held, (10**7,) * microbatches, 4 * GIB, GIB, **options)


def _language(microbatches, layers=16, seconds=0.16, **options):
    m = microbatches
    return SubModel("language", layers, (seconds,) * m, (8 * GIB,) * m, (10**7,) * m, 40 * GIB, 0, **options)


def _simulated(found):
    lowered = lower(found.schedule, costs=found.costs, transfer_s=found.transfer_s)
    verify(lowered, costs=found.costs, max_bytes=found.max_bytes)
    return simulate(schedule_tasks(lowered, found.costs, transfer_s=found.transfer_s))


@pytest.mark.parametrize("speedup", [{1: 1.0}, {1: 1.0, 2: 1.8, 4: 3.2}])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_value_is_that_of_the_verified_schedule_in_the_simulation(frozen, speedup):
    rng = random.Random(7)
    vision = _encoder(rng, "vision", 12, 0.06, frozen=frozen, readers=3, speedup=speedup)
    audio = _encoder(rng, "audio", 12, 0.02, speedup=speedup)
    language = _language(12, speedup=speedup)
    found = assign_submodels([vision, audio], language, Devices(8, 80 * GIB, 50e9))
    timeline = _simulated(found)
    assert found.value_s == pytest.approx(timeline.end_s, rel=1e-9)
    assert 0.0 <= found.gap < 1.0
    if set(found.widths) == {1}:
        assert found.bubble == pytest.approx(bubble_fraction(timeline), abs=1e-9)
    readers = {t for s, t in found.schedule.graph.edges if found.parts[s] != found.parts[t]}
    first = found.parts.index("language")
    needed = {s for s in range(first, len(found.parts)) if sum(found.layers[: s - first]) < 3}
    assert readers == needed


def test_lanes_show_every_sub_model():
    vision = _encoder(random.Random(1), "vision", 8, 0.1)
    found = assign_submodels([vision], _language(8), Devices(2, 80 * GIB, 50e9), {"copies": 2})
    lines = [line.split() for line in found.lanes(60).splitlines()]
    names = [["rank", str(r), "(1)", name] for r in range(2) for name in ("language", "vision")]
    assert [line[:4] for line in lines] == names
    assert all({"F", "I", "W", "."} == set(line[4]) and len(line[4]) == 60 for line in lines)


def test_memory_decides_where_copies_lie():
    vision = _encoder(random.Random(2), "vision", 16, 0.05)
    language = _language(16)
    wide = assign_submodels([vision], language, Devices(4, 80 * GIB, 50e9))
    large = replace(vision, state_bytes=30 * GIB)
    # 10 GiB of the language part and 30 GiB of a copy leave 4 GiB for activations, too few for all ranks with copies.
    narrow = assign_submodels([large], language, Devices(4, 44 * GIB, 50e9))
    assert narrow.choice.copies < wide.choice.copies
    assert narrow.value_s > wide.value_s
    with pytest.raises(ScheduleError, match="no assignment fits"):
        assign_submodels([large], language, Devices(4, 20 * GIB, 50e9))


def test_unknown_pins_are_refused():
    with pytest.raises(ScheduleError, match="unknown pin `depth`"):
        assign_submodels([], _language(4), Devices(2, 80 * GIB, 50e9), {"depth": 2})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"forward_s": (0.1,) * 3}, "`vision` needs one cost per microbatch"),
        ({"speedup": {2: 2.0}}, "`vision` needs its speed on one device"),
        ({"name": "language"}, "two sub-models have the same name"),
    ],
)
def test_incomplete_sub_models_are_refused(change, what):
    vision = replace(_encoder(random.Random(0), "vision", 4, 0.1), **change)
    with pytest.raises(ScheduleError, match=what):
        assign_submodels([vision], _language(4), Devices(2, 80 * GIB, 50e9))


@slow_cells(*range(2, 10))
@pytest.mark.parametrize("part", range(10))
def test_no_pinned_sub_space_is_better(part):
    compared = 0
    for seed in range(50 * part, 50 * part + 50):
        rng = random.Random(seed)
        m, speedup = rng.randint(2, 5), {1: 1.0, 2: rng.uniform(1.2, 2.0)}
        encoders = [
            _encoder(rng, name, m, rng.uniform(0.01, 0.2), frozen=rng.random() < 0.3, speedup=speedup)
            for name in ("vision", "audio")[: rng.randint(1, 2)]
        ]
        language = _language(m, layers=8, seconds=rng.uniform(0.05, 0.3), speedup=speedup)
        devices = Devices(rng.randint(2, 4), rng.choice((30, 50, 80)) * GIB, 10 ** rng.uniform(9, 11))
        values = {
            "width": (1, 2),
            "own": (0, 1, 2),
            "copies": (0, 1, 2),
            "stages_per_rank": (1, 2),
            "split": (True, False),
            "order": ("given", "light", "heavy"),
            "reduce_first": (True, False),
        }
        names = rng.sample([f.name for f in fields(Choice)], rng.randint(1, 3))
        pins = {name: rng.choice(values[name]) for name in names}
        try:
            pinned = assign_submodels(encoders, language, devices, pins)
        except ScheduleError:
            continue
        free = assign_submodels(encoders, language, devices)
        assert all(getattr(pinned.choice, name) == value for name, value in pins.items())
        assert free.lower_s <= free.value_s <= pinned.value_s, (seed, pins)
        compared += 1
    assert compared > 25


def test_the_search_takes_less_than_a_second():
    rng, speedup = random.Random(3), {1: 1.0, 2: 1.9, 4: 3.5, 8: 6.0}
    vision = _encoder(rng, "vision", 32, 0.08, speedup=speedup)
    language = _language(32, layers=32, seconds=0.32, speedup=speedup)
    start = time.process_time()
    found = assign_submodels([vision], language, Devices(8, 80 * GIB, 50e9))
    assert time.process_time() - start < 1.0
    assert found.gap < 0.05


def test_the_example_of_the_reference_page():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "stage_graphs.md").read_text()
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output
