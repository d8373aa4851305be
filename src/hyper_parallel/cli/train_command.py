"""`hyper-parallel train`: train a model from a recipe; writes the model, metrics and a report."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from hyper_parallel.cli import train_options as options
from hyper_parallel.cli.app import NoCode, enable_garbage_collection, is_quiet, say
from hyper_parallel.cli.option_conflicts import refuse_ignored
from hyper_parallel.cli.pipes import broken_pipe_safe_output, check_output
from hyper_parallel.errors import BadValue, Contradiction, Unwritten
from hyper_parallel.errors import console as printing_console

if TYPE_CHECKING:
    from rich.console import Console

    from hyper_parallel.config import LoadedRecipe, Recipe
    from hyper_parallel.ir import Plan
    from hyper_parallel.trainer import Job, Summary
    from hyper_parallel.trainer.signals import Interrupted

_MAX_KERNELS: Final = 12
"""Maximum number of fused kernels that the printed results list."""

_EXCLUDED: Final = dict.fromkeys(("trace", "topology", "ranks", "rank", "as_json"), ("launcher",))
"""For a parameter, the parameters that it leaves without effect: tracing starts no ranks."""


def train(
    ctx: typer.Context,
    recipe: options.RecipePath,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    trace: options.Trace = False,
    topology: options.Topology = None,
    ranks: options.Ranks = None,
    rank: options.Rank = None,
    no_calibrate: options.NoCalibrate = False,
    as_json: options.AsJson = False,
    launcher: options.Launcher = None,
    plan: options.Plan = None,
    no_code: NoCode = False,
) -> None:
    """Train a model from a recipe. Starts local ranks, unless a launcher is set or has started this process."""
    from hyper_parallel.hub import stay_offline

    stay_offline()
    _refuse_dash([str(recipe), *(overrides or [])], topology)
    trace_options = {"--trace": trace, "--topology": topology, "--ranks": ranks, "--rank": rank, "--json": as_json}
    tracing = [name for name, value in trace_options.items() if value is not None and value is not False]
    if tracing:
        if not dry_run:
            raise Contradiction(
                f"{tracing[0]} applies only to a dry run",
                where=tracing[0],
                hint=_trace_command([str(recipe), *(overrides or [])], {**trace_options, "--plan": plan}),
            )
        from hyper_parallel.cli.dry_run_command import print_dry_run

        refuse_ignored(ctx, _EXCLUDED)
        traced = [*(overrides or []), *([f"topology={topology}"] if topology else [])]
        print_dry_run(_load_with_plan(recipe, traced, plan, no_code)[0], ranks, rank, as_json)
        return
    from hyper_parallel.trainer.signals import Interrupted, handled, interrupt

    values = [*(overrides or []), *([f"launch.launcher={launcher}"] if launcher else [])]
    try:
        with broken_pipe_safe_output(), handled(interrupt):
            _train_recipe(recipe, values, plan, dry_run, no_calibrate, no_code)
    except Interrupted as error:
        sys.stderr.write("interrupted\n")
        raise typer.Exit(error.status) from None


def _trace_command(words: Sequence[str], options: Mapping[str, object]) -> str:
    command = ["hyper-parallel", "train", *words, "--dry-run", "--trace"]
    for name, value in options.items():
        if name != "--trace" and value is not None and value is not False:
            command += [name] if value is True else [name, str(value)]
    return shlex.join(command)


def _refuse_dash(words: Sequence[str], topology: str | None) -> None:
    """Raise HP102 for an override that begins with a dash, such as `-training.lr=1`, which typer reads as option `-t`.

    `words` are the recipe and the overrides, for the hint.
    """
    if topology is not None and "=" in topology:
        raise BadValue(
            "an override must not begin with a dash",
            got=f"-t{topology}",
            allowed="key=value, for example training.lr=1e-4",
            hint=shlex.join(["hyper-parallel", "train", *words, f"t{topology}"]),
        )


def _train_recipe(
    recipe: Path,
    values: Sequence[str],
    plan: Path | None,
    dry_run: bool,
    no_calibrate: bool,
    no_code: bool,
) -> None:
    from hyper_parallel.hub import permit_stream

    loaded, saved = _load_with_plan(recipe, values, plan, no_code)
    permit_stream(loaded.recipe.data.streaming, str(loaded.recipe.data.source))
    if loaded.recipe.launch.launcher in ("local", "slurm") and "SLURM_STEP_ID" in os.environ:
        from hyper_parallel.runtime import join_srun

        join_srun()
    flags = ["--no-code"] if no_code else []
    flags += [] if plan is None else ["--plan", str(plan)]
    check_plan = (lambda _: None) if saved is None else saved.check
    _train(loaded, [*flags, str(recipe), *values], dry_run, no_calibrate, check_plan)


def _load_with_plan(
    recipe: Path, values: Sequence[str], plan: Path | None, no_code: bool
) -> tuple[LoadedRecipe, _SavedPlan | None]:
    loaded = load_any_recipe(recipe, values, no_code)
    if plan is None:
        return loaded, None
    saved = _SavedPlan(plan)
    saved.refuse_layout(values)
    layout = saved.overrides(loaded)
    planned = load_any_recipe(recipe, [*values, *layout], no_code)
    saved.refuse_replaced({_key(v): v for v in values if _key(v) in map(_key, layout)}, loaded.recipe, planned.recipe)
    return planned, saved


def _key(override: str) -> str:
    return override.partition("=")[0]


def load_any_recipe(path: Path, overrides: Sequence[str], no_code: bool, command: str = "train") -> LoadedRecipe:
    """Load a recipe or a LlamaFactory file; errors are those of `load_recipe` and `load_llamafactory`.

    With `no_code`, also raise CodeRefused (HP110) if the file names code. `command` is the running command, for hints.
    """
    from hyper_parallel.config import load_recipe, read_mapping, refuse_code, refuse_data_file
    from hyper_parallel.errors import RecipeUnreadable

    refuse_data_file(path, command)
    if "model_name_or_path" in read_mapping(path, RecipeUnreadable, "recipe"):
        from hyper_parallel.integration.llamafactory import load_llamafactory

        loaded = load_llamafactory(path, overrides)
    else:
        loaded = load_recipe(path, overrides)
    if no_code:
        refuse_code(loaded)
    return loaded


class _SavedPlan:
    """Plan file of `train --plan`, which determines the layout of the run."""

    def __init__(self, path: Path) -> None:
        from hyper_parallel.ir import Plan

        self._path, self._plan = str(path), Plan.load(path)

    def refuse_layout(self, overrides: Sequence[str]) -> None:
        """Raise PlanMismatch (HP307) for overrides of `parallel` and `overlap`, which the plan determines."""
        from hyper_parallel.errors import PlanMismatch

        for override in overrides:
            section = override.partition("=")[0].partition(".")[0]
            if section in ("parallel", "overlap"):
                raise PlanMismatch(
                    f"the command line sets keys of `{section}`, but the saved plan already determines them",
                    where=self._path,
                    got=override,
                    allowed="overrides outside of the sections `parallel` and `overlap`",
                    hint=f"repeat the command without `{override}`",
                )

    def refuse_replaced(self, overrides: Mapping[str, str], own: Recipe, planned: Recipe) -> None:
        """Raise PlanMismatch (HP307) for an override of `training` whose value the plan would replace by another one.

        `overrides` is a dict from key to override; `planned` is the recipe `own` with the values of the plan.
        """
        from hyper_parallel.errors import PlanMismatch

        for key, override in overrides.items():
            name = key.removeprefix("training.")
            if name == "tokens_per_step":  # the plan derives it from other batch numbers, and compares it itself
                continue
            if (value := getattr(planned.training, name)) != getattr(own.training, name):
                raise PlanMismatch(
                    f"the command line and the saved plan set `{key}` to different values",
                    where=self._path,
                    got=f"{override}; {value} in the plan",
                    hint=f"repeat the command without `{override}`",
                )

    def overrides(self, loaded: LoadedRecipe) -> list[str]:
        from hyper_parallel.planner import plan_overrides

        return plan_overrides(self._plan, loaded.recipe, loaded.where, self._path)

    def check(self, plan: Plan) -> None:
        from hyper_parallel.planner import check_saved_plan

        check_saved_plan(self._plan, plan, self._path)


def _train(
    loaded: LoadedRecipe,
    arguments: Sequence[str],
    dry_run: bool,
    no_calibrate: bool,
    check_plan: Callable[[Plan], None],
) -> None:
    from hyper_parallel.cli.submit_job import describe_submit, submit_job
    from hyper_parallel.trainer import prepare_job, under_torchrun

    launcher = "local" if under_torchrun() else loaded.recipe.launch.launcher
    main = os.environ.get("RANK", "0") == "0"
    console = printing_console(stderr=True, quiet=is_quiet())
    words = ["train", *arguments]
    progress = main and sys.stderr.isatty() and not is_quiet()
    checks = {"check_ranks": _ranks_check(words, dry_run), "check_plan": check_plan}
    job = prepare_job(loaded, progress=progress, **checks)
    from hyper_parallel.trainer import calibrate_first_run  # imports torch

    enable_garbage_collection()
    if not (dry_run or no_calibrate) and launcher == "local" and (line := calibrate_first_run(job)):
        console.print(line, soft_wrap=True)
        job = prepare_job(loaded, progress=progress, **checks)
    if main:
        from hyper_parallel.trainer import startup_panel

        console.print(startup_panel(job))
    if dry_run:
        if main:
            say(f"{job.plan.explain()}\n\n{describe_submit(launcher, job, words)}")
        return
    if launcher in ("torchrun", "slurm", "kubernetes"):
        submit_job(launcher, job, [*words, *_pinned(loaded, job)])
        return
    _run(job, loaded, launcher, console)


def _ranks_check(words: Sequence[str], dry_run: bool) -> Callable[[Recipe, int], None]:
    """Return a function that raises an error if this machine cannot run the ranks; for a dry run it does nothing."""

    def check_ranks(recipe: Recipe, ranks: int) -> None:
        from hyper_parallel.runtime import check_local_start  # imports torch

        if not dry_run:
            check_local_start(recipe, ranks, words)

    return check_ranks


def _run(job: Job, loaded: LoadedRecipe, launcher: str, console: Console) -> None:
    """Run a job and print its results; exit if it is interrupted, a file is not written, or torchrun started it."""
    from hyper_parallel.trainer import run_job, run_on_ray, under_torchrun
    from hyper_parallel.trainer.signals import Interrupted

    status, unwritten = 0, Unwritten()
    try:
        summary = run_on_ray(job, loaded) if launcher == "ray" else run_job(job)
    except Interrupted as error:
        status, summary = error.status, None
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(_interrupted(job, error))
    if summary is not None:
        _conclude(job, summary, console, unwritten)
        for error in (*summary.unwritten, *unwritten.errors):
            sys.stderr.write(error.render() + "\n")
            status = 1
    if under_torchrun():
        # Threads of the collective library can abort a normal exit after all work is done.
        os._exit(status or check_output())
    if status:
        raise typer.Exit(status)


def _pinned(loaded: LoadedRecipe, job: Job) -> list[str]:
    """Return the override that fixes the commit of a Hub model, so that all ranks use the same; [] for other models."""
    from hyper_parallel.hub import name_of_snapshot

    path = job.recipe.model.path
    name = None if path == loaded.recipe.model.path else name_of_snapshot(path)
    return [] if name is None else [f"model.path={name}"]


def _interrupted(job: Job, error: Interrupted) -> str:
    """Return a message for an interrupted run: its state and, if a checkpoint exists, the command that resumes it."""
    from hyper_parallel.cli.submit_job import torchrun_command
    from hyper_parallel.errors import RankHung
    from hyper_parallel.trainer import under_torchrun
    from hyper_parallel.trainer.checkpoints.manifest import steps

    if isinstance(error.__cause__, RankHung):  # a hung step never ends
        sys.stderr.write(error.__cause__.render() + "\n")
    if error.step is None and not steps(job.checkpoint_dir):
        return "interrupted: all ranks were stopped before a checkpoint was saved\n"
    outcome = "all ranks were stopped; checkpoints written so far are intact"
    if error.step is not None:
        outcome = f"ended after step {error.step}, whose checkpoint is saved"
    words = [str(job.output_dir.absolute() / "config.yaml"), "checkpoint.resume=must"]
    if job.recipe.checkpoint.from_dir:
        words.append("checkpoint.from_dir=null")
    command = "hyper-parallel train " + shlex.join(words)
    if under_torchrun():
        command = torchrun_command(job, ["train", *words])
    return f"interrupted: {outcome}\nhint: {command}\n"


def _next_command(job: Job) -> str | None:
    """Return the command that generates text with the exported model; None for a reward model or without an export."""
    recipe = job.recipe
    if recipe.stage == "rm" or not (job.output_dir / "export").is_dir():
        return None
    words = ["--chat"]
    if recipe.stage == "pt":
        words = ["--prompt", (recipe.sample_prompt or "Once").splitlines()[0]]
    return shlex.join(["hyper-parallel", "generate", str(recipe.output_dir), *words])


def _is_newer(path: Path, other: Path) -> bool:
    return path.is_file() and other.is_file() and path.stat().st_mtime >= other.stat().st_mtime


def _kernel_lines(kernels: Sequence[Sequence[str]]) -> Iterator[str]:
    if not kernels:
        return
    yield f"{len(kernels)} fused kernels of {sum(map(len, kernels))} operators"
    yield from (f"  {len(k)}: {', '.join(k)}" for k in kernels[:_MAX_KERNELS])
    if len(kernels) > _MAX_KERNELS:
        yield f"  {len(kernels) - _MAX_KERNELS} more in the report"


def _conclude(job: Job, summary: Summary, console: Console, unwritten: Unwritten) -> None:
    """Write the report of a run; print results on standard error, and the sample on standard output.

    With --quiet, print one line on standard output instead. Do nothing if the run had ended before and its report is
    up to date. Write errors are collected in `unwritten`.
    """
    from hyper_parallel.reports import write_report

    if summary.complete and _is_newer(job.output_dir / "report.html", job.output_dir / "run.json"):
        return
    first, last, pages = summary.first_eval_loss, summary.last_eval_loss, None
    if job.recipe.sample_answers:
        from hyper_parallel.trainer import answer_held_out, write_answers

        answers = answer_held_out(job)
        with unwritten.spare(job.output_dir):
            write_answers(job, answers)
    with unwritten.spare(job.output_dir):
        pages = write_report(job.output_dir)
    page = pages[0] if pages else "no report"
    if is_quiet():
        losses = f"loss {summary.loss:.4f}"
        if not math.isnan(last):
            losses += f", held-out loss {last:.4f}"
        say(f"{summary.steps} steps in {summary.seconds:.0f} s, {losses}: {page}")
    if not math.isnan(last):
        console.print(f"held-out loss {first:.4f} -> {last:.4f} in {summary.seconds:.0f} s")
    for line in _kernel_lines(summary.fused_kernels):
        console.print(line, soft_wrap=True)
    if pages is not None:
        console.print(f"report {page}\ntrace  {pages[1]}")
    if (command := _next_command(job)) is not None:
        console.print(f"next   {command}", soft_wrap=True)
    if job.recipe.sample_prompt is not None:
        from hyper_parallel.trainer import make_sample, write_sample

        sample = make_sample(job)
        with unwritten.spare(job.output_dir):
            write_sample(job, sample)
        if not is_quiet():
            say(sample)
