"""Overlap of communication and computation inside of a layer, against the same step without it, on a throttled link.

Two ranks with one core each train one model by several strategies in turn, forward and backward, round after round.
They talk over the loopback of a network namespace of their own, with a token bucket as its link: time on the wire is
then time off the processor, as it is on an accelerator. Needs the right to make namespaces (`unshare -rn`).

    python benchmarks/overlap.py                  # tables at two rates of each case
    python benchmarks/overlap.py --json           # the same as JSON, with every sample
    python benchmarks/overlap.py --case experts --rate 1000    # one model, 1000 Mbit/s
    python benchmarks/overlap.py --predict FILE   # predictions for the JSON of an earlier run

gloo computes a reduce-scatter as an all-reduce and sends twice the bytes, so here ranks exchange their parts and add
them, as NCCL and HCCL do on a ring of two ranks. Packets of the loopback are large, because the processor time of
sending, which an accelerator does not have, goes with their number.

Masking by two definitions:

* `wait`: 1 - seconds blocked in collectives / seconds blocked in the serial step.
* `timeline`: of the seconds in which a collective is in flight, the part in which the rank does not wait for one.

For every strategy the step and the seconds blocked in collectives stand beside those that the cost model predicts,
calibrated on the serial step alone (see `_predicted_overlap`), with the choice of `overlap: auto`. They are not judged.

Exit status 1 when a bar is missed, 2 when the machine was too busy for a verdict (load of others above `QUIET`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from _machine import QUIET, busy_s, calm_rounds, machine, others_shares
from _predicted_overlap import predicted
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from hyper_parallel.backends.torch import collectives
from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import ModelRef, Overlap, Plan, Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.runtime import World, forward_backward, launch, parallelize
from hyper_parallel.shard import family_rules, plan_layouts
from hyper_parallel.topology import detect_local

INSIDE = "--inside-namespace"
JUDGED = ("speedup", "masking")
AUTO_BAR = 0.98
"""Bar of the measured speed of the predicted best strategy over that of the serial one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Model, batch and strategies of one comparison; the first strategy is serial.

    Attributes:
        config: Config of a Hugging Face model.
        sequences: Sequences per data rank.
        seq_len: Tokens per sequence.
        strategies: Name to strategy.
        rates: Rates of the link in Mbit/s: at the first one the speed is judged, at the second one, where all
            communication can be hidden, the part that is.
        bar: Bar of the step time of the serial strategy over that of the best other one.
        masked: Bar of the part of the communication that is hidden, by waits.
        zipf: Route tokens to experts by Zipf's law instead of evenly.
    """

    config: PretrainedConfig
    sequences: int
    seq_len: int
    strategies: dict[str, Strategy]
    rates: tuple[int, int]
    bar: float
    masked: float = 0.92
    zipf: bool = False


def cases() -> dict[str, Case]:
    """Comparisons by name."""
    experts = Strategy(dp_shard=2, ep=2, zero=0)
    tensor = Strategy(tp_x=2)

    def replaced(strategy: Strategy, **overlap: Any) -> Strategy:
        return dataclasses.replace(strategy, overlap=Overlap(**overlap))

    common = {
        "vocab_size": 512,
        "hidden_size": 1024,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    # Wide models compute more per byte, so the processor time of sending, which an accelerator does not have, weighs
    # less. Attention is narrow: the gradients of its parameters are summed over the same link.
    moe = Qwen3MoeConfig(
        **common, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=1024, decoder_sparse_step=1, mlp_only_layers=[],
        output_router_logits=False,
    )  # fmt: skip
    # The halves of tensor parallelism meet after all layers: more of them than 3 hide more, as in a real model.
    dense = Qwen3Config(
        **common, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=12, intermediate_size=2048,
    )  # fmt: skip
    exchanged = Case(
        moe, 8, 256,
        {
            "serial": experts,
            "chunks 4": replaced(experts, ep_chunks=4),
            "half-batch": replaced(experts, half_batch=True),
            "half-batch, chunks 2": replaced(experts, half_batch=True, ep_chunks=2),
            "half-batch, chunks 4": replaced(experts, half_batch=True, ep_chunks=4),
        },
        (650, 1100), 1.4,
    )  # fmt: skip
    return {
        "experts": exchanged,
        "experts-zipf": dataclasses.replace(exchanged, masked=0.8, zipf=True),
        "tensor": Case(
            dense, 4, 256,
            {
                "serial": tensor,
                "half-batch": replaced(tensor, half_batch=True),
                **{f"chunks {n}": replaced(tensor, tp_chunks=n) for n in (4, 8)},
            },
            (1200, 1400), 1.25,
        ),
    }  # fmt: skip


class Meter:
    """Seconds that this rank is blocked in collectives, and when collectives were in flight."""

    def __init__(self) -> None:
        self.blocked: list[tuple[float, float]] = []
        self.in_flight: list[tuple[float, float]] = []

    def clear(self) -> None:
        """Forget what was measured."""
        self.blocked, self.in_flight = [], []

    @contextmanager
    def install(self) -> Iterator[None]:
        """Measure the collectives that layers issue."""
        names = ("_all_gather", "_reduce_scatter")
        originals = {name: getattr(collectives, name) for name in names}
        exchange = dist.all_to_all_single
        collectives._all_gather = self._measured(originals["_all_gather"])
        collectives._reduce_scatter = _exchange_and_add
        dist.all_to_all_single = self._measured(exchange)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(collectives, name, function)
            dist.all_to_all_single = exchange

    def _measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            work = function(*args, async_op=async_op, **kwargs)
            if async_op:
                return _MeasuredWork(work, begin, self)
            now = time.perf_counter()
            self.blocked.append((begin, now))
            self.in_flight.append((begin, now))
            return None

        return call


class _ExchangeAndAdd:
    """Reduce-scatter in flight: parts are exchanged, which is measured; the wait adds them, which is computation."""

    def __init__(self, out: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._out, self._parts = out, rows.new_empty(group.size(), *out.shape)
        parts = self._parts.view(rows.shape)
        self._work = dist.all_to_all_single(parts, rows, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._parts, 0, out=self._out)


def _exchange_and_add(
    out: torch.Tensor, rows: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> _ExchangeAndAdd | None:
    """Reduce-scatter rows of all ranks into `out`; arguments as in `torch.distributed.reduce_scatter_tensor`."""
    work = _ExchangeAndAdd(out, rows, group)
    if async_op:
        return work
    work.wait()
    return None


class _MeasuredWork:
    def __init__(self, work: Any, begin: float, meter: Meter) -> None:
        self._work, self._begin, self._meter, self._end = work, begin, meter, 0.0
        with suppress(RuntimeError):
            work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self._end = time.perf_counter()

    def wait(self) -> None:
        begin = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        self._meter.blocked.append((begin, now))
        self._meter.in_flight.append((self._begin, min(self._end or now, now)))


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint intervals that cover the same time."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common_seconds(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Return the seconds that lie in both unions."""
    total, rest = 0.0, list(union(b))
    for begin, end in union(a):
        total += sum(max(0.0, min(end, e) - max(begin, s)) for s, e in rest)
    return total


