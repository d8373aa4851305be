"""Facts about the machine on which a benchmark runs, and its load."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch


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


def cpu_pressure() -> float:
    """Return the seconds since boot in which some process waited for a core; 0 if the kernel does not count them."""
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return int(text.splitlines()[0].rpartition("total=")[2]) / 1e6


def busy_s() -> float:
    """Return the core seconds since boot in which cores ran processes or were stolen by the host.

    The difference to the CPU time of a benchmark's own processes is the load of others. CPU pressure does not measure
    that
    load when each rank has one core, because a rank's communication threads wait for its own computation.
    """
    text = Path("/proc/stat").read_text(encoding="ascii")
    user, nice, system, _idle, _io, _irq, _softirq, steal, *_ = map(
        int, text.split(maxsplit=9)[1:9]
    )
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


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
