"""Tables of docs/results: one function per placeholder, which formats a JSON file in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
BENCHMARKS: Final = ROOT / "benchmarks" / "results"
RECORDS: Final = ROOT / "docs" / "results"
TABLES: Final[dict[str, Callable[[], str]]] = {}
USED: Final[set[str]] = set()
"""File names that tables have read."""


def table(function: Callable[[], str]) -> Callable[[], str]:
    """Decorate a function so that it is the table of its name."""
    TABLES[function.__name__] = function
    return function


def load(name: str, folder: Path = BENCHMARKS) -> Any:
    """Return the content of a JSON file and mark it as used."""
    USED.add(name)
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def percent(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """Return a fraction as a percentage; `none` for None."""
    if value is None:
        return "none"
    text = f"{100 * value:{'+' if sign else ''}.{digits}f}"
    return f"{text.replace('-0.0', '0.0') if float(text) == 0 else text} %"


def giga(num_bytes: float | None) -> str:
    """Return a number of bytes as text in GB (10^9 bytes)."""
    return "none" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"


def source(*names: str) -> str:
    """Return a line with the names of JSON files, and the machine that wrote the first."""
    data = json.loads((BENCHMARKS / f"{names[0]}.json").read_text(encoding="utf-8"))
    machine = data.get("machine", {}) if isinstance(data, dict) else {}
    facts = machine if isinstance(machine, dict) else data
    parts = [str(facts[key]) for key in ("device", "cpu", "machine") if facts.get(key)]
    cores = [f"{facts['cpu_count']} cores"] if "cpu_count" in facts else []
    versions = facts if "torch" in facts else data.get("versions", data) if isinstance(data, dict) else {}
    torch = [f"torch {versions['torch']}"] if "torch" in versions else []
    if isinstance(machine, str) and machine.startswith("this machine"):
        parts = [machine.removeprefix("this machine: ")]
    files = ", ".join(f"`benchmarks/results/{name}.json`" for name in names)
    place = ", ".join(dict.fromkeys([*parts, *cores, *torch]))
    return f"Raw data: {files}" + (f" ({place})." if place else ".")


# MindSpore


@table
def fusion() -> str:
    """Return the table of kernels, losses and times with and without graph-kernel fusion."""
    data = load("fusion_cpu")
    llama, block = data["llama"], data["block"]
    low, _, high = block["speedup_quartiles"]
    chains = sum(map(len, block["kernels"]))
    rows = [
        ("training of Llama", f"{len(llama['kernels'])} of {sum(map(len, llama['kernels']))} operators",
         f"{llama['largest_relative_difference']:.1e}", "-", "-"),
        (f"block of {block['tokens']:,} x {block['features']:,}", f"{len(block['kernels'])} of {chains} operators",
         f"{max(block['largest_relative_difference'].values()):.1e}",
         f"{1e3 * block['seconds_plain']:.0f} ms, {1e3 * block['seconds_fused']:.0f} ms",
         f"{block['speedup']:.2f} ({low:.2f} to {high:.2f})"),
    ]  # fmt: skip
    head = (
        "case",
        "fused kernels",
        "largest relative difference",
        "without, with",
        "ratio (quartiles)",
    )
    versions = f"MindSpore {data['machine']['mindspore']}. Missed bars: {', '.join(data['missed']) or 'none'}."
    return markdown(head, rows) + f"\n\n{versions}\n\n" + source("fusion_cpu")


# Parallelism


@table
def overhead() -> str:
    """Return the table of overhead of `parallelize` against a hand-written script."""
    data = load("overhead_cpu")
    rows = [(r["layout"], f"{r['time_ratio']:.2f}", f"{r['memory_ratio']:.2f}") for r in data["rows"]]
    head = ("layout", "time, `parallelize` / by hand", "peak memory, `parallelize` / by hand")
    return markdown(head, rows) + "\n\n" + source("overhead_cpu")


@table
def tensor_parallel_bytes() -> str:
    """Return the table of bytes sent with one and two tensor-parallel axes."""
    rows = [
        (r["case"], f"({r['tp_x']}, {r['tp_y']})", f"{r['tokens']:,}", r["shapes"],
         percent(r["change"], sign=True))
        for r in load("tensor_parallel_bytes")["rows"]
    ]  # fmt: skip
    head = ("case", "(x, y)", "tokens", "shapes", "bytes against one axis")
    return markdown(head, rows) + "\n\n" + source("tensor_parallel_bytes")


@table
def tensor_parallel_time() -> str:
    """Return the table of step times with one and two tensor-parallel axes."""
    names = ("tensor_parallel_time_4_cpu", "tensor_parallel_time_8_cpu")
    rows = [
        (r["tp"], r["side"], f"{r['median_s'] * 1e3:.0f} ms", f"{r['time_ratio']:.2f}",
         f"{r['bytes_ratio']:.2f}")
        for name in names
        for r in load(name)["rows"]
    ]  # fmt: skip
    head = ("ranks", "layout", "step", "time / 1-D", "bytes / 1-D")
    return markdown(head, rows) + "\n\n" + source(*names)


@table
def context_parallel() -> str:
    """Return the table of times by kind of context parallelism."""
    rows = [
        (r["kind"], f"{r['median_s'] * 1e3:.0f} ms", f"{r['time_to_ring']:.2f}",
         f"{r['bytes_to_ring']:.2f}")
        for r in load("context_parallel_cpu")["rows"]
    ]  # fmt: skip
    head = ("kind", "time", "time / ring", "bytes / ring")
    return markdown(head, rows) + "\n\n" + source("context_parallel_cpu")


@table
def moe_dispatch() -> str:
    """Return the table of step times with dispatched, gathered and dense experts."""
    data = load("moe_dispatch_cpu")
    dispatch_s = data["median_s"]["dispatch"]
    rows = [
        (way, f"{s * 1e3:.0f} ms", f"{dispatch_s / s:.2f}", f"{data['facts'][way]['sent_mib']:.1f} MiB")
        for way, s in data["median_s"].items()
    ]  # fmt: skip
    head = ("experts", "step", "dispatch / this", "sent per rank")
    return markdown(head, rows) + "\n\n" + source("moe_dispatch_cpu")


@table
def overlap() -> str:
    """Return the table of step times with overlapped communication within layers."""
    names = (
        "overlap_tensor_690_cpu", "overlap_tensor_quiet_cpu", "overlap_experts_620_cpu", "overlap_experts_880_cpu",
        "overlap_experts_zipf_cpu",
    )  # fmt: skip
    rows = []
    for name in names:
        data = load(name)
        predicted = data["predicted"]["strategies"]
        case = f"{data['case']}, {data['rate_mbit']} Mbit/s, {percent(data['communication_share'], 0)}"
        rows += [
            (case, way, f"{r['step_s'] * 1e3:.0f} ms", f"{r['speedup']:.2f}",
             percent(r["masking_wait"], 0), percent(r["masking_timeline"], 0),
             f"{predicted[way]['step_error']:+.0%}", f"{predicted[way]['blocked_error']:+.0%}")
            for way, r in data["strategies"].items()
        ]  # fmt: skip
    head = (
        "case, link, communication in the serial step", "overlap", "step", "serial / this", "hidden, by waits",
        "hidden, by timeline", "predicted step", "predicted blocked time",
    )  # fmt: skip
    return markdown(head, rows) + "\n\n" + source(*names)


@table
def overlap_predictions() -> str:
    """Return the table of published and predicted effects of overlap."""
    data = load("overlap_predictions")
    rows = [
        (pair["name"], pair["source"], "-" if pair["published"] is None else f"{pair['published']:.2f}",
         f"{pair['predicted']:.2f}", "right" if pair["right_sign"] else "wrong")
        for pair in data["pairs"]
    ]  # fmt: skip
    summary = (
        f"Mean error of the log ratio: {data['mean_error']:.3f}, of the prediction that overlap has no effect "
        f"{data['mean_error_without_effect']:.3f}. Right signs: {percent(data['right_signs'], 0)}. The bars are half "
        f"of the latter error, and 85 % of the signs: {'met' if data['met'] else 'missed'}."
    )
    head = ("pair", "source", "published speed-up", "predicted", "sign")
    own = ("overlap_tensor_cpu", "overlap_experts_cpu")
    rates = " and ".join(str(load(name)["rate_mbit"]) for name in own)
    summary += f" Own pairs are of narrow models, at {rates} Mbit/s."
    return markdown(head, rows) + "\n\n" + summary + "\n\n" + source("overlap_predictions", *own)


@table
def pipeline_bubbles() -> str:
    """Return the table of measured and simulated bubbles by schedule."""
    compute, wait = load("pipeline_bubble_cpu")["runs"].values()
    rows = [
        (name, percent(r["measured"]), percent(r["simulated"]), f"{r['measured_over_simulated']:.3f}",
         f"{r['measured'] / r['replayed']:.3f}", percent(wait[name]["measured"]),
         f"{wait[name]['measured_over_simulated']:.3f}")
        for name, r in compute.items()
    ]  # fmt: skip
    head = (
        "schedule", "2 computing ranks: measured", "simulated", "ratio", "measured / replayed",
        "4 waiting ranks: measured", "ratio",
    )  # fmt: skip
    return markdown(head, rows) + "\n\n" + source("pipeline_bubble_cpu")


# Planner


@table
def planner_speed() -> str:
    """Return the table of search times and chosen strategies."""
    rows = [
        (r["model"], r["topology"], f"{r['devices']:,}", f"{r['wall_s']:.2f} s", f"{r['priced']:,}",
         f"{r['cut']:,}", r["simulated"], percent(r["gap"]), percent(r["mfu"]), f"`{r['strategy']}`")
        for r in load("planner_speed")
    ]  # fmt: skip
    head = (
        "model", "topology", "devices", "wall clock", "priced", "cut", "simulated", "gap",
        "predicted MFU", "strategy",
    )  # fmt: skip
    return markdown(head, rows) + "\n\n" + source("planner_speed")


@table
def planner_pins() -> str:
    """Return the result of the planner's test on random subspaces, as text."""
    d = load("planner_pins")["summary"]
    return (
        f"{d['sub_spaces']} drawn sub-spaces: {d['better']} had a better plan than the whole space, "
        f"largest gap {percent(d['largest_gap'])}, {d['cpu_s']} CPU seconds.\n\n{source('planner_pins')}"
    )


