"""Predictions for runs of a CSV: step time, memory, every term, an interval, and what was assumed."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hyper_parallel.calibration._cells import RowError, number
from hyper_parallel.calibration._runs import PublishedRun
from hyper_parallel.cost import (
    RECOMPUTE,
    Candidates,
    DeviceCard,
    Machine,
    ModelNumbers,
    Scores,
    StackCard,
    card_names,
    device_card,
    load_card,
    read_card,
    score,
    stack_card,
)
from hyper_parallel.ir import Workload
from hyper_parallel.topology import Quantity, Supernode, load_topology, preset_names
from hyper_parallel.units import TFLOP, GiB

_DEVICES: Final = (
    (r"gb300", "gb300-nvl72"), (r"gb200", "gb200-nvl72"), (r"b300", "dgx-b300"), (r"b200", "dgx-b200"),
    (r"h200", "dgx-h200"), (r"h800", "dgx-h800"), (r"h100.*(96|hbm2e)", "h100-96gb"), (r"h100", "dgx-h100"),
    (r"a100", "dgx-a100"), (r"910c|a3\b|cloudmatrix", "cloudmatrix384"), (r"910b|a2\b", "atlas-900-a2"),
    (r"950", "atlas-950"), (r"v5p", "tpu-v5p"),
)  # fmt: skip
"""Device names of runs to topologies, the first match wins."""

_NAMED: Final = (
    "A100",
    "H100",
    "H200",
    "H800",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "910B",
    "910C",
    "950",
    "TPU v5p",
)
"""The same names as people write them."""
_PEAKS: Final = (1, 100_000)
"""TFLOP/s that a device may have."""
_PEAK_RATIO: Final = {"float8_e4m3fn": 2.0, "mxfp8": 2.0, "nvfp4": 4.0, "float32": 0.5}
"""Dense peak against bfloat16 where the topology has no entry: tensor cores double with each halving of the width."""
_FP4_RATIO: Final = {"gb300-nvl72": 6.0, "dgx-b300": 6.0}
"""The 300 series has 14.7 and 13.5 PFLOP/s of dense fp4 (published DGX Cloud peak table)."""

_STACKS: Final = (
    (r"nanotron", "nanotron"), (r"torchtitan.*\beager\b", "torchtitan-eager"), (r"torchtitan", "torchtitan"),
    (r"megatron-bridge", "megatron-bridge"), (r"nemo", "nemo"), (r"modellink|mindspeed|mindformers", "mindspeed"),
    (r"llm-foundry|composer|mosaic|fsdp|deepspeed zero", "torch-fsdp"), (r"maxtext|jax|pax", "jax"),
)  # fmt: skip
"""Stacks of runs to stack cards, the first match wins."""

_LAST_UNFUSED: Final = 2022
"""Sources up to this year are taken to run without fused attention, which spread in 2023."""

_SAFE: Final = 1.1
"""Share of the memory up to which a run that did fit is believed to fit by prediction, when recomputation is not
stated: published runs use options that save memory and are not in the row."""


@dataclass(frozen=True, slots=True)
class Cards:
    """Device and stack cards by name, over the shipped ones.

    Attributes:
        device: Cards that replace shipped device cards, by name.
        stack: Cards that replace shipped stack cards, by name.
    """

    device: Mapping[str, DeviceCard] = field(default_factory=dict)
    stack: Mapping[str, StackCard] = field(default_factory=dict)

    def device_for(self, name: str, kind: str) -> DeviceCard:
        """The device card for a device."""
        for card in self.device.values():
            if any(fnmatch.fnmatchcase(name.lower(), g.lower()) for g in card.devices):
                return card
        return device_card(name, kind)

    def stack_for(self, name: str) -> StackCard:
        """The stack card of a name."""
        return self.stack.get(name) or stack_card(name)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted for one run.

    Attributes:
        run: The run.
        scores: All terms, of one candidate.
        low: Lower end of the interval, seconds.
        high: Upper end.
        assumptions: Sentences about what was assumed.
    """

    run: PublishedRun
    scores: Scores
    low: float
    high: float
    assumptions: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return float(self.scores.step_s[0])

    @property
    def tokens_per_device_s(self) -> float:
        """Predicted tokens per second and device."""
        return self.run.sequences * self.run.seq_len / self.step_s / self.run.devices

    @property
    def memory_gib(self) -> float:
        """Predicted peak memory of the fullest device."""
        return float(self.scores.memory_bytes[0]) / GiB


