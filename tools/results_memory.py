"""Tables of docs/results/memory_plans.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from results_tables import giga, load, markdown, percent, source, table

LINKS_GB_S: Final = (25, 50, 100, 200)
POLICIES: Final = {
    "ours": "memory plan, margin 0",
    "ours-margin": "memory plan, default margin 0.3",
    "ours-copies-only": "memory plan, copies only",
    "recompute-only": "best recompute-only plan",
    "longest-gap": "evict longest gap first",
    "largest-first": "evict largest first",
    "on-demand": "evict on demand",
    "checkpoint": "activation checkpointing, recorded",
    "save-on-cpu": "`save_on_cpu`, recorded",
    "keep": "keep everything",
    "eager": "eager",
    "save_on_cpu": "`save_on_cpu`, pinned",
    "core": "activation offloading of torch",
    "plan-70": "fastest plan for 70 % of the eager peak",
    "plan": "least memory for 2 % more time",
}


def _policies(kind: str, goal: str, policies: Sequence[str], links: Sequence[int] = LINKS_GB_S) -> str:
    """Return a table of policies by link bandwidth; `kind` selects the step with or without gradient clipping."""
    data = {link: load(f"offload_{kind}_{link}") for link in links}
    rows = []
    for policy in policies:
        cells = [POLICIES[policy]]
        for d in data.values():
            (r,) = [r for r in d["rows"] if r["policy"] == policy and r["goal"] == goal]
            if goal == "peak":
                cells.append(f"{giga(r['simulated_peak_bytes'])} ({percent(r['against_start'], sign=True)})")
            else:
                cells.append(percent(r["against_keep_s"], sign=True))
        rows.append(cells)
    if goal == "peak":
        for key, name in (
            ("copies", "lower bound, copies only"),
            ("copies_and_recompute", "lower bound"),
        ):
            bounds = [d["no_plan_below"][0][key]["num_bytes"] for d in data.values()]
            starts = [d["start_peak_bytes"] for d in data.values()]
            pairs = zip(bounds, starts, strict=True)
            rows.append([name, *(f"{giga(b)} ({percent(b / s - 1, sign=True)})" for b, s in pairs)])
    names = [f"offload_{kind}_{link}" for link in links]
    return markdown(("policy", *(f"{link} GB/s" for link in links)), rows) + "\n\n" + source(*names)


_PEAK = ("ours", "ours-margin", "ours-copies-only", "recompute-only", "longest-gap", "largest-first",
         "on-demand", "keep")  # fmt: skip
_TIME = ("ours", "ours-copies-only", "recompute-only", "longest-gap", "largest-first", "on-demand",
         "checkpoint", "save-on-cpu")  # fmt: skip


@table
def training_peak() -> str:
    """Return the table of least peaks by policy and link, without clipping."""
    return _policies("training", "peak", _PEAK)


@table
def training_time() -> str:
    """Return the table of step times within 64 GB by policy and link, without clipping."""
    return _policies("training", "time", _TIME)


@table
def clipped_peak() -> str:
    """Return the table of least peaks by policy and link, with clipping."""
    return _policies("clipped", "peak", _PEAK)


@table
def clipped_time() -> str:
    """Return the table of step times within 64 GB by policy and link, with clipping."""
    return _policies("clipped", "time", _TIME)


@table
def budget_40gb() -> str:
    """Return the table of step times within 40 GB."""
    rows = []
    for kind, name in (("training", "without clipping"), ("clipped", "clipped")):
        d = load(f"offload_{kind}_40gb")
        for policy in ("ours", "ours-copies-only", "recompute-only"):
            found = [r for r in d["rows"] if r["policy"] == policy]
            cells = [percent(r.get("against_keep_s"), sign=True) for r in found]
            rows.append((f"{name}: {POLICIES[policy]}", *cells))
    head = ("policy", *(f"{link} GB/s" for link in LINKS_GB_S))
    return markdown(head, rows) + "\n\n" + source("offload_training_40gb", "offload_clipped_40gb")


@table
def longer_and_prefill() -> str:
    """Return the table of least peaks for a longer step and for a prefill."""
    rows = []
    for name, what in (("offload_training_50_longer", "training, 3.9 % more time allowed"),
                       ("offload_prefill_50", "prefill of 8192 tokens, 2 % allowed")):  # fmt: skip
        d = load(name)
        for r in d["rows"]:
            if r["goal"] == "peak" and r["policy"] in ("ours", "ours-copies-only"):
                peaks = f"{giga(d['start_peak_bytes'])} to {giga(r['simulated_peak_bytes'])}"
                changes = (percent(r[key], 2, True) for key in ("against_start", "against_keep_s"))
                rows.append((what, POLICIES[r["policy"]], peaks, *changes))
    head = ("step, 50 GB/s", "policy", "peak", "change", "more time")
    names = ("offload_training_50_longer", "offload_prefill_50")
    return markdown(head, rows) + "\n\n" + source(*names)


@table
def bandwidth_error() -> str:
    """Return the table of the effects of a wrong link bandwidth."""
    rows = [
        (r["bandwidth_margin"], f"{r['planned_gb_s']:g}", giga(r["simulated_peak_bytes"]),
         percent(r["over_the_limit"], sign=True))
        for r in load("offload_bandwidth_error")["bandwidth_error"]
    ]  # fmt: skip
    head = ("margin", "planned for GB/s (true: 50)", "peak", "time against the limit")
    return markdown(head, rows) + "\n\n" + source("offload_bandwidth_error")


@table
def decode() -> str:
    """Return the table of least peaks of decode steps."""
    names = ("offload_decode_llama", "offload_decode_sparse")
    rows = []
    for r in (r for name in names for r in load(name)["decode"]):
        bound = r.get("no_plan_saves_more_than")
        rows.append((
            r["what"], f"{r['bandwidth_gb_s']:g}", giga(r["start_peak_bytes"]),
            percent(r["against_start"], sign=True), "-" if bound is None else percent(-bound, sign=True),
            percent(r["slowdown"], sign=True),
        ))  # fmt: skip
    head = ("step", "link GB/s", "start", "least peak", "bound", "more time")
    return markdown(head, rows) + "\n\n" + source(*names)


@table
def planning_time() -> str:
    """Return the table of planning times."""
    d = load("offload_speed")
    rows = [
        (r["goal"], f"{r['bandwidth_gb_s']:g}", f"{r['planning_cpu_s']:.1f} s",
         f"{r['cached_cpu_s']:.2f} s")
        for r in d["rows"]
    ]  # fmt: skip
    head = ("goal", "link GB/s", "planning", "from the plan cache")
    text = (
        f"Capture takes {d['capture_cpu_s']:.1f} s for {d['operators']:,} operators and {d['storages']:,} storages; "
        f"capture, analysis and planning together at most {d['most_capture_analysis_planning_cpu_s']:.1f} s."
    )
    return f"{text}\n\n{markdown(head, rows)}\n\n{source('offload_speed')}"


@table
def addresses() -> str:
    """Return the table of arena sizes of random programs."""
    d = load("offload_addresses_random")["random"]
    rows = [
        (r["case"], r["goal"], r["stays"], f"{r['peak_bytes']:,}", percent(r["arena_over_peak"]))
        for r in d["over_2_percent"]
    ]
    head = ("program", "goal", "live ranges", "live peak, bytes", "arena above it")
    text = f"{d['plans']} plans of drawn programs; arenas more than 2 % above the live peak:"
    return f"{text}\n\n{markdown(head, rows)}\n\n{source('offload_addresses_random')}"


def _gpu_rows(tokens: int, clip_norm: float | None, policies: dict[str, Any]) -> list[tuple[str, ...]]:
    eager = policies["eager"]
    clipped = "yes" if clip_norm else "no"
    rows = []
    for name, r in policies.items():
        if name != "eager":
            predicted = r.get("predicted_peak_bytes")
            rows.append((
                POLICIES[name], f"{tokens:,}", clipped, f"{eager['step_s'] * 1e3:.0f} ms",
                percent(r["more_time"], sign=True), percent(-r["less_memory"], sign=True),
                giga(r["peak_bytes"]), giga(predicted) if predicted else "-",
            ))  # fmt: skip
    return rows


_GPU_HEAD = (
    "policy",
    "tokens",
    "clipped",
    "eager step",
    "time",
    "memory",
    "peak",
    "predicted peak",
)


@table
def gpu_chunked() -> str:
    """Return the table of policies on a GPU, with the loss in chunks."""
    rows = []
    for run in load("offload_gpu_h100_16k")["runs"]:
        tokens = int(run["command"].split("--tokens ")[1].split()[0])
        rows += _gpu_rows(tokens, run["clip_norm"], run["policies"])
    return markdown(_GPU_HEAD, rows) + "\n\n" + source("offload_gpu_h100_16k")


@table
def gpu_model_loss() -> str:
    """Return the table of policies on a GPU, with the model's own loss."""
    d = load("offload_gpu_h100")
    rows = _gpu_rows(d["tokens"], d["clip_norm"], d["policies"])
    rows += _gpu_rows(d["tokens"], d["clipped"]["clip_norm"], d["clipped"]["policies"])
    return markdown(_GPU_HEAD, rows) + "\n\n" + source("offload_gpu_h100")


