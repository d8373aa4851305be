"""plan_generation(): the layout in which prompts are continued fastest, of all that `generate --parallel` runs.

The space is small: every layout is made, those whose weights do not fit are left out, the others are priced at once and
ranked. So the search is exact within the cost model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from hyper_parallel.cost.generation_passes import pass_seconds
from hyper_parallel.errors import (
    BadValue,
    DoesNotFit,
    NoLegalStrategy,
    UnsupportedSharding,
)
from hyper_parallel.ir import GenerateWorkload, Strategy, Workload
from hyper_parallel.model import FAMILIES_READ, ModelSpec
from hyper_parallel.planner._generation_layouts import (
    LAID_OUT,
    GenerationCut,
    held_bytes,
    kinds_of,
    laid_out,
    local_bytes,
    setting_of,
    strategies_of,
)
from hyper_parallel.planner._recipe import parse_strategy
from hyper_parallel.planner.refusals import MOST_DOUBLINGS, check_degrees, check_legal
from hyper_parallel.planner.request import LOCAL, PlanRequest, resolve
from hyper_parallel.topology import Supernode
from hyper_parallel.units import format_bytes

GENERATE_OBJECTIVES: Final = ("throughput", "latency")
FORMATS: Final = ("float64", "float32", "bfloat16", "float16")
"""Formats that generation runs in."""
_WHERE: Final = "--parallel"


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """What is predicted of one layout; bytes are those of the fullest device."""

    parallel: str  # as `generate --parallel` takes it; "" for one device
    slots: int  # sequences of a data share at a time, as `generate --slots` takes it
    batch: int  # sequences at a time on all devices
    prefill_s: float  # until every sequence in the slots has its first token
    token_s: float  # of one more token of every sequence, at the mean length
    total_s: float  # from the prompts in the slots to the last new token
    tokens_s: float  # new tokens per second on all devices, prefill included
    tokens_s_device: float  # the same per device
    weight_bytes: int
    cache_bytes: int  # keys and values of all slots
    memory_bytes: int  # both, and what a pass needs
    largest_batch: int  # sequences at a time that fit, on all devices
    prefill: dict[str, float]  # its seconds by cause
    decode: dict[str, float]  # seconds of a token by cause


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The best layout for generation; every number in it is predicted."""

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
    """The layout that continues prompts fastest on a machine, of all that fit.

    Args:
        model: Preset name, Hugging Face directory, config.json, or a ModelSpec.
        topology: Preset name, YAML file, `local` for this machine, or a Supernode.
        workload: Prompts and lengths.
        num_devices: Devices to use; None: those of `strategy`, else all of the topology.
        strategy: Price exactly this layout, words as of `generate --parallel` or a `Strategy`.
        objective: `throughput`: the most new tokens per second, where prompts may wait for a slot; `latency`: the least
            seconds until the last token, with all prompts in slots at once.
        top: Runners-up to keep.
        memory_headroom: Share of a device's memory that is left free; None: 0.05 on accelerators, 0 on a CPU.

    Raises:
        BadValue: HP102 for an objective or a format that does not exist, or lengths beyond the context.
        UnsupportedSharding: HP205 for what generation does not run: cp, a model without slots, quantised weights.
        DegreesMismatch: HP301 when the strategy does not multiply to `num_devices`.
        NoLegalStrategy: HP302 when no layout is legal.
        DoesNotFit: HP401 when none fits; the hint is a change that does.
    """
    if objective not in GENERATE_OBJECTIVES:
        raise BadValue(
            "there is no such objective of generation",
            got=objective,
            allowed=GENERATE_OBJECTIVES,
            hint="--objective throughput",
        )
    given = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    if given is not None:
        _check_axes(given)
        check_degrees(given, num_devices, _WHERE)
        num_devices = given.world_size
    work, together = workload or GenerateWorkload(), objective == "latency"
    r = _request(model, topology, work, num_devices).with_headroom(memory_headroom)
    work, ruled_out = replace(work, dtype=r.workload.compute_dtype), Counter[str]()
    if given is not None:
        stepped = replace(r.workload, accumulation_steps=2 * given.stages)
        check_legal(r.numbers, stepped, given, _WHERE)
        r.shard(given, _WHERE)
    layouts = [*_layouts(r, work, ruled_out, given)]
    if not layouts:
        raise _nothing_legal(r, work, ruled_out)
    fixed, each, largest = held_bytes(r, work, layouts)
    needed = np.array([x.needed for x in layouts])
    # A layout that is given is priced where it does not fit: predictions may be wrong, and nobody asked for a choice.
    fits = (largest >= (needed if together else 1)) | (given is not None)
    if not fits.any():
        raise _nothing_fits(r, work, layouts, together)
    ruled_out["memory"] += int((~fits).sum())
    slots, kept = needed if together else np.clip(largest, 1, needed), np.flatnonzero(fits)
    setting = setting_of(r, [layouts[i] for i in kept], slots[kept].astype(np.float64))
    terms = pass_seconds(setting, [*kinds_of(r)], work)
    priced = []
    for row, i in enumerate(kept):
        x, count = layouts[i], int(slots[i])
        by_cause = (
            {k: float(np.broadcast_to(v, len(kept))[row]) for k, v in t.items()} for t in terms
        )
        prefill, decode = ({k: v for k, v in t.items() if v} for t in by_cause)
        batch, token_s = min(work.prompts, count * x.strategy.dp), sum(decode.values())
        total_s = sum(prefill.values()) + (work.new_tokens - 1) * token_s
        speed, held = batch * work.new_tokens / total_s, x.weights + count * x.cache
        full = int(np.argmax(held))
        made = GenerationLayout(
            _words(x.strategy), count, batch, sum(prefill.values()), token_s, total_s, speed, speed / r.num_devices,
            int(x.weights[full]), int(count * x.cache[full]), int(held[full] + fixed[i] + count * each[i]),
            max(0, int(largest[i])) * x.strategy.dp, prefill, decode,
        )  # fmt: skip
        s = x.strategy  # of equal values what is simpler
        rank = (total_s if together else -speed, s.tp_x, s.pp, s.ep, s.dp_shard)
        priced.append((rank, made))
    best, *others = (made for _, made in sorted(priced, key=lambda p: p[0]))
    return GenerationPlan(
        r.model.name, r.supernode.name, r.num_devices, work, objective, r.machine.memory_bytes, best,
        tuple(others[:top]), len(priced), dict(+ruled_out), r.notes,
    )  # fmt: skip


