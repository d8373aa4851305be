"""Facts about the machine on which a benchmark runs, and its load."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # names and numbers of malloc.h

QUIET = 0.05
"""Share of the cores' time that other processes may use, for a valid measurement."""


def machine() -> dict[str, object]:
    """Return facts about this machine for a benchmark's JSON; `load` shows whether the machine was idle."""
    return {
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load": os.getloadavg(),
    }


def busy_s() -> float:
    """Return the core seconds since boot in which cores ran processes or were stolen by the host.

    Less the processor time of a benchmark's own processes, it is the load of others. Pressure is no measure of that
    load where ranks have one core each: the threads of a rank that send and receive wait for its computation. The
    result is 0 where Linux's counters are missing.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _io, _irq, _softirq, steal, *_ = map(
        int, stat.read_text(encoding="ascii").split(maxsplit=9)[1:9]
    )
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def others_shares(busy: Sequence[float], step_s: Sequence[float], own: Sequence[Sequence[float]]) -> list[float]:
    """Return the share of all cores that processes other than the ranks used in every step.

    Args:
        busy: Increase of `busy_s` in every step.
        step_s: Seconds of every step.
        own: Processor seconds of every step, per rank.
    """
    cores = os.cpu_count() or 1
    return [(total - sum(ranks)) / (cores * seconds) for total, seconds, *ranks in zip(busy, step_s, *own, strict=True)]


def calm_rounds(shares: Iterable[Sequence[float]]) -> tuple[list[int], float]:
    """Return the rounds to evaluate, and the largest share of others in them.

    These are all rounds within `QUIET`, or the calmest half if fewer rounds are.

    Args:
        shares: Results of `others_shares` per variant; every round measures each of them.
    """
    worst = [max(steps) for steps in zip(*shares, strict=True)]
    calm = [i for i, share in enumerate(worst) if share <= QUIET]
    half = max(1, len(worst) // 2)
    if len(calm) < half:
        calm = sorted(range(len(worst)), key=worst.__getitem__)[:half]
    return calm, max(worst[i] for i in calm)


def keep_freed_memory(reserve_bytes: int = 2**31) -> None:
    """Let glibc keep freed memory of this process, as the caching allocator of an accelerator does.

    By default, glibc returns large tensors to the system, and each new one faults its pages in again. A strategy with
    smaller tensors then seems to compute faster. Nothing happens where there is no glibc.

    Args:
        reserve_bytes: Bytes to fault in now. Otherwise the first steps of each variant do so, and again whenever the
            free memory is fragmented: up to 2 s of a step of 14 s were measured.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 2**26)):
            libc.mallopt(option, value)
        torch.ones(reserve_bytes, dtype=torch.uint8)


def device_of(name: str) -> torch.device | None:
    """Return the device named by `--device`; None for `auto` on a machine without an accelerator."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True)
    return torch.device(name)


def _cpu() -> str:
    if sys.platform == "linux":
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor()
