"""`hyper-parallel plan`: best plan of a model on a machine, with runners-up and the reasons for the ranking."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from hyper_parallel.cli import plan_options as options
from hyper_parallel.cli.app import NoCode, is_quiet, say
from hyper_parallel.cli.option_conflicts import refuse_ignored, typed_options
from hyper_parallel.cli.schedule_command import check_schedule_file, pipeline_text, write_schedule
from hyper_parallel.errors import BadValue, Caller, Contradiction, reported_by, written

if TYPE_CHECKING:
    from hyper_parallel.ir import Plan
    from hyper_parallel.model import ModelSpec, Tower


WIDTH: Final = 80
"""Width of the panel in characters, also on wider terminals."""
_IN_RECIPE: Final = (
    "model", "seq_len", "tokens_per_step", "pin", "exclude", "objective", "deadline", "offload", "all_layouts",
    "memory_headroom", "media", "image_size",
)  # fmt: skip
"""Parameters that `--recipe` excludes, because the recipe determines their values."""
_DETAILS: Final = ("explain", "gantt")
_EXCLUDED: Final = {
    "diff": (
        *_IN_RECIPE, *_DETAILS, "topology", "devices", "top", "recipe", "output", "schedule_csv", "as_json", "dry_run",
        "launch",
    ),
    "launch": (*_DETAILS, "as_json"),
    "as_json": _DETAILS,
    "quiet": _DETAILS,
}  # fmt: skip
"""For a parameter, the parameters that it leaves without effect."""
_NOT_REPEATED: Final = ("explain", "gantt", "dry_run", "top", "output", "launch")
"""Parameters omitted from the suggested next command."""


def plan(
    ctx: typer.Context,
    model: options.Model = None,
    topology: options.Topology = None,
    devices: options.Devices = None,
    seq_len: options.SeqLen = None,
    tokens_per_step: options.TokensPerStep = None,
    pin: options.Pin = None,
    exclude: options.Exclude = None,
    objective: options.Objective = "step-time",
    deadline: options.Deadline = None,
    top: options.Top = 5,
    offload: options.Offload = False,
    all_layouts: options.AllLayouts = False,
    memory_headroom: options.MemoryHeadroom = None,
    media: options.Media = None,
    image_size: options.ImageSize = None,
    recipe: options.Recipe = None,
    output: options.Output = None,
    schedule_csv: options.ScheduleCsv = None,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    explain: options.Explain = False,
    gantt: options.Gantt = False,
    launch: options.Launch = None,
    diff: options.Diff = None,
    purpose: options.Purpose = "train",
    prompts: options.Prompts = None,
    prompt_len: options.PromptLen = None,
    new_tokens: options.NewTokens = None,
    parallel: options.Parallel = None,
    dtype: options.Dtype = None,
    no_code: NoCode = False,
) -> None:
    """Print the best plan of a model on a machine. Needs no accelerator.

    Imports torch only for multimodal models and for families whose config this package cannot read by itself.
    """
    free = None if memory_headroom is None else _fraction(memory_headroom)
    if purpose != "train" or {prompts, prompt_len, new_tokens, parallel, dtype} != {None}:
        from hyper_parallel.cli.plan_to_generate import plan_to_generate

        plan_to_generate(ctx, _read, free, WIDTH)
        return
    refuse_ignored(ctx, _EXCLUDED)
    if diff is not None:
        say(_difference(*diff))
        return
    output, schedule_csv = (None, None) if dry_run else (output, schedule_csv)
    _check_files(output, schedule_csv)
    chosen, names = _choose_plan(ctx, recipe, free)
    files = _write_files(chosen, output, schedule_csv, recipe)  # before the text, whose reader may close the pipe
    if launch is not None:
        say(_launch_text(chosen, names, launch))
    elif as_json or is_quiet():
        say(chosen.to_json() if as_json else chosen.one_line())
    else:
        commands = "\n".join(_next_commands(ctx, recipe, topology, chosen, output))
        say(f"{_plan_text(chosen, explain, gantt)}\n\nnext:\n{commands}")
    _say_lines(files)


def _say_lines(lines: list[str]) -> None:
    for line in lines:
        say(line, err=True)


def _difference(left: Path, right: Path) -> str:
    from hyper_parallel.ir import Plan

    return Plan.load(left).diff(Plan.load(right)) or "the plans do not differ"


def _check_files(output: Path | None, schedule_csv: Path | None) -> None:
    """Raise OutputNotWritable (HP105) if an existing `output` is no plan, or an existing `schedule_csv` no schedule."""
    from hyper_parallel.owned_folder import check_output_file

    if output is not None:
        check_output_file(output, _is_plan, "a plan", "--output")
    if schedule_csv is not None:
        check_schedule_file(schedule_csv)


def _write_files(chosen: Plan, output: Path | None, schedule_csv: Path | None, recipe: Path | None) -> list[str]:
    """Write the plan to `output` and its schedule to `schedule_csv`; return a line about each file."""
    lines = []
    if schedule_csv is not None:
        hint = "--pin pp=2" if recipe is None else f"set `parallel.pp=2` in {recipe}"
        if chosen.strategy.world_size % 2:
            hint = "leave out --schedule-csv, or plan for an even number of devices"
        write_schedule(chosen, schedule_csv, hint)
        lines.append(f"schedule written to {schedule_csv}")
    if output is not None:
        with written(output):
            chosen.save(output)
        lines.append(f"plan written to {output}")
    return lines


def _choose_plan(ctx: typer.Context, recipe: Path | None, headroom: float | None) -> tuple[Plan, tuple[str, str]]:
    """Return the plan of a recipe or, if `recipe` is None, of the model in `ctx`, and (model name, topology name)."""
    params = ctx.params
    if recipe is not None:
        if replaced := sorted(typed_options(ctx).keys() & {*_IN_RECIPE}):
            names = ["model" if n == "model" else f"--{n.replace('_', '-')}" for n in replaced]
            raise Contradiction(
                "a recipe already determines the model, the workload and the search",
                got=f"--recipe with {', '.join(names)}",
                hint=shlex.join(_current_command(ctx, {*_IN_RECIPE})),
                where="--recipe",
            )
        return _plan_recipe(recipe, params["devices"], params["topology"], params["no_code"])
    if params["model"] is None:
        raise BadValue(
            "nothing to plan: give a model, a recipe, or two plans to compare",
            hint="hyper-parallel plan llama-3-8b --topology dgx-h100",
        )
    names = (params["model"], params["topology"] or "local")
    return _plan_model(*names, params, headroom), names


def _is_plan(text: str) -> bool:
    return re.match(r'\{\s*"model": \{', text) is not None and '"peak_flops": ' in text


def _read(model: str, where: str | None = None) -> ModelSpec:
    """Return the spec of a model, from its config or, for families without a reader, from transformers' module."""
    from hyper_parallel.model import is_read, load_model, read_config

    values = read_config(model, where=where).values
    known = is_read(values) and "text_config" not in values
    if known or find_spec("transformers") is None:
        return load_model(model, where=where)
    from hyper_parallel.trainer.engine.recipe_model import read_spec

    return read_spec(model, where, tried=True)


