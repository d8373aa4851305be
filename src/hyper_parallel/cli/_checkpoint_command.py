"""`hyper-parallel checkpoint`: list, verify and export the checkpoints of a run.

`list` and `verify` read files only; `export` builds the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyper_parallel.errors import RunUnreadable

if TYPE_CHECKING:
    from hyper_parallel.trainer.checkpoints._manifest import Manifest

app = typer.Typer(
    name="checkpoint", help="List, verify and export checkpoints.", no_args_is_help=True
)

RunDir = Annotated[
    Path,
    typer.Argument(
        help="Directory that `hyper-parallel train` wrote, or its checkpoints directory.",
        show_default=False,
    ),
]


@app.command("list")
def list_(run_dir: RunDir) -> None:
    """Print one line per checkpoint; sizes are compared with the manifest, contents are not read."""
    _print_steps(run_dir, contents=False)


@app.command()
def verify(run_dir: RunDir) -> None:
    """Compare every file with its checksum; ends with status 1 when a checkpoint is damaged."""
    if not _print_steps(run_dir, contents=True):
        raise typer.Exit(1)


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; default RUN_DIR/export.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step; default the newest intact one.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of config.json, or such a file; default: as the run keeps it."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory of the tokenizer; default: that of the run or the model."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default as trained.")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face directory, in one process."""
    directory = _checkpoints(run_dir)
    source = model if model is not None else _recipe_model(directory.parent)
    target = out if out is not None else directory.parent / "export"
    from hyper_parallel.trainer.checkpoints._export import export_checkpoint

    found = export_checkpoint(directory, source, target, step, tokenizer, dtype)
    typer.echo(f"step {found}: {target}")


def _print_steps(run_dir: Path, *, contents: bool) -> bool:
    """One line per checkpoint, newest last; whether all are intact."""
    from hyper_parallel.trainer._files import Damaged, check_files
    from hyper_parallel.trainer.checkpoints import _manifest as files
    from hyper_parallel.units import format_bytes

    directory = _checkpoints(run_dir)
    intact = True
    for step in files.steps(directory):
        path = directory / files.step_name(step)
        try:
            manifest: Manifest = files.read_manifest(path)
            check_files(path, manifest.files, sorted(manifest.files) if contents else ())
        except Damaged as error:
            intact = False
            typer.echo(f"step {step:>8}  DAMAGED: {error}")
            continue
        size = format_bytes(sum(entry.size_bytes for entry in manifest.files.values()))
        state = "verified" if contents else "complete"
        ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
        typer.echo(f"step {step:>8}  {state}  {size:>10}  saved by {ranks}")
    return intact


def _checkpoints(run_dir: Path) -> Path:
    """The directory that holds the steps.

    Raises:
        RunUnreadable: HP603 when the run has none.
    """
    from hyper_parallel.trainer.checkpoints import _manifest as files

    for directory in (run_dir / "checkpoints", run_dir):
        if files.steps(directory):
            return directory
    raise RunUnreadable(
        "the run has no checkpoints",
        where=str(run_dir),
        allowed="a directory with checkpoints/step_00000010 and the like",
    )


def _recipe_model(run_dir: Path) -> Path:
    """The model as the run keeps it beside the checkpoints; an older run has only `model.path` of its recipe."""
    import yaml

    if (run_dir / "model" / "config.json").is_file():
        return run_dir / "model"
    path = run_dir / "config.yaml"
    try:
        return Path(yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["path"])
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise RunUnreadable(
            f"config.yaml of the run does not name its model ({error})",
            where=str(path),
            hint="hyper-parallel checkpoint export RUN_DIR --model MODEL_DIR",
        ) from None
