"""Run the test suite in two pytest processes that divide its modules dynamically: `make test`.

Each process claims the next unclaimed module. The first process begins with modules that start ranks, the second with
single-process modules, which leave a core idle. pytest-xdist is not used, because its workers have a thread, and tests
fork ranks, which requires a process without other threads.

    python tools/test_in_parallel.py [arguments of pytest]

The output of the first process is shown immediately, that of the second when it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ORDERS = ("ranks-first", "ranks-last")


def main() -> int:
    """Start both processes, print their output, and return the worse exit status."""
    begin = time.monotonic()
    # Tests start many processes: with byte code each compiles a third of a second less.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_tests_") as scratch:
        log = Path(scratch, "second.log")
        with log.open("w") as second:
            running = [
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "pytest", "-o", "console_output_style=classic"),
                        "--cpu-min=5",  # slow modules and tests, with their seconds
                        *(f"--claims={scratch}", f"--modules={order}", *sys.argv[1:]),
                    ],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                )
                for order, output in zip(ORDERS, (None, second), strict=True)
            ]
            # An interrupt of the terminal reaches both; each says what it was doing and ends.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            codes = [process.wait() for process in running]
        print("\n== second process", flush=True)
        sys.stdout.write(log.read_text(errors="replace"))
    seconds = time.monotonic() - begin
    print(f"both processes: exit status {codes[0]} and {codes[1]} after {seconds:.0f} s")
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
