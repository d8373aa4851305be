"""When nothing is legal or nothing fits: the nearest change that makes a plan possible, for the error's hint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hyper_parallel.cost import score
from hyper_parallel.errors import DoesNotFit, NoLegalStrategy
from hyper_parallel.ir import Workload
from hyper_parallel.planner._context import LOCAL, Context
from hyper_parallel.planner._space import Limits, enumerate_space
from hyper_parallel.units import format_bytes

MOST_DOUBLINGS = 7


def nothing_legal(
    context: Context, limits: Limits, ruled_out: Mapping[str, int]
) -> NoLegalStrategy:
    """The error when no combination of degrees is legal, with the smallest change that makes one so."""
    pins = dict(limits.pins)
    shown = ", ".join(f"{k}={v}" for k, v in pins.items()) or "no pins"
    reasons = ", ".join(f"{reason} ({n})" for reason, n in ruled_out.items())
    hint = allowed = None
    for name in pins:
        without = {k: v for k, v in pins.items() if k != name}
        found = _legal_values(context, replace(limits, pins=without), name)
        if found:
            allowed = [f"{name}={v}" for v in found]
            near = min(found, key=lambda v: (abs(v - pins[name]), v))
            hint = context.hint(f"--pin {name}=", f"parallel.{name}", near)
            break
    if hint is None:
        tokens = context.workload.tokens_per_step or 0
        unit = context.workload.seq_len * context.num_devices
        workload = replace(context.workload, tokens_per_step=max(1, round(tokens / unit)) * unit)
        if len(enumerate_space(context.numbers, workload, limits).candidates):
            hint = context.hint(
                "--tokens-per-step ", "training.tokens_per_step", workload.tokens_per_step
            )
    return NoLegalStrategy(
        f"no combination of degrees is legal for {context.model.name} on {context.num_devices} devices"
        + (f": {reasons}" if reasons else ""),
        got=f"{shown}; seq_len={context.workload.seq_len}, tokens_per_step={context.workload.tokens_per_step}",
        allowed=allowed,
        hint=hint,
    )


def _legal_values(context: Context, limits: Limits, name: str) -> list[int]:
    column = "tp" if name == "tp_x" else name
    if column == "tp_y":
        return [1]
    candidates = enumerate_space(context.numbers, context.workload, limits).candidates
    return sorted({int(v) for v in getattr(candidates, column)})


def nothing_fits(context: Context, limits: Limits, least_bytes: int) -> DoesNotFit:
    """The error when no legal candidate fits, with the nearest change that does."""
    hint = next(_changes(context, limits), None)
    return DoesNotFit(
        f"{context.model.name} does not fit on {context.num_devices} devices of {context.supernode.name}",
        got=f"{format_bytes(least_bytes)} on the fullest device at best",
        allowed=f"up to {format_bytes(context.machine.memory_bytes)}",
        hint=hint
        or "take a smaller model, or plan without pins and with a shorter sequence on more devices",
    )


def _changes(context: Context, limits: Limits) -> Iterator[str]:
    """Changes that make a plan fit, the smallest first."""
    if limits.recompute == (0,) and _fits(context, replace(limits, recompute=(1,))):
        yield "training.recompute=full"
    for name in limits.pins:
        without = {k: v for k, v in limits.pins.items() if k != name}
        if _fits(context, replace(limits, pins=without)):
            yield f"leave out the pin {name}={limits.pins[name]}"
    if context.supernode.name != LOCAL:
        least = _least_devices(context, limits)
        if least is not None:
            yield context.hint("--devices ", "parallel.world_size", least)
    workload = context.workload
    while workload.seq_len >= 512 and workload.seq_len % 2 == 0:
        workload = replace(workload, seq_len=workload.seq_len // 2)
        if _fits(replace(context, workload=workload), limits):
            yield context.hint("--seq-len ", "data.seq_len", workload.seq_len)


def _least_devices(context: Context, limits: Limits) -> int | None:
    """The least multiple of the devices, by doubling, that fits with as many tokens per device."""
    for doubling in range(1, MOST_DOUBLINGS + 1):
        factor = 1 << doubling
        devices = context.num_devices * factor
        tokens = context.workload.tokens_per_step
        workload: Workload = replace(
            context.workload, tokens_per_step=tokens * factor if tokens else None
        )
        wider = replace(context, num_devices=devices, workload=workload)
        if _fits(wider, replace(limits, num_devices=devices)):
            return devices
    return None


def _fits(context: Context, limits: Limits) -> bool:
    numbers, machine = context.numbers, context.machine
    limits = replace(limits, tp=context.tp_degrees(limits.num_devices, limits.executable))
    candidates = enumerate_space(numbers, context.workload, limits).candidates
    if len(candidates) == 0:
        return False
    prices = score(numbers, machine, context.workload, candidates)
    return bool((prices.memory_bytes <= machine.memory_bytes).any())
