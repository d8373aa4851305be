"""Part of `multimodal_schedule` on two processes: joint schedules of encoder and language part against the best 1F1B.

Two gloo ranks, one per core, train a LLaVA model with random weights in float32. Microbatches have equal lengths and
different numbers of images. All schedules run through `parallelize_submodels` and `forward_backward`.

    calibrate   steps with equal layers, in an order chosen for equal costs, give the seconds of encoder, layer, head,
                message and gradient reduction
    choose      simulations of these costs give the layers of both ranks and the ranks of the encoder: of ours, with
                copies on both ranks or on one, and of the best 1F1B pipeline, with the encoder on the first or the
                last rank, in the order of the data and in the best of four orders
    measure     in each round, every schedule runs one step; the quiet rounds count (see `calm_rounds`)

Compute is the CPU time of the actions; the bubble is 1 - compute / (2 * step), so waits, messages and the gradient
reduction of the encoder's copies are bubbles. The replay simulates the executed schedule with the CPU times of the same
step, and adds its reduction; the prediction simulates it with the calibrated times, before it runs.
Bars: the step at least 1.15 times as fast as 1F1B in the order of the data, at most 12 % bubble, replay within 5 %,
prediction within 10 %, equal gradients in float64. 1F1B in the best order is reported too.

To tell where a speedup is lost, each schedule has its processor seconds on both ranks, in actions (`compute_s`) and
outside of them (`outside_s`: interpreter, messages and their threads), and `replayed_speedup` is that of the replays.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from _machine import QUIET, busy_s, calm_rounds, keep_freed_memory, others_shares
from scipy.optimize import brentq
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from hyper_parallel.ir import Action, Schedule, StageCost, Strategy
from hyper_parallel.mpmd import (
    TowerLanes,
    list_schedule,
    lower,
    schedule_tasks,
    submodel_schedule,
    verify,
)
from hyper_parallel.runtime import (
    World,
    forward_backward,
    launch,
    microbatch_sources,
    parallelize,
    parallelize_submodels,
    plan_of,
)
from hyper_parallel.sim import simulate

LAYERS, TOKENS, IMAGE, WIDTH, AHEAD = 8, 1408, 196, 320, 4
IMAGES = (2, 3, 0, 7)
"""Images of each microbatch, a random draw from 0 to 8; the encoder takes a third of the time.

In simulations of 60 such draws, without the gradient reduction, the joint schedule is 1.06 to 1.26 times as fast as
1F1B in the order of the data, 1.17 times in the median, and 1.14 times as fast as 1F1B in the best order. This draw has
1.25 and 1.13.
"""
ASKED_SPEEDUP, MOST_BUBBLE, MOST_REPLAY_ERROR, MOST_PREDICTION_ERROR = 1.15, 0.12, 0.05, 0.10


@dataclass(frozen=True)
class Candidate:
    """Schedule, with the ranks of the encoder and the layers of each stage.

    Attributes:
        name: Name in the output.
        towers: Ranks with the encoder.
        layers: Layers of each language stage.
        schedule: Schedule of a step.
        end_s: Predicted seconds of the step.
        images: Images of each microbatch.
    """

    name: str
    towers: tuple[int, ...]
    layers: tuple[int, ...]
    schedule: Schedule
    end_s: float
    images: tuple[int, ...] = IMAGES


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model, with equal weights in every call."""
    text = {
        "model_type": "llama", "vocab_size": 1024, "hidden_size": WIDTH, "intermediate_size": WIDTH * 11 // 4,
        "num_hidden_layers": LAYERS, "num_attention_heads": 5, "num_key_value_heads": 5,
        "max_position_embeddings": TOKENS, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": WIDTH, "intermediate_size": WIDTH * 4,
        "num_hidden_layers": 12, "num_attention_heads": 5, "image_size": 224, "patch_size": 16,
        "projection_dim": WIDTH,
    }  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=1, dtype=str(dtype)[6:])
    return LlavaForConditionalGeneration(config).to(dtype).train()


