"""Cards of this machine, fitted to micro-benchmarks of its ranks and to short training steps of several layouts.

Micro-benchmarks measure the speed of kernels and links. On a CPU, most of a small step is host work: operator launches,
hooks of the parallel axes, and waits of ranks for a core. The predicted step time is about linear in the constants of
host work, such as the seconds of a launch. `fit_probes` fits them by non-negative least squares of relative errors,
regularized towards the micro-benchmarks. `fit_stack` fits the two steps that an accelerator measures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost import (
    LOCAL_CARD,
    Candidates,
    DeviceCard,
    Machine,
    ModelNumbers,
    PricingCase,
    StackCard,
    shipped_cards,
    step_seconds,
    with_numbers,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode
from hyper_parallel.units import DTYPE_BYTES

Array = NDArray[np.float64]

AXES: Final = ("dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp_x", "tp_y", "ep", "pp")
"""Parallel axes with host work: the keys of `StackCard.host_s`."""
_SATURATIONS: Final = (1e-3, 8.0)
"""Allowed range of `DeviceCard.saturation`, from none to fully memory-bound matmuls."""
_HEADS: Final = (1e-3, 128.0)
"""Allowed range of `DeviceCard.attention_head`, the head width at which attention reaches half of its rate."""
_PULL: Final = {"compute": 0.15, "latency": 0.05, "link": 0.10, "moe": 0.05}
"""Weight of the penalty on deviations from the micro-benchmark value; the relative error of one step has weight 1."""
_HOST_PULL: Final = 0.01
"""Weight of the penalty on constants of host work, which have no micro-benchmark; it favors 0."""
_UNITS: Final = {"kernel_s": 1e-5, "step_s": 1e-2, "moe_host_s": 1e-3}
"""Unit of each constant in seconds, such that all unknowns are near 1; `host_s` has the unit of `moe_host_s`."""
_ON_DEVICE: Final = ("kernel_s", "latency", "link")
"""Constants on the device card; the others are on the stack card."""
_ROUNDS: Final = 2
"""Rounds of the linear fit; more than one because the time of pipelines is not linear in the constants."""
_FASTEST: Final = 1e9
"""Maximum of the fitted `DeviceCard.link`, for links whose fitted cost is 0."""
_TINY: Final = 1e-9
"""Substitute for zero in numbers that must be positive."""


@dataclass(frozen=True, slots=True)
class LocalRates:
    """Micro-benchmark results of one rank, or means over the ranks of a machine."""

    # dtype to (rows, outputs, inputs, seconds of forward and both gradients)
    matmul: Mapping[str, tuple[tuple[int, int, int, float], ...]]
    # dtype to (batch, sequence, heads, head width, seconds of causal forward and backward)
    attention: Mapping[str, tuple[tuple[int, int, int, int, float], ...]]
    # (bytes kept for backward, seconds of forward and backward) of chains of element-wise kernels
    passing: tuple[tuple[float, float], ...]
    stream: tuple[float, float]  # (bytes, seconds) of an optimizer step
    # (gathered bytes, seconds) of all-gathers over all ranks, in increasing size
    rings: tuple[tuple[float, float], ...] = ()
    # (active ranks, seconds) of a small layer while other ranks wait, in decreasing ranks; nan if this rank waited
    layers: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Training step with its measured seconds; all batch numbers of `workload` are set."""

    model: ModelSpec
    strategy: Strategy
    workload: Workload
    seconds: float


def mean_rates(all_ranks: Sequence[LocalRates]) -> LocalRates:
    """Return the mean of each measurement over ranks that measured the same sizes; nan of waiting ranks is ignored."""
    return _combined(all_ranks, lambda seconds: float(np.nanmean(seconds)))


def fastest_rates(turns: Sequence[LocalRates]) -> LocalRates:
    """Return the minimum of each measurement over several rounds of measurements on one rank."""
    return _combined(turns, lambda seconds: float(np.fmin.reduce(seconds)))


