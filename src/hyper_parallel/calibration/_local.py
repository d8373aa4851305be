"""The card of this machine: from micro-benchmarks of its ranks to the numbers of a device card and a stack card."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hyper_parallel.cost import (
    LOCAL_CARD,
    Candidates,
    DeviceCard,
    Machine,
    ModelNumbers,
    StackCard,
    device_card,
    score,
    stack_card,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode

_SATURATIONS: Final = np.geomspace(1e-3, 8.0, 600)
_HEADS: Final = np.concatenate([[1e-9], np.geomspace(2.0, 128.0, 200)])


@dataclass(frozen=True, slots=True)
class LocalRates:
    """What the ranks of a machine measured, seconds each; mean over the ranks.

    Attributes:
        matmul: By dtype, (rows, outputs, inputs, seconds) of forward and both gradients.
        attention: By dtype, (batch, sequence, heads, head width, seconds) of causal forward and backward.
        passing: (bytes kept for backward, seconds) of element-wise chains, forward and backward.
        stream: (bytes, seconds) of an optimizer step.
        rings: (gathered bytes, seconds) of all-gathers over all ranks.
        layers: (ranks at work, seconds) of a small layer while so many work and the others wait, all of them first;
            nan where this rank waited.
    """

    matmul: Mapping[str, tuple[tuple[int, int, int, float], ...]]
    attention: Mapping[str, tuple[tuple[int, int, int, int, float], ...]]
    passing: tuple[tuple[float, float], ...]
    stream: tuple[float, float]
    rings: tuple[tuple[float, float], ...] = ()
    layers: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A whole training step that was measured: model, strategy, resolved workload and seconds."""

    model: ModelSpec
    strategy: Strategy
    workload: Workload
    seconds: float


def mean_rates(all_ranks: Sequence[LocalRates]) -> LocalRates:
    """The mean over ranks, without those that waited; they measured the same things."""
    return _combined(all_ranks, lambda seconds: float(np.nanmean(seconds)))


def fastest_rates(turns: Sequence[LocalRates]) -> LocalRates:
    """The fastest of several turns of one rank."""
    return _combined(turns, lambda seconds: float(np.fmin.reduce(seconds)))


def _combined(all_rates: Sequence[LocalRates], one: Callable[[list[float]], float]) -> LocalRates:
    def rows(of: Sequence[tuple[tuple[float, ...], ...]]) -> tuple[tuple[float, ...], ...]:
        return tuple((*same[0][:-1], one([r[-1] for r in same])) for same in zip(*of, strict=True))

    first = all_rates[0]
    return LocalRates(
        {d: rows([r.matmul[d] for r in all_rates]) for d in first.matmul},  # type: ignore[misc]
        {d: rows([r.attention[d] for r in all_rates]) for d in first.attention},  # type: ignore[misc]
        rows([r.passing for r in all_rates]),  # type: ignore[arg-type]
        (first.stream[0], one([r.stream[1] for r in all_rates])),
        rows([r.rings for r in all_rates]),  # type: ignore[arg-type]
        rows([r.layers for r in all_rates]),  # type: ignore[arg-type]
    )


def fit_device(rates: LocalRates, supernode: Supernode, source: str) -> DeviceCard:
    """A device card whose formulas give the measured seconds.

    Args:
        rates: Measurements.
        supernode: The machine; shares are of its peaks.
        source: What to say about where the numbers come from.
    """
    device = supernode.device
    base = device_card(device.name, device.kind)
    saturation, matmul = _fit_matmul(rates, supernode, base)
    head, attention = _fit_attention(rates, supernode, base)
    passes = stack_card("cpu" if device.kind == "cpu" else "hyper-parallel").passes
    moved = sum(passes * size for size, _ in rates.passing)
    elementwise = moved / sum(s for _, s in rates.passing) / device.memory_bytes_s.value
    stream = rates.stream[0] / rates.stream[1] / device.memory_bytes_s.value
    link, latency = _fit_rings(rates, supernode, base)
    numbers = {
        "saturation": saturation, "attention_head": head, "elementwise": elementwise, "stream": stream, "link": link,
        "latency": latency,
    }  # fmt: skip
    pace = _fit_pace(rates)
    told = [
        *(f"pace.{share}" for share in pace),
        *numbers,
        *(f"matmul.{d}" for d in matmul),
        *(f"attention.{d}" for d in attention),
    ]
    return replace(
        base,
        name=LOCAL_CARD,
        devices=(_glob(device.name),),
        matmul={**base.matmul, **matmul},
        attention={**base.attention, **attention},
        attention_len=1e-9,
        portable=1.0,
        pace=pace,
        sources={**base.sources, **dict.fromkeys(told, source)},
        priors={},
        **numbers,
    )


def _glob(name: str) -> str:
    """Pattern for a device name without what depends on the number of ranks."""
    plain = re.sub(r" \(.* cores .*\)$", "", name)
    return re.sub(r"([\[\]*?])", "?", plain) + "*"


