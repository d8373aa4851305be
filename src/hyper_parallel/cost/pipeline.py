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
"""Speed of a rank by the share of running ranks, relative to all ranks running: at least 1, and 1 for the share 1."""


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Split of layers into pipeline stages, and the slowest stage."""

    fullest: Array  # layers of the fullest stage without the head
    last: Array  # layers of the stage with the head
    layers: Array  # layers of the slowest stage
    head: Array  # 1 if the slowest stage has the head
    remaining_s: Array  # seconds of one microbatch over all stages but the slowest
    slowest: Array  # seconds of one microbatch on the slowest stage


def split_layers_closed_form(
    c: Candidates, layers: int, layer_s: Array, head_s: Array, even: bool, pace: Speed | None = None
) -> StageSplit:
    """Split equal layers into stages: with the fastest slowest stage, or evenly with the fewest layers on the last.

    With cores shared among ranks (`pace`), ranks use the cores that a light stage leaves idle. A round then takes the
    time of the mean stage at the greatest throughput of all ranks, or of the slowest stage alone.
    """
    p, single_stage = c.pp, c.pp <= 1
    total = layers * layer_s + head_s
    if single_stage.all():
        all_layers, nothing = np.full(1, float(layers)), np.zeros(1)
        return StageSplit(all_layers, all_layers, all_layers, np.ones(1), nothing, total)

    def slowest_of(last: Array) -> tuple[Array, Array]:
        # The other p - 1 stages share the rest; the fullest of them or the last stage is slowest.
        """Return the layers of the fullest stage without the head, and the seconds of the slowest stage."""
        fullest = np.ceil((layers - last) / np.maximum(p - 1.0, 1.0))
        return fullest, np.maximum(fullest * layer_s, last * layer_s + head_s)

    # An even split puts the fewest layers on the stage with the head.
    last = np.maximum(layers - np.ceil(layers / p) * (p - 1.0), 0.0)
    if not even:
        ideal = np.floor((total / p - head_s) / layer_s)
        for guess in (ideal, ideal + 1.0):
            clipped = np.clip(guess, 0.0, np.maximum(layers - (p - 1.0), 0.0))
            last = np.where(slowest_of(clipped)[1] < slowest_of(last)[1], clipped, last)
    fullest = slowest_of(last)[0]
    last, fullest = np.where(single_stage, layers, last), np.where(single_stage, layers, fullest)
    with_head = single_stage | (last * layer_s + head_s >= fullest * layer_s)
    slowest = np.where(with_head, last * layer_s + head_s, fullest * layer_s)
    share = np.ones(1)
    if pace is not None:
        slowest_alone = _by_stages(p, lambda k: 1.0 / pace(k)[0])
        most_work = _by_stages(p, lambda k: np.max(k * pace(k)))
        share = np.maximum(slowest_alone, total / p / slowest / most_work)
    return StageSplit(
        fullest,
        last,
        np.where(with_head, last, fullest) * share,
        np.where(with_head, 1.0, 0.0) * share,
        np.maximum(total - slowest * share, 0.0),
        slowest * share,
    )


def bubble_seconds(
    c: Candidates,
    remaining_s: Array,
    forward: Array,
    backward: Array,
    weight: Array,
    pace: Speed | None = None,
) -> Array:
    """Return seconds of pipeline fill and drain, from F, B + W and W of one layer.

    With shared cores, fill and drain have equally many rounds with 1, 2, ... p - 1 running ranks, each faster by its
    `pace`. `remaining_s` are seconds of one microbatch over all stages but the slowest.

    Sources: Narayanan et al. 2021, sections 2.2 and 2.3; Qi et al. 2023 (zero bubble), sections 2 and 6; DeepSeek-AI
    2024 (DualPipe), section 3.2.1.
    """
    all_layers = forward + backward
    factors = {
        "interleaved": 1.0 / np.maximum(c.vpp, 1.0),
        "zb-h1": np.maximum(0.0, all_layers - 2.0 * weight) / all_layers,
        "zbv": np.maximum(0.0, all_layers - 3.0 * weight) / all_layers,
        "dualpipev": np.maximum(0.0, 2.0 * all_layers - forward - 3.0 * weight) / 2.0 / all_layers,
    }
    factor: Array = np.ones(1)
    for name, value in factors.items():
        factor = np.where(c.schedule == SCHEDULES.index(name), value, factor)
    if pace is not None:
        mean = _by_stages(c.pp, lambda k: float(np.mean(1.0 / pace(k)[:-1])) if len(k) > 1 else 1.0)
        factor = factor * np.maximum(0.0, 2.0 * mean - 1.0)
    return np.where(c.pp > 1, remaining_s * factor, 0.0)


def _by_stages(p: Array, value: Callable[[Array], Array | float]) -> Array:
    """Return, for every p, a value of the shares 1/p, 2/p, ... 1 of p ranks."""
    result = np.ones(np.shape(p))
    for ranks in np.unique(p):
        shares = np.arange(1.0, ranks + 1.0) / ranks
        result = np.where(p == ranks, value(shares), result)
    return result


def in_flight(c: Candidates) -> Array:
    """Return microbatches with activations on the first rank at the peak, in units of all layers of the rank.

    1F1B and ZB-H1 p, GPipe m; interleaved p + (p - 1) / v; ZBV p and DualPipeV p + 1/2 spread over their two chunks.
    Sources: Korthikanti et al. 2022, section 4.2.3; Qi et al. 2023, section 6; DeepSeek-AI 2024, table 2.
    """
    return np.where(c.pp > 1, np.minimum(c.accumulation, _uncapped(c)), 1.0)


def in_flight_of(c: Candidates, rank: int) -> Array:
    """Return microbatches with activations on a pipeline rank at the peak, in units of all its layers.

    Each rank starts its first backward one microbatch after the next one does, two chunks in interleaved schedules.
    GPipe and the V-shaped schedules have equal numbers on all ranks. Sources as of `in_flight`.
    """
    differences: dict[str, Array] = {
        "1f1b": np.full(1, 1.0 * rank),
        "zb-h1": np.full(1, 1.0 * rank),
        "interleaved": 2.0 * rank / c.vpp,
    }
    result = _uncapped(c)
    for name, difference in differences.items():
        result = np.where(c.schedule == SCHEDULES.index(name), result - difference, result)
    return np.where(c.pp > 1, np.minimum(c.accumulation, np.maximum(result, 1.0)), 1.0)


def _uncapped(c: Candidates) -> Array:
    """Return microbatches in flight on the first rank for an unlimited number of microbatches."""
    p = c.pp
    num_in_flight = {
        "gpipe": c.accumulation,
        "interleaved": p + (p - 1.0) / np.maximum(c.vpp, 1.0),
        "dualpipev": p + 0.5,
    }
    result: Array = p * 1.0
    for name, value in num_in_flight.items():
        result = np.where(c.schedule == SCHEDULES.index(name), value, result)
    return result
