"""Local constants from short training steps of several layouts: what eager ranks that share cores really take.

Micro-benchmarks say how fast kernels and links are, but on a CPU most of a small step is host work: starting
operators, hooks of the parallel axes, waiting for ranks that have no core. The step time is linear in the constants of
all that, so they are found by least squares of relative errors with non-negative unknowns, drawn a little to what the
micro-benchmarks say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.calibration._local import MeasuredStep
from hyper_parallel.cost import (
    LOCAL_CARD,
    Candidates,
    DeviceCard,
    Machine,
    ModelNumbers,
    StackCard,
    step_seconds,
)
from hyper_parallel.topology import Supernode

AXES: Final = ("dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp_x", "tp_y", "ep", "pp")
"""Axes with host work of their own; the keys of `StackCard.host_s`."""

_PULL: Final = {"compute": 0.15, "latency": 0.05, "link": 0.10, "moe": 0.05}
"""Weight of what the micro-benchmarks say, against one relative error of one step."""
_HOST_UNIT_S: Final = 1e-3
_HOST_PULL: Final = 0.01
_SWEEPS: Final = 1500
_ROUNDS: Final = 2
_FASTEST: Final = 1e9
_BELIEVED_KERNEL_S: Final = 1e-5


def fit_probes(
    steps: Sequence[MeasuredStep],
    card: DeviceCard,
    base: StackCard,
    supernode: Supernode,
    source: str,
) -> tuple[DeviceCard, StackCard]:
    """The card of the device and of the stack whose predictions are nearest to the measured steps.

    Args:
        steps: Steps of several layouts, with different widths, layers and microbatches.
        card: What the micro-benchmarks say.
        base: The stack card to start from.
        supernode: The machine.
        source: What to say about where the numbers come from.
    """
    names = (
        "compute",
        "kernel_s",
        "latency",
        "link",
        "step_s",
        "moe_host_s",
        "moe",
        *(f"host_s.{a}" for a in AXES),
    )
    unit = {
        "compute": 1.0, "kernel_s": _BELIEVED_KERNEL_S, "latency": card.latency, "link": 1.0 / card.link,
        "step_s": 1e-2, "moe_host_s": _HOST_UNIT_S, "moe": 1.0,
        **{f"host_s.{a}": _HOST_UNIT_S for a in AXES},
    }  # fmt: skip
    measured = np.array([s.seconds for s in steps])
    each = [(s, ModelNumbers.of(s.model), Candidates.of(s.strategy, s.workload)) for s in steps]
    dtypes = {s.workload.compute_dtype for s in steps}

    def seconds(values: Mapping[str, float]) -> NDArray[np.float64]:
        device, stack = _cards(values, card, base)
        on = {d: Machine.of(supernode, d, card=device, stack=stack) for d in dtypes}
        return np.array(
            [
                float(step_seconds(n, on[s.workload.compute_dtype], s.workload, c)[0])
                for s, n, c in each
            ]
        )

    pulls = np.array([_PULL.get(n, _HOST_PULL) for n in names])
    believed = np.array([1.0 if n in _PULL else 0.0 for n in names])
    values = {n: x * unit[n] for n, x in zip(names, believed.tolist(), strict=True)}
    # Linear but for the pace of pipelines, which depends on how even their stages are: a second round is exact there.
    for _ in range(_ROUNDS):
        here = seconds(values)
        columns = [(seconds({**values, n: values[n] + unit[n]}) - here) / measured for n in names]
        rows = np.array(columns).T
        at = np.array([values[n] / unit[n] for n in names])
        wanted = 1.0 - here / measured + rows @ at
        matrix = np.vstack([rows, np.diag(pulls)])
        found = nonnegative(matrix, np.concatenate([wanted, pulls * believed]))
        values = {n: x * unit[n] for n, x in zip(names, found.tolist(), strict=True)}
    device, stack = _cards(values, card, base)
    told = {n: source for n in names if n not in ("kernel_s", "latency", "link")}
    known = dict.fromkeys(("kernel_s", "latency", "link"), source)
    return (
        replace(device, sources={**card.sources, **known}),
        replace(stack, name=LOCAL_CARD, sources={**base.sources, **told}, priors={}),
    )


def nonnegative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with non-negative unknowns, by coordinate descent (the problem is convex)."""
    gram, target = matrix.T @ matrix, matrix.T @ wanted
    found = np.zeros(len(target))
    for _ in range(_SWEEPS):
        for i, square in enumerate(np.diag(gram)):
            if square > 0.0:
                step = (target[i] - gram[i] @ found) / square
                found[i] = max(0.0, found[i] + step)
    return found


def _cards(
    values: Mapping[str, float], card: DeviceCard, base: StackCard
) -> tuple[DeviceCard, StackCard]:
    device = replace(
        card,
        kernel_s=values["kernel_s"],
        latency=values["latency"],
        link=1.0 / max(values["link"], 1.0 / _FASTEST),
    )
    stack = replace(
        base,
        compute=max(values["compute"], 1e-9),
        step_s=values["step_s"],
        moe_host_s=values["moe_host_s"],
        # All kernels take `compute` times as long, so what is linear is the product.
        moe=values["moe"] / max(values["compute"], 1e-9),
        host_s={a: values[f"host_s.{a}"] for a in AXES},
    )
    return device, stack
