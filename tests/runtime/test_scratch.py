"""Scratch folders: gone at the end, or with the next one when their process was killed; those of others stay."""

import os
import resource
import signal
import tempfile
import time
from pathlib import Path

import pytest

from hyper_parallel.errors import OutputNotWritable, RankFailed
from hyper_parallel.runtime import launch, scratch_folder

pytestmark = pytest.mark.dist


def held():
    """A folder of another process, which has a child; the folder and the process."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        with scratch_folder(in_memory=False) as folder:
            (folder / "file").write_text("x")
            if os.fork():
                os.write(writer, os.fsencode(folder))
            time.sleep(60)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as file:
        return Path(os.fsdecode(file.read(4096))), pid


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_ends_with_its_context_or_with_the_next_one(temporary):
    with scratch_folder(in_memory=False) as first:
        assert first.parent == temporary
    assert not [*temporary.iterdir()]
    left, process = held()
    with scratch_folder(in_memory=False):
        assert left.is_dir()  # it is in use
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with scratch_folder(in_memory=False):
        assert left.is_dir()  # by a child
    os.killpg(process, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while left.exists() and time.monotonic() < deadline:
        with scratch_folder(in_memory=False):
            pass
    assert not [*temporary.iterdir()]


def test_folders_of_others_stay(temporary):
    victim = temporary / "victim"
    (victim / "thesis").mkdir(parents=True)
    for name in ("hyper_parallel_plain", "hyper_parallel_locked", "hyper_parallel_other"):
        (temporary / name).mkdir()
    (temporary / "hyper_parallel_locked" / ".lock").write_text("")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    (temporary / "hyper_parallel_other" / ".lock").write_text(f"{boot}another_name")
    (temporary / "hyper_parallel_link").symlink_to(victim)
    (victim / ".lock").write_text(f"{boot}hyper_parallel_link")
    before = sorted(temporary.rglob("*"))
    with scratch_folder(in_memory=False):
        pass
    assert sorted(temporary.rglob("*")) == before


def test_without_space_it_is_refused_with_a_code(temporary):
    def rank(_):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(OutputNotWritable, match="TMPDIR"), scratch_folder():
            pass
        return [path.name for path in temporary.iterdir()]

    assert launch(rank, 1, timeout_s=60) == [[]]


def test_ranks_do_without_the_directory_of_temporary_files(temporary):
    temporary.chmod(0o500)
    try:
        large = launch(lambda rank: bytes(3 << 20) + bytes([rank]), 2, timeout_s=60)
    finally:
        temporary.chmod(0o700)
    assert [len(result) for result in large] == [(3 << 20) + 1] * 2
    assert [result[-1] for result in large] == [0, 1]
    assert not [*temporary.iterdir()]


def test_a_rank_without_a_log_names_none(tmp_path):
    def rank(number):
        if number == 0:
            os._exit(3)

    with pytest.raises(RankFailed) as raised:
        launch(rank, 2, timeout_s=60, log_dir=tmp_path, echo_rank=0)
    assert raised.value.where == "the lines above"
    (tmp_path / "rank_1.log").unlink(missing_ok=True)
    with pytest.raises(RankFailed) as raised:
        launch(rank, 2, timeout_s=60, log_dir=tmp_path, echo_rank=1)
    assert Path(raised.value.where).is_file()


def test_ranks_go_on_without_a_log_that_cannot_be_created(tmp_path):
    (tmp_path / "rank_0.log").mkdir()
    assert launch(lambda rank: rank, 2, timeout_s=60, log_dir=tmp_path) == [0, 1]
