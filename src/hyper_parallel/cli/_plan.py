"""`hyper-parallel plan`: the best plan of a model on a machine, its runners-up and why they lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyper_parallel.errors import BadValue, Contradiction, OutputNotWritable

if TYPE_CHECKING:
    from hyper_parallel.ir import Plan


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Preset name, Hugging Face directory, or config.json.", show_default=False
        ),
    ] = None,
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="Preset name, YAML file, or local.")
    ] = "local",
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
        list[str] | None, typer.Option(help="Fix a degree, as tp=8. May be repeated.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Runners-up to print.")] = 5,
    recipe: Annotated[
        Path | None, typer.Option(help="Plan what a recipe would train, instead of a model.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Write no file.")] = False,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Print what differs between two plan files, and plan nothing."),
    ] = None,
) -> None:
    """Print the best plan of a model on a machine; starts no device and imports no torch."""
    if diff is not None:
        from hyper_parallel.ir import Plan

        left, right = (Plan.load(path) for path in diff)
        typer.echo(left.diff(right) or "the plans do not differ")
        return
    if recipe is not None:
        if model is not None or pin or seq_len or tokens_per_step:
            raise Contradiction(
                "a recipe names the model and the workload itself",
                got="--recipe with a model, --pin, --seq-len or --tokens-per-step",
                hint=f"hyper-parallel plan --recipe {recipe}",
            )
        chosen = _plan_recipe(recipe, devices)
    elif model is not None:
        chosen = _plan_model(model, topology, devices, seq_len, tokens_per_step, pin, top)
    else:
        raise BadValue(
            "nothing to plan: give a model, a recipe, or two plans to compare",
            hint="hyper-parallel plan llama-3-8b --topology dgx-h100",
        )
    typer.echo(chosen.to_json() if as_json else chosen.explain())
    if output is not None and not dry_run:
        try:
            chosen.save(output)
        except OSError as error:
            raise OutputNotWritable(
                "the plan cannot be written", where="--output", got=f"{output}: {error.strerror}"
            ) from error
        typer.echo(f"plan written to {output}", err=True)


def _plan_model(
    model: str,
    topology: str,
    devices: int | None,
    seq_len: int | None,
    tokens_per_step: int | None,
    pin: list[str] | None,
    top: int,
) -> Plan:
    from hyper_parallel import planner
    from hyper_parallel.model import load_model
    from hyper_parallel.topology import detect_local, load_topology

    spec = load_model(model)
    supernode = detect_local(devices) if topology == "local" else load_topology(topology)
    workload = None
    if seq_len is not None or tokens_per_step is not None:
        workload = planner.default_workload(
            spec, supernode, devices, seq_len=seq_len, tokens_per_step=tokens_per_step
        )
    pins = dict(_pin(text) for text in pin or ())
    return planner.plan(spec, supernode, workload, num_devices=devices, pins=pins, top=top)


def _plan_recipe(recipe: Path, devices: int | None) -> Plan:
    from hyper_parallel.config import load_recipe
    from hyper_parallel.planner import plan_recipe

    loaded = load_recipe(recipe)
    return plan_recipe(loaded.recipe, devices, loaded.where)


def _pin(text: str) -> tuple[str, int]:
    name, _, degree = text.partition("=")
    if not degree.isdigit() or int(degree) < 1:
        raise BadValue(
            "a pin is a degree and a number",
            where="--pin",
            got=text,
            allowed="tp=8",
            hint="--pin tp=8",
        )
    return name.strip(), int(degree)
