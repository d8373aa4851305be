"""Output that outlives its reader, in a process of its own and in one that it forks."""

import subprocess
import sys

import pytest

APP = """
import os, sys
from hyper_parallel.cli._pipes import lasting_output
with lasting_output():
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
