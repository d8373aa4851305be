"""Peak memory of this rank during one step.

Accelerators: the allocator's own peak. CPU ranks: the peak of the resident anonymous memory above what the process
had before the model was built. Anonymous pages hold tensors, gradients, optimizer states and communication buffers;
code pages and the memory-mapped data are file pages and do not count, and pages inherited from the launching process
are in the baseline. The kernel keeps the peak of the whole resident set (`VmHWM`), which writing 5 to
`/proc/self/clear_refs` resets (proc(5)); the file part is subtracted. Freed memory that the C library holds for
the next allocation is resident and counts.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class MemoryGauge:
    """Reads the peak of each step; create it before the model.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu" and sys.platform == "linux":
            # Free memory of the inherited heap would be used again unseen: give it back before counting.
            with suppress(AttributeError):  # a C library other than glibc
                ctypes.CDLL(None).malloc_trim(0)
        self._baseline = _resident()["RssAnon"] if device.type == "cpu" else 0

    def start(self) -> None:
        """Forget the peak so far."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        elif _STATUS.exists():
            _RESET.write_text("5")

    def peak_bytes(self) -> int:
        """Peak since `start`; 0 on a system that tells neither."""
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        now = _resident()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return max(0, peak - self._baseline)


def _resident() -> dict[str, int]:
    """Resident memory of this process in bytes by kind, as the kernel counts it."""
    values = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0, "VmHWM": 0}
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in values:
                values[key] = int(rest.split()[0]) * 1024
    return values
