"""What ranks with memory plans tell people: records, lines, timelines."""

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
    """What offload predicted and measured in one step, over all ranks.

    Attributes:
        pred_memory_bytes: Predicted device memory of the fullest rank, the arena and what is made beside it; measured:
            `memory_bytes` of the step.
        difference_bytes: Largest distance between predicted and measured peak of any tier on any rank.
        outside_bytes: Most device bytes so far outside of planned steps: start, rehearsal, evaluations, checkpoints.
        dram_bytes: Host memory that the buffers of the fullest rank take.
        flash_bytes: Measured peak of the files of the fullest rank.
        sim_step_s: Time of the step on the virtual clock, slowest rank; on accelerators measured by events.
        pred_sim_step_s: What the plan predicts for it.
        wait_s: Of it, seconds the compute lane stood still for copies.
        pred_wait_s: What the plan predicts for that.
        join_s: Of it, seconds the compute lane stood still for other ranks.
        pred_join_s: What the plan predicts for that.
        replanned: A rank made a new plan after this step.
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
        """The largest of every number over all ranks."""
        return OffloadRecord(*map(max, zip(*map(astuple, gather_objects(self)), strict=True)))


def with_memory(plan: Plan, memory: MemoryPlan, notes: tuple[str, ...]) -> Plan:
    """The plan with the memory that offload predicts for the fullest rank; every rank must call.

    Args:
        plan: The plan of the run.
        memory: This rank's memory plan.
        notes: Sentences about it, beside those that it says itself.
    """
    fullest = max(
        gather_objects(_memory_terms(memory)),
        key=lambda terms: sum(t.bytes for t in terms if t.tier == "hbm"),
    )
    lines = tuple(f"offload: {line}" for line in memory.statement)
    return replace(plan, memory=fullest, notes=(*plan.notes, *notes, *lines))


def _memory_terms(plan: MemoryPlan) -> tuple[MemoryTerm, ...]:
    """The predicted device memory of a rank as terms of a plan, and what is in the other tiers."""
    unused, staging = plan.arena_bytes - plan.peak_bytes["device"], plan.program.staging_bytes
    flash, kinds = plan.peak_bytes["flash"], peak_by_kind(plan)
    terms = [
        *((k, "hbm", n, "bytes of this kind at the device peak") for k, n in kinds.items()),
        ("gaps", "hbm", unused, "between the addresses of the arena"),
        ("staging", "hbm", staging, "results made beside the arena"),
        ("offloaded to dram", "dram", plan.dram_bytes, "buffers, reserved before the first step"),
        ("offloaded to flash", "flash", flash, "peak of the tier"),
    ]
    return tuple(
        MemoryTerm(name, tier, size, f"memory plan: {why}")
        for name, tier, size, why in terms
        if size or name in kinds
    )


def offload_line(plan: MemoryPlan) -> str:
    """What a memory plan promises, in one line."""
    recorded = range(len(plan.program.operators))
    before, before_s = order_peak(plan.program, recorded), order_seconds(plan.program, recorded)
    most = {"device": plan.device_bytes, "dram": plan.dram_bytes, "flash": plan.peak_bytes["flash"]}
    tiers = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in most.items() if size)
    return (
        f"offload: predicted peak {tiers} (without: {format_bytes(before)}); simulated step "
        f"{format_seconds(plan.seconds)} (without: {format_seconds(before_s)})"
    )


def updates_line(plan: MemoryPlan, *, bitwise: bool) -> str:
    """How many optimizer operators run in host memory, and how the first step is checked, in one line."""
    count = sum(action.kind == "update" for action in plan.actions)
    how = "bit for bit"
    if count and not bitwise:
        how = f"up to {ULPS} units in the last place of a tensor's largest value"
    return (
        f"offload: {count} optimizer operators run in host memory; the state after the first step is compared with the "
        f"plain one's {how}"
    )


def drift_line(step: int, record: OffloadRecord) -> str:
    """That a step waited longer than planned, in one line."""
    return (
        f"offload: step {step} took {format_seconds(record.sim_step_s)} instead of the planned "
        f"{format_seconds(record.pred_sim_step_s)}, waiting {format_seconds(record.wait_s)} for copies; planned again "
        "with the measured bandwidth"
    )


def excess_line(step: int, record: OffloadRecord, measured_bytes: int) -> str:
    """That a step took more device memory than its plan says, in one line."""
    return (
        f"offload: step {step} took {format_bytes(measured_bytes)} of the device instead of the predicted "
        f"{format_bytes(record.pred_memory_bytes)}: something beside the plan holds memory"
    )


def write_timelines(timelines: tuple[Timeline, Timeline], directory: Path) -> None:
    """Predicted and measured timeline of one planned step, for the report."""
    for timeline, name in zip(timelines, ("predicted", "measured"), strict=True):
        write_timeline(timeline, directory / f"offload_{name}.json")
