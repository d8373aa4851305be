"""The numbers of a run at a glance, under what they were measured and predicted, and where runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Final, NamedTuple

from hyper_parallel.reports._run_record import RunRecord
from hyper_parallel.units import format_bytes, format_count, format_seconds

_CONDITIONS: Final = {
    "computed in": "training.dtype",
    "optimizer": "training.optimizer",
    "gradients clipped at": "training.max_grad_norm",
    "recompute": "training.recompute",
    "compiled": "training.compile",
    "deterministic": "training.deterministic",
    "seed": "training.seed",
}


class Result(NamedTuple):
    """One number of a run: its name, its value as text and as a number, and what belongs to it."""

    name: str
    text: str
    value: float
    note: str


def deviation(measured: float | None, predicted: float) -> str:
    if not measured or not predicted:
        return ""
    return f"{(measured / predicted - 1) * 100:+.1f} %"


def _beside(text: str, measured: float, predicted: float) -> str:
    return f"predicted {text} ({deviation(measured, predicted)})" if predicted else ""


def results(run: RunRecord) -> list[Result]:
    plan, last = run.plan, run.metrics[-1] if run.metrics else {}
    tokens = float(sum(int(m.get("tokens", 0)) for m in run.metrics))
    found = [
        Result("steps", f"{len(run.metrics)}", len(run.metrics), f"{format_count(tokens)} tokens")
    ]

    def add(name: str, text: str, value: float, note: str) -> None:
        found.append(Result(name, text, float(value), note))

    if "loss" in last:
        loss = last["loss"]
        add("training loss", f"{loss:.3f}", loss, f"from {run.metrics[0].get('loss', nan):.3f}")
    for key in run.rewards:
        first, final = run.metrics[0]["rollout"][key], last["rollout"][key]
        add(key.replace("_", " "), f"{final:.3f}", final, f"from {first:.3f}")
    if run.evals:
        first, final = run.evals[0]["loss"], run.evals[-1]["loss"]
        add("held-out loss", f"{final:.3f}", final, f"from {first:.3f} before training")
    part = run.last
    if (step_s := part.steady("step_s")) is not None:
        note = _beside(format_seconds(plan.whole_step_s), step_s, plan.whole_step_s)
        if run.rewards and plan.roles is None:
            note = f"of them {format_seconds(plan.step_s)} predicted for learning"
        add("step time (median)", format_seconds(step_s), step_s, note)
    for name, share in run.busy.items():
        add(f"busy, {name}", f"{share * 100:.0f} %", share, "of the seconds of steps")
    if (tps := part.steady("tps")) is not None:
        add("tokens/s per rank", f"{tps:,.0f}", tps, f"all ranks {tps * plan.mesh.size:,.0f}")
    if (mfu := part.steady("mfu")) is not None:
        add("MFU", f"{mfu * 100:.1f} %", mfu, f"predicted {plan.predicted_mfu * 100:.1f} %")
    if (peak := part.peak_memory_bytes) is not None:
        note = _beside(format_bytes(plan.memory_bytes), peak, plan.memory_bytes)
        add("peak memory per rank", format_bytes(peak), peak, note)
    if skipped := sum(int(m.get("skipped", 0)) for m in run.metrics):
        add(
            "skipped steps",
            f"{skipped}",
            skipped,
            "gradients were not finite, the loss scale was lowered",
        )
    return found


def medians_text(run: RunRecord) -> str:
    """Return of which steps the figures beside predictions are."""
    part, several = run.last, len(run.parts) > 1
    first, left_out = part.step + 1, part.warm_up
    steps = f"steps {first} to {part.step + len(part.rows)}" if several else "all steps"
    steps += f" without the first {left_out}" if left_out else ""
    text = f"Step time, tokens/s and MFU are medians of {steps}."
    if several:
        text += (
            " Predictions, peak memory and all conditions are those of this last part of the run."
        )
    return text


def part_rows(run: RunRecord) -> list[dict[str, str]]:
    """Return the parts of a run for a table; none of a run in one part."""
    rows = []
    for part in run.parts if len(run.parts) > 1 else ():
        plan, step_s, peak = part.plan, part.steady("step_s"), part.peak_memory_bytes
        rows.append(
            {
                "steps": f"{part.rows[0]['step']} to {part.rows[-1]['step']}",
                "layout": f"{plan.mesh.size}: {plan.strategy}",
                "predicted step": format_seconds(plan.whole_step_s),
                "measured step": "-" if step_s is None else format_seconds(step_s),
                "predicted peak": format_bytes(plan.memory_bytes),
                "measured peak": "-" if peak is None else format_bytes(peak),
                "changed": ", ".join(map(str, part.changed)) or "-",
            }
        )
    return rows


def conditions(run: RunRecord) -> list[tuple[str, str]]:
    """Under what the numbers of a run were measured and predicted."""
    plan, work, info = run.plan, run.plan.workload, run.run_info
    batch = f"{work.microbatch} x {work.accumulation_steps} sequences of {work.seq_len} tokens per data rank"
    versions = ("python", "torch", "transformers")
    rows = {
        "machine": str(info.get("device", plan.topology)),
        "ranks": f"{plan.mesh.size}: {plan.strategy}",
        "step": f"{format_count(work.tokens_per_step or 0)} tokens: {batch}",
        "parameters, reductions": f"{work.param_dtype}, {work.reduce_dtype}",
        "memory": f"{info['memory']}" if "memory" in info else "",
        "versions": ", ".join(f"{k} {info[k]}" for k in versions if k in info),
        "prediction": f"topology {plan.topology}, plan {plan.fingerprint}",
    }
    for name, key in _CONDITIONS.items():
        value = run.settings.get(key, "")
        spelled = {"None": "never", "True": "yes", "False": "no"}
        rows[name] = spelled.get(f"{value}", f"{value}")
    return [(name, value) for name, value in rows.items() if value]


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, with the value in each; `-` where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [f"{run.settings.get(key, '-')}" for run in runs]) for key in keys]
    strategies = ("mesh and strategy", [f"{run.plan.strategy}" for run in runs])
    machines = ("machine", [f"{run.run_info.get('device', '-')}" for run in runs])
    return [row for row in (strategies, machines, *rows) if len(set(row[1])) > 1]
