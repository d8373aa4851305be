"""What a generation may take of a device's memory, and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hyper_parallel.ir import MEMORY_TIERS
from hyper_parallel.memory import MemoryMachine, Roofline


@dataclass(frozen=True)
class MemoryLimits:
    """What a generation may take.

    Attributes:
        device_bytes: Device budget.
        machine: Channels, DRAM and flash capacities.
        roofline: Seconds of operators on the virtual clock.
        flash: Where the folder of the file tier is made; needed when the machine has one.
    """

    device_bytes: int
    machine: MemoryMachine
    roofline: Roofline
    flash: Path | None = None


@dataclass
class MemoryUse:
    """What was predicted and what was measured.

    Attributes:
        predicted_bytes: Peak per tier of the two plans; of device and DRAM what they give: the arena and what is made
            beside it, and the buffers.
        measured_bytes: The same of everything that ran, the move from one plan to the other included.
        state_bytes: Weights, buffers and KV cache.
        seconds: Seconds of all steps.
        wait_s: Those of them in which the device waited for copies.
        steps: Steps that ran.
        simulated: On the simulated device of a CPU: seconds are those of a virtual clock. Else all is measured.
    """

    predicted_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_TIERS, 0))
    state_bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    simulated: bool = True

    def add(self, other: MemoryUse) -> None:
        """Count another use of the same machine, after this one."""
        self.state_bytes = max(self.state_bytes, other.state_bytes)
        for mine, more in (
            (self.predicted_bytes, other.predicted_bytes),
            (self.measured_bytes, other.measured_bytes),
        ):
            mine |= {tier: max(size, mine.get(tier, 0)) for tier, size in more.items()}
        self.seconds += other.seconds
        self.wait_s += other.wait_s
        self.steps += other.steps