@table
def gpu_models() -> str:
    """Return the table of small models on a GPU: bitwise differences, predicted and allocated bytes."""
    rows = [
        (name, f"{r['predicted_bytes']:,}", f"{r['allocator_bytes']:,}", r["loss_apart"],
         r["parameters_unequal"])
        for name, r in load("offload_gpu_models_h100")["models"].items()
    ]  # fmt: skip
    head = ("model", "predicted bytes", "allocator's peak", "loss difference", "unequal parameters")
    return markdown(head, rows) + "\n\n" + source("offload_gpu_models_h100")


@table
def slice_predicted() -> str:
    """Return the table of predicted plans for other model sizes."""
    d = load("offload_slice_predicted")
    rows = []
    for run in d["runs"]:
        peak, time = ({r["goal"]: r for r in run["rows"]}[goal] for goal in ("peak", "time"))
        cells = (
            percent(peak["against_start"], sign=True),
            percent(time["against_keep_s"], sign=True),
        )
        rows.append((f"`{run['arguments']}`", *cells))
    head = ("arguments", "least peak for 2 % more time", "time within the budget")
    return markdown(head, rows) + "\n\n" + source("offload_slice_predicted")


@table
def executor_overhead() -> str:
    """Return the table of step times of planned and eager execution."""
    rows = [
        (f"{r['operators']} operators, eager peak {r['eager_peak_bytes'] / 2**20:.1f} MiB",
         f"{r['step_s']['eager'] * 1e3:.1f} ms", f"{r['identity_over_eager']:.2f}",
         f"{r['offload_over_eager']:.2f}", f"{r['copies']} copies of {r['copied_bytes'] / 2**20:.0f} MiB",
         f"{r['peak_bytes'] / 2**20:.1f} MiB")
        for r in load("offload_overhead_cpu")["sizes"].values()
    ]  # fmt: skip
    head = (
        "model",
        "eager step",
        "identity plan / eager",
        "offloading plan / eager",
        "copies",
        "peak",
    )
    return markdown(head, rows) + "\n\n" + source("offload_overhead_cpu")