def make_plan(case: Case, strategy: Strategy) -> Plan:
    """Return the plan of a strategy, without a search."""
    spec = spec_from_config(case.config.to_dict(), name="benchmark")
    parameters = {p.name: p for b in spec.blocks for p in b.params}
    attention = next(b.attention for b in spec.blocks if b.attention)
    planned = plan_layouts(
        [(p.name, p.shape, p.dims) for p in parameters.values()], family_rules(spec.family), strategy,
        num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads, head_dim=attention.qk_head_dim,
        vocab_size=spec.vocab_size, tied={p.name: p.tied_to for p in parameters.values() if p.tied_to},
    )  # fmt: skip
    tokens = case.sequences * case.seq_len * strategy.dp
    workload = Workload(
        seq_len=case.seq_len, tokens_per_step=tokens, microbatch=case.sequences,
        compute_dtype="float32", param_dtype="float32", reduce_dtype="float32",
    ).resolve(strategy.dp)  # fmt: skip
    reference = ModelRef("benchmark", spec.family, spec.num_params, spec.num_params, 0.0, "")
    return Plan(
        reference, "local", 0.0, workload, strategy, planned.layouts, 0.0, (), (), 0,
        collectives=step_collectives(spec, planned.layouts, strategy, workload),
    )  # fmt: skip


