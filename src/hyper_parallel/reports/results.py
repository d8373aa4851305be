"""Tables of a report: results of a run, conditions of measurement and prediction, and differences between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Result of a run: name, text to show, value, and a note such as the prediction."""

    name: str
    text: str
    value: float
    note: str


def deviation(measured: float | None, predicted: float) -> str:
    """Return the deviation of the measured from the predicted value, such as "+3.1 %"; "" if one is None or 0."""
    if not measured or not predicted:
        return ""
    return f"{(measured / predicted - 1) * 100:+.1f} %"


def _predicted_note(text: str, measured: float, predicted: float) -> str:
    return f"predicted {text} ({deviation(measured, predicted)})" if predicted else ""


def results(run: RunRecord) -> list[Result]:
    """Return the main numbers of a run: amounts and learning rate, quality, speed and memory."""
    return [*_settings_of(run), *_quality(run), *_speed(run)]


def _settings_of(run: RunRecord) -> Iterator[Result]:
    tokens = float(sum(int(m.get("tokens", 0)) for m in run.metrics))
    amount = f"{format_count(tokens)} tokens"
    if run.terms.records and run.plan.workload.seq_len:
        records = tokens / run.plan.workload.seq_len / run.terms.rows
        amount = f"{format_count(records)} {run.terms.records}"
    yield Result("steps", f"{len(run.metrics)}", float(len(run.metrics)), amount)
    if run.data is not None:
        used = sum(source["used"] for source in run.data["sources"])
        epochs = run.data["epochs"]
        note = run.data["records"] + (f", {epochs:.3g} epochs" if epochs is not None else ", a stream")
        yield Result("data", f"{used:,}", float(used), note)
    lr = run.settings.get("training.lr")
    if isinstance(lr, (int, float)):
        ratio, steps = (run.settings.get(f"training.warmup_{name}") for name in ("ratio", "steps"))
        warmup = f"{ratio:.1%}" if isinstance(ratio, (int, float)) else f"{steps} steps"
        note = f"{run.settings.get('training.lr_schedule')}, warm-up {warmup}"
        yield Result("learning rate", f"{lr:.3g}", float(lr), note)
    in_steps = float(sum(m.get("step_s", 0.0) for m in run.metrics))
    elapsed = float(run.run_info.get("training_s", 0.0)) if len(run.parts) == 1 else 0.0
    elapsed = max(elapsed, in_steps)
    if elapsed:
        note = f"{format_duration(in_steps)} in steps"
        yield Result("elapsed time", format_duration(elapsed), elapsed, note)


def format_duration(seconds: float) -> str:
    """Return a duration as text: below 100 s as `format_seconds`, else `4 min 5 s` or `3 h 20 min`."""
    if seconds < 100:
        return format_seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _quality(run: RunRecord) -> Iterator[Result]:
    """Yield losses, rewards and scores at the end of the run, with the values at its start as notes."""
    if not run.metrics:
        return
    first, last, loss = run.metrics[0], run.metrics[-1], run.terms.loss
    name = f"training {loss}" if loss == "loss" else loss
    if "loss" in last:
        yield Result(name, f"{last['loss']:.3f}", last["loss"], f"from {first.get('loss', nan):.3f}")
    for key in run.rewards:
        begin, end = first["rollout"][key], last["rollout"][key]
        yield Result(key.replace("_", " "), f"{end:.3f}", end, f"from {begin:.3f}")
    if (length := (last.get("rollout") or {}).get("completion_tokens")) is not None:
        begin = (first.get("rollout") or {}).get("completion_tokens", nan)
        yield Result("completion length", f"{length:.1f}", length, f"tokens, from {begin:.1f}")
    yield from _preference("", first.get("preference"), last.get("preference"))
    if run.evals:
        first, last = run.evals[0], run.evals[-1]
        note = f"from {first['loss']:.3f} before training"
        yield Result("held-out loss", f"{last['loss']:.3f}", last["loss"], note)
        for key in ("answer_accuracy", "token_accuracy"):
            if key in last:
                note = f"from {first[key] * 100:.1f} %" if key in first else ""
                name = f"held-out {key.replace('_', ' ')}"
                yield Result(name, f"{last[key] * 100:.1f} %", last[key], note)
        yield from _preference("held-out ", first.get("preference"), last.get("preference"))
        begin, end = ((row.get("rollout") or {}).get("reward") for row in (first, last))
        if begin is not None and end is not None:
            yield Result("held-out reward", f"{end:.3f}", end, f"from {begin:.3f}")


