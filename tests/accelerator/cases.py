"""What a device must do, one function per case; each runs on the emulated accelerator, in a process of its own kind.

    python -m tests.accelerator.cases FILE ...     # functions `on_*` of tests/accelerator/FILE.py, one JSON line each

A case gets a folder, and the device with its knobs as they are at the start.
"""

import gc
import importlib
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

CALM = {
    "copy_delay_us": 0, "bytes_per_s": 0, "operator_delay_us": 0, "skip_stream_wait": -1, "skip_host_wait": -1,
    "stream_waits": 0, "host_waits": 0, "fail_copy": -1, "copies": 0, "host_seeds": 0, "workspace_bytes": 0,
    "late_poison": 0,
}  # fmt: skip
CAPACITY = 1 << 32


def calm(knobs):
    """All knobs as at the start, and no garbage of the case before: it would be freed, and counted, in this one."""
    gc.collect()
    for name, value in CALM.items():
        getattr(knobs, f"set_{name}")(value)
    knobs.set_large_blocks(False)
    knobs.set_devices(1)
    knobs.set_capacity(0, CAPACITY, 0)


def names_in(file):
    """Cases of a file, without importing it: the parent must not have the device."""
    text = (Path(__file__).parent / f"{file}.py").read_text()
    return [line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def on_")]


def main(files):
    from tests.accelerator.device import load

    knobs = load()
    import torch

    torch.set_num_threads(1)
    for file in files:
        cases = importlib.import_module(f"tests.accelerator.{file}")
        for name in names_in(file):
            calm(knobs)
            start, error = time.perf_counter(), None
            try:
                with tempfile.TemporaryDirectory() as folder:
                    getattr(cases, name)(knobs, Path(folder))
            except (Exception, pytest.fail.Exception):  # the latter is no Exception
                error = traceback.format_exc()
            seconds = round(time.perf_counter() - start, 2)
            sys.stdout.write(json.dumps({"case": name, "seconds": seconds, "error": error}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    import os

    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the device's threads never end
