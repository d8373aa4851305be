"""Predictions of the cost model for strategies with overlap, calibrated only on a measured step without overlap.

Three numbers are calibrated, in this order:

    link bandwidth     predicted time of the serial step's collectives = measured time blocked in collectives
    compute rate       predicted serial step = measured serial step
    collective share   CPU time beyond computation, divided by the time in which collectives were in flight

Latencies and all other numbers are those of the topology `local` and of the card `cpu`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from scipy.optimize import brentq

from hyper_parallel.cost import (
    Candidates,
    Machine,
    ModelNumbers,
    PricingCase,
    Scores,
    device_card,
    score,
    stack_card,
)
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode

INSIDE_LAYERS = ("tp communication", "ep communication")
"""Terms of the collectives whose waits `overlap.py` measures."""
NOT_MEASURED = ("optimizer", "gradient norm", "every step", "stragglers")
"""Terms of a training step that a forward and backward pass lacks."""


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Cost-model inputs whose rates are calibrated on one measured serial step.

    Attributes:
        supernode: Machine; its innermost links connect all ranks.
        spec: Model.
        workload: Workload with all batch numbers.
        link_bytes_s: Bytes/s that a rank sends.
        slowdown: Factor on the kernel times of the card.
        share: Fraction of the compute units that a collective occupies.
        latency: Factor on the link latency of the card.
    """

    supernode: Supernode
    spec: ModelSpec
    workload: Workload
    link_bytes_s: float
    slowdown: float
    share: float
    latency: float = 1.0

    @classmethod
    def of(
        cls,
        supernode: Supernode,
        spec: ModelSpec,
        workload: Workload,
        serial: Strategy,
        measured: Mapping[str, float],
    ) -> Calibrated:
        """Calibrate on a serial step.

        Args:
            supernode: Machine with uncalibrated numbers.
            spec: Model.
            workload: Workload with all batch numbers.
            serial: Strategy without overlap.
            measured: Seconds of the serial step: `step_s`; `blocked_s`, blocked in collectives; `processor_s`, CPU time
                of one rank.
        """
        step_s, blocked_s = measured["step_s"], measured["blocked_s"]

        def excess_waits(link_bytes_s: float) -> float:
            return (
                cls(supernode, spec, workload, link_bytes_s, 1.0, 1.0).seconds(serial)[1]
                - blocked_s
            )

        def excess(slowdown: float) -> float:
            return cls(supernode, spec, workload, link, slowdown, 1.0).seconds(serial)[0] - step_s

        link = _root(excess_waits, 1e12, 1e4)
        slowdown = _root(excess, 1e-3, 1e3)
        case = cls(supernode, spec, workload, link, slowdown, 1.0)
        reduction_s = _terms(case.priced(serial))["data-parallel reduction"]
        sent_s = blocked_s + reduction_s
        share = (measured["processor_s"] - (step_s - sent_s)) / sent_s
        return dataclasses.replace(case, share=min(1.0, max(0.0, share)))

    def seconds(self, strategy: Strategy) -> tuple[float, float]:
        """Return the predicted seconds of forward and backward, and the seconds blocked in collectives of layers.

        Blocked seconds are the predicted exposed seconds without slowdowns of computation: without the slowdown by
        concurrent
        collectives, and minus the exposed seconds of a link that takes no time.
        """
        terms = _terms(self.priced(strategy))
        step_s = sum(s for name, s in terms.items() if name not in NOT_MEASURED)
        alone = dataclasses.replace(self, share=0.0)
        free = dataclasses.replace(alone, link_bytes_s=1e18, latency=0.0)
        with_link, without = (_terms(case.priced(strategy)) for case in (alone, free))
        return step_s, sum(with_link[name] - without[name] for name in INSIDE_LAYERS)

    def priced(self, strategy: Strategy) -> Scores:
        """Return the cost model's result for a strategy."""
        card = device_card("", "cpu")
        latency = card.latency * self.latency
        card = dataclasses.replace(card, collective_share=self.share, latency=latency)
        stack = dataclasses.replace(stack_card("cpu"), compute=self.slowdown)
        tier = self.supernode.tiers[0]
        rate = dataclasses.replace(tier.bytes_s, value=self.link_bytes_s)
        tiers = (dataclasses.replace(tier, bytes_s=rate),)
        supernode = dataclasses.replace(self.supernode, tiers=tiers)
        machine = Machine.of(supernode, "float32", card=card, stack=stack)
        numbers, candidates = ModelNumbers.of(self.spec), Candidates.of(strategy, self.workload)
        return score(PricingCase(numbers, machine, self.workload, candidates))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a monotonic function between `low` and `high`, or the nearer end if there is none."""
    for end, sign in ((low, 1.0), (high, -1.0)):
        if sign * function(end) >= 0.0:
            return end
    return math.exp(brentq(lambda x: function(math.exp(x)), math.log(low), math.log(high)))


def _terms(scores: Scores) -> dict[str, float]:
    """Return the seconds of each cost term by name."""
    return {t.name: float(t.seconds[0]) for t in scores.time}


def predicted(
    supernode: Supernode,
    spec: ModelSpec,
    workload: Workload,
    strategies: Mapping[str, Strategy],
    rows: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return predicted and measured seconds of every strategy, and the choice of `overlap: auto`.

    Args:
        supernode: Machine of the run.
        spec: Model.
        workload: Workload with all batch numbers.
        strategies: Strategies by name; `serial` has no overlap.
        rows: Measured `step_s`, `speedup`, `blocked_s` and `processor_s` by name of the strategy.
    """
    serial = rows["serial"]
    model = Calibrated.of(supernode, spec, workload, strategies["serial"], serial)
    results = {}
    for name, row in rows.items():
        step_s, blocked_s = model.seconds(strategies[name])
        speedup = serial["step_s"] / step_s
        results[name] = {
            "step_s": step_s,
            "step_error": step_s / row["step_s"] - 1.0,
            "speedup": speedup,
            "speedup_error": speedup / row["speedup"] - 1.0,
            "blocked_s": blocked_s,
            "blocked_error": blocked_s / row["blocked_s"] - 1.0,
            # relative to the communication of the serial step
            "blocked_difference": (blocked_s - row["blocked_s"]) / serial["blocked_s"],
        }
    choice = min(results, key=lambda name: results[name]["step_s"])
    return {
        "link_bytes_s": model.link_bytes_s,
        "slowdown": model.slowdown,
        "collective_share": model.share,
        "strategies": results,
        "auto": choice,
        "auto_speedup": rows[choice]["speedup"],
    }
