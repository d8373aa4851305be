"""`hyper-parallel plan`: best plan of a model on a machine, with runners-up and the reasons for their rank."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hyper_parallel.cli.app import NoCode, is_quiet, say
from hyper_parallel.cli.schedule_command import (
    check_schedule_file,
    pipeline_text,
    write_schedule,
)
from hyper_parallel.errors import BadValue, Contradiction, OutputNotWritable
from hyper_parallel.owned_folder import check_output_file

if TYPE_CHECKING:
    from hyper_parallel.ir import Plan
    from hyper_parallel.model import ModelSpec


WIDTH: Final = 80
"""Columns of the panel, also on wider terminals."""
_NOT_REPEATED: Final = ("explain", "gantt", "dry_run", "top", "output", "launch")
"""Options omitted from the suggested next command."""


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Preset name, Hugging Face directory, or config.json.", show_default=False
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            "-t",
            help="Preset name, YAML file, or local. Default: local, or the recipe's.",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices to use. Default: all of the topology.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per sequence. Default: the model's, at most 8192."),
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one step over all devices.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(help="Fix a degree or choice: tp=8, schedule=zbv. May be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Axes and choices to exclude: cp,gathered_inputs. May be repeated."),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="step-time, tokens-per-device-second, memory or fewest-devices. For generation: throughput or latency."
        ),
    ] = "step-time",
    deadline: Annotated[
        float | None,
        typer.Option(help="Maximum step time in seconds, for fewest-devices or memory.", min=0.0),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Runners-up to print.")] = 5,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Allow offload to host memory and recomputation if device memory is exceeded.",
        ),
    ] = False,
    all_layouts: Annotated[
        bool,
        typer.Option(
            "--all-layouts", help="For studies: include layouts that this version cannot run."
        ),
    ] = False,
    memory_headroom: Annotated[
        str | None,
        typer.Option(
            help="Fraction of device memory to leave free. Default: 5% on accelerators, 0% on a CPU.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Plan this recipe instead of a model.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")
    ] = None,
    schedule_csv: Annotated[
        Path | None,
        typer.Option(
            help="Write the actions of every pipeline rank as CSV for torch.distributed.pipelining."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Write no files.")] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print every cost term, layout, collective and runner-up."),
    ] = False,
    gantt: Annotated[
        bool, typer.Option("--gantt", help="Also draw the simulated schedule.")
    ] = False,
    launch: Annotated[
        str | None,
        typer.Option(
            help="Print launch settings instead of the plan: ours (a recipe) or megatron (flags).",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Print the differences of two plan files instead of planning."),
    ] = None,
    purpose: Annotated[
        str,
        typer.Option(
            "--for", help="Purpose: train, or generate (prompts continued by `generate`)."
        ),
    ] = "train",
    prompts: Annotated[
        int | None,
        typer.Option(help="For generation: prompts over all devices. Default: 32."),
    ] = None,
    prompt_len: Annotated[
        int | None, typer.Option(help="For generation: tokens per prompt. Default: 512.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="For generation: tokens per continuation. Default: 128.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help='For generation: use this layout: "tp=8", "pp=2 tp=4".')
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="For generation: float32, bfloat16, ... Default: as stored."),
    ] = None,
    no_code: NoCode = False,
) -> None:
    """Print the best plan of a model on a machine. Needs no accelerator and imports no torch."""
    free = None if memory_headroom is None else _share(memory_headroom)
    if purpose != "train" or {prompts, prompt_len, new_tokens, parallel, dtype} != {None}:
        from hyper_parallel.cli.plan_to_generate import plan_to_generate

        plan_to_generate(ctx, _read, free, WIDTH)
        return
    if diff is not None:
        from hyper_parallel.ir import Plan

        left, right = (Plan.load(path) for path in diff)
        say(left.diff(right) or "the plans do not differ")
        return
    if output is not None and not dry_run:
        check_output_file(output, _is_plan, "a plan", "--output")
    if schedule_csv is not None and not dry_run:
        check_schedule_file(schedule_csv)
    if recipe is not None:
        search_options = (pin, exclude, deadline, objective != "step-time", offload)
        search_options += (all_layouts, memory_headroom)
        if model is not None or seq_len or tokens_per_step or any(search_options):
            raise Contradiction(
                "a recipe already determines the model, the workload and the search",
                got="--recipe with a model, a workload or choices of the search",
                hint=f"hyper-parallel plan --recipe {recipe}",
            )
        chosen, named = _plan_recipe(recipe, devices, topology, no_code)
    elif model is not None:
        workload = (seq_len, tokens_per_step)
        goal = (objective, deadline)
        named = (model, topology or "local")
        chosen = _plan_model(
            *named, devices, workload, pin, exclude, goal, top,
            offload=offload, all_layouts=all_layouts, memory_headroom=free,
        )  # fmt: skip
    else:
        raise BadValue(
            "nothing to plan: give a model, a recipe, or two plans to compare",
            hint="hyper-parallel plan llama-3-8b --topology dgx-h100",
        )
    if launch is not None:
        from hyper_parallel.planner import launch_settings

        say(launch_settings(_as_named(chosen, *named), launch).rstrip())
    elif as_json:
        say(chosen.to_json())
    elif is_quiet():
        say(chosen.one_line())
    else:
        say(_shown(chosen, explain, gantt))
        ranks = chosen.strategy.world_size
        say("\nnext:\n" + "\n".join(_next(ctx, recipe, topology, ranks, output)))
    if schedule_csv is not None and not dry_run:
        write_schedule(chosen, schedule_csv)
        say(f"schedule written to {schedule_csv}", err=True)
    if output is not None and not dry_run:
        try:
            chosen.save(output)
        except OSError as error:
            raise OutputNotWritable(
                "the plan cannot be written", where="--output", got=f"{output}: {error.strerror}"
            ) from error
        say(f"plan written to {output}", err=True)


def _is_plan(text: str) -> bool:
    """Return whether a text begins like a plan file."""
    return re.match(r'\{\s*"model": \{', text) is not None and '"peak_flops": ' in text


def _read(model: str, where: str | None = None) -> ModelSpec:
    """Return the model spec from a config, or from transformers' module if the reader does not know it."""
    from hyper_parallel.model import is_read, load_model, read_config

    values = read_config(model, where=where).values
    known = is_read(values) and "text_config" not in values
    if known or find_spec("transformers") is None:
        return load_model(model, where=where)
    from hyper_parallel.trainer.engine.recipe_model import read_spec

    return read_spec(model, where, tried=True)