@table
def host_overhead() -> str:
    """Return the table of host times per operator."""
    d = load("offload_overhead_cpu")["host"]
    rows = [
        (name, r["copies"], r["events"], f"{r['host_us']:.1f} us", f"{r['between_ms']:.1f} ms")
        for name, r in d["ways"].items()
    ]
    head = ("plan and execution", "copies", "events", "host time per operator", "between two steps")
    operators = next(iter(d["ways"].values()))["operators"]
    text = (
        f"{operators:,} operators; eager {d['eager_us']:.1f} us per operator, torch's "
        f"operators alone {d['torch_us']:.1f} us. Bars: {d['bars']['host_us']:g} us and {d['bars']['between_ms']:g} ms."
    )
    return f"{text}\n\n{markdown(head, rows)}"


@table
def kernel_bytes() -> str:
    """Return the table of errors of predicted bytes, with and without workspace of kernels."""
    rows = []
    for name in ("offload_meter_cpu", "offload_meter_epyc"):
        d = load(name)
        steps = d["steps"]
        over = {s: r["storages_apart"] for s, r in steps.items() if abs(r["storages_apart"]) > d["bar"]}
        worst = max(over, key=lambda s: abs(over[s]), default="-")
        shown = f"{worst} {percent(over[worst], sign=True)}" if over else "-"
        with_kernels = f"{len(d['missed'])} ({d['worst']} {percent(d['worst_apart'], sign=True)})"
        rows.append((d["machine"]["cpu"], d["cells"], len(over), shown, with_kernels))
    head = (
        "processor",
        "cells",
        "over 1 %: storages alone",
        "worst",
        "over 1 %: with measured kernels (worst cell)",
    )
    return markdown(head, rows) + "\n\n" + source("offload_meter_cpu", "offload_meter_epyc")


@table
def census_offload() -> str:
    """Return the table of outcomes of offload by model type."""
    one, ranks = load("offload_census_cpu"), load("offload_census_ranks_cpu")
    rows = [("one rank", one["counts"].get("equal", 0), one["counts"].get("refused", 0))]
    rows += [(f"two ranks, {how}", c.get("equal", 0), c.get("refused", 0)) for how, c in ranks["counts"].items()]
    refused = [t["type"] for t in one["types"] if t["outcome"] != "equal"]
    text = markdown(("runs", "bitwise equal types", "refused types"), rows)
    names = source("offload_census_cpu", "offload_census_ranks_cpu")
    return f"{text}\n\nRefused: {', '.join(refused)}.\n\n{names}"


@table
def small_budgets() -> str:
    """Return the table of outcomes of random runs with small budgets."""
    rows = [
        (r["kind"], r["axis"], percent(r["share"], 0), r["outcome"], f"{r['first_step_s']:.1f} s")
        for r in load("offload_small_budgets_cpu")["cells"]
    ]
    head = ("model type", "axis", "budget / plain peak", "outcome", "first planned step done after")
    return markdown(head, rows) + "\n\n" + source("offload_small_budgets_cpu")
