"""Machine model of the planner: a roofline for operators, a serial channel per copy direction, and tier capacities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyper_parallel.ir import COPIES, MemoryProgram, Operator


@dataclass(frozen=True, slots=True)
class Channel:
    """Copy direction between two tiers; its copies run one after another.

    Attributes:
        bytes_s: Bytes per second of one device while all devices of its node copy.
        latency_s: Seconds before the first byte of a copy.
    """

    bytes_s: float
    latency_s: float = 10e-6

    def seconds(self, num_bytes: int) -> float:
        """Return the duration of one copy in seconds."""
        return self.latency_s + num_bytes / self.bytes_s


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline model: an operator takes overhead_s + max(FLOPs / flops_s, access bytes / bytes_s) seconds.

    Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
    """

    flops_s: float
    bytes_s: float
    overhead_s: float = 2e-6

    def seconds(self, op: Operator) -> float:
        """Return the duration of one operator in seconds."""
        return self.overhead_s + max(op.flops / self.flops_s, op.access_bytes / self.bytes_s)

    def annotate(self, program: MemoryProgram, link: Channel | None = None) -> MemoryProgram:
        """Return the program with the `seconds` of every operator computed from its FLOPs and access bytes.

        With `link`, the channel between ranks, collectives get 0 seconds and a `comm_s`. None: collectives are timed
        like other operators.
        """

        def timed(op: Operator) -> Operator:
            if link is not None and op.group:
                return replace(op, seconds=0.0, comm_s=link.seconds(op.access_bytes))
            return replace(op, seconds=self.seconds(op))

        return replace(program, operators=tuple(map(timed, program.operators)))


def with_seconds(program: MemoryProgram, measured: Sequence[float] | None) -> MemoryProgram:
    """Return the program with measured seconds of its operators, one number per operator; None: unchanged.

    Collectives, and operators whose measured seconds are 0, keep the seconds of `program`.
    """
    if measured is None:
        return program
    pairs = zip(program.operators, measured, strict=True)
    return replace(program, operators=tuple(replace(op, seconds=s) if s and not op.group else op for op, s in pairs))


@dataclass(frozen=True, slots=True)
class MemoryMachine:
    """Copy channels between device, DRAM and flash, and the capacities of DRAM and flash.

    A channel has the name of its copying action, a key of `COPIES`.

    Attributes:
        store: Channel from device to DRAM.
        prefetch: Channel from DRAM to device.
        copy_out: Channel from DRAM to flash; None: there is no flash tier.
        copy_in: Channel from flash to DRAM; None: there is no flash tier.
        dram_bytes: Pinned bytes this device may use, counted in the slabs from which buffers are cut
            (see `MemoryPlan.dram_bytes`); None: unlimited.
        flash_bytes: File bytes this device may use; None: unlimited.
    """

    store: Channel
    prefetch: Channel
    copy_out: Channel | None = None
    copy_in: Channel | None = None
    dram_bytes: int | None = None
    flash_bytes: int | None = None

    def derated(self, margin: float) -> MemoryMachine:
        """Return the machine with the rate of every channel divided by 1 + margin."""
        channels = {
            kind: replace(channel, bytes_s=channel.bytes_s / (1 + margin))
            for kind in COPIES
            if (channel := getattr(self, kind)) is not None
        }
        return replace(self, **channels)

    def channel(self, kind: str) -> Channel:
        """Return the channel of a copying action, such as `store`; raise ValueError if the machine lacks it."""
        channel: Channel | None = getattr(self, kind)
        if channel is None:
            raise ValueError(f"the plan uses {kind}, but the machine has no flash tier")
        return channel
