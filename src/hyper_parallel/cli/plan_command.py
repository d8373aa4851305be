"""`hyper-parallel plan`: best plan of a model on a machine, with runners-up and the reasons for the ranking."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from hyper_parallel.cli import plan_options as options
from hyper_parallel.cli.app import NoCode, is_quiet, say
from hyper_parallel.cli.schedule_command import check_schedule_file, pipeline_text, write_schedule
from hyper_parallel.errors import BadValue, Contradiction, OutputNotWritable

if TYPE_CHECKING:
    from hyper_parallel.ir import Plan
    from hyper_parallel.model import ModelSpec, Tower


WIDTH: Final = 80
"""Width of the panel in characters, also on wider terminals."""
_NOT_REPEATED: Final = ("explain", "gantt", "dry_run", "top", "output", "launch")
"""Options omitted from the suggested next command."""


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
    """Print the best plan of a model on a machine. Needs no accelerator and imports no torch."""
    free = None if memory_headroom is None else _share(memory_headroom)
    if purpose != "train" or {prompts, prompt_len, new_tokens, parallel, dtype} != {None}:
        from hyper_parallel.cli.plan_to_generate import plan_to_generate

        plan_to_generate(ctx, _read, free, WIDTH)
        return
    if diff is not None:
        say(_difference(*diff))
        return
    if not dry_run:
        _check_files(output, schedule_csv)
    search = _Search(
        pin, exclude, objective, deadline, top, offload, all_layouts, free, media, image_size
    )
    batch = (seq_len, tokens_per_step)
    chosen, names = _choose_plan(recipe, model, topology, devices, batch, search, no_code)
    if launch is not None:
        say(_launch_text(chosen, names, launch))
    elif as_json or is_quiet():
        say(chosen.to_json() if as_json else chosen.one_line())
    else:
        say(_plan_text(chosen, explain, gantt))
        say("\nnext:\n" + "\n".join(_next_commands(ctx, recipe, topology, chosen, output)))
    if not dry_run:
        _write_files(chosen, output, schedule_csv)


@dataclass(frozen=True, slots=True)
class _Search:
    """Options of `plan` that control the search."""

    pins: list[str] | None
    exclude: list[str] | None
    objective: str
    deadline_s: float | None
    top: int
    offload: bool
    all_layouts: bool
    memory_headroom: float | None
    media: int | None
    image_size: int | None

    @property
    def is_default(self) -> bool:
        """True if every choice that affects the best plan has its default."""
        choices = (self.pins, self.exclude, self.deadline_s, self.offload, self.all_layouts)
        unset = (self.memory_headroom, self.media, self.image_size)
        return not any(choices) and self.objective == "step-time" and unset == (None,) * 3


def _difference(left: Path, right: Path) -> str:
    from hyper_parallel.ir import Plan

    return Plan.load(left).diff(Plan.load(right)) or "the plans do not differ"


def _check_files(output: Path | None, schedule_csv: Path | None) -> None:
    """Raise an error if an output file exists and was not written by this command."""
    from hyper_parallel.owned_folder import check_output_file

    if output is not None:
        check_output_file(output, _is_plan, "a plan", "--output")
    if schedule_csv is not None:
        check_schedule_file(schedule_csv)


def _write_files(chosen: Plan, output: Path | None, schedule_csv: Path | None) -> None:
    if schedule_csv is not None:
        write_schedule(chosen, schedule_csv)
        say(f"schedule written to {schedule_csv}", err=True)
    if output is not None:
        try:
            chosen.save(output)
        except OSError as error:
            raise OutputNotWritable(
                "the plan cannot be written",
                where="--output",
                got=f"{output}: {error.strerror}",
                hint="-o plan.json",
            ) from error
        say(f"plan written to {output}", err=True)


def _choose_plan(
    recipe: Path | None,
    model: str | None,
    topology: str | None,
    devices: int | None,
    batch: tuple[int | None, int | None],
    search: _Search,
    no_code: bool,
) -> tuple[Plan, tuple[str, str]]:
    """Return the plan of a recipe or of a model, and the names of model and topology that the user gave."""
    if recipe is not None:
        if model is not None or any(batch) or not search.is_default:
            raise Contradiction(
                "a recipe already determines the model, the workload and the search",
                got="--recipe with a model, a workload or choices of the search",
                hint=f"hyper-parallel plan --recipe {recipe}",
                where="--recipe",
            )
        return _plan_recipe(recipe, devices, topology, no_code)
    if model is None:
        raise BadValue(
            "nothing to plan: give a model, a recipe, or two plans to compare",
            hint="hyper-parallel plan llama-3-8b --topology dgx-h100",
        )
    names = (model, topology or "local")
    return _plan_model(*names, devices, batch, search), names


def _is_plan(text: str) -> bool:
    """Return whether a text begins like a plan file; checks the first characters only."""
    return re.match(r'\{\s*"model": \{', text) is not None and '"peak_flops": ' in text


def _read(model: str, where: str | None = None) -> ModelSpec:
    """Return the model spec, from the config, or for other families from transformers' module on the meta device."""
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
    search: _Search,
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
    excluded = ",".join(search.exclude or ()).split(",")
    towers = _towers(spec, model, search)
    plan = planner.plan(
        spec,
        supernode,
        workload,
        num_devices=devices,
        pins=_pins(search.pins or ()),
        exclude=[axis.strip() for axis in excluded if axis.strip()],
        objective=search.objective,
        deadline_s=search.deadline_s,
        top=search.top,
        offload=search.offload,
        all_layouts=search.all_layouts,
        memory_headroom=search.memory_headroom,
        towers=towers,
        media=planner.MEDIA if search.media is None else search.media,
    )
    return replace(plan, notes=(*plan.notes, *_tower_notes(spec, towers, search.media)))


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


