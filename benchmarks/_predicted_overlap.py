"""Predictions of the cost model for strategies with overlap, calibrated only on a measured step without overlap.

In the serial step, a rank computes, waits for transfers (blocked) or waits for the other rank (late). Calibrated, in
this order:

    spread             share of a transfer by which one rank has its data first. In the replay, both ranks go on when
                       the last one has its data, so a replay takes longer than the step by half of that time
    link bandwidth     predicted time of the collectives = time blocked + excess of the replay
    compute rate       predicted computation = step - time blocked - time late
    element-wise rate  predicted computation between dispatch and combine = measured one, with experts; together with
                       the compute rate
    jitter             predicted step, with ranks that wait for each other = measured step
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
from hyper_parallel.cost.overlap import expert_work_seconds
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.topology import Supernode

INSIDE_LAYERS = ("tp communication", "ep communication")
"""Terms of the collectives whose waits `overlap.py` measures."""
NEEDED = ("step_s", "blocked_s", "late_s", "replayed_s", "processor_s")
"""Seconds of the serial step that calibration needs: step, blocked in collectives, late, replayed step, CPU time."""
EXPERTS = "experts_s"
"""Seconds of the serial step between the dispatch of rows to experts and the combine; absent without experts."""
NOT_MEASURED = ("optimizer", "gradient norm", "every step", "stragglers")
"""Terms of a training step that a forward and backward pass lacks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Numbers that replace those of the topology and of the cards.

    Attributes:
        link_bytes_s: Bytes/s that a rank sends.
        slowdown: Factor on the kernel times of the card.
        elementwise: Fraction of the memory bandwidth that element-wise kernels reach; None: that of the card.
        share: Fraction of the compute units that a collective occupies.
        jitter: Standard deviation of one task's time on one rank, relative to its mean.
        spread: Share of a collective's time by which the first rank has its result before the last one.
        latency: Factor on the link latency of the card.
        counts_late: Count waits for a rank that has not reached a collective.
    """

    link_bytes_s: float
    slowdown: float = 1.0
    elementwise: float | None = None
    share: float = 0.0
    jitter: float = 0.0
    spread: float = 0.0
    latency: float = 1.0
    counts_late: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Calibrated:
    """Cost-model inputs whose rates are calibrated on one measured serial step.

    Attributes:
        supernode: Machine; its innermost links connect all ranks.
        spec: Model.
        workload: Workload with all batch numbers.
        rates: Calibrated rates.
    """

    supernode: Supernode
    spec: ModelSpec
    workload: Workload
    rates: Rates

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
            measured: Seconds of the serial step, `NEEDED` and `EXPERTS`.
        """
        step_s, blocked_s, late_s, replayed_s, processor_s = (measured[name] for name in NEEDED)
        transfer_s = blocked_s + max(0.0, replayed_s - step_s)
        case = cls(supernode, spec, workload, Rates(1.0))
        case = case._fitted("link_bytes_s", lambda c: transfer_s - c.waits_s(serial), 1e4, 1e12)
        busy_s = step_s - blocked_s - late_s

        def at_speed(case: Calibrated) -> Calibrated:
            return case._fitted("slowdown", lambda c: c.step_s(serial) - busy_s - transfer_s, 1e-3, 1e3)

        if EXPERTS in measured:
            experts_s = measured[EXPERTS]
            case = case._fitted("elementwise", lambda c: at_speed(c).experts_s(serial) - experts_s, 1e-2, 1.0)
        case = at_speed(case)
        sent_s = blocked_s + _terms(case.priced(serial))["data-parallel reduction"]
        share = (processor_s - (step_s - late_s - sent_s)) / sent_s
        case = case.replace(spread=2.0 * (1.0 - blocked_s / transfer_s))
        case = case._fitted("jitter", lambda c: c.step_s(serial) - step_s, 1e-6, 10.0)
        return case.replace(share=min(1.0, max(0.0, share)))

    def replace(self, **rates: Any) -> Calibrated:
        """Return a copy with other rates."""
        return dataclasses.replace(self, rates=dataclasses.replace(self.rates, **rates))

    def _fitted(self, rate: str, excess: Callable[[Calibrated], float], low: float, high: float) -> Calibrated:
        """Return a copy with a rate from `low` to `high` at which the increasing `excess` is 0."""
        return self.replace(**{rate: _root(lambda x: excess(self.replace(**{rate: x})), low, high)})

    def step_s(self, strategy: Strategy) -> float:
        """Return the predicted seconds of forward and backward."""
        terms = _terms(self.priced(strategy))
        return sum(s for name, s in terms.items() if name not in NOT_MEASURED)

    def experts_s(self, strategy: Strategy) -> float:
        """Return the predicted seconds of computation between dispatch and combine, without overlap."""
        case = self.case(strategy)
        return float(case.n.layers * expert_work_seconds(case)[0])

    def waits_s(self, strategy: Strategy) -> float:
        """Return the predicted exposed seconds of collectives of layers, the cost of smaller kernels included.

        The slowdown of computation by concurrent collectives does not count.
        """
        terms = _terms(self.replace(share=0.0).priced(strategy))
        return sum(terms[name] for name in INSIDE_LAYERS)

    def blocked_s(self, strategy: Strategy) -> float:
        """Return the predicted seconds in which a rank waits for a collective that all ranks have reached.

        Waits for a link that takes no time are subtracted: they are the cost of smaller kernels.
        """
        linked = self.replace(counts_late=False)
        free = linked.replace(link_bytes_s=1e18, latency=0.0)
        return linked.waits_s(strategy) - free.waits_s(strategy)

    def priced(self, strategy: Strategy) -> Scores:
        """Return the cost model's result for a strategy."""
        return score(self.case(strategy))

    def case(self, strategy: Strategy) -> PricingCase:
        """Return the inputs of the cost model for a strategy."""
        card, rates = device_card("", "cpu"), self.rates
        card = dataclasses.replace(
            card,
            elementwise=card.elementwise if rates.elementwise is None else rates.elementwise,
            collective_share=rates.share,
            latency=card.latency * rates.latency,
            jitter=rates.jitter,
            collective_spread=rates.spread,
        )
        stack = dataclasses.replace(stack_card("cpu"), compute=rates.slowdown)
        tier = self.supernode.tiers[0]
        bytes_s = dataclasses.replace(tier.bytes_s, value=rates.link_bytes_s)
        tiers = (dataclasses.replace(tier, bytes_s=bytes_s),)
        supernode = dataclasses.replace(self.supernode, tiers=tiers)
        machine = Machine.of(supernode, "float32", card=card, stack=stack)
        machine = dataclasses.replace(machine, counts_late=rates.counts_late)
        numbers, candidates = ModelNumbers.of(self.spec), Candidates.of(strategy, self.workload)
        return PricingCase(numbers, machine, self.workload, candidates)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of an increasing function between `low` and `high`, or the nearer end if there is none."""
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
        rows: Measured `speedup` and `NEEDED` by name of the strategy.
    """
    serial = rows["serial"]
    model = Calibrated.of(supernode, spec, workload, strategies["serial"], serial)
    results = {}
    for name, row in rows.items():
        step_s, blocked_s = model.step_s(strategies[name]), model.blocked_s(strategies[name])
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
        "link_bytes_s": model.rates.link_bytes_s,
        "slowdown": model.rates.slowdown,
        "elementwise": model.rates.elementwise,
        "collective_share": model.rates.share,
        "jitter": model.rates.jitter,
        "collective_spread": model.rates.spread,
        "strategies": results,
        "auto": choice,
        "auto_speedup": rows[choice]["speedup"],
    }
