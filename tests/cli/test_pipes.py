"""Output that outlives its reader, in a process of its own and in one that it forks."""

import subprocess
import sys
from pathlib import Path

import pytest

APP = """
import os, sys
from hyper_parallel.cli.pipes import broken_pipe_safe_output
with broken_pipe_safe_output():
    print("first", flush=True)
    sys.stdin.readline()  # the reader has left
    if (child := os.fork()) == 0:
        for _ in range(9):
            print("to nobody" * 9999, flush=True)
        sys.stderr.write("child went on\\n")
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(9):
        print("to nobody" * 9999)
    os.write(1, b"past Python")
    sys.stderr.write("went on\\n")
"""


@pytest.mark.unit
def test_a_process_goes_on_when_the_reader_of_its_output_has_left():
    with subprocess.Popen(
        [sys.executable, "-c", APP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        errors = process.stderr.read()
        assert process.wait(30) == 0, errors
    assert errors == "child went on\nwent on\n"


FULL = """
import os, sys
from hyper_parallel.cli import app as frame
from hyper_parallel.cli.pipes import broken_pipe_safe_output
import typer

def go_on() -> None:
    with broken_pipe_safe_output():
        if (child := os.fork()) == 0:
            for _ in range(9):
                print("to a full disk" * 9999, flush=True)
            sys.stderr.write("child went on\\n")
            os._exit(0)
        os.waitpid(child, 0)
        for _ in range(9):
            print("to a full disk" * 9999)
        sys.stderr.write("went on\\n")

app = typer.Typer()
app.command()(go_on)
frame.run(app)
"""


@pytest.mark.unit
def test_a_process_goes_on_when_its_output_is_full_and_says_so_at_the_end():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr.startswith("child went on\nwent on\nerror[HP105]: standard output cannot be written")
    assert "No space left on device" in done.stderr
    assert done.returncode == 1


@pytest.mark.unit
def test_without_any_output_that_can_be_written_the_status_tells():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", FULL], stdout=full, stderr=full, check=False)
    assert done.returncode == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "output", "says"),
    [
        (("--version",), "/dev/full", "error[HP105]: the output cannot be written"),
        (("report", "d/" * 3000), "/dev/null", "error[HP102]: a path is longer"),
        (("checkpoint", "list", "n" * 300), "/dev/null", "error[HP102]: a path is longer"),
    ],
    ids=["full", "path", "name"],
)
def test_what_the_system_refuses_has_a_code(words, output, says):
    with Path(output).open("w") as file:
        command = [sys.executable, "-m", "hyper_parallel", *words]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.startswith(says), done.stderr
    assert done.returncode == 1
    assert len(done.stderr) < 1000


UNREADABLE = """
import os, sys
from pathlib import Path
from hyper_parallel.cli import app as frame
import typer

def read(name: str) -> None:
    Path(name).read_text() if name else os.read(os.open(".", os.O_RDONLY), 1)

app = typer.Typer()
app.command()(read)
frame.run(app)
"""


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "error[HP105]: a file cannot be read or written\n  --> absent"),
        ("", "error[HP105]: a file or stream cannot be opened, read or written"),
    ],
)
def test_a_failed_read_is_not_called_a_failed_write(name, says, tmp_path):
    command = [sys.executable, "-c", UNREADABLE, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stderr.startswith(says), done.stderr
    assert done.returncode == 1
    assert ("df -h" in done.stderr) == bool(name)
