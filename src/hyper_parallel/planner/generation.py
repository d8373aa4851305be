"""plan_generation(): the fastest layout for generation from prompts, among all that `generate --parallel` runs.

The space is small: every layout that fits is priced, in one vectorized call, and ranked. The search is exact within the
cost model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost.generation_passes import pass_seconds
from hyper_parallel.errors import BadValue, DoesNotFit, NoLegalStrategy, UnsupportedSharding
from hyper_parallel.ir import GenerateWorkload, Strategy, Workload
from hyper_parallel.model import FAMILIES_READ, ModelSpec
from hyper_parallel.planner._generation_layouts import (
    LAYOUT_AXES,
    StagedLayout,
    cut_into_stages,
    layer_kinds_of,
    layout_candidates,
    local_bytes,
    pass_memory,
    pricing_case,
)
from hyper_parallel.planner._recipe import parse_strategy
from hyper_parallel.planner.refusals import MAX_DOUBLINGS, check_degrees, check_legal
from hyper_parallel.planner.request import LOCAL, PlanRequest, resolve
from hyper_parallel.topology import Supernode, topology_hint
from hyper_parallel.units import format_bytes

GENERATE_OBJECTIVES: Final = ("throughput", "latency")
FORMATS: Final = ("float64", "float32", "bfloat16", "float16")
"""Number formats of generation."""
_WHERE: Final = "--parallel"


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """Predictions for one layout; bytes are those of the fullest device."""

    parallel: str  # value of `generate --parallel`; "" for one device
    slots: int  # sequences of a data-parallel rank at a time, value of `generate --slots`
    batch: int  # sequences at a time on all devices
    prefill_s: float  # until every sequence in the slots has its first token
    token_s: float  # decode step: one token of every sequence, at the mean length
    total_s: float  # from the prompts in the slots to the last new token
    tokens_s: float  # new tokens per second on all devices, prefill included
    tokens_s_device: float  # new tokens per second per device
    weight_bytes: int
    cache_bytes: int  # keys and values of all slots
    memory_bytes: int  # weights, cache, and memory of a pass
    largest_batch: int  # sequences at a time that fit, on all devices
    prefill: dict[str, float]  # seconds by cause
    decode: dict[str, float]  # seconds of a token by cause


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Best layout for generation; every number in it is predicted."""

    model: str
    topology: str
    devices: int
    workload: GenerateWorkload  # with its format
    objective: str
    device_bytes: int  # memory of a device that may be used
    best: GenerationLayout
    runners_up: tuple[GenerationLayout, ...]
    priced: int  # layouts that fit
    ruled_out: dict[str, int]  # layouts that are not legal or do not fit, by reason
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
    """Return the fastest layout for generation from prompts on a machine, among all that fit in memory.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.
        workload: Prompts and lengths.
        num_devices: Devices to use; None: those of `strategy`, else all of the topology.
        strategy: Layout to price instead of a search: a `Strategy`, or text as for `generate --parallel`.
        objective: `throughput`: the most new tokens per second, where prompts may wait for a slot; `latency`: the least
            seconds until the last token, with all prompts in slots at once.
        top: Number of runners-up to return.
        memory_headroom: Share of a device's memory that is left free; None: 0.05 on accelerators, 0 on a CPU.

    Raises:
        BadValue: HP102 for an unknown objective or format, or lengths beyond the context.
        UnsupportedSharding: HP205 for choices that generation does not run: cp, a model without slots, quantised
            weights.
        DegreesMismatch: HP301 when the strategy does not multiply to `num_devices`.
        NoLegalStrategy: HP302 when no layout is legal.
        DoesNotFit: HP401 when none fits; the hint is a change that does.
    """
    _check_objective(objective)
    explicit = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    if explicit is not None:
        _check_axes(explicit)
        check_degrees(explicit, num_devices, _WHERE)
        num_devices = explicit.world_size
    work, all_at_once = workload or GenerateWorkload(), objective == "latency"
    r = _request(model, topology, work, num_devices).with_headroom(memory_headroom)
    work, ruled_out = replace(work, dtype=r.workload.compute_dtype), Counter[str]()
    if explicit is not None:
        stepped = replace(r.workload, accumulation_steps=2 * explicit.stages)
        check_legal(r.numbers, stepped, explicit, _WHERE)
        r.shard(explicit, _WHERE)
    layouts = [*_layouts(r, work, ruled_out, explicit)]
    if not layouts:
        raise _no_legal_layout_error(r, work, ruled_out)
    # An explicit layout is priced even if it does not fit: predictions may be wrong, and there is no choice to make.
    priced = _price_fitting(r, work, layouts, all_at_once, keep_all=explicit is not None)
    ruled_out["memory"] += len(layouts) - len(priced)
    ranked = sorted(priced, key=lambda item: _rank_key(item[0], item[1], all_at_once))
    best, *runners_up = (layout for _, layout in ranked)
    return GenerationPlan(
        r.model.name, r.supernode.name, r.num_devices, work, objective, r.machine.memory_bytes, best,
        tuple(runners_up[:top]), len(priced), dict(+ruled_out), r.notes,
    )  # fmt: skip