def _towers(spec: ModelSpec, model: str, search: _Search) -> tuple[Tower, ...]:
    """Return the encoders (towers) whose cost a plan includes; empty with `--media 0` and for models without encoders.

    Raises:
        BadValue: HP102 for options of media if the cost of no encoder of the model can be predicted.
    """
    from hyper_parallel.model import fixed_image_size, read_config, towers_of

    values = read_config(model).values
    towers = towers_of(spec, values, search.image_size)
    kinds = [tower.name for tower in towers]
    problems = {}
    if search.media and not kinds:
        problems["--media"] = "the model has no encoder whose config states heads and patch size"
    if search.image_size is not None:
        size = fixed_image_size(values)
        if "vision" not in kinds:
            problems["--image-size"] = (
                "the model has no image encoder whose config states heads and patch size"
            )
        elif size is not None and size != search.image_size:
            problems["--image-size"] = f"the encoder of the model reads images of {size} pixels"
        elif search.media == 0:
            problems["--image-size"] = "a plan with `--media 0` has no images"
    chosen = {"--media": search.media, "--image-size": search.image_size}
    for name, problem in problems.items():
        raise BadValue(problem, where=name, got=f"{name} {chosen[name]}", hint=f"leave out {name}")
    return towers if search.media != 0 else ()


def _launch_text(chosen: Plan, names: tuple[str, str], launch: str) -> str:
    """Return the launch settings of a plan as a recipe or as flags of Megatron."""
    from hyper_parallel.planner import launch_settings

    return launch_settings(_as_named(chosen, *names), launch).rstrip()


def _plan_text(plan: Plan, explain: bool, gantt: bool) -> str:
    """Return the text to print for a plan: a panel, or all details with `--explain`."""
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
    """Yield the suggested next commands, as lines: write a recipe, then train.

    The training command has `--dry-run` if this machine has too few devices.
    """
    from hyper_parallel.topology import find_accelerators, rank_capacity

    train = ["hyper-parallel", "train", str(recipe or "recipe.yaml")]
    if recipe is None:
        yield from _wrapped_lines(
            [*map(shlex.quote, _current_command(ctx)), "--launch", "ours", "> recipe.yaml"]
        )
        yield "  # edit recipe.yaml: set model.path, data.source and stage"
    elif topology is not None:
        train.append(f"topology={topology}")
    if recipe is not None and output is not None:
        train += ["--plan", str(output)]
    if chosen.strategy.world_size > rank_capacity(len(find_accelerators())).num_ranks:
        train.append("--dry-run")
    yield from _wrapped_lines(list(map(shlex.quote, train)))


def _wrapped_lines(words: list[str]) -> Iterator[str]:
    """Yield the lines of a command, wrapped with a backslash at the end of each line but the last."""
    line = ""
    for word in words:
        if line and len(line) + len(word) > WIDTH - 5:
            yield f"{line} \\"
            line = "     "
        line += f" {word}" if line else f"  {word}"
    yield line


def _current_command(ctx: typer.Context) -> list[str]:
    """Return the words of the current command line without its output options."""
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
    """Return the plan with absolute paths of its model and topology files, for use in a recipe."""
    model, topology = (str(Path(n).resolve()) if Path(n).exists() else n for n in (model, topology))
    return replace(plan, model=replace(plan.model, name=model), topology=topology)


def _plan_recipe(
    recipe: Path, devices: int | None, topology: str | None, no_code: bool
) -> tuple[Plan, tuple[str, str]]:
    from hyper_parallel.config import load_recipe, refuse_code
    from hyper_parallel.planner import plan_recipe

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


def _share(text: str) -> float:
    """Parse a fraction written as `5%` or `0.05`."""
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


def _pins(texts: Iterable[str]) -> dict[str, str]:
    """Return the values of `--pin`, given as `name=value`, by name.

    Raises:
        BadValue: HP102 for a text that is not name=value.
        Contradiction: HP104 for a name with two values.
    """
    pins: dict[str, str] = {}
    for name, value in map(_pin, texts):
        if pins.setdefault(name, value) != value:
            raise Contradiction(
                f"`{name}` is pinned twice",
                where="--pin",
                got=f"{name}={pins[name]}, {name}={value}",
                hint=f"--pin {name}={value}",
            )
    return pins


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
