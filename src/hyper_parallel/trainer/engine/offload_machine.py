"""Machine models for offload, derived from recipe and topology, and checks that a run supports offload.

A memory plan lists, for the operators of a recorded step, the tensors to evict, prefetch and recompute. On a CPU rank a
simulated device executes the plan: host memory with the budget and the clock of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from hyper_parallel.backends.torch import resolve_layouts
from hyper_parallel.backends.torch.dropout import has_dropout
from hyper_parallel.backends.torch.forward_variants import ungrouped_experts
from hyper_parallel.backends.torch.memory import Measured
from hyper_parallel.config import Offload, Recipe
from hyper_parallel.errors import BudgetImpossible, CaptureUnsupported
from hyper_parallel.ir import Plan
from hyper_parallel.memory import Channel, MemoryMachine, Roofline
from hyper_parallel.runtime import host_machine
from hyper_parallel.topology import load_topology
from hyper_parallel.units import format_bytes

MARGIN: Final = 0.04
"""Share of available device memory that `budget: auto` leaves to kernel workspaces and fragmentation."""
NOTICED: Final = 0.02
"""Minimum relative difference between measured and assumed bandwidth that changes a machine model."""


@dataclass(frozen=True, slots=True)
class OffloadMachine:
    """Machine model and goal of a rank's memory plan.

    Attributes:
        choice: Section `offload` of the recipe.
        budget_bytes: Device budget of a rank; None when the goal is a maximum slowdown.
        planned: Machine model that the memory plan assumes.
        actual: Machine model that the simulated device follows. It differs from `planned` if the recipe sets
            `offload.bandwidth`.
        roofline: Peak FLOP/s and memory bandwidth, for predicted seconds of operators.
        link: Latency and bytes/s between ranks, for predicted seconds of collectives.
        notes: Lines that explain the budget.
    """

    choice: Offload
    budget_bytes: int | None
    planned: MemoryMachine
    actual: MemoryMachine
    roofline: Roofline
    link: Channel
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, device: torch.device) -> OffloadMachine:
        """Derive machine model and goal for a rank's device; `recipe.offload` must be enabled."""
        ranks, choice = plan.strategy.world_size, recipe.offload
        node = load_topology(recipe.topology, ranks)
        dram = choice.dram
        if dram is None and node.host_bytes is not None:
            dram = int(node.host_bytes)
        actual = host_machine(node, dram, choice.flash_dir is not None)
        actual = replace(actual, flash_bytes=choice.flash)
        planned = actual
        if choice.bandwidth is not None:
            channel = Channel(float(choice.bandwidth))
            planned = replace(actual, store=channel, prefetch=channel)
        budget, notes = choice.budget, tuple[str, ...]()
        if budget == "auto":
            budget, line = resolved_budget(int(plan.memory_capacity_bytes), device)
            notes = (line,)
        flops = node.peak_flops(plan.workload.compute_dtype)
        roofline = Roofline(flops, node.device.memory_bytes_s.value)
        tier = node.tier_of(ranks)
        link = Channel(tier.bytes_s.value, tier.latency_s.value)
        return cls(choice, budget, planned, actual, roofline, link, notes)


def budget_too_small(text: str, budget_bytes: int, least_bytes: int) -> BudgetImpossible:
    """Return the error `text` for a device budget below `least_bytes`; its hint sets the budget to `least_bytes`."""
    error = BudgetImpossible(
        text,
        where="offload.budget",
        got=f"{budget_bytes} bytes",
        allowed=f"at least {least_bytes} bytes ({format_bytes(least_bytes)})",
        hint=f"set `offload.budget={least_bytes}`",
    )
    error.least_bytes = least_bytes
    return error


def resolved_budget(budget_bytes: int, device: torch.device) -> tuple[int, str]:
    """Return the device budget of `budget: auto` in bytes, and a line that explains it.

    On a CPU the budget is `budget_bytes`, the memory of a rank's device according to the topology. On an accelerator
    the budget is the smaller of `budget_bytes` and the device's memory, minus the memory that device contexts and other
    processes use outside of torch's allocator, minus the share `MARGIN` of the rest.
    """
    if device.type == "cpu":
        text = f"offload: budget auto = {format_bytes(budget_bytes)}, the memory of a rank"
        return budget_bytes, text
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    outside = int(total - free - module.memory_reserved(device))
    budget = int((min(budget_bytes, total) - outside) * (1 - MARGIN))
    return budget, (
        f"offload: budget auto = {format_bytes(budget)}: {format_bytes(min(budget_bytes, total))} of the device, "
        f"{format_bytes(outside)} used outside of the plan, {MARGIN:.0%} of the rest reserved"
    )


def check_offload(recipe: Recipe, plan: Plan, model: nn.Module, where: Callable[[str], str]) -> None:
    """Check that offload supports the model and the layout; no effect if the recipe does not enable offload.

    Raises:
        CaptureUnsupported: HP511 for experts whose number of tokens is not fixed, and for dropout under tensor
            parallelism with replicated activations.
    """
    strategy = plan.strategy
    if not recipe.offload.on:
        return
    if strategy.tp > 1 and has_dropout(model) and resolve_layouts(model, plan).whole_stream:
        raise CaptureUnsupported(
            "offload does not support dropout under tensor parallelism with replicated activations: each rank needs "
            "its own random stream",
            where=where("parallel.tp_x"),
            got=f"tp={strategy.tp}, a model with dropout",
            allowed="training.disable_dropout=true, or no tensor parallelism",
            hint="training.disable_dropout=true",
        )
    if recipe.moe.capacity_factor is not None:
        return
    dtype = recipe.training.dtype
    if why := ungrouped_experts(model, getattr(torch, dtype)):
        in_float32 = strategy.ep == 1 and dtype != "float32" and not ungrouped_experts(model, torch.float32)
        raise CaptureUnsupported(
            f"a memory plan needs fixed shapes, but these experts run one by one ({why}), each on a number of tokens "
            "that depends on the data",
            where=where("training.dtype"),
            got=f"training.dtype={dtype}, moe.capacity_factor=null",
            hint=_capacity_hint(recipe) + (", or training.dtype=float32" if in_float32 else ""),
        )
    if strategy.ep > 1:
        raise CaptureUnsupported(
            "a memory plan needs fixed shapes, but without a capacity the tokens per expert depend on the data",
            where=where("parallel.ep"),
            got=f"ep={strategy.ep}, moe.capacity_factor=null",
            hint=f"{_capacity_hint(recipe)}, or parallel.ep=1",
        )


def _capacity_hint(recipe: Recipe) -> str:
    """Return overrides that set an expert capacity, and disable overlaps that do not support one."""
    overlap = recipe.overlap
    return "moe.capacity_factor=1.25" + (" overlap=none" if overlap.ep != "none" or overlap.tp == "half-batch" else "")


def measured_machine(machine: MemoryMachine, measured: Measured) -> MemoryMachine:
    """Return the machine model, with the measured bandwidth of each channel that differs by more than `NOTICED`."""
    changed = {}
    for kind in ("store", "prefetch", "copy_out", "copy_in"):
        channel: Channel | None = getattr(machine, kind)
        rate = None if channel is None else measured.copied[kind].bytes_s(channel.latency_s)
        if channel is not None and rate is not None and abs(rate / channel.bytes_s - 1) > NOTICED:
            changed[kind] = replace(channel, bytes_s=rate)
    return replace(machine, **changed)