def _plan_model(
    model: str,
    topology: str,
    devices: int | None,
    batch: tuple[int | None, int | None],
    pin: list[str] | None,
    exclude: list[str] | None,
    goal: tuple[str, float | None],
    top: int,
    **choices: Any,
) -> Plan:
    from hyper_parallel import planner
    from hyper_parallel.topology import detect_local, load_topology

    spec = _read(model)
    supernode = detect_local(devices) if topology == "local" else load_topology(topology)
    workload = None
    seq_len, tokens_per_step = batch
    if seq_len is not None or tokens_per_step is not None:
        workload = planner.default_workload(
            spec, supernode, devices, seq_len=seq_len, tokens_per_step=tokens_per_step
        )
    pins: dict[str, str] = {}
    for name, value in map(_pin, pin or ()):
        if pins.setdefault(name, value) != value:
            raise Contradiction(
                f"`{name}` is pinned twice",
                where="--pin",
                got=f"{name}={pins[name]}, {name}={value}",
                hint=f"--pin {name}={value}",
            )
    return planner.plan(
        spec,
        supernode,
        workload,
        num_devices=devices,
        pins=pins,
        exclude=[axis.strip() for axis in ",".join(exclude or ()).split(",") if axis.strip()],
        objective=goal[0],
        deadline_s=goal[1],
        top=top,
        **choices,
    )