def batches(images: Sequence[int] = IMAGES, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Return the microbatches of a step."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for count in images:
        ids = torch.randint(2, 1024, (1, TOKENS), generator=generator)
        ids[0, : count * IMAGE] = 1
        batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 1, -100)}
        if count:
            pixels = torch.randn(count, 3, 224, 224, generator=generator, dtype=torch.float64)
            batch["pixel_values"] = pixels.to(dtype)
        result.append(batch)
    return result


class Spans:
    """Recorder of CPU seconds of a step's computations, in order, and of seconds in the gradient reduction."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.reduction_s = 0.0

    @contextmanager
    def __call__(self, name: str, kind: str) -> Iterator[None]:
        """Measure the body of the context."""
        begin, begin_wall = time.thread_time(), time.perf_counter()
        yield
        if kind == "compute":
            self.seconds.append(time.thread_time() - begin)
        elif name == "gradient reduction":
            self.reduction_s += time.perf_counter() - begin_wall


def timed(row: Sequence[Action]) -> list[Action]:
    """Return the actions of a rank that `Spans` records: all computations except I of the encoder, which is empty."""
    return [a for a in row if a.kind in "FBIW" and (a.stage or a.kind != "I")]


def prepare(candidate: Candidate, world: World, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return this rank's sub-models, parallelized with the placement of a candidate."""
    return parallelize_submodels(
        build(dtype),
        {
            "vision": Strategy(dp_replicate=len(candidate.towers)),
            "language": Strategy(pp=2, stage_layers=candidate.layers),
        },
        world,
        ranks={"vision": candidate.towers, "language": (0, 1)},
        schedule=candidate.schedule,
    )


def one_step(part: nn.Module, given: Sequence[dict[str, Tensor]], spans: Spans) -> Tensor:
    """Run forward and backward of a step, and return this rank's part of the loss; the parts add up to the loss."""
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in given)
    parts = [s and given[s[1]] for s in microbatch_sources(part, len(given))]
    return forward_backward(part, parts, count, spans)


@dataclass
class Sample:
    """Values of the steps of a candidate on one rank.

    Attributes:
        step_s: Seconds of each step.
        busy_s: Increase of `_machine.busy_s`.
        own_s: Processor seconds of this rank.
        actions: CPU seconds of its actions.
        reduction_s: Seconds of the gradient reduction.
        loss: Summand of the loss.
    """

    step_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    actions: list[list[float]] = field(default_factory=list)
    reduction_s: list[float] = field(default_factory=list)
    loss: float = 0.0


def measure(candidates: Sequence[Candidate], rounds: int) -> list[dict[str, Any]]:
    """Return per candidate: values of every step, as named in `Sample`, and the loss."""

    def rank(index: int) -> list[Sample]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
        torch.set_num_threads(1)
        keep_freed_memory()
        samples = [Sample() for _ in candidates]
        with World.join("cpu") as world:
            cases = [(prepare(c, world), batches(c.images)) for c in candidates]
            for turn in range(rounds + 1):
                for (part, given), sample in zip(cases, samples, strict=True):
                    part.zero_grad()
                    spans = Spans()
                    dist.barrier()
                    busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
                    loss = one_step(part, given, spans)
                    dist.barrier()
                    seconds = time.perf_counter() - begin
                    sample.loss = float(loss)
                    if turn:  # in the first step, memory is allocated
                        sample.step_s.append(seconds)
                        sample.busy_s.append(busy_s() - busy)
                        sample.own_s.append(time.process_time() - own)
                        sample.actions.append(spans.seconds)
                        sample.reduction_s.append(spans.reduction_s)
        return samples

    ranks = launch(rank, 2, timeout_s=3000)
    return [
        {
            "step_s": first.step_s,
            "others": others_shares(first.busy_s, first.step_s, [first.own_s, second.own_s]),
            "own_s": list(map(sum, zip(first.own_s, second.own_s, strict=True))),
            "actions": list(zip(first.actions, second.actions, strict=True)),
            # The rank that comes last does not wait for the other one.
            "reduction_s": list(map(min, first.reduction_s, second.reduction_s)),
            "loss": first.loss + second.loss,
        }
        for first, second in zip(*ranks, strict=True)
    ]