@table
def planner_regret() -> str:
    """Return the table of the planner's regret on published runs."""
    rows = [
        (r["model"], f"{r['n_dev']} {r['device']}", r["precision"], r["layouts"], percent(r["regret"]))
        for r in load("planner_regret")["rows"]
    ]  # fmt: skip
    head = ("model", "devices", "format", "published layouts", "regret of the predicted best")
    return markdown(head, rows) + "\n\n" + source("planner_regret")


@table
def plan_then_train() -> str:
    """Return the table of outcomes of plans in a dry run."""
    rows = [
        (r["model"], r["topology"], f"{r['devices']:,}", " ".join(r["options"]) or "-",
         "passed" if r["passed"] else r["reason"])
        for r in load("plan_then_train")["rows"]
    ]  # fmt: skip
    head = ("model", "topology", "devices", "options", "outcome")
    return markdown(head, rows) + "\n\n" + source("plan_then_train")


@table
def offload_pricing() -> str:
    """Return the table of predicted and simulated extra time of offload, by step and budget."""
    cells: dict[tuple[str, float], dict[float, Any]] = {}
    for r in load("offload_pricing")["rows"]:
        cells.setdefault((r["model"], r["budget_bytes"]), {})[r["link_gb_s"]] = r

    def cell(r: Any, kind: str) -> str:
        return " / ".join(percent(r.get(f"{side}_{kind}")) for side in ("predicted", "simulated"))

    rows = []
    for (model, budget), links in cells.items():
        slow, fast = (links[key] for key in sorted(links))
        at = f"{budget / 1e9:.2f} of {slow['start_bytes'] / 1e9:.2f} GB"
        found = [cell(r, kind) for kind in ("recompute", "copies") for r in (slow, fast)]
        rows.append((model, at, f"{slow['link_gb_s']:g}, {fast['link_gb_s']:g}", *found))
    head = (
        "step", "budget", "links, GB/s", "slow link", "fast link", "copies only, slow", "copies only, fast",
    )  # fmt: skip
    return markdown(head, rows) + "\n\n" + source("offload_pricing")