def route_by_zipf(model: torch.nn.Module) -> None:
    """Change a model's weights so that the k-th of a random order of experts is chosen about 1 / k as often.

    All embeddings get one large feature, which the router maps to the logarithm of the frequency.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1.0
        feature = 1.0 / embedding.square().mean(-1).sqrt().mean()  # behind the norm
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                ranks = 1 + torch.randperm(len(weight), generator=generator)
                weight[:, 0] = -ranks.log() / feature


def measure(case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    """Return samples per strategy: step seconds, blocked seconds, masking by timeline, and the loss."""
    torch.manual_seed(0)
    models = {name: AutoModelForCausalLM.from_config(case.config) for name in case.strategies}
    if case.zipf:
        route_by_zipf(next(iter(models.values())))
    first = next(iter(models.values())).state_dict()
    for model in models.values():
        model.load_state_dict(first)
    plans = {name: make_plan(case, s) for name, s in case.strategies.items()}

    def rank(index: int) -> dict[str, dict[str, Any]]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
        torch.set_num_threads(1)
        meter = Meter()
        samples: dict[str, dict[str, Any]] = {
            name: {
                "step_s": [],
                "blocked_s": [],
                "timeline": [],
                "loss": None,
                "busy_s": [],
                "own_s": [],
            }
            for name in models
        }
        with World.join("cpu") as world, meter.install():
            ready = {name: parallelize(m, plans[name], world) for name, m in models.items()}
            generator = torch.Generator().manual_seed(
                index if plans["serial"].strategy.dp > 1 else 0
            )
            ids = torch.randint(
                case.config.vocab_size, (case.sequences, case.seq_len), generator=generator
            )
            batch = {"input_ids": ids, "labels": ids}
            tokens = ids.numel() * plans["serial"].strategy.dp
            for turn in range(rounds + 1):
                for name, model in ready.items():
                    model.zero_grad()
                    dist.barrier()
                    meter.clear()
                    busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
                    loss = forward_backward(model, [batch], tokens)
                    dist.barrier()
                    seconds = time.perf_counter() - begin
                    if turn == 0:  # memory is allocated and kernels are chosen
                        samples[name]["loss"] = float(loss)
                        continue
                    blocked = sum(e - s for s, e in meter.blocked)
                    flying = sum(e - s for s, e in union(meter.in_flight))
                    waited = common_seconds(meter.in_flight, meter.blocked)
                    samples[name]["step_s"].append(seconds)
                    samples[name]["blocked_s"].append(blocked)
                    samples[name]["timeline"].append(1 - waited / flying if flying else 0.0)
                    samples[name]["busy_s"].append(busy_s() - busy)
                    samples[name]["own_s"].append(time.process_time() - own)
        return samples

    ranks = launch(rank, 2, timeout_s=600)
    return {
        name: {
            "step_s": ranks[0][name]["step_s"],
            "others": others_shares(
                ranks[0][name]["busy_s"],
                ranks[0][name]["step_s"],
                [r[name]["own_s"] for r in ranks],
            ),
            "processor_s": _mean(r[name]["own_s"] for r in ranks),
            "blocked_s": _mean(r[name]["blocked_s"] for r in ranks),
            "timeline": _mean(r[name]["timeline"] for r in ranks),
            "loss": sum(r[name]["loss"] for r in ranks),
        }
        for name in models
    }


def _mean(columns: Any) -> list[float]:
    return [statistics.fmean(values) for values in zip(*columns, strict=True)]


def summary(case: Case, samples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return medians of each strategy, over the calmest half of the rounds."""
    calm, others = calm_rounds(s["others"] for s in samples.values())

    def median(name: str, key: str) -> float:
        return statistics.median(samples[name][key][i] for i in calm)

    serial_s, alone_s = median("serial", "step_s"), median("serial", "blocked_s")
    rows = {}
    for name in samples:
        ratios = [samples["serial"]["step_s"][i] / samples[name]["step_s"][i] for i in calm]
        rows[name] = {
            "step_s": median(name, "step_s"),
            "speedup": statistics.median(ratios),
            "blocked_s": median(name, "blocked_s"),
            "processor_s": median(name, "processor_s"),
            "masking_wait": 1 - median(name, "blocked_s") / alone_s,
            "masking_timeline": median(name, "timeline"),
            "loss_difference": samples[name]["loss"] - samples["serial"]["loss"],
        }
    return {
        "communication_share": alone_s / serial_s,
        "others": others,
        "strategies": rows,
        "best_speedup": max(r["speedup"] for r in rows.values()),
        "best_masking": max(r["masking_wait"] for r in rows.values()),
        "bars": {"speedup": case.bar, "masking": case.masked},
    }


