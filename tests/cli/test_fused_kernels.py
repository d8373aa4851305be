"""Output of the compiler of fused kernels."""

import os
import subprocess
import sys

SCRIPT = """
import subprocess
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

from hyper_parallel.backends.mindspore.fusion import KernelFolder

folder = KernelFolder(Path.cwd(), owned=False)
for number in range(2):
    print("step", number)
    with suppress(RuntimeError), folder.building(Path(f"{number}.log")):
        CDLL(None).puts(b"library")  # C buffers it
        subprocess.run(["echo", "child"])
        print("python")
        raise RuntimeError("no kernel")
print("end")
"""


def test_output_of_the_compiler_is_in_the_log_only(tmp_path):
    command = [sys.executable, "-c", SCRIPT]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("step 0\nstep 1\nend\n", "")
    for number in range(2):
        lines = (tmp_path / f"{number}.log").read_text().splitlines()
        assert sorted(lines) == ["child", "library", "python"]
