"""Schedules over a graph of stages: text form, lowering, and a verdict that agrees with an execution by threads."""

import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule, StageGraph
from hyper_parallel.mpmd import (
    StageCost,
    held_bytes,
    in_flight,
    lower,
    make_schedule,
    schedule_tasks,
    verify,
)
from hyper_parallel.sim import peaks, simulate

pytestmark = pytest.mark.unit

TWO_TOWERS = StageGraph(((0, 2), (1, 2), (2, 3)), frozen=frozenset({0}), copied=frozenset({1}))
ROWS = (
    "1F0 2F0 2F1 2I0 1I0 2W0 2I1 1W0 2W1",
    "0F0 0F1 1F1 3F0 3B0 3F1 3B1 1B1",
)


def _schedule(rows=ROWS, graph=TWO_TOWERS, microbatches=2):
    ranks = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    return Schedule("towers", 4, microbatches, ranks, graph)


def test_the_text_form_keeps_the_graph_and_the_ends_of_messages():
    lowered = lower(_schedule())
    verify(lowered)
    text = lowered.to_csv(extended=True)
    assert all(f",{name}," in text for name in ("0SEND_F1:2", "2RECV_F1:0", "2SEND_B1", "1RECV_B1"))
    assert text.endswith("graph,0>2,1>2,2>3,0 frozen,1 copied\n")
    assert Schedule.from_csv(text, "towers") == lowered
    with pytest.raises(ScheduleError, match="only a chain"):
        lowered.to_csv()


def test_a_chain_written_as_a_graph_has_the_messages_of_the_chain():
    chain = make_schedule("zb_h1", 3, 5)
    graph = StageGraph(((0, 1), (1, 2)))
    assert lower(replace(chain, graph=graph)).ranks == lower(chain).ranks
    assert "graph" not in lower(chain).to_csv(extended=True)


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: StageGraph(((1, 0),)), "does not lead to a stage with a larger number"),
        (lambda: StageGraph(((0, 1),), frozen=frozenset({1})), "stage 0 gets no gradient"),
        (lambda: _schedule(graph=StageGraph(((0, 7),))), "names a stage that does not exist"),
        (lambda: _schedule(graph=StageGraph(((0, 1),), copied=frozenset({7}))), "`7 copied` marks a stage"),
        (lambda: StageGraph.parse(["0>1", "1 copy"]), "`1 copy` is not an entry of a stage graph"),
        (lambda: Action.parse("0F0:2"), "is not a schedule action"),
    ],
)
def test_graphs_without_meaning_are_refused(build, what):
    with pytest.raises(ScheduleError, match=what):
        build()


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ((ROWS[0], ROWS[1] + " 0B0"), "the frozen stage 0 has a backward of microbatch 0"),
        ((ROWS[0].replace(" 1W0", ""), ROWS[1] + " 1W0"), "microbatch 0 of stage 1 is computed on"),
        ((ROWS[0] + " 0F1", ROWS[1].replace("0F1 ", "")), "stage 0 is computed on rank 0 and on"),
    ],
)
def test_wrong_computations_of_a_graph_are_refused(rows, what):
    with pytest.raises(ScheduleError, match=what):
        verify(_schedule(rows))


def test_copies_reduce_their_gradients_together():
    lowered = lower(_schedule())
    rows = [[str(a) for a in row] for row in lowered.ranks]
    assert all("1REDUCE_GRAD" in row for row in rows)
    # Rank 0 waits for the other copy before it sends the gradient that this copy needs.
    late = [a for a in rows[0] if a != "2SEND_B1"]
    late.insert(late.index("1REDUCE_GRAD") + 1, "2SEND_B1")
    crossed = replace(lowered, ranks=(tuple(map(Action.parse, late)), lowered.ranks[1]))
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        verify(crossed)
    waits = (caught.value.what, *caught.value.others)
    assert any("1REDUCE_GRAD waits for 1REDUCE_GRAD of rank 1" in line for line in waits)


