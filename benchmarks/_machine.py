"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """Facts of this machine, for the JSON of a benchmark; `load` tells whether it was idle."""
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


def device_of(name: str) -> torch.device | None:
    """The device that `--device` names; None: `auto` on a machine without an accelerator."""
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