def _request(
    model: str | Path | ModelSpec, topology: str | Supernode, work: GenerateWorkload, num_devices: int | None
) -> PlanRequest:  # fmt: skip
    """Model and machine, with a workload that stands for the formats; refuses what does not generate."""
    formats = Workload(work.prompt_len, microbatch=1)
    request = resolve(model, topology, formats, num_devices)
    spec = request.model
    if spec.family not in FAMILIES_READ:
        raise UnsupportedSharding(
            f"it is not known whether the cache of the family `{spec.family}` has slots",
            got=spec.name,
            allowed=FAMILIES_READ,
            hint="hyper-parallel generate RUN_DIR --prompts FILE.jsonl says whether it has",
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
            "not a format that generation runs in",
            got=dtype,
            allowed=FORMATS,
            hint="--dtype bfloat16",
        )
    context = spec.max_position_embeddings
    if context is not None and work.columns > context:
        raise BadValue(
            "prompt and continuation are longer than the context of the model",
            got=f"{work.prompt_len} + {work.new_tokens} tokens",
            allowed=f"up to {context}",
            hint=f"--prompt-len {max(1, context - work.new_tokens)}",
        )
    formats = replace(formats, compute_dtype=dtype, param_dtype=dtype, reduce_dtype=dtype)
    return replace(request, workload=formats)