def gradient_difference(candidates: Sequence[Candidate]) -> float:
    """Return the difference of the gradients from those of one rank in float64, over the norm of all gradients."""
    whole, given = build(torch.float64), batches(dtype=torch.float64)
    with World.join("cpu") as world:
        one_step(parallelize(whole, plan_of(whole), world), given, Spans())
    expected = {name: p.grad for name, p in whole.named_parameters()}

    def rank(_: int) -> float:
        square = 0.0
        with World.join("cpu") as world:
            for candidate in candidates:
                part = prepare(candidate, world, torch.float64)
                one_step(part, given, Spans())
                for name, p in part.named_parameters():
                    right = expected[name]
                    if (p.grad is None) != (right is None):
                        return float("inf")
                    if right is not None:
                        square = max(square, float((p.grad - right).square().sum()))
        return square**0.5

    norm = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    return max(launch(rank, 2, timeout_s=3000)) / norm


Costs = list[list[StageCost]]
KEYS = ("forward_s", "input_grad_s", "weight_grad_s")


def costs_of(schedule: Schedule, actions: Sequence[Sequence[float]]) -> Costs:
    """Return the cost of each stage and microbatch, from CPU seconds of every rank's actions; B counts as W."""
    table = [[StageCost(0.0, 0.0, 0.0)] * schedule.microbatches for _ in range(schedule.stages)]
    names = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s", "B": "weight_grad_s"}
    for row, seconds in zip(schedule.compute_only().ranks, actions, strict=True):
        for action, value in zip(timed(row), seconds, strict=True):
            cost = table[action.stage][action.microbatch or 0]
            changed = replace(cost, **{names[action.kind]: value})
            table[action.stage][action.microbatch or 0] = changed
    return table


@dataclass(frozen=True)
class Calibrated:
    """Seconds of the parts of a step.

    Attributes:
        encoder: Encoder, per microbatch.
        layer: Layer of the language part.
        head: Head of the language part.
        message_s: Message between ranks, with the work around it.
        reduction_s: Gradient reduction of two copies of the encoder.
    """

    encoder: tuple[StageCost, ...]
    layer: StageCost
    head: StageCost
    message_s: float
    reduction_s: float

    def costs(self, layers: Sequence[int]) -> Costs:
        """Return the costs of the encoder and of two language stages."""
        rows = [[*self.encoder]]
        for number, count in enumerate(layers):
            values = [count * getattr(self.layer, key) + number * getattr(self.head, key) for key in KEYS]
            rows.append([StageCost(*values)] * len(self.encoder))
        return rows

    def step_s(self, schedule: Schedule, costs: Costs, towers: Sequence[int]) -> float:
        """Return the predicted seconds of a step."""
        return end_s(schedule, costs, self.message_s) + self.reduction_s * (len(towers) > 1)


def end_s(schedule: Schedule, costs: Costs, message_s: float = 0.0) -> float:
    """Return the simulated seconds of a schedule, without gradient reduction."""
    edges = {} if schedule.graph is None else dict.fromkeys(schedule.graph.edges, message_s)
    transfer_s = {edge: [s] * schedule.microbatches for edge, s in edges.items()}
    return simulate(schedule_tasks(schedule, costs, transfer_s=transfer_s)).end_s