@table
def offload_pricing_summary() -> str:
    """Return the table of errors of predicted offload cost by group."""
    names = {"models that the form was worked out on": "development models"}
    rows = []
    for models, groups in load("offload_pricing")["summary"].items():
        for kind, d in groups.items():
            if "cases" in d:
                numbers = (percent(d[key], sign=True) for key in ("median", "lowest", "highest"))
                name = kind.replace("up to +inf%", "above +50%")
                rows.append((names.get(models, models), name, d["cases"], d["within_10_percent"], *numbers))
    head = ("models", "kind of plan", "cases", "within 10 %", "median", "lowest", "highest")
    return markdown(head, rows)


# Cost model


@table
def accuracy() -> str:
    """Return the table of errors on published runs, by the group of runs that was left out of the fit."""
    ways = {"group": "", "model": "_left_out_model", "moe_model": "_left_out_moe_model",
            "device": "_left_out_device"}  # fmt: skip
    data = {way: load(f"cost_model_accuracy{suffix}") for way, suffix in ways.items()}

    def cell(d: Any) -> str:
        return f"{percent(d['median'])} ({percent(d['p90'])})"

    rows = []
    for kind, name in (("dense", "dense"), ("moe", "MoE")):
        first = data["group"]
        start = [f"{name}, {first[f'{kind} believed']['groups']} groups"]
        own = [cell(first[f"{kind} {state}"]) for state in ("believed", "fitted")]
        rows.append([*start, *own, *(cell(d[f"{kind} left_out"]) for d in data.values())])
    head = (
        "runs",
        "before the fit",
        "fitted",
        *(f"left out: {way.replace('_', ' ')}" for way in ways),
    )
    names = (f"cost_model_accuracy{suffix}" for suffix in ways.values())
    return markdown(head, rows) + "\n\n" + source(*names)


