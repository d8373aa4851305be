"""Records, log lines and timelines of steps executed by memory plans."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from pathlib import Path

from hyper_parallel.backends.torch.memory import ULPS
from hyper_parallel.ir import MemoryPlan, MemoryTerm, Plan, Timeline
from hyper_parallel.memory import order_peak, order_seconds, peak_by_kind
from hyper_parallel.runtime import gather_objects
from hyper_parallel.trainer.files import write_timeline
from hyper_parallel.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class OffloadRecord:
    """Predictions and measurements of offload in one step, over all ranks.

    Attributes:
        pred_memory_bytes: Predicted device memory of the fullest rank: arena and staging buffers. The measured value is
            `memory_bytes` of the step.
        difference_bytes: Largest difference between predicted and measured peak of any tier on any rank.
        outside_bytes: Peak device bytes outside of planned steps so far: start, warm-up, evaluations, checkpoints.
        dram_bytes: Host memory of the buffers of the fullest rank.
        flash_bytes: Measured peak of the files of the fullest rank.
        sim_step_s: Time of the step on the virtual clock, slowest rank; on accelerators measured by events.
        pred_sim_step_s: Predicted `sim_step_s`.
        wait_s: Seconds of the step in which the compute lane waited for copies.
        pred_wait_s: Predicted `wait_s`.
        join_s: Seconds of the step in which the compute lane waited for other ranks.
        pred_join_s: Predicted `join_s`.
        replanned: Whether a rank made a new plan after this step.
    """

    pred_memory_bytes: int
    difference_bytes: int
    outside_bytes: int
    dram_bytes: int
    flash_bytes: int
    sim_step_s: float
    pred_sim_step_s: float
    wait_s: float
    pred_wait_s: float
    join_s: float
    pred_join_s: float
    replanned: bool

    def over_ranks(self) -> OffloadRecord:
        """Return the maximum of every number over all ranks."""
        return OffloadRecord(*map(max, zip(*map(astuple, gather_objects(self)), strict=True)))


def with_memory(plan: Plan, memory: MemoryPlan, notes: tuple[str, ...]) -> Plan:
    """Return the plan with the memory that offload predicts for the fullest rank; every rank must call.

    Args:
        plan: Plan of the run.
        memory: Memory plan of this rank.
        notes: Notes in addition to the statement of the memory plan.
    """
    fullest = max(
        gather_objects(_memory_terms(memory)),
        key=lambda terms: sum(t.bytes for t in terms if t.tier == "hbm"),
    )
    lines = tuple(f"offload: {line}" for line in memory.statement)
    return replace(plan, memory=fullest, notes=(*plan.notes, *notes, *lines))


def _memory_terms(plan: MemoryPlan) -> tuple[MemoryTerm, ...]:
    """Return the predicted memory of a rank, on the device and in the other tiers, as terms of a plan."""
    unused, staging = plan.arena_bytes - plan.peak_bytes["device"], plan.program.staging_bytes
    flash, kinds = plan.peak_bytes["flash"], peak_by_kind(plan)
    terms = [
        *((k, "hbm", n, "bytes of this kind at the device peak") for k, n in kinds.items()),
        ("gaps", "hbm", unused, "between the addresses of the arena"),
        ("staging", "hbm", staging, "staging buffers outside the arena"),
        ("offloaded to dram", "dram", plan.dram_bytes, "buffers, reserved before the first step"),
        ("offloaded to flash", "flash", flash, "peak of the tier"),
    ]
    return tuple(
        MemoryTerm(name, tier, size, f"memory plan: {why}")
        for name, tier, size, why in terms
        if size or name in kinds
    )


def offload_line(plan: MemoryPlan) -> str:
    """Return the predicted peaks and step time of a memory plan, in one line."""
    recorded = range(len(plan.program.operators))
    recorded_peak, recorded_s = (
        order_peak(plan.program, recorded),
        order_seconds(plan.program, recorded),
    )
    most = {"device": plan.device_bytes, "dram": plan.dram_bytes, "flash": plan.peak_bytes["flash"]}
    tiers = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in most.items() if size)
    return (
        f"offload: predicted peak {tiers} (without: {format_bytes(recorded_peak)}); simulated step "
        f"{format_seconds(plan.seconds)} (without: {format_seconds(recorded_s)})"
    )


def updates_line(plan: MemoryPlan, *, bitwise: bool) -> str:
    """Return the number of optimizer operators in host memory and the first step's comparison mode, in one line."""
    count = sum(action.kind == "update" for action in plan.actions)
    tolerance = "bit for bit"
    if count and not bitwise:
        tolerance = f"up to {ULPS} units in the last place of a tensor's largest value"
    return (
        f"offload: {count} optimizer operators run in host memory; the state after the first step is compared with the "
        f"eager step's {tolerance}"
    )


def drift_line(step: int, record: OffloadRecord) -> str:
    """Return a line for a step that waited longer than planned."""
    return (
        f"offload: step {step} took {format_seconds(record.sim_step_s)} instead of the planned "
        f"{format_seconds(record.pred_sim_step_s)}, waiting {format_seconds(record.wait_s)} for copies; planned again "
        "with the measured bandwidth"
    )


def excess_line(step: int, record: OffloadRecord, measured_bytes: int) -> str:
    """Return a line for a step that used more device memory than planned."""
    return (
        f"offload: step {step} took {format_bytes(measured_bytes)} of the device instead of the predicted "
        f"{format_bytes(record.pred_memory_bytes)}: memory is allocated outside of the plan"
    )


def write_timelines(timelines: tuple[Timeline, Timeline], directory: Path) -> None:
    """Write the predicted and measured timeline of one planned step, for the report."""
    for timeline, name in zip(timelines, ("predicted", "measured"), strict=True):
        write_timeline(timeline, directory / f"offload_{name}.json")
