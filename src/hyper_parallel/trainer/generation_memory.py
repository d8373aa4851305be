"""Memory budget of text generation, and lines of output about the memory used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.backends.torch.memory.generation import MemoryLimits, MemoryUse
from hyper_parallel.errors import BadValue, UnknownPeak
from hyper_parallel.memory import Roofline
from hyper_parallel.runtime import host_machine
from hyper_parallel.topology import load_topology
from hyper_parallel.trainer.files import check_writable
from hyper_parallel.units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """Memory budget of text generation, and the topology to plan for.

    Attributes:
        device_bytes: Maximum bytes of device memory.
        dram_bytes: Maximum bytes of DRAM; None: unlimited.
        flash: Folder of the flash tier; None: no flash tier.
        topology: Topology preset, or path of a topology file; `local`: this machine. The memory plan and the clock of a
            simulated device use the FLOP/s and bandwidths of the topology.
    """

    device_bytes: int
    dram_bytes: int | None = None
    flash: Path | None = None
    topology: str = "local"

    @classmethod
    def parse(cls, device: str, dram: str | None, flash: Path | None, topology: str) -> DeviceMemory:
        """Parse a budget from sizes such as `4GiB`.

        Raises:
            BadValue: HP102 for a size that is malformed or not positive.
            OutputNotWritable: HP105 when `flash` is not writable.
        """
        if flash is not None:
            check_writable(flash, "--flash-dir")
        return cls(
            _size("--device-memory", device),
            None if dram is None else _size("--dram", dram),
            flash,
            topology,
        )

    def limits(self, dtype: str) -> MemoryLimits:
        """Return the limits of a memory plan for a model with parameters of this dtype.

        Raises:
            UnknownPeak: HP310 when the topology has no peak FLOP/s for the dtype.
            HyperParallelError: Errors of `load_topology`.
        """
        node = load_topology(self.topology, 1)
        machine = host_machine(node, self.dram_bytes, self.flash is not None)
        try:
            flops_s = node.peak_flops(dtype)
        except UnknownPeak as error:
            other = "" if dtype == "float32" else "--dtype float32, or "
            error.hint = f"{other}a --topology with peak FLOP/s for {dtype}"
            raise
        roofline = Roofline(flops_s, node.device.memory_bytes_s.value)
        return MemoryLimits(self.device_bytes, machine, roofline, self.flash)


def _size(name: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise BadValue(f"{name} is not a size in bytes", where=name, got=text, hint=f"{name} 4GiB") from error
    if size <= 0:
        raise BadValue(f"{name} must be above 0 bytes", where=name, got=text, hint=f"{name} 4GiB")
    return size


def describe_use(use: MemoryUse, topology: str) -> list[str]:
    """Return lines of output: bytes of weights and cache, peak bytes per used tier, time, and time spent waiting."""
    lines = [f"weights and cache {format_bytes(use.state_bytes)}"]
    for tier, predicted in use.predicted_bytes.items():
        measured = use.measured_bytes[tier]
        if predicted or measured:
            lines.append(
                f"{tier} peak: predicted {predicted} bytes, measured {measured} bytes "
                f"({format_bytes(measured)}), {measured - predicted:+d}"
            )
    clock = f"simulated on `{topology}`" if use.simulated else "measured by events"
    share = use.wait_s / use.seconds if use.seconds else 0.0
    lines.append(
        f"{clock}: {format_seconds(use.seconds)} for {use.steps} steps, "
        f"{format_seconds(use.wait_s)} ({share:.0%}) of it waiting for copies"
    )
    return lines