def _rank_key(s: Strategy, layout: GenerationLayout, all_at_once: bool) -> tuple[float, ...]:
    """Return the sort key of a layout, best first: by latency if `all_at_once`, else by tokens per second."""
    value = layout.total_s if all_at_once else -layout.tokens_s
    return value, s.tp_x, s.pp, s.ep, s.dp_shard


def _check_objective(objective: str) -> None:
    """Raise BadValue (HP102) for an unknown objective."""
    if objective not in GENERATE_OBJECTIVES:
        raise BadValue(
            "unknown objective for generation",
            got=objective,
            allowed=GENERATE_OBJECTIVES,
            hint="--objective throughput",
            where="--objective",
        )


def _price_fitting(
    r: PlanRequest,
    work: GenerateWorkload,
    layouts: list[StagedLayout],
    all_at_once: bool,
    keep_all: bool,
) -> list[tuple[Strategy, GenerationLayout]]:
    """Return (strategy, predictions) of every layout that fits in memory; with `keep_all`, of every layout.

    Args:
        r: Model and machine.
        work: Prompts and lengths.
        layouts: Legal layouts.
        all_at_once: Whether all prompts have a slot at once.
        keep_all: Whether to include layouts that do not fit.

    Raises:
        DoesNotFit: HP401 when no layout fits.
    """
    fixed, per_sequence, largest = pass_memory(r, work, layouts)
    needed = np.array([x.needed for x in layouts])
    fits = (largest >= (needed if all_at_once else 1)) | keep_all
    if not fits.any():
        raise _memory_error(r, work, layouts, all_at_once)
    slots = needed if all_at_once else np.clip(largest, 1, needed)
    return _priced(
        r,
        work,
        [layouts[i] for i in np.flatnonzero(fits)],
        slots[fits].astype(np.int64),
        fixed[fits],
        per_sequence[fits],
        largest[fits],
    )


def _priced(
    r: PlanRequest,
    work: GenerateWorkload,
    layouts: Sequence[StagedLayout],
    slots: NDArray[np.int64],
    fixed: NDArray[np.float64],
    per_sequence: NDArray[np.float64],
    largest: NDArray[np.float64],
) -> list[tuple[Strategy, GenerationLayout]]:
    """Return (strategy, predictions) of layouts with `slots` sequences at a time per data-parallel rank.

    `fixed`, `per_sequence` and `largest` are the results of `pass_memory`.
    """
    case = pricing_case(r, layouts, slots.astype(np.float64))
    terms = pass_seconds(case, [*layer_kinds_of(r)], work)
    priced = []
    for row, x in enumerate(layouts):
        count = int(slots[row])
        by_cause = (
            {k: float(np.broadcast_to(v, len(layouts))[row]) for k, v in t.items()} for t in terms
        )
        prefill, decode = ({k: v for k, v in t.items() if v} for t in by_cause)
        batch, token_s = min(work.prompts, count * x.strategy.dp), sum(decode.values())
        total_s = sum(prefill.values()) + (work.new_tokens - 1) * token_s
        tokens_s, rank_bytes = batch * work.new_tokens / total_s, x.weights + count * x.cache
        full = int(np.argmax(rank_bytes))
        layout = GenerationLayout(
            parallel=_words(x.strategy),
            slots=count,
            batch=batch,
            prefill_s=sum(prefill.values()),
            token_s=token_s,
            total_s=total_s,
            tokens_s=tokens_s,
            tokens_s_device=tokens_s / r.num_devices,
            weight_bytes=int(x.weights[full]),
            cache_bytes=int(count * x.cache[full]),
            memory_bytes=int(rank_bytes[full] + fixed[row] + count * per_sequence[row]),
            largest_batch=max(0, int(largest[row])) * x.strategy.dp,
            prefill=prefill,
            decode=decode,
        )
        priced.append((x.strategy, layout))
    return priced


