"""Step time with and without overlap of communication and computation within a layer, on a throttled link.

Two ranks with one core each run forward and backward of one model under several strategies, in turn, round after round.
They communicate over the loopback of a separate network namespace with a token bucket, so transfer time costs no CPU
time, as on an accelerator. Needs permission to create namespaces (`unshare -rn`).

    python benchmarks/overlap.py                  # tables at two rates of each case
    python benchmarks/overlap.py --json           # the same as JSON, with every sample
    python benchmarks/overlap.py --case experts --rate 1000    # one model, 1000 Mbit/s
    python benchmarks/overlap.py --predict FILE   # predictions for the JSON of an earlier run

gloo implements reduce-scatter as all-reduce and sends twice the bytes. Here, ranks therefore exchange and add their
parts, as NCCL and HCCL do on a ring of two ranks. Packets are large, because the CPU time of sending, which an
accelerator does not have, is proportional to their number.

Two definitions of masking, the fraction of hidden communication:

* `wait`: 1 - seconds blocked in collectives / seconds blocked in the serial step.
* `timeline`: fraction of the time with a collective in flight in which the rank does not wait for a collective.

A collective is in flight once both ranks have issued it. A rank that waits earlier waits for a rank with more rows to
compute, which overlap cannot hide; these seconds are `late_s`. Router biases are fitted to the batch, so that experts
get equal numbers of rows, or numbers by Zipf's law.

Processes keep the memory of freed tensors, as allocators of accelerators do. Otherwise glibc maps and clears new pages
for every tensor of 32 MiB or more. Only the serial step has so large ones, so its slowdown would count as a gain of
overlap.

Step times and blocked seconds of every strategy are printed with the predictions of the cost model, calibrated on the
serial step alone (see `_predicted_overlap`), and with the choice of `overlap: auto`. Predictions have no bar.

Each step is also replayed: its own order and computation, with durations of collectives computed from their bytes and
the bandwidth of the serial step (see `_overlap_replay`). The replay must take as long as the measured step.

Exit status 1 when a bar is missed, 2 when other load exceeded `QUIET`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from _machine import QUIET, busy_s, calm_rounds, keep_freed_memory, machine, others_shares
from _overlap_replay import FEW_BYTES, replays
from _predicted_overlap import EXPERTS, NEEDED, predicted
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
REPLAY_BAR = 0.05
"""Bar of the error of a replayed step, relative to the measured one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Model, batch and strategies of one comparison; the first strategy is serial.

    Attributes:
        config: Config of a Hugging Face model.
        sequences: Sequences per data-parallel rank.
        seq_len: Tokens per sequence.
        strategies: Strategies by name.
        rates: Two rates of the link in Mbit/s. `bar` applies at the first. `masked` applies at the second, at which all
            communication could be hidden.
        bar: Bar on the step time of the serial strategy, divided by that of the best other strategy.
        masked: Bar on masking by the definition `wait`.
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
    """Return the comparisons by name."""
    experts = Strategy(dp_shard=2, ep=2, zero=0)
    tensor = Strategy(tp_x=2)

    def replaced(strategy: Strategy, **overlap: Any) -> Strategy:
        return dataclasses.replace(strategy, overlap=Overlap(**overlap))

    common = {"vocab_size": 512, "head_dim": 64, "max_position_embeddings": 1024}
    # Wide models compute more per byte, so the CPU time of sending, which an accelerator does not have, matters less.
    # Attention is narrow and the batch large, because gradients of other parameters are reduced over the same link.
    moe = Qwen3MoeConfig(
        **common, hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=1024, decoder_sparse_step=1, mlp_only_layers=[],
        output_router_logits=False,
    )  # fmt: skip
    # The two halves are joined after all layers, so more than 3 layers hide more communication, as in a real model.
    dense = Qwen3Config(
        **common, hidden_size=2048, num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=6,
        intermediate_size=4096,
    )  # fmt: skip
    exchanged = Case(
        moe, 16, 256,
        {
            "serial": experts,
            "chunks 4": replaced(experts, ep_chunks=4),
            "half-batch": replaced(experts, half_batch=True),
            "half-batch, chunks 2": replaced(experts, half_batch=True, ep_chunks=2),
            "half-batch, chunks 4": replaced(experts, half_batch=True, ep_chunks=4),
        },
        (550, 1000), 1.4,
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
            (580, 900), 1.25,
        ),
    }  # fmt: skip