@table
def accuracy_ranks() -> str:
    """Return the table of rank correlations of predictions for runs left out of the fit."""
    ranks = load("cost_model_accuracy")["rank correlation, left out"]
    return markdown(("model", "rank correlation of left-out predictions"), ranks.items())


@table
def accuracy_memory() -> str:
    """Return the table of predicted and published memory of runs."""
    rows = [
        (r["id"], f"{r['measured_gib']:.1f} GiB", f"{r['predicted_gib']:.1f} GiB",
         percent(r["error"], sign=True))
        for r in load("cost_model_accuracy")["memory"]
    ]  # fmt: skip
    return markdown(("run", "published", "predicted", "error"), rows)


@table
def strategy_ranking() -> str:
    """Return the table of predicted and measured step times of strategies on CPU ranks."""
    names = ("strategy_ranking_4_ranks", "strategy_ranking_8_ranks")
    rows = []
    for name in names:
        d = load(name)
        errors = [r["predicted_s"] / r["measured_s"] - 1 for r in d["rows"]]
        s = d["summary"]
        ends = f"{percent(min(errors), 0, True)} to {percent(max(errors), 0, True)}"
        numbers = (f"{s['rank_correlation']:.3f}", percent(s["median_error"]), ends)
        rows.append((s["ranks"], s["strategies"], *numbers))
    head = ("ranks", "strategies", "rank correlation", "median error", "range")
    return markdown(head, rows) + "\n\n" + source(*names)


@table
def simulator_accuracy() -> str:
    """Return the table of errors of closed form and simulation by layout."""
    shipped, measured = (
        {r["layout"]: r for r in load(name)["rows"]} for name in ("simulator_accuracy", "simulator_accuracy_calibrated")
    )
    rows = []
    for layout, r in measured.items():
        cells = [layout]
        for run in (shipped[layout], r):
            cells.append(f"{run['measured_s'] * 1e3:.0f} ms")
            cells += [percent(run[key] / run["measured_s"] - 1, 0, True) for key in ("closed_form_s", "simulated_s")]
        rows.append(cells)
    head = (
        "layout", "step", "closed form, shipped card", "simulation", "step, second run",
        "closed form, calibrated", "simulation",
    )  # fmt: skip
    return markdown(head, rows) + "\n\n" + source("simulator_accuracy", "simulator_accuracy_calibrated")


