"""Memory limits of a generation, and its predicted and measured memory use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hyper_parallel.ir import MEMORY_TIERS
from hyper_parallel.memory import MemoryMachine, Roofline


@dataclass(frozen=True)
class MemoryLimits:
    """Memory limits of a generation.

    Attributes:
        device_bytes: Device budget.
        machine: Channels, DRAM and flash capacities.
        roofline: Seconds of operators on the virtual clock.
        flash: Parent of the file tier's folder; required when the machine has a file tier.
    """

    device_bytes: int
    machine: MemoryMachine
    roofline: Roofline
    flash: Path | None = None


@dataclass
class MemoryUse:
    """Predicted and measured memory use of a generation.

    Attributes:
        predicted_bytes: Peak per tier of the two plans: the arena and staging on the device, the buffers in DRAM.
        measured_bytes: Measured peaks of all steps, the transition from one plan to the other included.
        state_bytes: Bytes of weights, buffers and KV cache.
        seconds: Seconds of all steps.
        wait_s: Part of `seconds` in which the device waited for copies.
        steps: Steps that ran.
        simulated: True on the simulated device of a CPU, with seconds of a virtual clock; else all is measured.
    """

    predicted_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_TIERS, 0))
    state_bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    simulated: bool = True

    def add(self, other: MemoryUse) -> None:
        """Add a later use of the same machine: peaks are maxima, seconds and steps are sums."""
        self.state_bytes = max(self.state_bytes, other.state_bytes)
        for peaks, other_peaks in (
            (self.predicted_bytes, other.predicted_bytes),
            (self.measured_bytes, other.measured_bytes),
        ):
            peaks |= {tier: max(size, peaks.get(tier, 0)) for tier, size in other_peaks.items()}
        self.seconds += other.seconds
        self.wait_s += other.wait_s
        self.steps += other.steps