def predictions(case: Case, rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return predictions of the strategies of a case; `rows` is what `summary` returns for them."""
    serial = case.strategies["serial"]
    workload = make_plan(case, serial).workload
    spec = spec_from_config(case.config.to_dict(), name="benchmark")
    known = {name: row for name, row in rows.items() if name in case.strategies}
    return predicted(detect_local(2), spec, workload, case.strategies, known)


def print_predictions(result: dict[str, Any]) -> None:
    """Print the predictions of a case beside what was measured."""
    forecast = result["predicted"]
    print(
        f"  predicted with {forecast['link_bytes_s'] / 1e6:.1f} MB/s, collectives on {forecast['collective_share']:.0%}"
        f" of a core; auto takes {forecast['auto']}, measured {forecast['auto_speedup']:.2f}x (bar {AUTO_BAR})"
    )
    for name, row in forecast["strategies"].items():
        measured = result["strategies"][name]
        print(
            f"  {name:22} step {measured['step_s'] * 1e3:8.1f} ms, predicted {row['step_s'] * 1e3:8.1f}"
            f" ({row['step_error']:+4.0%})  {measured['speedup']:5.2f}x, predicted {row['speedup']:5.2f}x"
            f"  blocked {measured['blocked_s'] * 1e3:7.1f} ms, predicted {row['blocked_s'] * 1e3:7.1f}"
            f" ({row['blocked_error']:+4.0%}; {row['blocked_difference']:+4.0%} of the serial ones)"
        )


def predict_files(paths: list[str]) -> int:
    """Print predictions for the results in files of earlier runs, one JSON object per line; return the exit status."""
    for path in paths:
        for line in filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines()):
            result = json.loads(line)
            if "processor_s" not in result["strategies"]["serial"]:
                print(f"{path}: without `processor_s`, which calibration needs", file=sys.stderr)
                return 2
            result["predicted"] = predictions(cases()[result["case"]], result["strategies"])
            quiet = "quiet" if result["quiet"] else "not quiet"
            print(f"{path}: {result['case']}, {result['rate_mbit']} Mbit/s, {quiet}")
            print_predictions(result)
    return 0


def in_namespace(arguments: list[str], rate: int) -> int:
    """Run this script in a network namespace whose loopback has a rate in Mbit/s."""
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        print("needs unshare (util-linux) and tc (iproute2)", file=sys.stderr)
        return 2
    link = f"ip link set lo mtu 65536 up && tc qdisc add dev lo root tbf rate {rate}mbit burst 256kb latency 400ms"
    command = f'{link} && exec "$0" "$@"'
    words = [sys.executable, __file__, INSIDE, *arguments]
    return subprocess.run(["unshare", "-rn", "bash", "-c", command, *words], check=False).returncode


def main() -> int:
    """Print one table per case and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=sorted(cases()), action="append")
    parser.add_argument("--rate", type=int, help="Mbit/s of the link")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--predict", nargs="+", metavar="FILE", help="results of earlier runs")
    parser.add_argument("--judge", nargs="+", default=JUDGED, help=argparse.SUPPRESS)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.predict:
        return predict_files(args.predict)
    names = args.case or sorted(cases())
    if not args.inside_namespace:
        status = 0
        for name in names:
            speed, masking = cases()[name].rates
            judged = (
                [(args.rate, JUDGED)] if args.rate else [(speed, JUDGED[:1]), (masking, JUDGED[1:])]
            )
            for rate, bars in judged:
                words = ["--case", name, "--rate", str(rate), "--rounds", str(args.rounds)]
                words += ["--json"] * args.json + ["--judge", *bars]
                status = max(status, in_namespace(words, rate))
        return status
    (name,) = names
    case = cases()[name]
    result = summary(case, samples := measure(case, args.rounds))
    result["predicted"] = predictions(case, result["strategies"])
    busy = result["others"] > QUIET
    if args.json:
        facts = {
            "case": name,
            "rate_mbit": args.rate,
            "machine": machine(),
            "quiet": not busy,
            "judged": args.judge,
        }
        print(json.dumps({**facts, **result, "samples": samples}))
    else:
        share = result["communication_share"]
        print(
            f"{name}: {args.rate} Mbit/s, communication {share:.0%} of the serial step,"
            f" other processes {result['others']:.0%} of the cores"
        )
        for key, row in result["strategies"].items():
            print(
                f"  {key:22} {row['step_s'] * 1e3:8.1f} ms  {row['speedup']:5.2f}x  masked {row['masking_wait']:5.0%}"
                f" (waits) {row['masking_timeline']:5.0%} (timeline)  loss {row['loss_difference']:+.1e}"
            )
        print_predictions(result)
    if busy:
        return 2
    return int(any(result[f"best_{key}"] < result["bars"][key] for key in args.judge))


if __name__ == "__main__":
    sys.exit(main())