def supernode_of(run: PublishedRun, told: list[str]) -> Supernode:
    """The topology a run's device belongs to; the nearest by peak rate when none is known by that name."""
    text = f"{run.row.get('device', '')}".lower()
    # What tells a special part from the usual one is often only in the remarks.
    remarks = f"{text} {run.row.get('notes', '')}".lower()
    found = next((name for pattern, name in _DEVICES if re.search(pattern, text)), None)
    if found == "dgx-h100" and re.search(r"hbm2e|96 ?gb", remarks):
        found = "h100-96gb"
    peak = number(run.row, "peak_tflops")
    if peak is not None and not _PEAKS[0] <= peak <= _PEAKS[1]:
        raise RowError(f"`peak_tflops` is {peak:g}; it is in TFLOP/s, {_PEAKS[0]} to {_PEAKS[1]}")
    if found is None:
        if peak is None:
            known = ", ".join(_NAMED)
            raise RowError(
                f"device `{run.row.get('device')}` is not known and `peak_tflops` is blank; known are {known}"
            )
        presets = [load_topology(name) for name in preset_names() if name != "local-cpu"]
        wanted = peak * TFLOP
        nearest = min(presets, key=lambda s: abs(math.log(s.peak_flops("bfloat16") / wanted)))
        told.append(
            f"device `{run.row.get('device')}` is not known: links and memory of {nearest.name}"
        )
        found = nearest.name
    supernode = load_topology(found)
    memory = supernode.device.memory_bytes
    if found == "dgx-a100" and re.search(r"40 ?g", text):
        memory = Quantity(40.0 * GiB, "A100 40 GB", "general")
    peaks = dict(supernode.device.peak_flops)
    if peak and abs(peak * TFLOP / peaks["bfloat16"].value - 1.0) > 1e-3:
        peaks["bfloat16"] = Quantity(peak * TFLOP, "column peak_tflops", "stated")
        told.append(f"peak {peak:g} TFLOP/s: column peak_tflops")
    base = peaks["bfloat16"]
    peaks.setdefault("float16", base)
    for dtype, ratio in _PEAK_RATIO.items():
        factor = _FP4_RATIO.get(found, ratio) if dtype == "nvfp4" else ratio
        peaks.setdefault(dtype, Quantity(base.value * factor, f"{factor:g} x bfloat16", "derived"))
    device = replace(supernode.device, peak_flops=peaks, memory_bytes=memory)
    return replace(supernode, device=device)


def stack_name(run: PublishedRun, told: list[str]) -> str:
    """The stack card of a run, by its stack, notes, and the year of its source."""
    text = f"{run.row.get('stack', '')} {run.row.get('notes', '')}".lower()
    for pattern, name in _STACKS:
        if re.search(pattern, text):
            old = re.search(r"20(1\d|2[0-4])[01]\d", run.row.get("source", ""))
            return "torchtitan-2024" if name == "torchtitan" and old else name
    years = re.findall(r"\b(20[12]\d)\b", f"{run.row.get('source', '')} {run.row.get('stack', '')}")
    if years and min(map(int, years)) <= _LAST_UNFUSED:
        told.append(f"stack of {min(years)}: attention is not fused")
        return "megatron-2022"
    if re.search(r"megatron|deepspeed|galvatron|colossal", text):
        return "megatron"
    name = "torch-fsdp" if run.zero == 3 else "megatron"
    told.append(f"stack `{run.row.get('stack', '')}` is not known: priced as {name}")
    return name


def _release(run: PublishedRun) -> float | None:
    """Months since 2020 of a release such as 26.04 in the stack's name."""
    found = re.search(r"\b(2\d)\.(0[1-9]|1[0-2])\b", run.row.get("stack", ""))
    return (int(found[1]) - 20) * 12.0 + int(found[2]) - 1 if found else None