@table
def planned_peak() -> str:
    """Return the table of planned and traced peaks of shortened models."""
    rows = [
        (r["model"], r["layout"], giga(r["planned_bytes"]), giga(r["traced_bytes"]),
         f"{r['planned_to_traced']:.3f}")
        for r in load("planned_peak")["rows"]
    ]  # fmt: skip
    head = ("model", "layout", "planned", "traced", "planned / traced")
    return markdown(head, rows) + "\n\n" + source("planned_peak")


@table
def full_size() -> str:
    """Return the table of planned and traced peaks of full-size models."""
    rows = [
        (r["name"], r["topology"], giga(r["planned_bytes"]), giga(r["traced_bytes"]),
         f"{r['planned_to_traced']:.3f}", f"{r['operators']:,}")
        for r in load("full_size")["rows"]
    ]  # fmt: skip
    head = ("model", "devices", "planned", "traced", "planned / traced", "operators")
    return markdown(head, rows) + "\n\n" + source("full_size")


# Generation, roles, models, predictions


@table
def generation_predicted() -> str:
    """Return the table of predicted and measured generation times."""
    rows = [
        (r["case"], f"{r['prefill_s'] * 1e3:.0f} / {r['predicted_prefill_s'] * 1e3:.0f} ms",
         f"{r['token_s'] * 1e3:.1f} / {r['predicted_token_s'] * 1e3:.1f} ms")
        for r in load("generation_predicted_cpu")["cases"]
    ]  # fmt: skip
    head = ("model and prompts", "prefill: measured / predicted", "one token: measured / predicted")
    return markdown(head, rows) + "\n\n" + source("generation_predicted_cpu")


@table
def generation_speed() -> str:
    """Return the table of decoding rates in tokens/s."""
    data = load("generation_speed_cpu")
    rows = [(way, f"{rate:,.0f}") for way, rate in data["tokens_per_s"].items()]
    return markdown(("decoder", "tokens/s"), rows) + "\n\n" + source("generation_speed_cpu")


@table
def rollout_modes() -> str:
    """Return the table of step times and times to the reward goal, by rollout mode."""
    d = load("rollout_modes_cpu")
    names = {
        "colocated": "same ranks, in turn",
        "in_step": "own ranks, in step",
        "ahead": "own ranks, one step ahead",
    }
    rows = []
    for key, name in names.items():
        busy = d["busy"].get(key)
        learned = [
            f"{s:.0f} s ({n} steps)" for s, n in zip(d["seconds_to_reward"][key], d["steps"][key], strict=True)
        ]  # fmt: skip
        rows.append((name, f"{d['step_s'][key]:.3f} s", percent(busy, 0) if busy else "-", *learned))
    head = ("mode", "step", "busy", "to reward 0.9: seed 0", "seed 1", "seed 2")
    return markdown(head, rows) + "\n\n" + source("rollout_modes_cpu")


@table
def staleness_rewards() -> str:
    """Return the table of rewards by staleness bound."""
    rows = [
        (bound, f"{r['reward']:.3f}", f"{r['age']:.3g}", f"{r['oldest']:.0f}")
        for bound, r in load("staleness_rewards")["bounds"].items()
    ]
    head = ("`max_staleness`", "reward of the last 20 steps", "mean age", "oldest")
    return markdown(head, rows) + "\n\n" + source("staleness_rewards")


@table
def staleness_simulated() -> str:
    """Return the table of simulated step times by staleness."""
    rows = [
        (bound, f"{r['step_s']:.1f} s", f"{r['wait_s']:.1f} s", f"{r['reread_s']:.1f} s")
        for bound, r in load("staleness_simulated")["curve"].items()
    ]
    head = ("staleness", "simulated step", "wait", "prefixes read again")
    return markdown(head, rows) + "\n\n" + source("staleness_simulated")


@table
def hypertron() -> str:
    """Return the table of best predicted strategies by strategy space."""
    rows = [
        (r["model"], r["space"], f"{r['predicted_step_s']:.2f} s", percent(r["predicted_mfu"]),
         f"{r['predicted_speed_up']:.3f}", f"`{r['strategy']}`")
        for r in load("hypertron")["rows"]
    ]  # fmt: skip
    head = ("model", "space", "step", "MFU", "speed-up", "strategy")
    return markdown(head, rows) + "\n\n" + source("hypertron")


