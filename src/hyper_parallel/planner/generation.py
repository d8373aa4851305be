"""`plan_generation`: the fastest layout for generation from prompts, among those that `generate --parallel` can run.

The search prices every layout that fits in memory, with as many slots as fit and have a prompt. A slot is the memory
for one sequence at a time on a data-parallel rank; prompts may wait for a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from hyper_parallel.errors import BadValue, DoesNotFit, HyperParallelError, NoLegalStrategy, UnsupportedSharding
from hyper_parallel.ir import GenerateWorkload, Strategy, Workload
from hyper_parallel.model import FAMILIES_READ, ModelSpec
from hyper_parallel.planner._generation_layouts import (
    LAYOUT_AXES,
    GenerationLayout,
    GenerationPricer,
    StagedLayout,
    layout_text,
)
from hyper_parallel.planner._recipe import parse_strategy
from hyper_parallel.planner.refusals import (
    MAX_DOUBLINGS,
    check_degrees,
    check_legal,
    check_objective,
    follow_changes,
    with_changes,
)
from hyper_parallel.planner.request import LOCAL, PlanRequest, resolve
from hyper_parallel.topology import Supernode, topology_hint
from hyper_parallel.units import format_bytes

GENERATE_OBJECTIVES: Final = ("throughput", "latency")
FORMATS: Final = ("float64", "float32", "bfloat16", "float16")
"""Number formats of generation."""
_WHERE: Final = "--parallel"


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Best layout for generation and its runners-up, with predicted times and memory."""

    model: str
    topology: str
    devices: int
    workload: GenerateWorkload  # number of prompts, lengths and dtype
    objective: str
    device_bytes: int  # memory of a device that may be used
    best: GenerationLayout
    runners_up: tuple[GenerationLayout, ...]
    priced: int  # number of layouts with predictions
    ruled_out: dict[str, int]  # number of layouts that are not legal or do not fit, by reason
    notes: tuple[str, ...]


def plan_generation(
    model: str | Path | ModelSpec,
    topology: str | Supernode = LOCAL,
    workload: GenerateWorkload | None = None,
    *,
    num_devices: int | None = None,
    strategy: str | Strategy | None = None,
    objective: str = "throughput",
    top: int = 5,
    memory_headroom: float | None = None,
) -> GenerationPlan:
    """Return a plan with the fastest layout for generation from prompts on a machine, among all that fit in memory.

    A given `strategy` is evaluated without a search, even if it does not fit.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.
        workload: Number of prompts, lengths and dtype; None: the defaults of `GenerateWorkload`.
        num_devices: Number of devices to use; None: those of `strategy`, else all of the topology.
        strategy: Layout to evaluate: a `Strategy`, or text as for `generate --parallel`. None: search for the best one.
        objective: `throughput`: the most new tokens per second; prompts may wait for a slot. `latency`: the fewest
            seconds until the last token, with a slot for every prompt.
        top: Maximum number of runners-up to return.
        memory_headroom: Fraction of device memory that is left free; None: 0.05 on accelerators, 0 on a CPU.

    Raises:
        BadValue: HP102 for an unknown objective, an unsupported dtype, lengths beyond the context, or a bad `strategy`.
        HyperParallelError: For an unknown key, topology or model, an unreadable file, or a missing peak rate.
        UnsupportedSharding: HP205 for choices that generation does not support, such as cp or quantised weights, and
            for families that are not known to decode several sequences at a time.
        DegreesMismatch: HP301 when the degrees of the strategy do not multiply to `num_devices`.
        NoLegalStrategy: HP302 when no layout is legal.
        NotDivisible: HP203 for a `strategy` that does not divide the model.
        DoesNotFit: HP401 when no layout fits in memory.
    """
    check_objective(objective, GENERATE_OBJECTIVES, " for generation")
    explicit = _parsed(strategy) if isinstance(strategy, str) else strategy
    if explicit is not None:
        _check_axes(explicit)
        check_degrees(explicit, num_devices, _WHERE, f"--devices {explicit.world_size}")
        num_devices = explicit.world_size
    work, all_at_once = workload or GenerateWorkload(), objective == "latency"
    r = _request(model, topology, work, num_devices).with_headroom(memory_headroom)
    work, ruled_out = replace(work, dtype=r.workload.compute_dtype), Counter[str]()
    if explicit is not None:
        _check_explicit(r, explicit)
    pricer = GenerationPricer(r, work)
    layouts = [*_layouts(pricer, ruled_out, explicit)]
    if not layouts:
        raise _no_legal_layout_error(pricer, ruled_out, explicit)
    # An explicit layout is priced even if it does not fit: predictions may be wrong, and there is no choice to make.
    ranked = _ranked(pricer, layouts, all_at_once, keep_all=explicit is not None)
    ruled_out["memory"] += len(layouts) - len(ranked)
    return GenerationPlan(
        r.model.name, r.supernode.name, r.num_devices, work, objective, r.machine.memory_bytes,
        ranked[0], tuple(ranked[1 : top + 1]), len(ranked), dict(+ruled_out), r.notes,
    )  # fmt: skip


