"""The legal strategies of a model on a number of devices, as candidates, with a count of what was ruled out and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from hyper_parallel.cost import Candidates, ModelNumbers
from hyper_parallel.errors import UnknownKey
from hyper_parallel.ir import Workload

DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")
EXECUTABLE: Final = ("dp_replicate", "dp_shard", "tp_x")
MICROBATCHES: Final = (1, 2, 4, 8, 16)
MOST_CP: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may choose from.

    Attributes:
        num_devices: Devices; the degrees multiply to it.
        pins: Degrees that are fixed.
        tp: Tensor-parallel degrees to try.
        executable: Only axes that this version can run.
        recompute: Recompute choices to try, 0 none and 1 full.
        reshard: Choices of freeing gathered parameters after forward, 1 yes and 0 no.
    """

    num_devices: int
    pins: Mapping[str, int]
    tp: tuple[int, ...]
    executable: bool
    recompute: tuple[int, ...] = (0, 1)
    reshard: tuple[int, ...] = (1, 0)


@dataclass(frozen=True, slots=True)
class Space:
    """Legal candidates and how many combinations were ruled out, by reason."""

    candidates: Candidates
    ruled_out: dict[str, int]


def check_pins(pins: Mapping[str, int] | None) -> dict[str, int]:
    """Pinned degrees by axis name; `tp` means `tp_x`.

    Raises:
        UnknownKey: HP101 for a name that is no axis.
    """
    named = {("tp_x" if name == "tp" else name): degree for name, degree in (pins or {}).items()}
    for name in named:
        if name not in DEGREES:
            raise UnknownKey("a pin names no axis", got=name, allowed=(*DEGREES, "tp"))
    return named


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def enumerate_space(numbers: ModelNumbers, workload: Workload, limits: Limits) -> Space:
    """All legal candidates.

    Args:
        numbers: The model.
        workload: Sequence length and the batch numbers that are given; the others are derived per candidate.
        limits: Devices, pins and choices.
    """
    ruled_out: Counter[str] = Counter()
    meshes = list(_meshes(numbers, workload, limits, ruled_out))
    if not meshes:
        return Space(Candidates.of_rows(np.empty((0, 10))), dict(ruled_out))
    table = np.asarray(meshes, dtype=np.float64)
    tokens = workload.tokens_per_step
    data_ranks = table[:, 1] * table[:, 2]
    parts = []
    for microbatch in _microbatches(workload):
        if tokens is None:
            micro = np.full(len(table), float(workload.microbatch or 1))
            steps = np.full(len(table), float(workload.accumulation_steps or 1))
        else:
            sequences = tokens / workload.seq_len / data_ranks
            if microbatch is None:
                steps = np.full(len(table), float(workload.accumulation_steps or 1))
                micro = sequences / steps
            else:
                micro = np.full(len(table), float(microbatch))
                steps = sequences / micro
        whole = (micro == np.floor(micro)) & (steps == np.floor(steps)) & (micro >= 1)
        if workload.microbatch and workload.accumulation_steps:
            whole &= (micro == workload.microbatch) & (steps == workload.accumulation_steps)
        _count(ruled_out, "the batch does not divide", ~whole)
        full = steps >= table[:, 0]
        _count(ruled_out, "fewer microbatches than pipeline stages", whole & ~full)
        keep = whole & full
        for recompute in limits.recompute:
            for reshard in limits.reshard:
                # Without FSDP there is nothing to free, so one of the two choices is enough.
                useful = keep & ((table[:, 2] * table[:, 3] > 1) | (reshard == limits.reshard[0]))
                rows = table[useful]
                choice = np.broadcast_to([recompute, reshard], (len(rows), 2))
                parts.append(np.column_stack([rows, micro[useful], steps[useful], choice]))
    return Space(Candidates.of_rows(np.concatenate(parts)), dict(ruled_out))


def _microbatches(workload: Workload) -> tuple[int | None, ...]:
    if workload.microbatch is not None:
        return (workload.microbatch,)
    if workload.tokens_per_step is None or workload.accumulation_steps is not None:
        return (None,)
    return MICROBATCHES


def _count(ruled_out: Counter[str], reason: str, mask: np.ndarray) -> None:
    if number := int(mask.sum()):
        ruled_out[reason] += number


def _meshes(
    numbers: ModelNumbers, workload: Workload, limits: Limits, ruled_out: Counter[str]
) -> Iterator[tuple[int, ...]]:
    """Degrees (pp, dp_replicate, dp_shard, cp, tp, ep) that multiply to the devices and divide the model."""

    def choices(axis: str, number: int) -> list[int]:
        pinned = limits.pins.get(axis)
        if pinned is not None:
            return [pinned] if number % pinned == 0 else []
        return divisors(number) if not limits.executable or axis in EXECUTABLE else [1]

    seq_len, tokens = workload.seq_len, workload.tokens_per_step
    for pp in choices("pp", limits.num_devices):
        if pp > numbers.layers:
            ruled_out["more pipeline stages than layers"] += 1
            continue
        for tp in choices("tp_x", limits.num_devices // pp):
            if tp not in limits.tp:
                ruled_out["tp does not divide heads or widths"] += 1
                continue
            for cp in choices("cp", limits.num_devices // pp // tp):
                # Zigzag context parallelism cuts a sequence into 2 cp pieces, sequence parallelism each into tp.
                if cp > MOST_CP or (cp > 1 and seq_len % (2 * cp)) or seq_len % (cp * tp):
                    ruled_out["the sequence does not divide by cp and tp"] += 1
                    continue
                dp = limits.num_devices // pp // tp // cp
                if tokens is not None and tokens % (seq_len * dp):
                    ruled_out["tokens per step do not divide over the data-parallel ranks"] += 1
                    continue
                for dp_shard in choices("dp_shard", dp):
                    if limits.pins.get("dp_replicate", dp // dp_shard) != dp // dp_shard:
                        continue
                    inner = math.gcd(numbers.experts, dp_shard * cp * tp) if numbers.experts else 1
                    for ep in choices("ep", inner):
                        yield pp, dp // dp_shard, dp_shard, cp, tp, ep
