"""`hyper-parallel plan --for generate`: predict the fastest layout for generation on a machine."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import typer

from hyper_parallel.cli.app import is_quiet, say
from hyper_parallel.cli.option_conflicts import typed_options
from hyper_parallel.errors import BadValue, Contradiction
from hyper_parallel.ir import GenerateWorkload
from hyper_parallel.planner.generation import GenerationLayout, GenerationPlan, plan_generation
from hyper_parallel.serde import encode
from hyper_parallel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hyper_parallel.model import ModelSpec

_WORK: Final = ("prompts", "prompt_len", "new_tokens", "dtype")
_OWN: Final = (*_WORK, "parallel")
_SHARED: Final = ("model", "topology", "devices", "objective", "top", "memory_headroom", "as_json")


def plan_to_generate(ctx: typer.Context, read: Callable[[str], ModelSpec], headroom: float | None, width: int) -> None:
    """Print the best layout for generation and the runners-up, for the options of the `plan` command in `ctx`.

    `read` returns the spec of a named model. `headroom` is the fraction of device memory to leave free; None: the
    default of the device. Printed text is wrapped at `width` columns.

    Raises:
        BadValue: HP102 for an unknown value of `--for`, or without a model.
        Contradiction: HP104 for an option that the value of `--for` does not support.
        HyperParallelError: Errors of `read` and `plan_generation`.
    """
    chosen = ctx.params
    typed = _checked_options(ctx)
    if chosen["model"] is None:
        raise BadValue("no model is given", hint="hyper-parallel plan llama-3-8b -t dgx-h100 --for generate")
    plan = plan_generation(
        read(chosen["model"]),
        chosen["topology"] or "local",
        GenerateWorkload(**{n: chosen[n] for n in _WORK if n in typed}),
        num_devices=chosen["devices"],
        strategy=chosen["parallel"],
        objective=chosen["objective"] if "objective" in typed else "throughput",
        top=chosen["top"],
        memory_headroom=headroom,
    )
    title = f"{plan.model} on {plan.devices} devices of {plan.topology}"
    if chosen["as_json"]:
        say(json.dumps(encode(plan), indent=2))
    elif is_quiet():
        say(f"{title}: {_one_line(plan.best)}, predicted")
    else:
        say(f"{title}, to generate; all numbers are predicted")
        for label, item in _rows(plan):
            head = f"  {label:<11}"
            indents = {"initial_indent": head, "subsequent_indent": " " * len(head)}
            say(textwrap.fill(item, width, break_on_hyphens=False, **indents))
        say(f"\nnext:\n{_next(plan)}")


def _checked_options(ctx: typer.Context) -> set[str]:
    """Return the names of the options on the command line.

    Raise HP102 for an unknown value of `--for`, and HP104 for an option that it does not support.
    """
    purpose, typed = ctx.params["purpose"], {*typed_options(ctx)}
    if purpose not in ("train", "generate"):
        raise BadValue("the purpose of a plan is unknown", where="--for", got=purpose, allowed="train, generate")
    generate = purpose == "generate"
    wrong = typed - {*_OWN, *_SHARED, "purpose"} if generate else typed & {*_OWN}
    if wrong:
        (option,) = (max(p.opts, key=len) for p in ctx.command.params if p.name == min(wrong))
        raise Contradiction(
            f"{option} applies to {'training' if generate else 'generation'} only",
            got=f"--for {purpose}",
            hint=f"leave out {option}" if generate else "--for generate",
        )
    return typed


def _one_line(p: GenerationLayout) -> str:
    times = f"first token after {format_seconds(p.prefill_s)}, then {format_seconds(p.token_s)} each"
    return f"{p.parallel or 'one device'}, {p.tokens_s:,.0f} tokens/s, {times}"


def _mostly(seconds: float, terms: dict[str, float]) -> str:
    largest = sorted(terms.items(), key=lambda t: -t[1])[:3]
    return ", ".join(f"{name} {s / seconds:.0%}" for name, s in largest)


def _rows(plan: GenerationPlan) -> list[tuple[str, str]]:
    p, w = plan.best, plan.workload
    memory = f"weights {format_bytes(p.weight_bytes)} + cache {format_bytes(p.cache_bytes)} per device"
    total = f"{format_bytes(p.memory_bytes)} of {format_bytes(plan.device_bytes)}"
    fits = "" if p.memory_bytes <= plan.device_bytes else ": does not fit"
    layouts = plan.priced + sum(plan.ruled_out.values())
    return [
        ("layout", f"{p.parallel or 'one device'}, {p.slots} sequences at a time on each data-parallel replica"),
        ("batch", f"{p.batch:,} of {w.prompts:,} prompts at a time, {w.prompt_len:,} + {w.new_tokens:,} new tokens"),
        ("prefill", f"{format_seconds(p.prefill_s)} to the first token: {_mostly(p.prefill_s, p.prefill)}"),
        ("decode", f"{format_seconds(p.token_s)} a token: {_mostly(p.token_s, p.decode)}"),
        ("throughput", f"{p.tokens_s:,.0f} tokens/s, {p.tokens_s_device:,.0f} per device, prefill included"),
        ("memory", f"{memory}, total {total}{fits}; largest batch that fits: {p.largest_batch:,} sequences"),
        *(("next best", _one_line(other)) for other in plan.runners_up),
        ("searched", f"all {layouts} layouts, ranked by {plan.objective}; {0 if fits else plan.priced} fit"),
        *(("note", note) for note in plan.notes),
    ]  # fmt: skip


def _next(plan: GenerationPlan) -> str:
    p = plan.best
    layout = f" --parallel {shlex.quote(p.parallel)}" if p.parallel else ""
    return (
        f"  hyper-parallel generate RUN_DIR --prompts FILE.jsonl -o OUT.jsonl{layout} \\\n"
        f"     --slots {p.slots} --max-new-tokens {plan.workload.new_tokens} --dtype {plan.workload.dtype}"
    )
