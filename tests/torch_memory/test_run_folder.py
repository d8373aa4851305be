"""Folders of the flash tier: a living process keeps its own, what a killed one has left goes with the next run."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyper_parallel.backends.torch.memory import run_folder
from hyper_parallel.errors import TransferFailed
from hyper_parallel.owned_folder import MARKER, Marker, write_marker
from tests.owned_folder.test_replacement import listing

pytestmark = pytest.mark.torch

_HOLD = """
import os, sys, time
from pathlib import Path
from hyper_parallel.backends.torch.memory import run_folder

with run_folder(Path(sys.argv[1]), "run") as folder:
    (folder / "rank0").mkdir()
    (folder / "rank0" / "3.bin").write_bytes(b"12345678")
    child = os.fork() if sys.argv[2] == "with-rank" else 0  # ranks are forked
    if child or sys.argv[2] == "alone":
        print(folder, child, flush=True)
    time.sleep(100)
"""


@contextmanager
def holding(parent, how="alone"):
    """Another process with a folder: the process, the folder, the process of its rank."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(parent), how], stdout=subprocess.PIPE, text=True)
    try:
        folder, child = process.stdout.readline().split()
        yield process, parent / folder, int(child)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_killed_process_leaves_its_folder_to_the_next_run(tmp_path):
    (tmp_path / "run-older").mkdir()  # no lock: nobody can tell whose it is
    (tmp_path / "other.lock").write_text("of another program")
    theirs = sorted(tmp_path.iterdir())
    with holding(tmp_path) as (living, kept, _), holding(tmp_path) as (victim, left, _):
        with run_folder(tmp_path, "run"):
            assert (kept / "rank0" / "3.bin").exists()
            assert (left / "rank0" / "3.bin").exists()
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert (left / "rank0" / "3.bin").exists()
        with run_folder(tmp_path, "run") as mine:
            assert mine.is_dir()
            assert not left.exists()
            assert (kept / "rank0" / "3.bin").read_bytes() == b"12345678"
        assert sorted(tmp_path.iterdir()) == sorted([*theirs, kept, kept.with_suffix(".lock")])
        assert living.poll() is None
    with run_folder(tmp_path, "run"):
        pass
    assert sorted(tmp_path.iterdir()) == theirs


@pytest.mark.slow
def test_a_folder_lives_as_long_as_a_rank_of_its_run(tmp_path):
    with holding(tmp_path, "with-rank") as (parent, folder, rank):
        parent.kill()
        parent.wait()
        with run_folder(tmp_path, "run"):
            assert (folder / "rank0" / "3.bin").exists()
        os.kill(rank, signal.SIGKILL)
        parent.stdout.read()  # ends when the rank has
        with run_folder(tmp_path, "run"):
            assert not folder.exists()


def test_the_folder_of_another_host_stays(tmp_path):
    """Whether its processes live cannot be told from here."""
    (tmp_path / "run-there").mkdir()
    (tmp_path / "run-there.lock").write_text("hyper-parallel 00000000-0000-0000-0000-000000000000\n")
    with run_folder(tmp_path, "run"):
        assert (tmp_path / "run-there").exists()


def lock_of(folder: str) -> bytes:
    """A lock file as a run on this machine writes it."""
    return b"hyper-parallel " + Path("/proc/sys/kernel/random/boot_id").read_bytes() + folder.encode() + b"\n"


def plant_lock(parent, content=None, name="work"):
    (parent / f"{name}.lock").write_bytes(lock_of(name) if content is None else content)


def plant_link(parent):
    plant_lock(parent, name="other")
    (parent / "work.lock").symlink_to("other.lock")


def plant_marker(parent, **values):
    plant_lock(parent)
    write_marker(parent / "work", Marker(**{"kind": "scratch", "identity": "work"} | values))


def plant_linked_folder(parent):
    (parent / "work").rename(parent / "victim")
    write_marker(parent / "victim", Marker("scratch", identity="work"))
    (parent / "work").symlink_to("victim")
    plant_lock(parent)


def plant_hard_link(parent):
    plant_marker(parent)
    os.link(parent / "work.lock", parent / "second")


def plant_for_another_user(parent):
    plant_marker(parent)
    os.chown(parent / "work.lock", 4321, -1)


PLANTED = {
    "a lock": plant_lock,
    "an older lock": lambda parent: plant_lock(parent, lock_of("").rstrip() + b"\n"),
    "an empty lock": lambda parent: plant_lock(parent, b""),
    "a lock that is a link": plant_link,
    "a lock with a second name": plant_hard_link,
    "a lock of another folder": lambda parent: plant_lock(parent, lock_of("elsewhere")),
    "a marker of another folder": lambda parent: plant_marker(parent, identity="elsewhere"),
    "a marker of another kind": lambda parent: plant_marker(parent, kind="run"),
    "a folder that is a link": plant_linked_folder,
    "a file of somebody else in a run's folder": plant_marker,
    "a lock of another user": plant_for_another_user,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_lock_removes_nothing(tmp_path, name):
    if name == "a lock of another user" and os.geteuid():
        pytest.skip("only root gives files away")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years of work")
    (tmp_path / "work" / "3.txt" if name != "a lock of another user" else tmp_path / "3.txt").touch()
    PLANTED[name](tmp_path)
    before = listing(tmp_path)
    with run_folder(tmp_path, "run"):
        pass
    after = listing(tmp_path)
    assert {k: v for k, v in after.items() if v != before.get(k)} == {}
    assert [k for k in before if k not in after and not k.endswith((".lock", "second"))] == []


def test_a_lock_that_is_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.lock")
    with run_folder(tmp_path, "run"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["pipe.lock"]


def test_files_of_somebody_else_in_the_folder_of_a_run_survive_its_end(tmp_path):
    with run_folder(tmp_path, "run") as folder:
        (folder / "rank0").mkdir()
        (folder / "rank0" / "3.bin").write_bytes(b"12345678")
        (folder / "thesis.txt").write_text("years of work")
    assert list(listing(folder)) == [MARKER, "thesis.txt"]


def test_a_place_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TransferFailed, match="HP513"), run_folder(tmp_path / "file", "run"):
        pass