def _plan_model(model: str, topology: str, params: Mapping[str, Any], headroom: float | None) -> Plan:
    from hyper_parallel import planner
    from hyper_parallel.topology import load_topology

    spec, devices = _read(model), params["devices"]
    supernode = load_topology(topology, devices)
    workload, media = None, params["media"]
    seq_len, tokens_per_step = params["seq_len"], params["tokens_per_step"]
    if seq_len is not None or tokens_per_step is not None:
        workload = planner.default_workload(spec, supernode, devices, seq_len=seq_len, tokens_per_step=tokens_per_step)
    excluded = ",".join(params["exclude"] or ()).split(",")
    towers = _towers(spec, model, media, params["image_size"])
    with reported_by(Caller()):  # options, not arguments of `plan`
        plan = planner.plan(
            spec,
            supernode,
            workload,
            num_devices=devices,
            pins=_pins(params["pin"] or ()),
            exclude=[axis.strip() for axis in excluded if axis.strip()],
            objective=params["objective"],
            deadline_s=params["deadline"],
            top=params["top"],
            offload=params["offload"],
            all_layouts=params["all_layouts"],
            memory_headroom=headroom,
            towers=towers,
            media=planner.MEDIA if media is None else media,
        )
    return replace(plan, notes=(*plan.notes, *_tower_notes(spec, towers, media)))


def _tower_notes(spec: ModelSpec, towers: Sequence[Tower], media: int | None) -> Iterator[str]:
    """Yield a note for each encoder (tower) of a model whose cost the plan does not include."""
    from hyper_parallel.model import tower_kinds

    priced = [tower.name for tower in towers]
    for kind in tower_kinds(spec):
        if media == 0:
            yield f"{kind}: left out of the step with `--media 0`; its parameters are counted"
        elif kind not in priced:
            yield (
                f"{kind}: left out of the step, as its config states no number of heads or size of patches; "
                "its parameters are counted"
            )


