"""Calibration of this machine: measure it, write its cards, and compare the predictions of shipped and new cards.

The constants of the cost model are stored in a device card (rates and overheads of the hardware) and a stack card
(overheads of the framework). Ranks measure these constants by micro-benchmarks and by probes. A probe is a training
step of a small model with some layout. Probes run in groups whose models are resident at once. In each round every
model of a group runs a step, so other load on the machine affects all probes of the group alike.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import (
    clip_grad_norm_,
    forward_backward,
    materialize,
    measure_rates,
)
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
    own_cards_by_ranks,
    own_path,
    shipped_cards,
    stack_card,
    step_seconds,
)
from hyper_parallel.errors import OutputNotWritable
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.planner import plan as make_plan
from hyper_parallel.runtime import World, launch, parallelize, scratch_folder
from hyper_parallel.topology import Supernode, detect_local, rank_threads
from hyper_parallel.trainer.engine.recipe_model import read_spec
from hyper_parallel.trainer.job import Job, prepare_job, under_torchrun
from hyper_parallel.trainer.run_start import run_job

logger = logging.getLogger(__name__)

_WARM: Final = 3
_DTYPES: Final = ("float32", "bfloat16")
_WINDOW_S: Final = 0.12
_SHORT_WINDOW_S: Final = 0.06
_NARROW: Final = 64
_WIDE: Final = 256
"""Hidden sizes of the models that are probed on a CPU. Operator launches dominate the step of a narrow model, and
matmuls the step of a wide model."""
_MANY_RANKS: Final = 4
"""Number of ranks above which most multi-rank probes have 1 layer instead of 2: ranks that share cores are slower."""
_AT_ONCE: Final = 5
"""Maximum number of probes of a group; more resident models and process groups would slow down a rank."""
_MIN_ROUNDS: Final = 3
"""Minimum rounds per measurement: a warm-up round, which does not count, and two counted rounds."""
_MAX_ROUNDS: Final = 15
_BUDGET_S: Final = 2.0
"""Seconds after which a group of probes starts no further round beyond `_MIN_ROUNDS`."""

_Row = tuple[int, int, Mapping[str, Any], int, int, bool]


@dataclass(frozen=True, slots=True)
class Probe:
    """Small model and layout whose training step is timed.

    Attributes:
        config: Values of the model's `config.json`.
        plan_model: `ModelSpec` of the model, for the planner.
        plan: Plan with the layout and the workload.
    """

    config: dict[str, Any]
    plan_model: ModelSpec
    plan: Plan


def make_probes(supernode: Supernode, *, short: bool = False) -> list[Probe]:
    """Return probes whose step times determine the constants of the machine's cost model.

    The first two probes differ only in their number of layers. An accelerator has no further probes. On a CPU, two
    widths separate the time of FLOPs from the launch time of operators. Several numbers of layers and microbatches
    separate costs per layer from costs per step. Without `short` and with a multiple of 4 ranks, every parallel axis
    has a probe.

    Args:
        supernode: Machine to measure; each of its devices is a rank.
        short: Whether to return fewer probes on a CPU, only for dense models on the axes dp_replicate, dp_shard, tp_x,
            cp, pp.
    """
    ranks, kind = supernode.num_devices, supernode.device.kind
    if kind != "cpu":
        return [_probe(supernode, 512, layers, {}, 1) for layers in (2, 6)]
    # Width, layers, degrees except dp_replicate, microbatches, sequences per microbatch, experts.
    repeats = 2 if ranks <= _MANY_RANKS else 1
    rows: list[_Row] = [
        (_NARROW, 1, {}, 1, 1, False), (_NARROW, 3, {}, 1, 1, False), (_NARROW, 2, {}, 3, 1, False),
        (_WIDE, 2, {}, 1, 1, False), (_WIDE, 2, {}, 1, 2, False), (_NARROW, 2, {}, 1, 1, True),
        (_WIDE, 2, {}, 1, 1, True),
    ]  # fmt: skip
    widths = (_NARROW, _WIDE)
    if short:
        rows = [rows[0], rows[1], rows[3]]
        if ranks > 1:
            rows += [(w, repeats, {"dp_shard": ranks}, 2, 1, False) for w in widths]
        if ranks % 2 == 0:
            rows += [(w, 2, {"pp": 2}, 2, 1, False) for w in widths]
            rows += [(w, repeats, {"tp_x": 2}, 2, 1, False) for w in widths]
            rows += [(_WIDE, repeats, {"cp": 2}, 2, 1, False)]
        return [_probe(supernode, *row) for row in rows]
    if ranks > 1:
        rows += [(w, repeats, {"dp_shard": ranks}, 2, 1, False) for w in widths]
    if ranks % 2 == 0:
        halves = ({"tp_x": 2}, {"cp": 2}, {"cp": 2, "cp_kind": "ulysses"})
        rows += [(w, repeats, half, 2, 1, False) for half in halves for w in widths]
        rows += [(w, 2, {"pp": 2}, m, 1, False) for w, m in ((_NARROW, 2), (_WIDE, 2), (_WIDE, 4))]
        rows += [(w, repeats, {"dp_shard": ranks, "ep": 2}, 1, 1, True) for w in widths]
    if ranks % 4 == 0:
        quarters = ({"tp_x": 4}, {"tp_x": 2, "tp_y": 2}, {"cp": 4})
        rows += [(w, repeats, quarter, repeats, 1, False) for quarter in quarters for w in widths]
    return [_probe(supernode, *row) for row in rows]


def _probe(
    supernode: Supernode,
    width: int,
    layers: int,
    degrees: Mapping[str, Any],
    microbatches: int,
    sequences: int = 1,
    experts: bool = False,
) -> Probe:
    cpu, ranks = supernode.device.kind == "cpu", supernode.num_devices
    product = math.prod(v for k, v in degrees.items() if isinstance(v, int) and k != "ep")
    strategy = Strategy(dp_replicate=ranks // product, **degrees)
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if experts:
        config |= {
            "model_type": "qwen3_moe", "head_dim": width // 4, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": width, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    workload = Workload(
        256, microbatch=sequences, accumulation_steps=microbatches, compute_dtype="float32" if cpu else "bfloat16"
    ).resolve(strategy.dp)  # fmt: skip
    spec = spec_from_config(config, name=f"calibration, {layers} layers of width {width}")
    return Probe(config, spec, make_plan(spec, supernode, workload, strategy=strategy))


def time_probes(probes: Sequence[Probe], world: World, pick: Callable[[Sequence[float]], float] = min) -> list[float]:
    """Return the seconds per step of each probe on this rank; collective over all ranks.

    `pick` reduces the seconds that a probe took in each round, except the first, to one number.
    """
    runs = [_timed_step(probe, world) for probe in probes]
    # A real run has a single model, so garbage collection must not traverse the objects of all models.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    rounds: list[list[float]] = []
    spent = torch.zeros(1, device=world.device)
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and float(spent) < _BUDGET_S):
        rounds.append([run() for run in runs])
        spent.fill_(time.perf_counter() - start)
        if world.world_size > 1:
            dist.all_reduce(spent, dist.ReduceOp.MAX)  # all ranks stop at the same round
    return [pick(turns) for turns in zip(*rounds[1:], strict=True)]


def short_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[dict[str, Tensor]],
    valid_tokens: int,
    world: World,
) -> Tensor:
    """Run a training step: forward, backward, clipping to gradient norm 1, loss reduction and optimizer update.

    `valid_tokens` is the number of target tokens of the step over all ranks and microbatches. Return the loss over all
    ranks as a scalar tensor.
    """
    loss = forward_backward(model, microbatches, valid_tokens)
    clip_grad_norm_(model, 1.0)
    if world.world_size > 1:
        dist.all_reduce(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def _timed_step(probe: Probe, world: World) -> Callable[[], float]:
    """Build a probe on this rank; return a function that runs a step after a barrier and returns its seconds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(**probe.config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).train()
    parallelize(model, probe.plan, world)
    materialize(model, seed=0, device=world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    work = probe.plan.workload
    tokens = torch.arange(work.seq_len, device=world.device).repeat(work.microbatch or 1, 1) % 1000
    batches = [{"input_ids": tokens, "shift_labels": tokens}] * (work.accumulation_steps or 1)

    def turn() -> float:
        if world.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = short_step(model, optimizer, batches, work.tokens_per_step or 1, world)
        float(loss)  # synchronizes with the device
        return time.perf_counter() - start

    return turn


def calibrate_local(output: Path | None, ranks: int | None, check: Path | None, steps: int) -> Iterator[str]:
    """Measure this machine, write its cards, and yield lines of output.

    Args:
        output: Path of the card file; None: the path that `plan` and `train` read.
        ranks: Number of ranks; None: all accelerators, or 4 ranks on a machine without accelerators. On a CPU, runs on
            1, 2, 4, ... ranks below this number are measured too.
        check: Recipe to train. Its measured step is compared with the predictions of the shipped and the new cards.
            None: no comparison.
        steps: Number of steps to train, at least 4; the first 3 steps are not measured.

    Raises:
        OutputNotWritable: HP105 if `output` exists and is not a card file, or if the cards cannot be written.
        HyperParallelError: Errors of detecting the machine, and of planning and training `check`.
    """
    path = output or own_path()
    check_card_file(path)
    supernode = detect_local(ranks)
    by_ranks = {k: _measure(detect_local(k)) for k in _rank_counts(supernode)}
    write_local_cards(path, by_ranks)
    yield f"measured {supernode.description}"
    kind = supernode.device.kind
    if len(by_ranks) > 1:
        yield f"  the numbers are for {', '.join(map(str, by_ranks))} concurrent ranks"
    measured = [_printed_numbers(*cards) for cards in by_ranks.values()]
    for name, shipped in _printed_numbers(*shipped_cards(supernode.device)).items():
        yield f"  {name}: {shipped:.4g} -> {'  '.join(f'{m[name]:.4g}' for m in measured)}"
    used = "" if output else f"; `plan` and `train` on this {kind} use it from now on"
    yield f"card written to {path}{used}"
    if check is not None:
        yield from _check(check, steps, by_ranks)


def calibrate_first_run(job: Job) -> str | None:
    """Measure this machine for some seconds before its first run, and save the cards where `calibrate` saves them.

    Nothing is measured under torchrun, if the topology is not `local`, or if the saved cards cover this number of
    ranks.

    Returns:
        Line of output; the caller must then plan the run again. None if nothing was measured or saved.
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
    except OutputNotWritable as error:
        logger.warning("the measured rates of this machine cannot be saved:\n%s", error)
        return None
    return (
        f"first run with {ranks} ranks on this machine: measured it in {time.perf_counter() - start:.0f} s for the "
        f"predictions, saved in {path} (--no-calibrate skips this; `hyper-parallel calibrate` measures longer)"
    )


def _printed_numbers(device: DeviceCard, stack: StackCard) -> dict[str, float]:
    numbers = ("saturation", "elementwise", "stream", "link", "latency", "kernel_s")
    tables = ("matmul", "attention")
    return {
        **{name: getattr(device, name) for name in numbers},
        **{f"{table}.{d}": device.share(table, d) for table in tables for d in _DTYPES},
        "step_s": stack.step_s,
    }


def _rank_counts(supernode: Supernode) -> list[int]:
    most = supernode.num_devices
    if supernode.device.kind != "cpu":
        return [most]
    return sorted({most, *(2**k for k in range(most.bit_length()) if 2**k < most)})


def _measure(supernode: Supernode, *, short: bool = False) -> tuple[DeviceCard, StackCard]:
    """Measure the machine with all its ranks and return its cards.

    With `short` on a CPU, the constants of experts and of axes without a probe are those of the shipped CPU card.
    """
    ranks, kind = supernode.num_devices, supernode.device.kind
    # With a name other than `local`, earlier or damaged cards of this machine are not read.
    supernode = replace(supernode, name=LOCAL_CARD + " machine")
    dtypes = tuple(d for d in _DTYPES if d in supernode.device.peak_flops)
    probes = make_probes(supernode, short=short)
    window_s = _SHORT_WINDOW_S if short else _WINDOW_S
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    threads = rank_threads(ranks)
    by_rank: list[LocalRates] = launch(lambda rank: _rates_of(dtypes, window_s), ranks, threads=threads)
    rates = mean_rates(by_rank)
    seconds: list[float] = []
    for first in range(0, len(probes), _AT_ONCE):
        group = probes[first : first + _AT_ONCE]
        each = launch(lambda rank, group=group: _seconds_of(group, short), ranks, threads=threads)
        seconds += [max(per_rank) for per_rank in zip(*each, strict=True)]
    source = f"micro-benchmarks of this machine, {ranks} ranks at once, torch {torch.__version__}"
    card = fit_device(rates, supernode, source)
    measured = [
        MeasuredStep(p.plan_model, p.plan.strategy, p.plan.workload, s) for p, s in zip(probes, seconds, strict=True)
    ]
    source = f"{len(probes)} small training steps on {ranks} ranks"
    if kind == "cpu":
        card, stack = fit_probes(measured, card, supernode, source)
        return card, _with_shipped(stack, stack_card("cpu"), probes) if short else stack
    return fit_stack(measured[:2], card, supernode, source)


def _with_shipped(stack: StackCard, base: StackCard, probes: Sequence[Probe]) -> StackCard:
    """Return `stack` with the constants of `base` for experts and for parallel axes that no probe uses."""
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


def _check(path: Path, steps: int, by_ranks: Mapping[int, tuple[DeviceCard, StackCard]]) -> Iterator[str]:
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
    for name, cards in (
        ("before", shipped_cards(machine.device)),
        ("after", cards_for_ranks(by_ranks, ranks)),
    ):
        predicted = _predicted(spec, plan, machine, *cards)
        yield f"  predicted {name}: {predicted:.4g} s, {predicted / measured - 1.0:+.1%} of the measured"


def _predicted(spec: ModelSpec, plan: Plan, supernode: Supernode, device: DeviceCard, stack: StackCard) -> float:
    machine = Machine.of(supernode, plan.workload.compute_dtype, card=device, stack=stack)
    candidate = Candidates.of(plan.strategy, plan.workload)
    return float(step_seconds(PricingCase(ModelNumbers.of(spec), machine, plan.workload, candidate))[0])