def _parsed(text: str) -> Strategy:
    try:
        return parse_strategy(text)
    except HyperParallelError as error:
        error.where = (error.where or "").replace("strategy", _WHERE, 1)
        raise


def _ranked(
    pricer: GenerationPricer, layouts: Sequence[StagedLayout], all_at_once: bool, keep_all: bool
) -> list[GenerationLayout]:
    """Return the predictions for every layout that fits in memory, best first; with `keep_all`, for every layout.

    With `all_at_once`, every prompt must have a slot, and layouts are ranked by latency, else by tokens per second.

    Raises:
        DoesNotFit: HP401 when no layout fits.
    """
    needed, most = np.array([x.needed for x in layouts]), pricer.memory(layouts)[2]
    fits = (most >= (needed if all_at_once else 1)) | keep_all
    if not fits.any():
        raise _memory_error(pricer, layouts, all_at_once)
    slots = needed if all_at_once else np.clip(most, 1, needed)
    fitting = [x for x, fit in zip(layouts, fits, strict=True) if fit]
    prices = pricer.price(fitting, slots[fits])

    def sort_key(k: int) -> tuple[float, ...]:
        s, value = fitting[k].strategy, prices[k].total_s if all_at_once else -prices[k].tokens_s
        return value, s.tp_x, s.pp, s.ep, s.dp_shard

    return [prices[k] for k in sorted(range(len(prices)), key=sort_key)]


def _request(
    model: str | Path | ModelSpec, topology: str | Supernode, work: GenerateWorkload, num_devices: int | None
) -> PlanRequest:  # fmt: skip
    """Return the inputs of the planner; raise HP205 or HP102 for an unsupported model, dtype or length."""
    formats = Workload(work.prompt_len, microbatch=1)
    request = resolve(model, topology, formats, num_devices)
    spec = request.model
    if spec.family not in FAMILIES_READ:
        raise UnsupportedSharding(
            f"for the family `{spec.family}`, it is not known whether several sequences can be decoded at a time",
            got=spec.name,
            allowed=FAMILIES_READ,
            hint="run `hyper-parallel generate RUN_DIR --prompts FILE.jsonl`, which reports whether this is possible",
        )
    if spec.quantised and work.dtype is None:
        raise UnsupportedSharding(
            "generation does not run quantised weights",
            got=f"{spec.name}, as published",
            allowed=f"a copy in {spec.dtype}",
            hint=f"--dtype {spec.dtype}",
        )
    dtype = work.dtype or spec.dtype
    if dtype not in FORMATS:
        raise BadValue(
            f"generation does not support the dtype {dtype}",
            got=dtype,
            allowed=FORMATS,
            hint="--dtype bfloat16",
            where="--dtype",
        )
    context = spec.max_position_embeddings
    if context is not None and work.columns > context:
        room = context - work.new_tokens
        raise BadValue(
            "prompt and continuation are longer than the context of the model",
            got=f"{work.prompt_len} + {work.new_tokens} tokens",
            allowed=f"up to {context}",
            hint=f"--prompt-len {room}" if room > 0 else f"--prompt-len 1 --new-tokens {context - 1}",
            where="--prompt-len",
        )
    formats = replace(formats, compute_dtype=dtype, param_dtype=dtype, reduce_dtype=dtype)
    return replace(request, workload=formats)


def _check_axes(strategy: Strategy) -> None:
    """Raise UnsupportedSharding (HP205) for choices that generation cannot run or that have no prediction."""
    plain = Strategy(**{name: getattr(strategy, name) for name in (*LAYOUT_AXES, "stage_layers")})
    plain = replace(plain, dp_shard=strategy.dp_shard * strategy.cp)
    names = [f.name for f in fields(Strategy)]
    unpriced = [n for n in names if n != "dp_shard" and getattr(strategy, n) != getattr(plain, n)]
    if strategy.cp > 1:
        reason = "generation does not support cp: a step has one token per sequence, so no sequence can be sharded"
    elif unpriced:
        reason = f"a plan for generation cannot set {', '.join(unpriced)}"
    else:
        return
    fits_stages = strategy.stages == plain.stages
    near = layout_text(plain if fits_stages else replace(plain, stage_layers=())) or f"tp={strategy.world_size}"
    raise UnsupportedSharding(
        reason, where=_WHERE, got=str(strategy), allowed="pp, dp_replicate, dp_shard, tp, ep, stage_layers",
        hint=f'--parallel "{near}"',
    )  # fmt: skip