def _combined(all_rates: Sequence[LocalRates], reduce: Callable[[list[float]], float]) -> LocalRates:
    def combine(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            return {key: combine([v[key] for v in values]) for key in first}
        if not first or isinstance(first[0], tuple):
            return tuple(combine(same) for same in zip(*values, strict=True))
        return (*first[:-1], reduce([v[-1] for v in values]))

    columns = ([getattr(r, f.name) for r in all_rates] for f in fields(LocalRates))
    return LocalRates(*map(combine, columns))


def fit_device(rates: LocalRates, supernode: Supernode, source: str) -> DeviceCard:
    """Return a device card fitted to micro-benchmarks.

    Args:
        rates: Micro-benchmark results.
        supernode: The machine; the rates on a card are fractions of its peak rates.
        source: Text to record as the source of the numbers.
    """
    device = supernode.device
    base, stack = shipped_cards(device)
    dtype = _compute_dtype(supernode)
    # Number of elements at which a matmul reaches half its rate, for a saturation of 1 on the card.
    unit = supernode.peak_flops(dtype) / device.memory_bytes_s.value * DTYPE_BYTES[dtype] / 2.0
    saturation, matmul = _fit_shares(
        rates.matmul, supernode, lambda s, sizes: _matmul_flops(s * unit, sizes), _SATURATIONS
    ) or (base.saturation, {})
    fitted = _fit_shares(rates.attention, supernode, _attention_flops, _HEADS)
    head, attention = fitted or (base.attention_head, {})
    moved = sum(stack.passes * size for size, _ in rates.passing)
    elementwise = moved / sum(s for _, s in rates.passing) / device.memory_bytes_s.value
    stream = rates.stream[0] / rates.stream[1] / device.memory_bytes_s.value
    link, latency = _fit_rings(rates, supernode, base)
    numbers: dict[str, Any] = {
        "saturation": saturation, "attention_head": head, "elementwise": elementwise, "stream": stream, "link": link,
        "latency": latency,
    }  # fmt: skip
    tables = {"pace": _fit_pace(rates), "matmul": matmul, "attention": attention}
    measured = [*numbers, *(f"{name}.{key}" for name, table in tables.items() for key in table)]
    return replace(
        base,
        name=LOCAL_CARD,
        devices=(_glob(device.name),),
        matmul={**base.matmul, **matmul},
        attention={**base.attention, **attention},
        attention_len=_TINY,
        portable=1.0,
        pace=tables["pace"],
        few_rows={},  # the fitted saturation includes their cost
        sources={**base.sources, **dict.fromkeys(measured, source)},
        priors={},
        **numbers,
    )


def _glob(name: str) -> str:
    """Return a glob for a device name, with a wildcard in place of the cores per rank."""
    plain = re.sub(r" \(.* cores .*\)$", "", name)
    return re.sub(r"([\[\]*?])", "?", plain) + "*"


def _fit_shares(
    rates: Mapping[str, Sequence[tuple[float, ...]]],
    supernode: Supernode,
    flops: Callable[[float, list[Array]], Array],
    bounds: tuple[float, float],
) -> tuple[float, dict[str, float]] | None:
    """Fit a size constant and fractions of the peak FLOP/s by least squares of log ratios.

    Args:
        rates: Dict from dtype to rows of sizes, with the measured seconds last.
        supernode: The machine with the peak FLOP/s.
        flops: Function from (size constant, columns of sizes) to FLOPs; small sizes count as more FLOPs than they have.
        bounds: Range of the size constant.

    Returns:
        (size constant, dict from dtype to fraction of the peak FLOP/s); None without measurements.
    """
    from scipy.optimize import minimize_scalar

    if not rates:
        return None
    columns = {d: list(np.asarray(rows, dtype=float).T) for d, rows in rates.items()}

    def log_shares(log_constant: float) -> dict[str, Array]:
        return {
            d: np.log(flops(math.exp(log_constant), c) / supernode.peak_flops(d) / c[-1]) for d, c in columns.items()
        }

    def spread(log_constant: float) -> float:
        return sum(float(v.var() * v.size) for v in log_shares(log_constant).values())

    best = float(minimize_scalar(spread, bounds=np.log(bounds), method="bounded").x)
    return math.exp(best), {d: math.exp(float(v.mean())) for d, v in log_shares(best).items()}


def _matmul_flops(saturation: float, sizes: list[Array]) -> Array:
    stretch = np.prod([1 + saturation / size for size in sizes[:3]], axis=0)
    return np.asarray(6.0 * np.prod(sizes[:3], axis=0) * stretch)


def _attention_flops(head: float, sizes: list[Array]) -> Array:
    batch, seq, heads, width = sizes[:4]
    return 3.5 * 2.0 * batch * seq * (seq / 2.0) * heads * 2.0 * width * (1 + head / width)


def _fit_rings(rates: LocalRates, supernode: Supernode, base: DeviceCard) -> tuple[float, float]:
    """Return (fraction of the link bandwidth, factor on the latency); without `rates.rings`, the values of `base`."""
    if not rates.rings:
        return base.link, base.latency
    ranks = float(supernode.num_devices)
    card = replace(base, link=1.0, latency=1.0)
    unit = Machine.of(supernode, _compute_dtype(supernode), card=card)
    ring = unit.ring((np.asarray([ranks]), np.ones(1)))
    rate, delay = float(ring.rate[0]), float(ring.delay[0])
    (bytes_few, small), (bytes_many, large) = rates.rings[0], rates.rings[-1]
    sent = (bytes_many - bytes_few) * (ranks - 1) / ranks
    return sent / max(large - small, 0.05 * large) / rate, small / delay if delay else 1.0


def _fit_pace(rates: LocalRates) -> dict[str, float]:
    """Return a dict from fraction of active ranks, as text, to the speed of a rank; {} without `rates.layers`.

    The speed is relative to that with all ranks active. It is at least 1, and not lower than with more active ranks.
    """
    pace, slowest = dict[str, float](), 1.0
    for ranks, seconds in rates.layers[1:]:
        max_ranks, full_s = rates.layers[0]
        pace[f"{ranks / max_ranks:g}"] = slowest = max(slowest, full_s / seconds)
    return pace


def _compute_dtype(supernode: Supernode) -> str:
    return "float32" if supernode.device.kind == "cpu" else "bfloat16"


def _pricer(steps: Sequence[MeasuredStep], supernode: Supernode) -> Callable[[DeviceCard, StackCard], Array]:
    prepared = [(s.workload, ModelNumbers.of(s.model), Candidates.of(s.strategy, s.workload)) for s in steps]

    def seconds(card: DeviceCard, stack: StackCard) -> Array:
        formats = {workload.compute_dtype for workload, *_ in prepared}
        machines = {d: Machine.of(supernode, d, card=card, stack=stack) for d in formats}
        settings = (PricingCase(numbers, machines[w.compute_dtype], w, c) for w, numbers, c in prepared)
        return np.array([float(step_seconds(s)[0]) for s in settings])

    return seconds


def fit_stack(
    steps: Sequence[MeasuredStep], card: DeviceCard, supernode: Supernode, source: str
) -> tuple[DeviceCard, StackCard]:
    """Return cards with kernel launch time and fixed time per step fitted to two small measured steps.

    `StackCard.compute` is fitted too if launches do not overlap kernels and a layer is faster than its kernels.

    Args:
        steps: Two measured steps that differ only in their number of layers, the one with fewer layers first.
        card: Device card of the machine.
        supernode: The machine.
        source: Text to record as the source of the numbers.
    """
    _, base = shipped_cards(supernode.device)
    kernels = base.kernels_forward + base.kernels_backward
    few, many = steps
    layers = many.model.num_layers - few.model.num_layers
    priced = _pricer(steps, supernode)
    measured = (many.seconds - few.seconds) / layers
    work = float(np.diff(priced(replace(card, kernel_s=0.0), base))[0]) / layers
    microbatches = many.workload.accumulation_steps or 1
    # If launches overlap kernels, they determine the time of a small layer; otherwise they are added to its work.
    floor = measured if card.launch_hidden else max(measured - work, 0.0)
    fitted = replace(
        card, kernel_s=max(floor, _TINY) / kernels / microbatches, sources={**card.sources, "kernel_s": source}
    )
    if measured < work and not card.launch_hidden:
        # The layer is faster than the sum of its kernels: the micro-benchmarks interfered more than a step does.
        base = replace(base, compute=measured / work, sources={**base.sources, "compute": source})
    bare = float(priced(fitted, replace(base, step_s=0.0))[0])
    sources = {**base.sources, "step_s": source}
    step_s = max(few.seconds - bare, 0.0)
    return fitted, replace(base, name=LOCAL_CARD, step_s=step_s, sources=sources, priors={})


def fit_probes(
    steps: Sequence[MeasuredStep], card: DeviceCard, supernode: Supernode, source: str
) -> tuple[DeviceCard, StackCard]:
    """Return the device card and the stack card whose predictions are closest to the measured steps.

    Args:
        steps: Measured steps with several layouts, widths, numbers of layers and microbatches.
        card: Device card from the micro-benchmarks.
        supernode: The machine.
        source: Text to record as the source of the numbers.
    """
    from scipy.optimize import nnls

    _, base = shipped_cards(supernode.device)
    host = [f"host_s.{a}" for a in AXES]
    units = {
        "compute": 1.0, "latency": card.latency, "link": 1.0 / card.link, "moe": 1.0, **_UNITS,
        **dict.fromkeys(host, _UNITS["moe_host_s"]),
    }  # fmt: skip
    unit, pulls = np.array([*units.values()]), np.array([_PULL.get(n, _HOST_PULL) for n in units])
    believed = np.array([float(n in _PULL) for n in units])
    measured, priced = np.array([s.seconds for s in steps]), _pricer(steps, supernode)

    def seconds(values: Array) -> Array:
        return priced(*_with(dict(zip(units, values.tolist(), strict=True)), card, base))

    point = believed
    for _ in range(_ROUNDS):
        current_s = seconds(point * unit)
        moved = point + np.eye(len(point))
        slopes = np.array([(seconds(row * unit) - current_s) / measured for row in moved]).T
        targets = 1.0 - current_s / measured + slopes @ point
        rows = np.vstack([slopes, np.diag(pulls)])
        point, _ = nnls(rows, np.concatenate([targets, pulls * believed]))
    device, stack = _with(dict(zip(units, (point * unit).tolist(), strict=True)), card, base)
    of_stack = {name: source for name in units if name not in _ON_DEVICE}
    return (
        replace(device, sources={**card.sources, **dict.fromkeys(_ON_DEVICE, source)}),
        replace(stack, name=LOCAL_CARD, sources={**base.sources, **of_stack}, priors={}),
    )


def _with(values: Mapping[str, float], card: DeviceCard, base: StackCard) -> tuple[DeviceCard, StackCard]:
    """Return `card` and `base` with the constants in `values` replaced.

    To make the step time about linear in `values`, `link` is the inverse of the card's number, and `moe` is multiplied
    by `compute`.
    """
    device = {name: values[name] for name in _ON_DEVICE}
    device["link"] = 1.0 / max(values["link"], 1.0 / _FASTEST)
    stack = {name: value for name, value in values.items() if name not in device}
    stack["compute"] = max(values["compute"], _TINY)
    stack["moe"] = values["moe"] / stack["compute"]
    return with_numbers(card, device), with_numbers(base, stack)
