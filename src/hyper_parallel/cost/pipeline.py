"""Pipelines: the slowest stage, the bubble and the microbatches in flight of every schedule, as arrays.

With F, B and W the seconds of one microbatch on one rank in forward, in the backward of inputs and in that of
weights, and sum over stages S, slowest stage t, p stages, m microbatches, v virtual stages:

    GPipe, 1F1B       (m - 1) t + S            every stage is filled and drained once
    interleaved       m t + (S - t) / v        filled and drained by chunks
    ZB-H1             as 1F1B, with W moved into the bubble: (S - t) (F + B - W) / (F + B + W)
    ZBV               (S - t) max(0, F + B - 2W) / (F + B + W): none when the three are equal
    DualPipeV         (S - t) (F + 2B - W) / 2 / (F + B + W), a forward and a backward at once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyper_parallel.cost._candidates import SCHEDULES, Array, Candidates

Speed = Callable[[Array], Array]
"""Speed of a rank while a share of all ranks works, against all of them at work: 1 or more, and 1 for the share 1."""


@dataclass(frozen=True, slots=True)
class StageSplit:
    """How layers lie on pipeline stages, and which stage sets the pace."""

    most: Array  # layers of the fullest stage without the head
    last: Array  # layers of the stage with the head
    layers: Array  # layers of the slowest stage
    head: Array  # 1 where the slowest stage has the head
    others: Array  # seconds of one microbatch over all stages but the slowest
    slowest: Array  # seconds of one microbatch on the slowest stage


def lay_out(
    c: Candidates,
    layers: int,
    layer_s: Array,
    head_s: Array,
    even: bool,
    pace: Speed | None = None,
) -> StageSplit:
    """Equal layers on stages: the slowest as fast as it can be, or evenly with the fewest on the last.

    What a light stage leaves of cores that ranks share, `pace`, the others use, so that the round is that of the mean
    stage at the greatest throughput of all ranks, or of the slowest alone.
    """
    p, one = c.pp, c.pp <= 1
    total = layers * layer_s + head_s
    if one.all():
        whole, nothing = np.full(1, float(layers)), np.zeros(1)
        return StageSplit(whole, whole, whole, np.ones(1), nothing, total)

    def slowest_of(last: Array) -> tuple[Array, Array]:
        # The other p - 1 stages share the rest; the fullest of them or the last stage decides.
        most = np.ceil((layers - last) / np.maximum(p - 1.0, 1.0))
        return most, np.maximum(most * layer_s, last * layer_s + head_s)

    # The even cut leaves fewest on the stage with the head.
    last = np.maximum(layers - np.ceil(layers / p) * (p - 1.0), 0.0)
    if not even:
        ideal = np.floor((total / p - head_s) / layer_s)
        for other in (ideal, ideal + 1.0):
            guess = np.clip(other, 0.0, np.maximum(layers - (p - 1.0), 0.0))
            last = np.where(slowest_of(guess)[1] < slowest_of(last)[1], guess, last)
    most = slowest_of(last)[0]
    last, most = np.where(one, layers, last), np.where(one, layers, most)
    with_head = one | (last * layer_s + head_s >= most * layer_s)
    slowest = np.where(with_head, last * layer_s + head_s, most * layer_s)
    share = np.ones(1)
    if pace is not None:
        alone = _by_stages(p, lambda k: 1.0 / pace(k)[0])
        most_work = _by_stages(p, lambda k: np.max(k * pace(k)))
        share = np.maximum(alone, total / p / slowest / most_work)
    return StageSplit(
        most,
        last,
        np.where(with_head, last, most) * share,
        np.where(with_head, 1.0, 0.0) * share,
        np.maximum(total - slowest * share, 0.0),
        slowest * share,
    )


def bubble_seconds(
    c: Candidates,
    others: Array,
    forward: Array,
    backward: Array,
    weight: Array,
    pace: Speed | None = None,
) -> Array:
    """Seconds a step waits for the pipeline to fill and drain, of F, B + W and W of one layer.

    Where ranks share cores filling and draining have as many rounds with 1, 2, ... p - 1 ranks at work, each faster by
    its `pace`. `others` are seconds of one microbatch over all stages but the slowest.

    Sources: Narayanan et al. 2021, sections 2.2 and 2.3; Qi et al. 2023 (zero bubble), sections 2 and 6; DeepSeek-AI
    2024 (DualPipe), section 3.2.1.
    """
    whole = forward + backward
    factors = {
        "interleaved": 1.0 / np.maximum(c.vpp, 1.0),
        "zb-h1": np.maximum(0.0, whole - 2.0 * weight) / whole,
        "zbv": np.maximum(0.0, whole - 3.0 * weight) / whole,
        "dualpipev": np.maximum(0.0, 2.0 * whole - forward - 3.0 * weight) / 2.0 / whole,
    }
    factor: Array = np.ones(1)
    for name, value in factors.items():
        factor = np.where(c.schedule == SCHEDULES.index(name), value, factor)
    if pace is not None:
        mean = _by_stages(c.pp, lambda k: float(np.mean(1.0 / pace(k)[:-1])) if len(k) > 1 else 1.0)
        factor = factor * np.maximum(0.0, 2.0 * mean - 1.0)
    return np.where(c.pp > 1, others * factor, 0.0)


def _by_stages(p: Array, value: Callable[[Array], Array | float]) -> Array:
    """A value of the shares 1/p, 2/p, ... 1 of p ranks, for every p."""
    found = np.ones(np.shape(p))
    for ranks in np.unique(p):
        shares = np.arange(1.0, ranks + 1.0) / ranks
        found = np.where(p == ranks, value(shares), found)
    return found


def in_flight(c: Candidates) -> Array:
    """Microbatches whose activations the first rank holds at the peak, in units of all layers of the rank.

    1F1B and ZB-H1 p, GPipe m; interleaved p + (p - 1) / v; ZBV p and DualPipeV p + 1/2 spread over their two chunks.
    Sources: Korthikanti et al. 2022, section 4.2.3; Qi et al. 2023, section 6; DeepSeek-AI 2024, table 2.
    """
    return np.where(c.pp > 1, np.minimum(c.accumulation, _uncapped(c)), 1.0)


def in_flight_of(c: Candidates, rank: int) -> Array:
    """Microbatches whose activations a pipeline rank holds at the peak, in units of all its layers.

    Each rank starts its first backward one microbatch after the next one does, two chunks in interleaved schedules.
    GPipe and the V-shaped schedules hold as much on every rank. Sources as of `in_flight`.
    """
    fewer: dict[str, Array] = {
        "1f1b": np.full(1, 1.0 * rank),
        "zb-h1": np.full(1, 1.0 * rank),
        "interleaved": 2.0 * rank / c.vpp,
    }
    found = _uncapped(c)
    for name, less in fewer.items():
        found = np.where(c.schedule == SCHEDULES.index(name), found - less, found)
    return np.where(c.pp > 1, np.minimum(c.accumulation, np.maximum(found, 1.0)), 1.0)


def _uncapped(c: Candidates) -> Array:
    """Return what the first rank would hold of many microbatches."""
    p = c.pp
    held = {
        "gpipe": c.accumulation,
        "interleaved": p + (p - 1.0) / np.maximum(c.vpp, 1.0),
        "dualpipev": p + 0.5,
    }
    found: Array = p * 1.0
    for name, value in held.items():
        found = np.where(c.schedule == SCHEDULES.index(name), value, found)
    return found