def _check_explicit(request: PlanRequest, strategy: Strategy) -> None:
    """Raise the error of a layout that is not legal for the model; its hint is a legal layout, if one is found."""
    stepped = replace(request.workload, accumulation_steps=2 * strategy.stages)

    def check(strategy: Strategy, workload: Workload) -> None:
        check_legal(request.numbers, workload, strategy, _WHERE)
        request.shard(strategy, _WHERE)

    try:
        check(strategy, stepped)
    except HyperParallelError as error:
        legal, _ = with_changes(strategy, stepped, follow_changes(error, strategy, stepped, check))
        text = layout_text(legal)
        error.hint = f'--parallel "{text}"' if text not in ("", layout_text(strategy)) else f"leave out {_WHERE}"
        raise


def _layouts(
    pricer: GenerationPricer, ruled_out: Counter[str], chosen: Strategy | None = None
) -> Iterator[StagedLayout]:
    """Yield the layout of `chosen`, or else of every legal strategy; count illegal strategies in `ruled_out`."""
    for strategy in pricer.candidates() if chosen is None else [chosen]:
        layout = pricer.layout(strategy)
        if isinstance(layout, str):
            ruled_out[layout] += 1
        else:
            yield layout


def _with_devices(pricer: GenerationPricer, num_devices: int) -> GenerationPricer:
    return GenerationPricer(replace(pricer.request, num_devices=num_devices), pricer.work)


def _no_legal_layout_error(
    pricer: GenerationPricer, ruled_out: Counter[str], chosen: Strategy | None
) -> NoLegalStrategy:
    """Return the error for a request without a legal layout.

    Its hint is the largest number of devices with a legal layout, at most the requested number, or below it if the user
    set no layout (`chosen`). `ruled_out` is a dict from reason to number of illegal layouts.
    """
    r = pricer.request
    near = next(
        n for n in range(r.num_devices - (chosen is None), 0, -1) if any(_layouts(_with_devices(pricer, n), Counter()))
    )
    leave_out = "" if chosen is None else f", without {_WHERE}"
    reasons = ", ".join(f"{reason} ({n})" for reason, n in ruled_out.items())
    return NoLegalStrategy(
        f"no layout can run generation of {r.model.name} on {r.num_devices} devices: {reasons}",
        got=f"{pricer.work.prompts} prompts",
        hint=f"--devices {near}{leave_out}",
    )


def _memory_error(pricer: GenerationPricer, layouts: Sequence[StagedLayout], all_at_once: bool) -> DoesNotFit:
    """Return the error for layouts that all exceed memory; its hint is fewer prompts, more devices or another model."""

    def max_slots(pricer: GenerationPricer, layouts: Sequence[StagedLayout]) -> list[tuple[int, StagedLayout]]:
        return [(int(n), x) for n, x in zip(pricer.memory(layouts)[2], layouts, strict=True)]

    r = pricer.request
    hint = f"a smaller model, or {topology_hint('--topology ')}"
    if all_at_once and (prompts := max(n * x.strategy.dp for n, x in max_slots(pricer, layouts))) > 0:
        hint = f"--prompts {prompts}"
    elif r.supernode.name != LOCAL:
        larger = (_with_devices(pricer, r.num_devices << n) for n in range(1, MAX_DOUBLINGS + 1))
        legal = ((q, max_slots(q, x)) for q in larger if (x := [*_layouts(q, Counter())]))
        fitting = (q for q, slots in legal if any(n >= (x.needed if all_at_once else 1) for n, x in slots))
        hint = next((f"--devices {q.request.num_devices}" for q in fitting), hint)
    least = min(int(np.max(x.weights)) for x in layouts)
    return DoesNotFit(
        f"{r.model.name} does not fit on {r.num_devices} devices of {r.supernode.name} for generation",
        got=f"at least {format_bytes(least)} of weights on the fullest device, with {pricer.work.prompts} prompts",
        allowed=f"up to {format_bytes(r.machine.memory_bytes)}",
        hint=hint,
    )