def calibrated(rounds: int) -> Calibrated:
    """Return the costs of steps with equal layers, in the order that is the fastest one if all costs are equal.

    Both ranks compute at the same time, as in all measured steps. A pass alone on the machine is up to 10 % faster.
    """
    half = (LAYERS // 2,) * 2
    schedule = submodel_schedule(TowerLanes(2, (0, 1)), len(IMAGES))
    (sample,) = measure([Candidate("calibration", (0, 1), half, schedule, 0.0)], rounds)
    calm, _ = calm_rounds([sample["others"]])
    runs = [costs_of(schedule, sample["actions"][i]) for i in calm]

    def median(stage: int, microbatches: Sequence[int]) -> StageCost:
        costs = [run[stage][n] for run in runs for n in microbatches]
        return StageCost(*(statistics.median(getattr(cost, key) for cost in costs) for key in KEYS))

    # A stage with images has I and W; without, W is the whole backward.
    with_images = [n for n, count in enumerate(IMAGES) if count]
    body, end = median(1, with_images), median(2, with_images)
    reductions = [sample["reduction_s"][i] for i in calm]
    rests = [sample["step_s"][i] - s for i, s in zip(calm, reductions, strict=True)]
    return Calibrated(
        encoder=tuple(median(0, [n]) for n in range(len(IMAGES))),
        layer=StageCost(*(getattr(body, key) / half[0] for key in KEYS)),
        head=StageCost(*(max(0.0, getattr(end, key) - getattr(body, key)) for key in KEYS)),
        message_s=statistics.median(_message_s(schedule, run, rest) for run, rest in zip(runs, rests, strict=True)),
        reduction_s=statistics.median(reductions),
    )


def _message_s(schedule: Schedule, costs: Costs, step_s: float) -> float:
    """Return the seconds per message with which the simulation takes `step_s`; 0 if it takes longer without."""
    if end_s(schedule, costs) >= step_s:
        return 0.0
    return float(brentq(lambda s: end_s(schedule, costs, s) - step_s, 0.0, step_s, xtol=1e-6))


def choose(rounds: int) -> tuple[list[Candidate], Calibrated]:
    """Return by prediction the best of ours, of 1F1B in the order of the data, and of 1F1B in any order."""
    model = calibrated(rounds)
    ours: list[Candidate] = []
    plain: list[Candidate] = []
    ordered: list[Candidate] = []
    for first in range(1, LAYERS):
        layers = (first, LAYERS - first)
        costs = model.costs(layers)
        for towers in ((0, 1), (0,), (1,)):
            joint = submodel_schedule(TowerLanes(2, towers), len(IMAGES), costs, ahead=AHEAD)
            step_s = model.step_s(joint, costs, towers)
            ours.append(Candidate("joint", towers, layers, joint, step_s))
        for rank in (0, 1):
            for names, rows in (("order of the data", plain), ("best order", ordered)):
                schedule = one_f_one_b(rank, costs, reorder=rows is ordered)
                name = f"1f1b, encoder on rank {rank}, {names}"
                step_s = model.step_s(schedule, costs, (rank,))
                rows.append(Candidate(name, (rank,), layers, schedule, step_s))
    key = lambda candidate: candidate.end_s  # noqa: E731
    return [min(ours, key=key), min(plain, key=key), min(ordered, key=key)], model


def one_f_one_b(rank: int, costs: Costs, reorder: bool) -> Schedule:
    """Return the 1F1B schedule with the encoder on `rank`, with full backwards; `reorder` permutes microbatches."""
    count, lanes = len(costs[0]), TowerLanes(2, (rank,))
    seconds = [c.forward_s for c in costs[0]]
    light = sorted(range(count), key=seconds.__getitem__)
    few = count // 4
    best: tuple[float, Schedule] | None = None
    orders = [[*range(count)], light, light[::-1], light[:few] + light[few:][::-1]]
    for order in orders if reorder else orders[:1]:
        # One byte per microbatch in flight on a language stage.
        counted = [
            [replace(c, activation_bytes=int(s > 0), weight_grad_input_bytes=0) for c in row]
            for s, row in enumerate(costs)
        ]
        homes = [[rank] * count, [0] * count, [1] * count]
        schedule = list_schedule(lanes.graph(), homes, counted, max_bytes=[2, 1], split=False, order=order)
        seconds_of_step = end_s(schedule, costs)
        if best is None or seconds_of_step < best[0]:
            best = seconds_of_step, schedule
    assert best is not None
    lowered = lower(best[1], costs=costs, reduce_grad=False)
    verify(lowered)
    return lowered


def measured(rounds: int) -> dict[str, Any]:
    """Return medians, the ratios of 1F1B to ours, bubbles, replays, predictions and bars."""
    candidates, model = choose(max(2, rounds // 2))
    samples = measure(candidates, rounds)
    facts = {"message_s": model.message_s, "reduction_s": model.reduction_s}
    return summary(candidates, samples, model) | {"calibrated": facts, "samples": samples}


def summary(candidates: Sequence[Candidate], samples: Sequence[dict[str, Any]], model: Calibrated) -> dict[str, Any]:
    """Return the results over the rounds of `calm_rounds`."""
    calm, others = calm_rounds(s["others"] for s in samples)
    rows, replays = [], []
    for candidate, sample in zip(candidates, samples, strict=True):
        steps = [sample["step_s"][i] for i in calm]
        compute = [sum(map(sum, sample["actions"][i])) for i in calm]
        replayed = [
            end_s(candidate.schedule, costs_of(candidate.schedule, sample["actions"][i])) + sample["reduction_s"][i]
            for i in calm
        ]
        replays.append(replayed)
        rows.append({
            "name": candidate.name,
            "encoder_ranks": candidate.towers,
            "layers": candidate.layers,
            "step_s": statistics.median(steps),
            "predicted_s": candidate.end_s,
            "prediction_error": statistics.median(candidate.end_s / s - 1 for s in steps),
            "replay_error": statistics.median(r / s - 1 for r, s in zip(replayed, steps, strict=True)),
            "bubble": statistics.median(1 - c / (2 * s) for c, s in zip(compute, steps, strict=True)),
            "compute_s": statistics.median(compute),
            "predicted_compute_s": sum(
                cost.microbatch_s for row in model.costs(candidate.layers) for cost in row
            ),
            "outside_s": statistics.median(
                sample["own_s"][i] - c for i, c in zip(calm, compute, strict=True)
            ),
            "reduction_s": statistics.median(sample["reduction_s"][i] for i in calm),
            "loss": sample["loss"],
        })  # fmt: skip

    def ratio(columns: Sequence[Sequence[float]]) -> list[float]:
        """Return the medians of the other columns over the first one, round by round."""
        first, *rest = columns
        return [statistics.median(a / b for a, b in zip(c, first, strict=True)) for c in rest]

    speedups = ratio([[s["step_s"][i] for i in calm] for s in samples])
    difference = gradient_difference(candidates)
    return {
        "kind": "measured",
        "images": IMAGES,
        "rounds": len(samples[0]["step_s"]),
        "others": others,
        "quiet": others <= QUIET,
        "schedules": rows,
        "speedup": speedups[0],
        "speedup_over_best_order": speedups[1],
        "replayed_speedup": ratio(replays),
        "predicted_speedup": [c.end_s / candidates[0].end_s for c in candidates[1:]],
        "gradient_difference": difference,
        "bars": {
            "speedup": speedups[0] >= ASKED_SPEEDUP,
            "bubble": rows[0]["bubble"] <= MOST_BUBBLE,
            "replay": abs(rows[0]["replay_error"]) <= MOST_REPLAY_ERROR,
            "prediction": abs(rows[0]["prediction_error"]) <= MOST_PREDICTION_ERROR,
            "gradients": difference <= 1e-10,
        },
    }  # fmt: skip
