"""The clock of emission against the event simulation of the same actions, and the simulator's bytes against replay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.ir import MemoryPlan
from hyper_parallel.memory import (
    ProgramClock,
    overlapped,
    predicted_timeline,
    use_definitions,
)
from hyper_parallel.memory.candidates import OffloadCandidates
from hyper_parallel.memory.emission import Emitter
from hyper_parallel.memory.emitted_programs import assign_tiers
from hyper_parallel.memory.recompute import ChainFinder, choose_recomputes
from hyper_parallel.sim import peaks, simulate
from tests.memory.plan_graph import plan_tasks
from tests.memory.programs import training_chain
from tests.memory.test_communication import communicating
from tests.memory.test_random_programs import machines, programs

pytestmark = pytest.mark.unit


@st.composite
def emissions(draw):
    """Draw a plan and its machine: any order, recomputation, and choice of offloads.

    Durations are whole microseconds, so nanoseconds are exact.
    """
    machine = draw(machines())
    program = draw(st.one_of(programs(), communicating()))
    if draw(st.booleans()):
        sizes = {name: draw(st.sampled_from([20, 500])) for name in ("act", "weight")}
        program = training_chain(layers=draw(st.integers(2, 6)), **sizes)
    order = overlapped(program, range(len(program.operators)), draw(st.integers(0, 2)))
    finder = ChainFinder(program, use_definitions(program, order))
    may = [s for s in range(len(program.storages)) if finder.for_longest_gap(s)]
    recomputed = draw(st.lists(st.sampled_from(may), unique=True)) if may else []
    recomputes = choose_recomputes(finder, recomputed)
    movable = [s for s, x in enumerate(program.storages) if x.persistent or not x.at_start]
    candidates = OffloadCandidates(program, machine, order, recomputes, movable)
    whole = int(candidates.profile.max())
    target = int(whole * draw(st.floats(0.0, 1.0)))
    chosen = [c for c in candidates.all if draw(st.booleans())]
    planned = candidates.profile.copy()
    for c in chosen:
        for low, high in c.spans:
            planned[low:high] -= c.num_bytes
    gaps = assign_tiers(program, machine, chosen, draw(st.sampled_from([0.0, 0.5])))
    budget = draw(st.sampled_from([None, target, whole]))
    emitter = Emitter(candidates, gaps, budget, planned)
    actions = emitter.emit()
    seconds = emitter.ledger.clock.now_s
    return MemoryPlan(program, tuple(emitter.copies.homes), actions, seconds), machine


@settings(max_examples=100, deadline=None)
@given(emissions())
def test_the_clock_is_the_simulation(emission):
    plan, machine = emission
    simulated = simulate(plan_tasks(plan, machine))
    ends = [span.end_s for span in simulated.spans if span.lane == "compute"]
    clock = ProgramClock(plan.program, machine)
    for action, end_s in zip(plan.actions, ends, strict=True):
        clock.apply(action)
        assert clock.now_s == pytest.approx(end_s, abs=0.5e-9), action
    assert clock.now_s == plan.seconds
    copies = dict.fromkeys(clock.copied, 0.0)
    for span in simulated.spans:
        if span.lane in copies:
            copies[span.lane] += span.duration_s
    assert copies == pytest.approx({k: c.seconds for k, c in clock.copied.items()}, abs=1e-9)
    timelines = simulated, predicted_timeline(plan, machine)
    one, other = (
        sorted(
            (s.lane, s.name, round(s.start_s * 1e9), round(s.duration_s * 1e9))
            for s in timeline.spans
            if s.lane != "compute" or s.category in ("run", "recompute")
        )
        for timeline in timelines
    )
    assert one == other
    assert peaks(timelines[1]) == plan.peak_bytes
    waits = [s.duration_s for s in predicted_timeline(plan, machine).spans if s.category == "wait"]
    assert sum(waits) == pytest.approx(clock.wait_s + clock.join_s, abs=1e-9)
    assert peaks(simulated) == plan.peak_bytes


@pytest.mark.slow
def test_drawn_emissions_have_every_kind_of_action():
    """Else the test above would hold for a clock that does not know a kind."""
    seen = set()

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(emissions())
    def collect(emission):
        seen.update(action.kind for action in emission[0].actions)

    collect()
    assert seen == {
        "run", "recompute", "join", "prefetch", "store", "copy_in", "copy_out", "wait", "detach", "free",
    }  # fmt: skip