def _request(
    model: str | Path | ModelSpec, topology: str | Supernode, work: GenerateWorkload, num_devices: int | None
) -> PlanRequest:  # fmt: skip
    """Return the planning request of a generation run; raise an error for models that cannot generate."""
    formats = Workload(work.prompt_len, microbatch=1)
    request = resolve(model, topology, formats, num_devices)
    spec = request.model
    if spec.family not in FAMILIES_READ:
        raise UnsupportedSharding(
            f"for the family `{spec.family}`, it is not known whether several sequences can be decoded at a time",
            got=spec.name,
            allowed=FAMILIES_READ,
            hint="run `hyper-parallel generate RUN_DIR --prompts FILE.jsonl`, which reports whether they can",
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
        raise BadValue(
            "prompt and continuation are longer than the context of the model",
            got=f"{work.prompt_len} + {work.new_tokens} tokens",
            allowed=f"up to {context}",
            hint=f"--prompt-len {max(1, context - work.new_tokens)}",
            where="--prompt-len",
        )
    formats = replace(formats, compute_dtype=dtype, param_dtype=dtype, reduce_dtype=dtype)
    return replace(request, workload=formats)


def _check_axes(strategy: Strategy) -> None:
    """Raise UnsupportedSharding (HP205) for choices that generation cannot run or that cannot be priced."""
    plain = Strategy(**{name: getattr(strategy, name) for name in (*LAYOUT_AXES, "stage_layers")})
    names = [f.name for f in fields(Strategy)]
    unpriced = [n for n in names if getattr(strategy, n) != getattr(plain, n)]
    if strategy.cp > 1:
        reason = "generation does not support cp: a step has one token per sequence, so no sequence can be sharded"
    elif unpriced:
        reason = f"generation is not planned with {', '.join(unpriced)}"
    else:
        return
    near = _words(plain) or f"tp={strategy.world_size}"
    raise UnsupportedSharding(
        reason, where=_WHERE, got=str(strategy), allowed="pp, dp_replicate, dp_shard, tp, ep, stage_layers",
        hint=f'--parallel "{near}"',
    )  # fmt: skip


def _words(strategy: Strategy) -> str:
    """Return a layout in the syntax of `generate --parallel`."""
    named = ((name.removesuffix("_x"), getattr(strategy, name)) for name in LAYOUT_AXES)
    words = [f"{name}={degree}" for name, degree in named if degree > 1]
    if strategy.stage_layers:
        words.append(f"stage_layers=[{','.join(map(str, strategy.stage_layers))}]")
    return " ".join(words)


def _layouts(
    r: PlanRequest, work: GenerateWorkload, ruled_out: Counter[str], chosen: Strategy | None = None
) -> Iterator[StagedLayout]:
    """Yield the layout of `chosen`, or of every legal strategy; count illegal ones by reason in `ruled_out`."""
    unsplit = dict(r.model.unsplit)
    cache: dict[tuple[int, ...], dict[str, int] | str] = {}
    for s in layout_candidates(r) if chosen is None else [chosen]:
        key = (s.tp_x, s.dp_shard, s.ep)
        if key not in cache:
            cache[key] = local_bytes(r, Strategy(tp_x=s.tp_x, dp_shard=s.dp_shard, ep=s.ep))
        sizes = cache[key]
        if s.pp > 1 and "pp" in unsplit:
            ruled_out[unsplit["pp"]] += 1
        elif s.dp > work.prompts:
            ruled_out["more data-parallel ranks than prompts"] += 1
        elif isinstance(sizes, str):
            ruled_out[sizes] += 1
        else:
            yield cut_into_stages(r, work, s, sizes)


def _no_legal_layout_error(
    r: PlanRequest, work: GenerateWorkload, ruled_out: Counter[str]
) -> NoLegalStrategy:
    """Return the error for a request without a legal layout, with the nearest number of devices that has one."""
    fewer = (replace(r, num_devices=n) for n in range(r.num_devices - 1, 0, -1))
    near = next(q.num_devices for q in fewer if any(_layouts(q, work, Counter())))
    reasons = ", ".join(f"{reason} ({n})" for reason, n in ruled_out.items())
    return NoLegalStrategy(
        f"no layout can run generation of {r.model.name} on {r.num_devices} devices: {reasons}",
        got=f"{work.prompts} prompts",
        hint=f"--devices {near}",
    )


def _memory_error(
    r: PlanRequest, work: GenerateWorkload, layouts: Sequence[StagedLayout], all_at_once: bool
) -> DoesNotFit:
    """Return the error for layouts that all exceed memory; its hint is fewer prompts or twice the devices."""

    def max_prompts(r: PlanRequest, layouts: Sequence[StagedLayout]) -> int:
        return max(
            int(n) * x.strategy.dp
            for n, x in zip(pass_memory(r, work, layouts)[2], layouts, strict=True)
        )

    hint = f"a smaller model, or {topology_hint('--topology ')}"
    if all_at_once and (prompts := max_prompts(r, layouts)) > 0:
        hint = f"--prompts {prompts}"
    elif r.supernode.name != LOCAL:
        larger = (replace(r, num_devices=r.num_devices << n) for n in range(1, MAX_DOUBLINGS + 1))
        fitting_requests = (
            q for q in larger if (x := [*_layouts(q, work, Counter())]) and max_prompts(q, x) > 0
        )
        hint = next((f"--devices {q.num_devices}" for q in fitting_requests), hint)
    least = min(int(np.max(x.weights)) for x in layouts)
    return DoesNotFit(
        f"{r.model.name} does not fit on {r.num_devices} devices of {r.supernode.name} for generation",
        got=f"at least {format_bytes(least)} of weights on the fullest device, with {work.prompts} prompts",
        allowed=f"up to {format_bytes(r.machine.memory_bytes)}",
        hint=hint,
    )