def _fit_matmul(
    rates: LocalRates, supernode: Supernode, base: DeviceCard
) -> tuple[float, dict[str, float]]:
    """One saturation for all formats and a share for each, least squares of the log ratio."""
    peak = supernode.peak_flops("bfloat16" if supernode.device.kind != "cpu" else "float32")
    unit = (
        peak
        / supernode.device.memory_bytes_s.value
        * (2.0 if supernode.device.kind == "cpu" else 1.0)
    )
    best = (np.inf, base.saturation, dict[str, float]())
    for candidate in _SATURATIONS:
        s, error, shares = candidate * unit, 0.0, {}
        for dtype, rows in rates.matmul.items():
            m, n, k, seconds = (np.asarray(column) for column in zip(*rows, strict=True))
            stretch = (1 + s / m) * (1 + s / n) * (1 + s / k)
            ideal = np.log(6.0 * m * n * k * stretch / supernode.peak_flops(dtype) / seconds)
            shares[dtype] = float(np.exp(ideal.mean()))
            error += float(((ideal - ideal.mean()) ** 2).sum())
        if error < best[0]:
            best = (error, float(candidate), shares)
    return best[1], best[2]


def _fit_attention(
    rates: LocalRates, supernode: Supernode, base: DeviceCard
) -> tuple[float, dict[str, float]]:
    best = (np.inf, base.attention_head, dict[str, float]())
    for head in _HEADS:
        error, shares = 0.0, {}
        for dtype, rows in rates.attention.items():
            batch, seq, heads, width, seconds = (np.asarray(c) for c in zip(*rows, strict=True))
            flops = 3.5 * 2.0 * batch * seq * (seq / 2.0) * heads * 2.0 * width
            ideal = np.log(flops * (1 + head / width) / supernode.peak_flops(dtype) / seconds)
            shares[dtype] = float(np.exp(ideal.mean()))
            error += float(((ideal - ideal.mean()) ** 2).sum())
        if error < best[0]:
            best = (error, float(head), shares)
    return best[1], best[2]


def _fit_rings(rates: LocalRates, supernode: Supernode, base: DeviceCard) -> tuple[float, float]:
    """Share of the link bandwidth and factor on the latency: seconds are linear in the bytes sent."""
    if not rates.rings:
        return base.link, base.latency
    ranks = float(supernode.num_devices)
    plain = replace(base, link=1.0, latency=1.0)
    machine = Machine.of(supernode, _compute(supernode), card=plain)
    axis = (np.asarray([ranks]), np.ones(1))
    rate, delay = float(machine.bandwidth(axis)[0]), float(machine.latency(axis)[0])
    sent = [size * (ranks - 1) / ranks for size, _ in rates.rings]
    small, large = rates.rings[0][1], rates.rings[-1][1]
    seconds = max(large - small, 0.05 * large)
    return (sent[-1] - sent[0]) / seconds / rate, small / delay if delay else 1.0


def _fit_pace(rates: LocalRates) -> dict[str, float]:
    """Speed of a rank by the share of all ranks at work; fewer are never slower."""
    found: dict[str, float] = {}
    least = 1.0
    for ranks, seconds in rates.layers[1:]:
        most, whole = rates.layers[0]
        least = max(least, whole / seconds)
        found[f"{ranks / most:g}"] = least
    return found


def _compute(supernode: Supernode) -> str:
    return "float32" if supernode.device.kind == "cpu" else "bfloat16"


def fit_stack(
    steps: Sequence[MeasuredStep], card: DeviceCard, supernode: Supernode, source: str
) -> tuple[DeviceCard, StackCard]:
    """Launch floor and time of every step from two small measured steps that differ in their layers.

    Args:
        steps: Two steps, fewer layers first.
        card: The device card of the machine.
        supernode: The machine.
        source: What to say about where the numbers come from.
    """
    base = stack_card("cpu" if supernode.device.kind == "cpu" else "hyper-parallel")
    kernels = base.kernels_forward + base.kernels_backward
    few, many = steps
    layers = many.model.num_layers - few.model.num_layers

    def predicted(step: MeasuredStep, with_card: DeviceCard, stack: StackCard) -> float:
        dtype = step.workload.compute_dtype
        machine = Machine.of(supernode, dtype, card=with_card, stack=stack)
        c = Candidates.of(step.strategy, step.workload)
        return float(score(ModelNumbers.of(step.model), machine, step.workload, c).step_s[0])

    bare = replace(card, kernel_s=0.0)
    measured = (many.seconds - few.seconds) / layers
    work = (predicted(many, bare, base) - predicted(few, bare, base)) / layers
    microbatches = many.workload.accumulation_steps or 1
    # Hidden launches pace the layer themselves when its work is shorter; others come on top of it.
    floor = measured if card.launch_hidden else max(measured - work, 0.0)
    fitted = replace(
        card,
        kernel_s=max(floor, 1e-9) / kernels / microbatches,
        sources={**card.sources, "kernel_s": source},
    )
    if measured < work and not card.launch_hidden:
        # The whole step is faster than its parts alone: they disturbed each other more than a step does.
        base = replace(base, compute=measured / work, sources={**base.sources, "compute": source})
    rest = max(few.seconds - predicted(few, fitted, replace(base, step_s=0.0)), 0.0)
    stack = replace(
        base, name=LOCAL_CARD, step_s=rest, sources={**base.sources, "step_s": source}, priors={}
    )
    return fitted, stack