def _check_axes(strategy: Strategy) -> None:
    """Refuse what generation does not run, or what is not priced for it."""
    plain = Strategy(**{name: getattr(strategy, name) for name in (*LAID_OUT, "stage_layers")})
    names = [f.name for f in fields(Strategy)]
    other = [n for n in names if getattr(strategy, n) != getattr(plain, n)]
    if strategy.cp > 1:
        what = "generation has no cp: a step reads one token of a sequence, and there is nothing to cut"
    elif other:
        what = f"generation is not priced with {', '.join(other)}"
    else:
        return
    near = _words(plain) or f"tp={strategy.world_size}"
    raise UnsupportedSharding(
        what, where=_WHERE, got=str(strategy), allowed="pp, dp_replicate, dp_shard, tp, ep, stage_layers",
        hint=f'--parallel "{near}"',
    )  # fmt: skip


def _words(strategy: Strategy) -> str:
    """A layout as `generate --parallel` takes it."""
    named = ((name.removesuffix("_x"), getattr(strategy, name)) for name in LAID_OUT)
    words = [f"{name}={degree}" for name, degree in named if degree > 1]
    if strategy.stage_layers:
        words.append(f"stage_layers=[{','.join(map(str, strategy.stage_layers))}]")
    return " ".join(words)


def _layouts(
    r: PlanRequest, work: GenerateWorkload, ruled_out: Counter[str], given: Strategy | None = None
) -> Iterator[GenerationCut]:
    """The layout that is given, or all that are legal; the others are counted by reason."""
    unsplit = dict(r.model.unsplit)
    known: dict[tuple[int, ...], dict[str, int] | str] = {}
    for s in strategies_of(r) if given is None else [given]:
        key = (s.tp_x, s.dp_shard, s.ep)
        if key not in known:
            known[key] = local_bytes(r, Strategy(tp_x=s.tp_x, dp_shard=s.dp_shard, ep=s.ep))
        sizes = known[key]
        if s.pp > 1 and "pp" in unsplit:
            ruled_out[unsplit["pp"]] += 1
        elif s.dp > work.prompts:
            ruled_out["more data shares than prompts"] += 1
        elif isinstance(sizes, str):
            ruled_out[sizes] += 1
        else:
            yield laid_out(r, work, s, sizes)


def _nothing_legal(
    r: PlanRequest, work: GenerateWorkload, ruled_out: Counter[str]
) -> NoLegalStrategy:
    fewer = (replace(r, num_devices=n) for n in range(r.num_devices - 1, 0, -1))
    near = next(q.num_devices for q in fewer if any(_layouts(q, work, Counter())))
    reasons = ", ".join(f"{reason} ({n})" for reason, n in ruled_out.items())
    return NoLegalStrategy(
        f"no layout generates with {r.model.name} on {r.num_devices} devices: {reasons}",
        got=f"{work.prompts} prompts",
        hint=f"--devices {near}",
    )


def _nothing_fits(
    r: PlanRequest, work: GenerateWorkload, layouts: Sequence[GenerationCut], together: bool
) -> DoesNotFit:
    """The error when no layout fits, with fewer prompts or the number of devices, by doubling, that would."""

    def most(r: PlanRequest, layouts: Sequence[GenerationCut]) -> int:
        return max(
            int(n) * x.strategy.dp
            for n, x in zip(held_bytes(r, work, layouts)[2], layouts, strict=True)
        )

    hint = "a smaller model, or a machine with more memory"
    if together and (prompts := most(r, layouts)) > 0:
        hint = f"--prompts {prompts}"
    elif r.supernode.name != LOCAL:
        more = (replace(r, num_devices=r.num_devices << n) for n in range(1, MOST_DOUBLINGS + 1))
        enough = (q for q in more if (x := [*_layouts(q, work, Counter())]) and most(q, x) > 0)
        hint = next((f"--devices {q.num_devices}" for q in enough), hint)
    least = min(int(np.max(x.weights)) for x in layouts)
    return DoesNotFit(
        f"{r.model.name} does not generate on {r.num_devices} devices of {r.supernode.name}",
        got=f"{format_bytes(least)} of weights on the fullest device at best, with {work.prompts} prompts",
        allowed=f"up to {format_bytes(r.machine.memory_bytes)}",
        hint=hint,
    )