class Meter:
    """Recorder of the times of this rank's collectives, in seconds of the machine's clock.

    Attributes:
        issued: Issue time of each collective, in order; the order is the same on all ranks.
        blocked: Begin and end of the wait for each collective, by its index.
        in_flight: Issue and completion time of each collective, by its index.
        sent_bytes: Bytes that this rank sends to other ranks in each collective, in order.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Delete all recorded times."""
        self.issued: list[float] = []
        self.blocked: dict[int, tuple[float, float]] = {}
        self.in_flight: dict[int, tuple[float, float]] = {}
        self.sent_bytes: list[int] = []

    def times(self) -> dict[str, list[Any]]:
        """Return the times of all collectives in the order of issue."""
        order = range(len(self.issued))
        return {
            "issued": self.issued,
            "bytes": self.sent_bytes,
            "blocked": [self.blocked[n] for n in order],
            "in_flight": [self.in_flight[n] for n in order],
        }

    @contextmanager
    def install(self) -> Iterator[None]:
        """Measure the collectives that layers issue inside the context."""
        names = ("all_gather_single", "_reduce_scatter")
        originals = {name: getattr(collectives, name) for name in names}
        exchange = dist.all_to_all_single
        gather = originals["all_gather_single"]
        collectives.all_gather_single = self._measured(gather, _bytes_to_gather)
        collectives._reduce_scatter = _exchange_and_add
        dist.all_to_all_single = self._measured(exchange, _bytes_to_exchange)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(collectives, name, function)
            dist.all_to_all_single = exchange

    def _measured(self, function: Callable[..., Any], sent_bytes: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            number, begin = len(self.issued), time.perf_counter()
            self.issued.append(begin)
            self.sent_bytes.append(sent_bytes(*args, **kwargs))
            work = function(*args, async_op=async_op, **kwargs)
            if async_op:
                return _MeasuredWork(work, number, self)
            self.blocked[number] = self.in_flight[number] = begin, time.perf_counter()
            return None

        return call


def _bytes_to_gather(_: torch.Tensor, x: torch.Tensor, *, group: dist.ProcessGroup) -> int:
    """Return the bytes that a rank sends in an all-gather of `x`."""
    return x.numel() * x.element_size() * (group.size() - 1)


def _bytes_to_exchange(
    _: torch.Tensor,
    x: torch.Tensor,
    receive: list[int] | None = None,
    send: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> int:
    """Return the bytes that a rank sends to others in an all-to-all of the rows of `x`."""
    send = send or [1] * group.size()
    size = x.numel() * x.element_size()
    return size * (sum(send) - send[group.rank()]) // max(1, sum(send))


class _ExchangeAndAdd:
    """Reduce-scatter in flight: the exchange of parts counts as communication, and adding them as computation."""

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
    """Reduce-scatter rows of all ranks into `out`; arguments as for `torch.distributed.reduce_scatter_tensor`."""
    work = _ExchangeAndAdd(out, rows, group)
    if async_op:
        return work
    work.wait()
    return None


class _MeasuredWork:
    def __init__(self, work: Any, number: int, meter: Meter) -> None:
        self._work, self._number, self._meter, self._end = work, number, meter, 0.0
        with suppress(RuntimeError):
            work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self._end = time.perf_counter()

    def wait(self) -> None:
        begin = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        number, issued = self._number, self._meter.issued[self._number]
        self._meter.blocked[number] = begin, now
        self._meter.in_flight[number] = issued, min(self._end or now, now)


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint intervals."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common_seconds(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Return the length in seconds of the intersection of two unions of intervals."""
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


def fit_routing(model: torch.nn.Module, ids: torch.Tensor, zipf: bool) -> None:
    """Change the routers of a model so that experts get equal numbers of a batch's rows, or numbers by Zipf's law.

    One feature of all embeddings is set to 1, so that its router weights act as biases of the experts. The biases are
    fitted layer by layer. With Zipf's law, the order of the experts is random.

    Args:
        model: The model.
        ids: Tokens of all ranks, [B, S].
        zipf: Use Zipf's law.
    """
    generator = torch.Generator().manual_seed(0)
    inputs: list[torch.Tensor] = []
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        for name, gate in model.named_modules():
            if not name.endswith("mlp.gate"):
                continue
            hook = gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            for sequences in ids.split(4):
                model(input_ids=sequences)
            hook.remove()
            rows = torch.cat([x.flatten(0, -2) for x in inputs])
            inputs.clear()
            experts = len(gate.weight)
            order = torch.randperm(experts, generator=generator)
            share = 1.0 / (1 + order if zipf else torch.ones(experts))
            _fit_biases(gate.weight, rows, model.config.num_experts_per_tok, share / share.sum())


def _fit_biases(weight: torch.Tensor, rows: torch.Tensor, chosen: int, share: torch.Tensor, steps: int = 400) -> None:
    """Fit the router biases `weight[:, 0]` so that experts get the fractions `share` of the rows [T, D].

    Each row goes to its `chosen` best experts.
    """
    for step in range(steps):
        best = (rows @ weight.t()).topk(chosen, -1).indices.flatten()
        counts = torch.bincount(best, minlength=len(weight)) / len(best)
        weight[:, 0] += 0.5 ** (step / 50) * (share - counts) / rows[:, 0].mean()


def _tokens(case: Case, rank: int) -> torch.Tensor:
    """Return the tokens [B, S] of a rank."""
    generator = torch.Generator().manual_seed(rank if case.strategies["serial"].dp > 1 else 0)
    shape = (case.sequences, case.seq_len)
    return torch.randint(case.config.vocab_size, shape, generator=generator)


def measure(case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    """Return lists of samples per strategy: step seconds, `communication`, `replays`, load of others, and the loss."""
    torch.manual_seed(0)
    models = {name: AutoModelForCausalLM.from_config(case.config) for name in case.strategies}
    batches = [_tokens(case, index) for index in range(2)]
    if hasattr(case.config, "num_experts"):
        fit_routing(next(iter(models.values())), torch.cat(batches), case.zipf)
    first = next(iter(models.values())).state_dict()
    for model in models.values():
        model.load_state_dict(first)
    plans = {name: make_plan(case, s) for name, s in case.strategies.items()}

    def rank(index: int) -> dict[str, dict[str, Any]]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
        torch.set_num_threads(1)
        keep_freed_memory()
        meter = Meter()
        samples: dict[str, dict[str, Any]] = {
            name: {
                "step_s": [],
                "times": [],
                "loss": None,
                "busy_s": [],
                "own_s": [],
            }
            for name in models
        }
        with World.join("cpu") as world, meter.install():
            ready = {name: parallelize(m, plans[name], world) for name, m in models.items()}
            ids = batches[index]
            batch = {"input_ids": ids, "labels": ids}
            tokens = ids.numel() * plans["serial"].strategy.dp
            for turn in range(rounds + 1):
                for name, model in ready.items():
                    dist.barrier()
                    meter.clear()
                    busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
                    loss = forward_backward(model, [batch], tokens)
                    end = time.perf_counter()
                    dist.barrier()
                    seconds = time.perf_counter() - begin
                    model.zero_grad()
                    if turn == 0:  # memory is allocated and kernels are chosen
                        samples[name]["loss"] = float(loss)
                        continue
                    samples[name]["step_s"].append(seconds)
                    samples[name]["times"].append({**meter.times(), "step": (begin, end)})
                    samples[name]["busy_s"].append(busy_s() - busy)
                    samples[name]["own_s"].append(time.process_time() - own)
        return samples

    ranks = launch(rank, 2, timeout_s=600)
    replayed = replays({name: list(zip(*(r[name]["times"] for r in ranks), strict=True)) for name in models})
    results: dict[str, dict[str, Any]] = {
        name: {
            "step_s": ranks[0][name]["step_s"],
            "others": others_shares(
                ranks[0][name]["busy_s"],
                ranks[0][name]["step_s"],
                [r[name]["own_s"] for r in ranks],
            ),
            "processor_s": _mean(r[name]["own_s"] for r in ranks),
            **communication([r[name]["times"] for r in ranks]),
            **replayed[name],
            "loss": sum(r[name]["loss"] for r in ranks),
        }
        for name in models
    }
    if hasattr(case.config, "num_experts"):
        results["serial"][EXPERTS] = expert_seconds([r["serial"]["times"] for r in ranks])
    return results


def communication(ranks: Sequence[Sequence[Mapping[str, list[Any]]]]) -> dict[str, list[float]]:
    """Return, per round, means over ranks of the seconds blocked and late, and of masking by timeline.

    A collective is in flight once all ranks have issued it. A rank that waits earlier is late because of a rank with
    more work, and not blocked by communication.

    Args:
        ranks: Results of `Meter.times` by rank and round.
    """
    columns: dict[str, list[float]] = {"blocked_s": [], "late_s": [], "timeline": []}
    for times in zip(*ranks, strict=True):
        starts = [max(at) for at in zip(*(t["issued"] for t in times), strict=True)]
        rows = [_communication_of_rank(t, starts) for t in times]
        for name, values in zip(columns, zip(*rows, strict=True), strict=True):
            columns[name].append(statistics.fmean(values))
    return columns


def _communication_of_rank(times: Mapping[str, list[Any]], starts: list[float]) -> tuple[float, float, float]:
    """Return seconds blocked, seconds late, and masking by timeline of one rank.

    `starts` are the times from which the collectives are in flight.
    """

    def clipped(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(min(e, max(b, start)), e) for (b, e), start in zip(intervals, starts, strict=True)]

    blocked, in_flight = clipped(times["blocked"]), clipped(times["in_flight"])
    blocked_s = sum(e - b for b, e in blocked)
    late_s = sum(e - b for b, e in times["blocked"]) - blocked_s
    flying_s = sum(e - b for b, e in union(in_flight))
    return blocked_s, late_s, 1 - common_seconds(in_flight, blocked) / flying_s if flying_s else 0.0


def expert_seconds(ranks: Sequence[Sequence[Mapping[str, list[Any]]]]) -> list[float]:
    """Return, per round, the seconds of computation between dispatch and combine in a serial step, as means over ranks.

    Exchanges of rows are those with more than a few bytes. They come in pairs, in forward and in backward.

    Args:
        ranks: Results of `Meter.times` by rank and round.
    """

    def of_rank(times: Mapping[str, list[Any]]) -> float:
        large = [n for n, size in enumerate(times["bytes"]) if size >= FEW_BYTES]
        pairs = zip(large[::2], large[1::2], strict=True)
        return sum(times["blocked"][b][0] - times["blocked"][a][1] for a, b in pairs)

    return _mean([of_rank(times) for times in rounds] for rounds in ranks)


def _mean(columns: Any) -> list[float]:
    return [statistics.fmean(values) for values in zip(*columns, strict=True)]


def summary(case: Case, samples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return medians per strategy over the half of the rounds with the least load of other processes."""
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
            "late_s": median(name, "late_s"),
            "processor_s": median(name, "processor_s"),
            "masking_wait": 1 - median(name, "blocked_s") / alone_s,
            "masking_timeline": median(name, "timeline"),
            "replayed_s": median(name, "replayed_s"),
            "replay_error": median(name, "replay_error"),
            "loss_difference": samples[name]["loss"] - samples["serial"]["loss"],
        }
        if EXPERTS in samples[name]:
            rows[name][EXPERTS] = median(name, EXPERTS)
    return {
        "communication_share": alone_s / serial_s,
        "others": others,
        "strategies": rows,
        "best_speedup": max(r["speedup"] for r in rows.values()),
        "best_masking": max(r["masking_wait"] for r in rows.values()),
        "worst_replay": max(abs(r["replay_error"]) for r in rows.values()),
        "bars": {"speedup": case.bar, "masking": case.masked, "replay": REPLAY_BAR},
    }


def predictions(case: Case, rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return predictions for the strategies of a case; `rows` are the results of `summary`."""
    serial = case.strategies["serial"]
    workload = make_plan(case, serial).workload
    spec = spec_from_config(case.config.to_dict(), name="benchmark")
    known = {name: row for name, row in rows.items() if name in case.strategies}
    return predicted(detect_local(2), spec, workload, case.strategies, known)


def print_predictions(result: dict[str, Any]) -> None:
    """Print predicted and measured values of a case."""
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
    """Print predictions for the results of earlier runs in files of JSON lines, and return the exit status."""
    for path in paths:
        for line in filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines()):
            result = json.loads(line)
            if missing := set(NEEDED) - result["strategies"]["serial"].keys():
                names = ", ".join(sorted(missing))
                print(f"{path}: without {names}, which calibration needs", file=sys.stderr)
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
            judged = [(args.rate, JUDGED)] if args.rate else [(speed, JUDGED[:1]), (masking, JUDGED[1:])]
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
                f" (waits) {row['masking_timeline']:5.0%} (timeline)  late {row['late_s'] * 1e3:6.1f} ms"
                f"  replayed {row['replay_error']:+5.1%}  loss {row['loss_difference']:+.1e}"
            )
        print_predictions(result)
    if busy:
        return 2
    missed = any(result[f"best_{key}"] < result["bars"][key] for key in args.judge)
    return int(missed or result["worst_replay"] > REPLAY_BAR)


if __name__ == "__main__":
    sys.exit(main())