@table
def model_properties() -> str:
    """Return the table of times to measure model properties."""
    d = load("model_properties_cpu")
    rows = [
        ("configs measured", d["configs"]),
        ("first measurement, median", f"{d['first_s']['median']:.1f} s"),
        ("first measurement, longest", f"{d['first_s']['most']:.1f} s"),
        ("cached answers, share of a run of one step", percent(d["second_share_of_run"], 2)),
        ("classes whose copy was refused", ", ".join(d["refused"])),
        ("classes without a working copy", ", ".join(d["not_measured"])),
    ]
    return markdown(("quantity", "value"), rows) + "\n\n" + source("model_properties_cpu")


@table
def preset_sizes() -> str:
    """Return the table of parameter counts of presets."""
    from hyper_parallel.model import load_model

    names = (
        "llama-3-8b", "llama-3-70b", "llama-3-405b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b",
        "mixtral-8x7b", "mixtral-8x22b", "deepseek-v3", "gpt-oss-120b", "gpt3-175b", "megatron-310b",
    )  # fmt: skip
    specs = [(name, load_model(name)) for name in names]
    rows = [
        (name, f"{s.num_params:,}", f"{s.num_active_params / 1e9:.2f} B",
         f"{s.flops_per_token(8192) / 1e9:.1f} G")
        for name, s in specs
    ]  # fmt: skip
    return markdown(("preset", "parameters", "active", "FLOPs per token at 8192"), rows)


# Reliability


@table
def chaos() -> str:
    """Return the table of outcomes of injected faults."""
    d = load("chaos")
    runs = sum(r["runs"] for r in d["runs"])
    text = f"{d['faults']:,} injected faults in {runs} training runs; lost runs: {d['lost']}."
    kinds = markdown(("fault", "times"), d["by_kind"].items())
    return f"{text}\n\n{kinds}\n\n{source('chaos')}"


@table
def effective_time() -> str:
    """Return the table of simulated effective training time."""
    d = load("effective_training_time")
    rows = [(name, percent(r["checkpoints"]), percent(r["with snapshots"])) for name, r in d["effective"].items()]
    s = d["simulated"]
    head = ("published failure rate", "checkpoints", "with snapshots")
    text = f"Simulated: {s['devices']:,} devices for {s['hours']:,} hours."
    return f"{text}\n\n{markdown(head, rows)}\n\n{source('effective_training_time')}"


@table
def save_cost() -> str:
    """Return the table of costs of checkpoints."""
    d = load("save_cost_cpu")
    rows = [
        (
            name,
            percent(d["cost"][key], 2),
            " to ".join(percent(v, sign=True) for v in d["spread"][key]),
        )
        for key, name in (("ours", "HyperParallel"), ("dcp", "torch.distributed.checkpoint"))
    ]
    head = ("writer", "time of a step lost to saving", "spread over rounds")
    text = f"{d['ranks']} ranks, {d['state_bytes'] / 2**20:.0f} MiB of state, one save per {d['steps_per_save']} steps."
    return f"{text}\n\n{markdown(head, rows)}\n\n{source('save_cost_cpu')}"


@table
def attack() -> str:
    """Return the table of outcomes of hostile inputs."""
    d = load("attack", RECORDS)
    keys = (
        "uncoded",
        "silent",
        "no_way_back",
        "outside_writes",
        "outside_reads",
        "foreign",
        "slow",
        "large",
    )
    names = ("errors without a code", "accepted silently", "without a way back", "writes outside", "reads outside",
             "foreign code", "too slow", "too large")  # fmt: skip
    rows = [(name, d[key]) for key, name in zip(keys, names, strict=True)]
    return f"{d['inputs']:,} mutated input files, `{d['command']}`.\n\n{markdown(('outcome', 'inputs'), rows)}"


@table
def resume_changes() -> str:
    """Return the table of outcomes of changes between a checkpoint and its resume."""
    d = load("resume_changes", RECORDS)
    names = {"equal": "same curve", "said": "change reported, run continues", "refused": "refused"}
    rows = [(names[key], count) for key, count in d["counts"].items()]
    return (
        markdown(("outcome of a changed resume", "changes"), rows) + "\n\nRaw data: `docs/results/resume_changes.json`."
    )