def machine_of(run: PublishedRun, cards: Cards, told: list[str]) -> Machine:
    """The machine of a run: its topology, its device card, and its stack card as the row describes it."""
    supernode = supernode_of(run, told)
    stack = cards.stack_for(stack_name(run, told))
    compute = "float16" if run.matmul_dtype == "float16" else "bfloat16"
    if run.matmul_dtype == "float32":
        compute = "float32"
    release = _release(run)
    card = cards.device_for(supernode.device.name, supernode.device.kind)
    if stack.moe_month and run.model.num_params and release is not None:
        behind = max(0.0, stack.moe_release - release)
        factor = 1.0 + stack.moe_month * card.maturing * math.sqrt(behind)
        stack = replace(stack, moe=stack.moe * factor, moe_host_s=stack.moe_host_s * factor)
    if not stack.sequence_parallel and "sp" in re.split(
        r"\W", run.row.get("recompute", "").lower()
    ):
        stack = replace(stack, sequence_parallel=1.0)
    elif not run.sequence_parallel:
        stack = replace(stack, sequence_parallel=0.0)
    if not stack.sequence_parallel and run.degrees["tp"] > 1:
        told.append("the sequence is not sharded between tensor-parallel blocks")
    return Machine.of(supernode, compute, matmul_dtype=run.matmul_dtype, card=card, stack=stack)


def workload_of(run: PublishedRun, compute_dtype: str) -> Workload:
    """Sequence length, batch numbers and formats of a run; states and gradients in float32."""
    return Workload(
        run.seq_len, run.sequences * run.seq_len, run.microbatch, run.accumulation, compute_dtype
    )


def candidate_of(run: PublishedRun, recompute: str) -> Candidates:
    """A run as a candidate of one row."""
    d = run.degrees
    return Candidates.of_columns(
        pp=d["pp"], vpp=d["vpp"], dp_shard=d["dp"], cp=d["cp"], tp_x=d["tp"], ep=d["ep"], etp=d["etp"],
        microbatch=run.microbatch, accumulation=run.accumulation, zero=run.zero,
        recompute=RECOMPUTE.index(recompute),
    )  # fmt: skip


def predict(run: PublishedRun, cards: Cards | None = None) -> Prediction:
    """Predict one run.

    Recomputation that the row does not state is none or selective, whichever fits in memory.
    """
    told = list(run.assumptions)
    machine = machine_of(run, cards or Cards(), told)
    numbers, workload = ModelNumbers.of(run.model), workload_of(run, machine.compute_dtype)
    choices = (run.recompute,) if run.recompute else RECOMPUTE[:2]
    for recompute in choices:
        scores = score(numbers, machine, workload, candidate_of(run, recompute))
        if scores.memory_bytes[0] <= _SAFE * machine.memory_bytes:
            break
    if run.recompute is None:
        fits = scores.memory_bytes[0] <= _SAFE * machine.memory_bytes
        why = "the lightest that fits in memory" if fits else "nothing fits by prediction"
        told.append(f"recompute={recompute}: not stated, {why}")
    spread = interval_share(run, machine)
    step = float(scores.step_s[0])
    assert 0.0 < step < math.inf, f"the price of a run is {step} s"
    return Prediction(run, scores, step * math.exp(-spread), step * math.exp(spread), tuple(told))


def interval_share(run: PublishedRun, machine: Machine) -> float:
    """Half width of the interval in log ratio, from left-out residuals of similar runs."""
    kind = "moe" if run.model.num_experts else "dense"
    return machine.stack.interval.get(kind, 0.2)


def shipped_cards() -> Cards:
    """All shipped cards by name, for fitting."""
    device: dict[str, Any] = {}
    stack: dict[str, Any] = {}
    for name in card_names():
        one, other = load_card(name)
        if one:
            device[name] = one
        if other:
            stack[name] = other
    return Cards(device, stack)


def read_cards(folder: str | Path) -> Cards:
    """The cards of a folder over the shipped ones.

    Raises:
        CardUnreadable: HP313 when a file of the folder is no card.
    """
    shipped = shipped_cards()
    device, stack = dict(shipped.device), dict(shipped.stack)
    for path in sorted(Path(folder).glob("*.yaml")):
        one, other = read_card(path)
        if one:
            device[one.name] = one
        if other:
            stack[other.name] = other
    return Cards(device, stack)