def _preference(prefix: str, first: Mapping[str, float] | None, last: Mapping[str, float] | None) -> Iterator[Result]:
    first, last = first or {}, last or {}
    if (accuracy := last.get("accuracy")) is not None:
        note = f"from {first['accuracy'] * 100:.1f} %" if first.get("accuracy") is not None else ""
        yield Result(f"{prefix}accuracy", f"{accuracy * 100:.1f} %", accuracy, note)
    if (margin := last.get("margin")) is not None:
        scores = [f"{key} {last[key]:.3g}" for key in ("chosen", "rejected") if last.get(key) is not None]
        yield Result(f"{prefix}margin", f"{margin:.3g}", margin, ", ".join(scores))


def _speed(run: RunRecord) -> Iterator[Result]:
    plan, part = run.plan, run.last
    if (step_s := part.steady("step_s")) is not None:
        note = _predicted_note(format_seconds(plan.whole_step_s), step_s, plan.whole_step_s)
        if run.rewards and plan.roles is None:
            note = f"of which {format_seconds(plan.step_s)} predicted for learning"
        yield Result("step time (median)", format_seconds(step_s), step_s, note)
    for name, share in run.busy.items():
        yield Result(f"busy, {name}", f"{share * 100:.0f} %", share, "of the step time")
    if (tps := part.steady("tps")) is not None:
        note = f"all ranks {tps * plan.num_ranks:,.0f}"
        yield Result("tokens/s per rank", f"{tps:,.0f}", tps, note)
    if (mfu := part.steady("mfu")) is not None:
        note = f"predicted {plan.predicted_mfu * 100:.1f} %"
        yield Result("MFU", f"{mfu * 100:.1f} %", mfu, note)
    if (peak := part.peak_memory_bytes) is not None:
        note = _predicted_note(format_bytes(plan.memory_bytes), peak, plan.memory_bytes)
        yield Result("peak memory per rank", format_bytes(peak), float(peak), note)
    if memory := run.run_info.get("program_memory"):
        peak, whole = memory["peak_bytes"], memory["unplanned_bytes"]
        note = f"{format_bytes(whole)} without the plan, {format_bytes(memory['host_bytes'])} on the host"
        name = f"peak memory of the program ({memory['origin']})"
        yield Result(name, format_bytes(peak), float(peak), note)
    if kernels := run.fused_kernels:
        note = f"generated from {sum(len(kernel['operators']) for kernel in kernels)} operators"
        yield Result("fused kernels", f"{len(kernels)}", float(len(kernels)), note)
    if skipped := sum(int(m.get("skipped", 0)) for m in run.metrics):
        note = "no update of the parameters; the log names the causes"
        yield Result("skipped steps", f"{skipped}", float(skipped), note)


def medians_text(run: RunRecord) -> str:
    """Return the report's sentence about the steps over which medians are taken."""
    part, several = run.last, len(run.parts) > 1
    first, left_out = part.step + 1, part.warm_up
    steps = f"steps {first} to {part.step + len(part.rows)}" if several else "all steps"
    steps += f" without the first {left_out}" if left_out else ""
    text = f"Step time, tokens/s and MFU are medians of {steps}."
    if several:
        text += " Predictions, peak memory and all conditions are those of this last part of the run."
    return text


def part_rows(run: RunRecord) -> list[dict[str, str]]:
    """Return the rows of the table of parts; empty for a run of one part."""
    rows = []
    for part in run.parts if len(run.parts) > 1 else ():
        plan, step_s, peak = part.plan, part.steady("step_s"), part.peak_memory_bytes
        rows.append(
            {
                "steps": f"{part.rows[0]['step']} to {part.rows[-1]['step']}",
                "layout": f"{plan.num_ranks}: {plan.degrees}",
                "predicted step": format_seconds(plan.whole_step_s),
                "measured step": "-" if step_s is None else format_seconds(step_s),
                "predicted peak": format_bytes(plan.memory_bytes),
                "measured peak": "-" if peak is None else format_bytes(peak),
                "changed": ", ".join(map(str, part.changed)) or "-",
            }
        )
    return rows


def conditions(run: RunRecord) -> list[tuple[str, str]]:
    """Return the conditions under which a run was measured and predicted, as pairs of name and text."""
    plan, work, info = run.plan, run.plan.workload, run.run_info
    batch = (
        f"per data rank microbatch {work.microbatch} x {work.accumulation_steps} accumulated, "
        f"sequences of {work.seq_len} tokens"
    )
    versions = ("python", "torch", "transformers")
    rows = {
        "machine": str(info.get("device", plan.topology)),
        "ranks": f"{plan.num_ranks}: {plan.degrees}",
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
    """Return (name, texts of the runs) for the strategy, machine and settings that differ; `-` is a missing value."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [f"{run.settings.get(key, '-')}" for run in runs]) for key in keys]
    strategies = ("mesh and strategy", [f"{run.plan.strategy}" for run in runs])
    machines = ("machine", [f"{run.run_info.get('device', '-')}" for run in runs])
    return [row for row in (strategies, machines, *rows) if len(set(row[1])) > 1]
