"""Measurement of matrix-multiply rate and memory bandwidth of the CPU with every core busy.

This file runs as a script in a separate process, because the number of BLAS threads is fixed when numpy loads. One
thread per core runs single-threaded multiplications. The script prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_GEMM_N = 384
_BUDGET_S = 0.05
_COPY_BYTES = 128 * 2**20


def _rate_of_all_cores(cores: int, work: Callable[[], float]) -> float:
    """Run `work`, which returns a rate, on every core at the same time, and return the sum of the rates."""
    barrier = threading.Barrier(cores)

    def run(_: int) -> float:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(run, range(cores)))


def _rate(amount: float, action: Callable[[], object]) -> float:
    """Run `action`, which processes `amount` units, for `_BUDGET_S`; return the highest rate in units per second."""
    action()
    best, end = 0.0, time.perf_counter() + _BUDGET_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = max(best, amount / (time.perf_counter() - start))
    return best


def measure(cores: int) -> dict[str, float]:
    """Return the rates of all cores together: `float32` and `float64` FLOP/s, `memory` bytes/s (read plus written)."""
    import numpy as np

    def gemm(dtype: str) -> Callable[[], float]:
        def work() -> float:
            a = np.full((_GEMM_N, _GEMM_N), 0.5, dtype)
            out = np.empty_like(a)
            return _rate(2.0 * _GEMM_N**3, lambda: np.matmul(a, a, out=out))

        return work

    def copy() -> float:
        source = np.zeros(max(2**20, min(_COPY_BYTES // cores // 2, 2**25)), np.uint8)
        source.fill(1)
        target = np.empty_like(source)
        return _rate(2.0 * source.nbytes, lambda: np.copyto(target, source))

    rates = {dtype: _rate_of_all_cores(cores, gemm(dtype)) for dtype in ("float32", "float64")}
    rates["memory"] = _rate_of_all_cores(cores, copy)
    return rates


if __name__ == "__main__":
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[_name] = "1"
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))))
