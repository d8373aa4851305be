"""The controller of roles: groups, calls, what is refused, and its journal."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, CallFailed, Contradiction, JournalMismatch, RunInUse
from hyper_parallel.runtime.controller import ahead
from tests.runtime.own_roles import load_example


class Group:
    """A role of several ranks."""

    def __init__(self) -> None:
        self.world = hp.World.join("cpu")

    def total(self) -> list:
        value = torch.tensor(2.0**self.world.rank)
        dist.all_reduce(value)
        return [int(value), dist.get_world_size()]

    def place(self) -> int:
        return self.world.local_rank

    def fail(self, rank: int) -> None:
        if self.world.rank == rank:
            raise ValueError("of this rank only")
        dist.barrier()

    def stop(self, rank: int, mark: str) -> int:
        if self.world.rank == rank and not os.path.exists(mark):  # noqa: PTH110
            open(mark, "w").close()  # noqa: PTH123
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return dist.get_world_size()


class Counter:
    """A role that notes what it runs."""

    def __init__(self, file: str, start: int = 0) -> None:
        self.file, self.value = file, start

    def add(self, amount: int) -> int:
        with open(self.file, "a") as file:  # noqa: PTH123
            file.write(f"{amount}\n")
        self.value += amount
        return amount

    def wait(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, *_: object) -> None:
        raise KeyError("missing thing")

    def tensor(self) -> torch.Tensor:
        return torch.ones(1)


class Unborn:
    def __init__(self) -> None:
        raise OSError("no such weights")

    def learn(self) -> None: ...


@pytest.mark.dist
def test_ranks_of_a_role_are_a_group_of_their_own() -> None:
    with hp.Controller() as controller:
        pair = controller.start(Group, ranks=2)
        three = controller.start(Group, ranks=3, name="Three")
        calls = [pair.call("total"), three.call("total")]
        assert [call.result() for call in calls] == [[3, 2], [7, 3]]
        for size in (1, 2):
            pair.resize(size)
            assert pair.call("total").result() == [2**size - 1, size]
            assert pair.call("place").result() == 0
        shared = controller.start(Group, name="Shared", first_device=1)
        last = controller.start(Group, name="Last")
        places = [role.call("place") for role in (three, shared, last)]
        assert [place.result() for place in places] == [2, 1, 5]
        assert three.call("total").result() == [7, 3]


@pytest.mark.dist
def test_a_rank_that_raises_alone_or_is_frozen_holds_up_nobody(tmp_path, caplog) -> None:
    with hp.Controller() as controller:
        pair = controller.start(Group, ranks=2)
        with pytest.raises(CallFailed, match=r"`fail` of role `Group` has raised ValueError on rank 1"):
            pair.call("fail", 1).result()
        assert pair.call("total").result() == [3, 2]
        assert pair.restarts == 0
        assert pair.call("stop", 1, str(tmp_path / "mark"), timeout_s=3.0).result() == 2
        assert pair.restarts == 1
    assert "role `Group`: rank 1 is stopped by a signal (no progress for 3 s)" in caplog.text
    assert "the others wait for it" in caplog.text


@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.dist)])
def test_an_exception_is_given_to_who_asks(engine, tmp_path) -> None:
    with hp.Controller(engine) as controller:
        role = controller.start(Counter, str(tmp_path / "ran"))
        failed, after = role.call("fail", 1), role.call("add", 2)
        with pytest.raises(CallFailed, match=r"(?s)`fail` of role `Counter`.*KeyError: .missing thing") as caught:
            failed.result()
        assert 'raise KeyError("missing thing")' in caught.value.what
        assert after.result() == 2
        with pytest.raises(BadValue, match=r"the result of `Counter.tensor` is not a JSON value.*(?s:.*)hp.save"):
            role.call("tensor").result()
        unborn = controller.start(Unborn)
        for _ in range(2):
            with pytest.raises(CallFailed, match="no such weights"):
                unborn.call("learn").result()


def test_what_is_refused(tmp_path) -> None:
    with pytest.raises(BadValue) as caught:
        hp.Controller("threads")
    assert caught.value.allowed == ["inline", "processes", "ray"]
    with hp.Controller("inline") as controller:
        with pytest.raises(Contradiction, match="role `Counter` requests 2 ranks"):
            controller.start(Counter, "file", ranks=2)
        with pytest.raises(BadValue, match="at least one rank"):
            controller.start(Counter, "file", ranks=0)
        role = controller.start(Counter, str(tmp_path / "ran"))
        with pytest.raises(BadValue, match="a role with this name"):
            controller.start(Counter, "file")
        with pytest.raises(BadValue, match="not a JSON value") as caught:
            controller.start(Counter, tmp_path, name="Other")
        for method in ("added", "__init__", "value"):
            with pytest.raises(BadValue, match="no public method of this name"):
                role.call(method)
        with pytest.raises(BadValue, match=r"an argument of `Counter.add` is not a JSON value") as caught:
            role.call("add", torch.ones(1))
        assert "hp.save(" in caught.value.hint
        with pytest.raises(Contradiction):
            role.resize(2)
        with pytest.raises(BadValue):
            controller.first([])
        assert role.call("add", 1).result() == 1  # nothing of this has counted as a call


def program(journal, file, *, start=0, name="Counter", method="add", amounts=(1, 2, 3)) -> list:
    with hp.Controller("inline", journal) as controller:
        role = controller.start(Counter, str(file), start, name=name)
        return [role.call(method, amount).result() for amount in amounts]


def test_the_journal_of_another_program_is_refused(tmp_path) -> None:
    journal, file = tmp_path / "run" / "journal", tmp_path / "ran"
    assert program(journal, file) == [1, 2, 3]
    assert program(journal, file, amounts=(1, 2, 3, 4)) == [1, 2, 3, 4]
    assert file.read_text() == "1\n2\n3\n4\n"
    for other, named in (
        ({"amounts": (1, 5)}, "call 2: add(5)"),
        ({"method": "wait"}, "call 1: wait(1)"),
        ({"start": 7}, "7)"),
        ({"name": "Adder"}, "role `Adder`"),
    ):
        with pytest.raises(JournalMismatch) as caught:
            program(journal, file, **other)
        assert named in caught.value.got
        assert caught.value.allowed.startswith("role `Counter`, call ")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(JournalMismatch, match="not a record"):
        program(journal, file)


def test_an_exception_is_asked_again_unless_the_program_went_on(tmp_path) -> None:
    journal, file = tmp_path / "journal", tmp_path / "ran"

    def calls(*methods) -> list:
        with hp.Controller("inline", journal) as controller:
            role = controller.start(Counter, str(file))
            answers = []
            for method in methods:
                try:
                    answers.append(role.call(method, 1).result())
                except CallFailed as error:
                    answers.append(error.what.splitlines()[0])
            return answers

    failed = "`fail` of role `Counter` has raised KeyError on rank 0"
    assert calls("add", "fail") == [1, failed]
    assert calls("add", "fail", "add") == [1, failed, 1]
    assert len(journal.read_text().splitlines()) == 5  # the role, and `fail` twice
    assert calls("add", "fail", "add", "add") == [1, failed, 1, 1]
    assert len(journal.read_text().splitlines()) == 6
    assert file.read_text() == "1\n1\n1\n"


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 10**6))
def test_a_journal_cut_anywhere_has_its_whole_lines(tmp_path_factory, cut) -> None:
    folder = tmp_path_factory.mktemp("cut")
    journal, file = folder / "journal", folder / "ran"
    program(journal, file)
    whole = journal.read_bytes()
    cut %= len(whole) + 1
    journal.write_bytes(whole[:cut])
    file.write_text("")
    assert program(journal, file) == [1, 2, 3]
    known = max(whole[:cut].count(b"\n") - 1, 0)  # the first line is the role
    assert file.read_text() == "".join(f"{n}\n" for n in (1, 2, 3)[known:])
    assert journal.read_bytes() == whole


@pytest.mark.parametrize("text", ["years of work", "{}", '{"role": "user", "content": "hi"}\n', "[1]\n"])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path, text) -> None:
    (tmp_path / "thesis.txt").write_text(text)
    with pytest.raises(JournalMismatch, match="HP641"):
        program(tmp_path / "thesis.txt", tmp_path / "ran")
    assert (tmp_path / "thesis.txt").read_text() == text


def test_one_journal_has_one_controller(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hyper_parallel.runtime.controller.journal._LONGEST_WAIT_S", 0.0)
    with hp.Controller("inline", tmp_path / "journal"), pytest.raises(RunInUse):
        hp.Controller("inline", tmp_path / "journal")
    hp.Controller("inline", tmp_path / "journal").close()


@pytest.mark.dist
def test_the_first_answer_is_chosen_again(tmp_path) -> None:
    def chosen(engine) -> str:
        with hp.Controller(engine, tmp_path / "journal") as controller:
            slow, fast = (controller.start(Counter, "", name=name) for name in ("slow", "fast"))
            calls = [slow.call("wait", 1.0), fast.call("wait", 0.0)]
            first = controller.first(calls)
            calls.remove(first)
            assert controller.first(calls) is calls[0]
            return first.role.name

    assert chosen("processes") == "fast"
    assert chosen("inline") == "fast"  # where `slow` would be answered first
    (tmp_path / "journal").unlink()
    assert chosen("inline") == "slow"


class Clock:
    """A controller of a world in which calls take drawn times: what each sample was made from, and when."""

    def __init__(self, durations) -> None:
        self.durations, self.now = durations, 0.0
        self.learned, self.ages, self.overlap = [(0.0, 0)], [], 0.0

    def start(self, cls, *_, **__):
        clock, free = self, [0.0]

        class Role:
            def call(self, method, *arguments):
                begin = max(clock.now, free[0])
                free[0] = end = begin + next(clock.durations)
                if method == "learn":
                    clock.learned.append((end, arguments[0]))
                if method == "sample":
                    step, version = arguments
                    there = max(v for at, v in clock.learned if at <= begin)
                    assert version <= there, "weights that do not exist yet"
                    clock.ages.append((step, step - 1 - version))
                value = [] if method != "learn" else {"reward": 0.0}
                return Answer(end, value)

        class Answer:
            def __init__(self, end, value) -> None:
                self.end, self.value = end, value

            def result(self):
                clock.now = max(clock.now, self.end)
                return self.value

        return Role()


@settings(deadline=None)
@given(
    steps=st.integers(1, 12),
    staleness=st.integers(0, 5),
    durations=st.lists(st.floats(0.001, 10), min_size=1, max_size=20),
)
def test_no_sample_of_the_example_is_older_than_allowed(steps, staleness, durations) -> None:
    forever = (durations[n % len(durations)] for n in range(10**6))
    clock, example = Clock(forever), load_example()
    example.train(clock, "", steps, staleness, 1)
    assert [step for step, _ in clock.ages] == list(range(1, steps + 1))
    assert [step for _, step in clock.learned] == list(range(steps + 1))
    assert [age for _, age in clock.ages] == [min(s, staleness) for s in range(steps)]


@given(steps=st.integers(0, 30), staleness=st.integers(0, 40))
def test_the_order_of_calls(steps, staleness) -> None:
    order = list(ahead(steps, staleness))
    learned = sampled = 0
    for what, step in order:
        if what == "sample":
            assert step == sampled + 1
            assert step - 1 - learned <= staleness  # nor older than allowed,
            sampled = step
        else:
            assert step == learned + 1 <= sampled
            # nor later than allowed
            assert sampled == min(steps, learned + 1 + staleness)
            learned = step
    assert learned == sampled == steps
