"""The program of examples/own_roles.py with roles that write down what they run, and meet with an accident."""

import importlib.util
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import hyper_parallel as hp

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
CALLS = {"Learner": STEPS + 2, "Sampler": STEPS, "Scorer": STEPS}
"""Of a whole program by role: the learner begins, learns, and gives the checksum."""


def load_example():
    spec = importlib.util.spec_from_file_location("own_roles", ROOT / "examples" / "own_roles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accident(pid, number):
    os.kill(pid, number)
    time.sleep(60)  # until it has come


def watched(cls, folder, role="", at=0, when="before", who="self", number=signal.SIGKILL):
    """A role like `cls` that notes in `folder` what it runs; its call `at` ends in an accident, once."""
    mark, controller = folder / f"accident-{role}-{at}", os.getpid()

    def noted(name):
        def method(self, *arguments):
            with (folder / "ran").open("a") as file:
                file.write(f"{os.getpid()} {cls.__name__} {name} {json.dumps(arguments)}\n")
            self.calls = getattr(self, "calls", 0) + 1
            due = cls.__name__ == role and self.calls == at and not mark.exists()
            if due and when == "before":
                mark.touch()
                accident(os.getpid() if who == "self" else controller, number)
            value = getattr(cls, name)(self, *arguments)
            if due:
                mark.touch()
                accident(os.getpid() if who == "self" else controller, number)
            return value

        return method

    names = [n for n in vars(cls) if n[0] != "_" and callable(getattr(cls, n))]
    return type(cls.__name__, (cls,), {name: noted(name) for name in names})


def run(folder, engine="processes", *, staleness=0, timeout_s=60.0, max_restarts=3, ranks=1, **fate):
    """The checksum that the program prints, and its controller, which is closed."""
    example = load_example()
    for name in CALLS:
        setattr(example, name, watched(getattr(example, name), folder, **fate))
    said = []
    example.print = lambda *words: said.append(words)
    journal = folder / "journal.jsonl"
    with hp.Controller(engine, journal, max_restarts, timeout_s) as controller:
        example.train(controller, str(folder / "weights"), STEPS, staleness, ranks)
    (((_, checksum),)) = said
    return checksum, controller


def ran(folder):
    """Calls that were begun, as (role, method, arguments), with how often."""
    lines = (folder / "ran").read_text().splitlines()
    return Counter(line.partition(" ")[2] for line in lines)


def answered(folder):
    """Calls that the journal has answers of, by role, in the words of `ran`."""
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return Counter(
        f"{r['role']} {r['method']} {json.dumps(r['arguments'])}" for r in records if r["role"] and r["number"]
    )


def by_role(calls):
    total = Counter()
    for call, times in calls.items():
        total[call.split()[0]] += times
    return dict(total)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """Checksum of the program in one process."""
    return run(tmp_path_factory.mktemp("inline"), "inline")[0]