def test_bytes_are_those_of_the_simulation_and_are_limited():
    schedule = _schedule()
    costs = [
        [StageCost(1, 1, 1, activation_bytes=b, weight_grad_input_bytes=b // 2) for b in (s, 3 * s)]
        for s in (10, 100, 1000, 10000)
    ]
    held = held_bytes(schedule, costs)
    simulated = peaks(simulate(schedule_tasks(schedule, costs)))
    assert held == (simulated["rank 0/device"], simulated["rank 1/device"])
    verify(lower(schedule), costs=costs, max_bytes=held)
    with pytest.raises(ScheduleError, match=r"rank 0 holds \d+ bytes at once"):
        verify(lower(schedule), costs=costs, max_bytes=[held[0] - 1, held[1]])
    assert in_flight(schedule) == (3, 2)


def test_uneven_costs_and_transfers_in_the_simulation():
    """Microbatch 1 of the tower takes 7 s instead of 2, and its edge 3 s instead of 1."""
    graph = StageGraph(((0, 2), (1, 2)), frozen=frozenset({0, 1, 2}))
    schedule = Schedule.from_csv("0F0,0F1\n1F0,1F1\n2F0,2F1\n" + f"graph,{graph}\n")
    costs = [[StageCost(2, 0, 0), StageCost(7, 0, 0)], StageCost(1, 0, 0), StageCost(4, 0, 0)]
    timeline = simulate(schedule_tasks(schedule, costs, transfer_s={(0, 2): (1.0, 3.0)}))
    starts = {span.name: span.start_s for span in timeline.spans}
    assert (starts["2F0"], starts["2F1"]) == (3, 12)
    assert timeline.end_s == 16


# Execution by threads: one per rank, blocking sends without tags, reductions that wait for all copies.


class _Ranks:
    """Meeting point of ranks: a send and its receive, or the reductions of all copies of a stage, end together."""

    def __init__(self, schedule):
        self.schedule, self.homes = schedule, schedule.homes()
        self.condition = threading.Condition()
        self.waiting = {}  # rank to the action at which it is blocked
        self.left = set(range(len(schedule.ranks)))
        self.verdict = "runs"

    def meet(self, rank, action):
        """Block until the action of a rank has met its partners."""
        with self.condition:
            self.waiting[rank] = action
            partners = self._partners(rank, action)
            if partners is not None:
                for partner in partners:
                    del self.waiting[partner]
                self.condition.notify_all()
            self._detect()
            while self.waiting.get(rank) is action and self.verdict == "runs":
                self.condition.wait()
            if self.verdict != "runs":
                raise InterruptedError

    def leave(self, rank, verdict="runs"):
        with self.condition:
            self.left.discard(rank)
            if self.verdict == "runs":
                self.verdict = verdict
            self._detect()
            self.condition.notify_all()

    def _detect(self):
        if self.verdict == "runs" and self.left and self.left <= set(self.waiting):
            self.verdict = "deadlocks"
            self.condition.notify_all()

    def _partners(self, rank, action):
        if action.kind == "REDUCE_GRAD":
            copies = {r for (s, _), r in self.homes.items() if s == action.stage}
            return copies if all(self.waiting.get(r) == action for r in copies) else None
        if len(action.kind) == 1:  # waits for a computation that follows on its own rank
            return None
        peer = self.homes[action.peer.stage, action.microbatch]
        met = self.waiting.get(peer)
        if met is None or {met.kind[:4], action.kind[:4]} != {"SEND", "RECV"}:
            return None
        if self.homes[met.peer.stage, met.microbatch] != rank:
            return None
        if met != action.peer:  # no tags: the ranks exchange a message that the receiver does not expect
            self.verdict = "wrong"
            self.condition.notify_all()
        return (rank, peer)


def _run_rank(ranks, rank):
    schedule, values = ranks.schedule, set()
    row = schedule.ranks[rank]
    left = Counter(a.stage for a in row if a.kind in ("B", "W"))
    try:
        for a in row:
            s, i = a.stage, a.microbatch
            if a.kind == "REDUCE_GRAD":
                if left[s]:
                    ranks.leave(rank, "wrong")
                    return
                ranks.meet(rank, a)
                continue
            if a.kind.startswith("RECV"):
                ranks.meet(rank, a)
                values.add((a.peer.stage, a.kind[-1], i, s))
                continue
            way = "F" if a.kind in ("F", "SEND_F") else "B"
            needed = {(s, way, i, a.peer.stage)} if a.kind.startswith("SEND") else set()
            inputs = {(other, way, i, s) for other in schedule.inputs(a)}
            if any(ranks.homes[other[0], i] == rank for other in inputs - values):
                ranks.meet(rank, a)
            needed |= inputs
            needed |= {(s, "I" if a.kind == "W" else "forward", i)} if a.kind in "BIW" else set()
            if not needed <= values:
                ranks.leave(rank, "wrong")
                return
            if a.kind.startswith("SEND"):
                ranks.meet(rank, a)
            else:
                values |= {(s, way, i, send.peer.stage) for send in schedule.messages(a)}
                values.add((s, "forward" if a.kind == "F" else a.kind, i))
                left[s] -= a.kind in ("B", "W")
        ranks.leave(rank)
    except InterruptedError:
        ranks.leave(rank, ranks.verdict)


def _execute(schedule):
    ranks = _Ranks(schedule)
    threads = [threading.Thread(target=_run_rank, args=(ranks, r)) for r in sorted(ranks.left)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks.verdict


def _random_schedule(rng):
    """Return a compute-only schedule of a random graph, in a random order of its dependencies."""
    stages, microbatches, world = rng.randint(2, 5), rng.randint(1, 3), rng.randint(2, 4)
    edges, frozen = [], set()
    for s in range(1, stages):
        edges += [(source, s) for source in sorted(rng.sample(range(s), rng.randint(0, min(s, 2))))]
    for s in range(stages):
        if rng.random() < 0.3 and all(a in frozen for a, b in edges if b == s):
            frozen.add(s)
    copied = {s for s in range(stages) if rng.random() < 0.3}
    graph = StageGraph(tuple(edges), frozenset(frozen), frozenset(copied))
    place = [rng.randrange(world) for _ in range(stages)]
    work = []
    for s in range(stages):
        for i in range(microbatches):
            rank = rng.randrange(world) if s in copied else place[s]
            kinds = "F" if s in frozen else rng.choice(("FB", "FIW"))
            work += [(rank, Action(s, kind, i)) for kind in kinds]
    empty = Schedule("random", stages, microbatches, (), graph)
    done, rows = set(), [[] for _ in range(world)]
    while work:
        rank, a = rng.choice(work)
        key = "F" if a.kind == "F" else "B"
        needs = {(other, key, a.microbatch) for other in empty.inputs(a)}
        if a.kind in ("B", "I"):
            needs.add((a.stage, "F", a.microbatch))
        if a.kind == "W":
            needs.add((a.stage, "B", a.microbatch))
        if needs <= done:
            work.remove((rank, a))
            rows[rank].append(a)
            if a.kind != "W":
                done.add((a.stage, key, a.microbatch))
    return replace(empty, ranks=tuple(map(tuple, rows)))


def _shuffled(schedule, rng, moves):
    rows = [list(row) for row in schedule.ranks]
    for _ in range(moves):
        row = rng.choice([row for row in rows if len(row) > 1] or [[0, 1]])
        place = rng.randrange(len(row))
        row.insert(max(0, min(len(row) - 1, place + rng.choice((-3, -2, -1, 1, 2, 3)))), row.pop(place))
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def _verdict(schedule):
    try:
        verify(schedule)
    except ScheduleError as error:
        return "deadlocks" if "deadlocks" in error.what else "wrong"
    return "runs"


def test_the_verdict_on_random_graphs_agrees_with_an_execution_by_threads():
    seen = Counter()
    for seed in range(600):
        rng = random.Random(seed)
        lowered = lower(_random_schedule(rng))
        moves = rng.choice((0, 1, 1, 2, 3, 6))
        for _ in range(rng.choice((1, 20))):  # most shuffles break a message, few only the progress
            schedule = _shuffled(lowered, rng, moves)
            verdict = _verdict(schedule)
            if verdict == "deadlocks":
                break
        executed = _execute(schedule)
        if verdict == "wrong":
            assert executed != "runs", (seed, schedule.to_csv(extended=True))
        else:
            assert executed == verdict, (seed, schedule.to_csv(extended=True))
        assert moves or verdict == "runs"
        seen[verdict] += 1
    assert min(seen.values()) > 30, seen