def _shown(plan: Plan, explain: bool, gantt: bool) -> str:
    """Return the printed form of a plan: the panel, or all details with `--explain`."""
    from hyper_parallel import planner

    width = shutil.get_terminal_size((WIDTH, 24)).columns
    if explain:
        parts = [plan.explain(width)]
        if plan.strategy.pp > 1:
            parts.append(pipeline_text(plan))
    else:
        parts = [plan.summary(planner.half_width(plan), min(width, WIDTH))]
    if gantt:
        parts.append(planner.gantt(plan))
    return "\n\n".join(parts)


def _next(
    ctx: typer.Context,
    recipe: Path | None,
    topology: str | None,
    ranks: int,
    output: Path | None,
) -> Iterator[str]:
    """Yield the suggested next commands: write a recipe and train it, or a dry run if this machine is too small."""
    from hyper_parallel.topology import find_accelerators, rank_capacity

    train = ["hyper-parallel", "train", str(recipe or "recipe.yaml")]
    if recipe is None:
        yield from _folded([*map(shlex.quote, _again(ctx)), "--launch", "ours", "> recipe.yaml"])
        yield "  # edit recipe.yaml: set model.path, data.source and stage"
    elif topology is not None:
        train.append(f"topology={topology}")
    if recipe is not None and output is not None:
        train += ["--plan", str(output)]
    if ranks > rank_capacity(len(find_accelerators())).num_ranks:
        train.append("--dry-run")
    yield from _folded(list(map(shlex.quote, train)))


def _folded(words: list[str]) -> Iterator[str]:
    """Yield a command as lines that a shell reads as one command."""
    line = ""
    for word in words:
        if line and len(line) + len(word) > WIDTH - 5:
            yield f"{line} \\"
            line = "     "
        line += f" {word}" if line else f"  {word}"
    yield line


def _again(ctx: typer.Context) -> list[str]:
    """Return the words of the current command without its output options."""
    words = ["hyper-parallel", "plan"]
    for param in ctx.command.params:
        name, value = param.name or "", ctx.params.get(param.name or "")
        if name in _NOT_REPEATED or value in (None, param.default, False, ()):
            continue
        option = [] if param.param_type_name == "argument" else [max(param.opts, key=len)]
        for item in value if isinstance(value, list) else [value]:
            words += option if item is True else [*option, str(item)]
    return words


def _as_named(plan: Plan, model: str, topology: str) -> Plan:
    """Return the plan with the paths of its model and machine, by which a recipe refers to them."""
    model, topology = (str(Path(n).resolve()) if Path(n).exists() else n for n in (model, topology))
    return replace(plan, model=replace(plan.model, name=model), topology=topology)


def _plan_recipe(
    recipe: Path, devices: int | None, topology: str | None, no_code: bool
) -> tuple[Plan, tuple[str, str]]:
    """Return the plan of a recipe, and the names of its model and topology."""
    from hyper_parallel.config import load_recipe, refuse_code
    from hyper_parallel.planner import plan_recipe

    loaded = load_recipe(recipe, [] if topology is None else [f"topology={topology}"])
    if no_code:
        refuse_code(loaded)
    named = (loaded.recipe.model.path, loaded.recipe.topology)
    spec = _read(loaded.recipe.model.path, loaded.where("model.path"))
    return plan_recipe(loaded.recipe, devices, loaded.where, spec), named


def _share(text: str) -> float:
    """Return the fraction given as text such as 5% or 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise BadValue(
            "the memory headroom must be a fraction of device memory",
            where="--memory-headroom",
            got=text,
            allowed="from 0% to below 100%",
            hint="--memory-headroom 5%",
        )
    return share


def _pin(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name.strip() or not value.strip():
        raise BadValue(
            "a pin must have the form name=value",
            where="--pin",
            got=text,
            allowed="tp=8",
            hint="--pin tp=8",
        )
    return name.strip(), value.strip()
