"""Calibration of this machine: measure its ranks, write its cards, and compare predictions before and after."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from hyper_parallel.backends.torch import measure_rates
from hyper_parallel.calibration import (
    LocalRates,
    MeasuredStep,
    check_card_file,
    fit_device,
    fit_probes,
    fit_stack,
    mean_rates,
    write_local_cards,
)
from hyper_parallel.config import load_recipe
from hyper_parallel.cost import (
    LOCAL_CARD,
    Candidates,
    DeviceCard,
    Machine,
    ModelNumbers,
    PricingCase,
    StackCard,
    cards_for_ranks,
    device_card,
    own_cards_by_ranks,
    own_path,
    stack_card,
    step_seconds,
)
from hyper_parallel.ir import Plan
from hyper_parallel.model import ModelSpec
from hyper_parallel.runtime import World, launch, scratch_folder
from hyper_parallel.topology import Supernode, detect_local, rank_threads
from hyper_parallel.trainer._probe import AT_ONCE, Probe, make_probes, time_probes
from hyper_parallel.trainer.engine.recipe_model import read_spec
from hyper_parallel.trainer.job import Job, prepare_job, under_torchrun
from hyper_parallel.trainer.run_start import run_job

_WARM: Final = 3
_DTYPES: Final = ("float32", "bfloat16")
_WINDOW_S: Final = 0.12
_SHORT_WINDOW_S: Final = 0.06

logger = logging.getLogger(__name__)


def calibrate_local(
    output: Path | None, ranks: int | None, check: Path | None, steps: int
) -> Iterator[str]:
    """Measure this machine, write its cards, and yield lines of output.

    Args:
        output: Path of the cards; None: the path that `plan` and `train` read.
        ranks: Number of ranks; None: every accelerator, or 4 on a machine without one.
        check: Recipe whose predictions before and after are compared with measured steps.
        steps: Number of measured steps.
    """
    path = output or own_path()
    check_card_file(path)
    supernode = detect_local(ranks)
    by_ranks = {k: _measure(detect_local(k)) for k in _rank_counts(supernode)}
    write_local_cards(path, by_ranks)
    yield f"measured {supernode.description}"
    kind = supernode.device.kind
    if len(by_ranks) > 1:
        yield f"  the numbers are for {', '.join(map(str, by_ranks))} ranks at work"
    measured = [_printed_numbers(*cards) for cards in by_ranks.values()]
    for name, shipped in _printed_numbers(*_shipped(supernode)).items():
        yield f"  {name}: {shipped:.4g} -> {'  '.join(f'{m[name]:.4g}' for m in measured)}"
    used = "" if output else f"; `plan` and `train` on this {kind} use it from now on"
    yield f"card written to {path}{used}"
    if check is not None:
        yield from _check(check, steps, by_ranks)


def calibrate_first_run(job: Job) -> str | None:
    """Measure this machine for some seconds before its first run, and save the cards where `calibrate` saves them.

    Skipped for ranks of another launcher, for a topology that is not this machine, and for a known number of ranks.

    Returns:
        A line of output, or None when nothing was measured; after a measurement the run must be planned again.
    """
    ranks = job.ranks
    if job.recipe.topology != "local" or under_torchrun():
        return None
    supernode = detect_local(ranks)
    path, known = own_path(), own_cards_by_ranks(supernode.device.name)
    if known and min(known) <= ranks <= max(known):
        return None
    start = time.perf_counter()
    cards = _measure(supernode, short=True)
    try:
        write_local_cards(path, {**known, ranks: cards})
    except OSError as error:
        logger.warning("the measured rates of this machine cannot be saved: %s", error)
        return None
    return (
        f"first run with {ranks} ranks on this machine: measured it in {time.perf_counter() - start:.0f} s for the "
        f"predictions, saved in {path} (--no-calibrate skips this; `hyper-parallel calibrate` measures longer)"
    )


def _printed_numbers(device: DeviceCard, stack: StackCard) -> dict[str, float]:
    """Return the printed numbers of the cards."""
    numbers = ("saturation", "elementwise", "stream", "link", "latency", "kernel_s")
    tables = ("matmul", "attention")
    return {
        **{name: getattr(device, name) for name in numbers},
        **{f"{table}.{d}": device.share(table, d) for table in tables for d in _DTYPES},
        "step_s": stack.step_s,
    }


def _rank_counts(supernode: Supernode) -> list[int]:
    """Return the rank counts to measure: all devices of an accelerator; 1, 2, 4, ... and all ranks of a CPU."""
    most = supernode.num_devices
    if supernode.device.kind != "cpu":
        return [most]
    return sorted({most, *(2**k for k in range(most.bit_length()) if 2**k < most)})


def _shipped(supernode: Supernode) -> tuple[DeviceCard, StackCard]:
    device = supernode.device
    stack = stack_card("cpu" if device.kind == "cpu" else "hyper-parallel")
    return device_card(device.name, device.kind), stack


def _measure(supernode: Supernode, *, short: bool = False) -> tuple[DeviceCard, StackCard]:
    """Return the cards of a number of ranks; a short measurement keeps shipped values that no probe measures."""
    ranks, kind = supernode.num_devices, supernode.device.kind
    # A name other than `local`, so that earlier or damaged cards of this machine are not read.
    supernode = replace(supernode, name=LOCAL_CARD + " machine")
    dtypes = tuple(d for d in _DTYPES if d in supernode.device.peak_flops)
    probes = make_probes(supernode, short=short)
    window_s = _SHORT_WINDOW_S if short else _WINDOW_S
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    threads = rank_threads(ranks)
    by_rank: list[LocalRates] = launch(
        lambda rank: _rates_of(dtypes, window_s), ranks, threads=threads
    )
    rates = mean_rates(by_rank)
    seconds: list[float] = []
    for first in range(0, len(probes), AT_ONCE):
        group = probes[first : first + AT_ONCE]
        each = launch(lambda rank, group=group: _seconds_of(group, short), ranks, threads=threads)
        seconds += [max(per_rank) for per_rank in zip(*each, strict=True)]
    source = f"micro-benchmarks of this machine, {ranks} ranks at once, torch {torch.__version__}"
    card = fit_device(rates, supernode, source)
    measured = [
        MeasuredStep(p.plan_model, p.plan.strategy, p.plan.workload, s)
        for p, s in zip(probes, seconds, strict=True)
    ]
    source = f"{len(probes)} small training steps on {ranks} ranks"
    if kind == "cpu":
        card, stack = fit_probes(measured, card, supernode, source)
        return card, _with_shipped(stack, stack_card("cpu"), probes) if short else stack
    return fit_stack(measured[:2], card, supernode, source)


def _with_shipped(stack: StackCard, base: StackCard, probes: Sequence[Probe]) -> StackCard:
    """Return a stack card of dense probes, with shipped numbers for experts and for axes without a probe."""
    strategies = [probe.plan.strategy for probe in probes]
    unused = [a for a in stack.host_s if all(getattr(s, a, 1) == 1 for s in strategies)]
    names = ("moe", "moe_host_s", *(f"host_s.{axis}" for axis in unused))
    return replace(
        stack,
        moe=base.moe,
        moe_host_s=base.moe_host_s,
        host_s={**stack.host_s, **{a: base.host_s.get(a, 0.0) for a in unused}},
        sources={**stack.sources, **{name: base.sources.get(name, "assumed") for name in names}},
    )


def _rates_of(dtypes: tuple[str, ...], window_s: float) -> LocalRates:
    with World.join() as world:
        return measure_rates(world.device, dtypes, window_s)


def _seconds_of(probes: Sequence[Probe], short: bool) -> list[float]:
    with World.join() as world:
        return time_probes(probes, world, statistics.median if short else min)


def _check(
    path: Path, steps: int, by_ranks: Mapping[int, tuple[DeviceCard, StackCard]]
) -> Iterator[str]:
    with scratch_folder(in_memory=False) as scratch:
        loaded = load_recipe(
            path,
            [f"training.steps={steps}", f"output_dir={scratch}/run", "training.eval_every=0", "training.warmup_steps=1",
             "checkpoint.resume=never", "checkpoint.export=false", "sample_prompt=null"],
        )  # fmt: skip
        job = prepare_job(loaded, progress=False)
        run_job(job)
        lines = (job.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    measured = statistics.median(float(json.loads(line)["step_s"]) for line in lines[_WARM:])
    plan = job.plan
    yield f"{path}: {plan.strategy}, {steps} steps, measured {measured:.4g} s a step (median)"
    spec = read_spec(loaded.recipe.model.path)
    ranks = plan.strategy.world_size
    machine = detect_local(ranks)
    for name, cards in (("before", _shipped(machine)), ("after", cards_for_ranks(by_ranks, ranks))):
        predicted = _predicted(spec, plan, machine, *cards)
        yield f"  predicted {name}: {predicted:.4g} s, {predicted / measured - 1.0:+.1%} of the measured"


def _predicted(
    spec: ModelSpec, plan: Plan, supernode: Supernode, device: DeviceCard, stack: StackCard
) -> float:
    machine = Machine.of(supernode, plan.workload.compute_dtype, card=device, stack=stack)
    candidate = Candidates.of(plan.strategy, plan.workload)
    return float(
        step_seconds(PricingCase(ModelNumbers.of(spec), machine, plan.workload, candidate))[0]
    )
