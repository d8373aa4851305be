"""When nothing is legal or nothing fits: the nearest change that makes a plan possible, for the error's hint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from hyper_parallel.errors import DoesNotFit, NoLegalStrategy
from hyper_parallel.ir import Workload
from hyper_parallel.planner._context import LOCAL, Context
from hyper_parallel.planner._leaves import Goal
from hyper_parallel.planner._legal import space_of
from hyper_parallel.planner._limits import CHOICES, DEGREES, Limits
from hyper_parallel.planner._solve import solve
from hyper_parallel.planner._space import divisors
from hyper_parallel.units import format_bytes

MOST_DOUBLINGS: Final = 7


def nothing_legal(
    context: Context, limits: Limits, ruled_out: Mapping[str, int]
) -> NoLegalStrategy:
    """The error when no combination of degrees is legal, with the smallest change that makes one so."""
    shown = ", ".join(f"{k}={_named(k, v)}" for k, v in limits.pins.items()) or "no pins"
    counted = [f"{reason} ({n})" for reason, n in ruled_out.items()]
    reasons = ", ".join(list(_impossible_pins(context, limits)) or counted)
    hint = allowed = None
    for name in limits.pins:
        found = _legal_values(context, limits, name)
        if found:
            allowed = [f"{name}={_named(name, v)}" for v in found]
            near = min(found, key=lambda v: (abs(v - limits.pins[name]), v))
            hint = context.hint(f"--pin {name}=", f"parallel.{name}", _named(name, near))
            break
    if hint is None:
        tokens = context.workload.tokens_per_step or 0
        unit = context.workload.seq_len * context.num_devices
        workload = replace(context.workload, tokens_per_step=max(1, round(tokens / unit)) * unit)
        if _any_legal(replace(context, workload=workload), limits):
            hint = context.hint(
                "--tokens-per-step ", "training.tokens_per_step", workload.tokens_per_step
            )
    if hint is None and context.supernode.name != LOCAL:
        devices = _nearest_devices(context, limits)
        if devices is not None:
            hint = context.hint("--devices ", "parallel.world_size", devices)
    return NoLegalStrategy(
        f"no combination of degrees is legal for {context.model.name} on {context.num_devices} devices"
        + (f": {reasons}" if reasons else ""),
        got=f"{shown}; seq_len={context.workload.seq_len}, tokens_per_step={context.workload.tokens_per_step}",
        allowed=allowed,
        hint=hint,
    )


def _impossible_pins(context: Context, limits: Limits) -> Iterator[str]:
    """Pins that no combination can have, whatever else is chosen."""
    experts = max((b.mlp.num_experts for b in context.model.blocks if b.mlp), default=0)
    for name, value in limits.pins.items():
        if name not in (*DEGREES, "tp"):
            continue
        if context.num_devices % value:
            yield f"{name}={value} does not divide {context.num_devices} devices"
        elif name == "ep" and value > 1 and (not experts or experts % value):
            yield f"ep={value}, but the model has {experts or 'no'} experts"


def _named(name: str, value: int) -> object:
    choices = CHOICES.get(name)
    return value if choices is None else choices[value]


def _legal_values(context: Context, limits: Limits, name: str) -> list[int]:
    """Values of a pin that are legal together with the others."""
    choices = CHOICES.get(name)
    if choices is not None:
        values = list(range(len(choices)))
    else:
        most = max(context.num_devices, context.model.num_layers)
        values = divisors(most) + divisors(context.num_devices)
    others = [v for v in sorted({*values}) if v != limits.pins[name]]
    return [v for v in others if _any_legal(context, _repinned(limits, name, v))]


def _repinned(limits: Limits, name: str, value: int) -> Limits:
    return replace(limits, pins={**limits.pins, name: value})


def _any_legal(context: Context, limits: Limits) -> bool:
    space = space_of(context, limits)
    meshes = space.meshes()
    names = ("pp", "tp_x", "tp_y", "cp", "dp", "accumulation")
    for pp, x, y, cp, dp, steps in {
        tuple(int(v) for v in row) for row in zip(*(meshes[n] for n in names), strict=True)
    }:
        if not space.schedules(pp, steps):
            continue
        for block in space.blocks(x, y, cp, dp):
            for _, shard, *_ in space.states(dp, x * y * cp, block[2] * block[3]):
                if space.refusal_of(shard, cp, x, y, *block) is None:
                    return True
    return False


def _nearest_devices(context: Context, limits: Limits) -> int | None:
    """The nearest number of devices, fewer first, on which something is legal."""
    for distance in range(1, context.num_devices):
        for devices in (context.num_devices - distance, context.num_devices + distance):
            if _any_legal(
                replace(context, num_devices=devices), replace(limits, num_devices=devices)
            ):
                return devices
    return None


def nothing_fits(context: Context, limits: Limits, least_bytes: int) -> DoesNotFit:
    """The error when no legal strategy fits, with the nearest changes that do."""
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
    for name in sorted(limits.pins, key=lambda n: (n != "recompute", n != "microbatch")):
        if not _fits(context, limits.without(name)):
            continue
        if name == "recompute":
            yield context.hint("--pin recompute=", "training.recompute", "full")
        elif name == "microbatch" and _fits(context, _repinned(limits, name, 1)):
            yield context.hint("--pin microbatch=", "training.microbatch", 1)
        else:
            value = limits.pins[name]
            what = "pin or exclusion" if name in DEGREES and value == 1 else "pin"
            yield f"leave out the {what} {name}={_named(name, value)}"
    if context.workload.microbatch not in (None, 1):
        smaller = replace(context, workload=replace(context.workload, microbatch=1))
        if _fits(smaller, limits):
            yield context.hint("--pin microbatch=", "training.microbatch", 1)
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
    goal = Goal(context.machine.memory_bytes)
    found = solve(
        context.numbers, context.machine, context.workload, space_of(context, limits), goal
    )
    return bool(found.best)