def _towers(spec: ModelSpec, model: str, media: int | None, image_size: int | None) -> tuple[Tower, ...]:
    """Return the encoders (towers) whose cost a plan includes; raise HP102 for media options without effect."""
    from hyper_parallel.model import fixed_image_size, read_config, towers_of

    values = read_config(model).values
    towers = towers_of(spec, values, image_size)
    kinds = [tower.name for tower in towers]
    problems = {}
    if media and not kinds:
        problems["--media"] = "the model has no encoder whose config states heads and patch size"
    if image_size is not None:
        size = fixed_image_size(values)
        if "vision" not in kinds:
            problems["--image-size"] = "the model has no image encoder whose config states heads and patch size"
        elif size is not None and size != image_size:
            problems["--image-size"] = f"the encoder of the model reads images of {size} pixels"
        elif media == 0:
            problems["--image-size"] = "a plan with `--media 0` has no images"
    chosen = {"--media": media, "--image-size": image_size}
    for name, problem in problems.items():
        raise BadValue(problem, where=name, got=f"{name} {chosen[name]}", hint=f"leave out {name}")
    return towers if media != 0 else ()


def _launch_text(chosen: Plan, names: tuple[str, str], launch: str) -> str:
    from hyper_parallel.planner import launch_settings

    model, topology = (str(Path(n).resolve()) if Path(n).exists() else n for n in names)
    named = replace(chosen, model=replace(chosen.model, name=model), topology=topology)
    return launch_settings(named, launch).rstrip()


def _plan_text(plan: Plan, explain: bool, gantt: bool) -> str:
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


def _next_commands(
    ctx: typer.Context, recipe: Path | None, topology: str | None, chosen: Plan, output: Path | None
) -> Iterator[str]:
    """Yield the suggested next commands, as lines: write a recipe unless one is given, then train.

    The training command has `--dry-run` if this machine has too few devices.
    """
    from hyper_parallel.topology import find_accelerators, rank_capacity

    train = ["hyper-parallel", "train", str(recipe or "recipe.yaml")]
    if recipe is None:
        yield from _wrapped_lines([*map(shlex.quote, _current_command(ctx)), "--launch", "ours", "> recipe.yaml"])
        yield "  # edit recipe.yaml: set model.path, data.source and stage"
    elif topology is not None:
        train.append(f"topology={topology}")
    if recipe is not None and output is not None:
        train += ["--plan", str(output)]
    if chosen.strategy.world_size > rank_capacity(len(find_accelerators())).num_ranks:
        train.append("--dry-run")
    yield from _wrapped_lines(list(map(shlex.quote, train)))


def _wrapped_lines(words: list[str]) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + len(word) > WIDTH - 5:
            yield f"{line} \\"
            line = "     "
        line += f" {word}" if line else f"  {word}"
    yield line


def _current_command(ctx: typer.Context, omitted: Collection[str] = _NOT_REPEATED) -> list[str]:
    words, typed = ["hyper-parallel", "plan"], typed_options(ctx)
    for param in ctx.command.params:
        if param.name in omitted or param.name not in typed:
            continue
        value = typed[param.name]
        option = [] if param.param_type_name == "argument" else [max(param.opts, key=len)]
        for item in value if isinstance(value, list) else [value]:
            words += option if item is True else [*option, str(item)]
    return words


def _plan_recipe(
    recipe: Path, devices: int | None, topology: str | None, no_code: bool
) -> tuple[Plan, tuple[str, str]]:
    from hyper_parallel.config import load_recipe, refuse_code, refuse_data_file
    from hyper_parallel.planner import plan_recipe

    refuse_data_file(recipe, "plan")
    loaded = load_recipe(recipe, [] if topology is None else [f"topology={topology}"])
    if no_code:
        refuse_code(loaded)
    named = (loaded.recipe.model.path, loaded.recipe.topology)
    spec = _read(loaded.recipe.model.path, loaded.where("model.path"))
    if loaded.recipe.parallel.submodels is None:
        return plan_recipe(loaded.recipe, devices, loaded.where, spec), named
    from hyper_parallel.trainer.job import plan_with_submodels, resolve_submodels

    loaded, notes, proof = resolve_submodels(loaded, devices)
    plan = plan_recipe(loaded.recipe, None if notes else devices, loaded.where, spec)
    plan = replace(plan, notes=(*plan.notes, *notes))
    return plan_with_submodels(loaded, plan, proof), named


def _fraction(text: str) -> float:
    """Return the value of a fraction written as `5%` or `0.05`; raise BadValue (HP102) unless it is in [0, 1)."""
    try:
        fraction = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction < 1.0:
        raise BadValue(
            "the memory headroom must be a fraction of device memory",
            where="--memory-headroom",
            got=text,
            allowed="from 0% to below 100%",
            hint="--memory-headroom 5%",
        )
    return fraction


def _pins(texts: Iterable[str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise BadValue(
                "a pin must have the form name=value",
                where="--pin",
                got=text,
                allowed="name=value, such as tp=8",
                hint="--pin tp=8",
            )
        if pins.setdefault(name, value) != value:
            raise Contradiction(
                f"`{name}` is pinned twice",
                where="--pin",
                got=f"{name}={pins[name]}, {name}={value}",
                hint=f"leave out --pin {name}={pins[name]}",
            )
    return pins
