"""Folders of the flash tier: a living process keeps its own, what a killed one has left goes with the next run."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from hyper_parallel.backends.torch.memory import run_folder
from hyper_parallel.errors import TransferFailed

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
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(parent), how], stdout=subprocess.PIPE, text=True
    )
    try:
        folder, child = process.stdout.readline().split()
        yield process, parent / folder, int(child)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


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
    (tmp_path / "run-there.lock").write_text(
        "hyper-parallel 00000000-0000-0000-0000-000000000000\n"
    )
    with run_folder(tmp_path, "run"):
        assert (tmp_path / "run-there").exists()


def test_a_place_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TransferFailed, match="HP513"), run_folder(tmp_path / "file", "run"):
        pass
