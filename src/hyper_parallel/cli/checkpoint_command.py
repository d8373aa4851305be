"""`hyper-parallel checkpoint`: list, verify, inspect and export checkpoints of a run; import a model as a checkpoint.

`list`, `verify` and `inspect` only read files; `export` and `import` build a model.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyper_parallel.cli.app import TrustRemoteCode, say
from hyper_parallel.errors import BadValue, CheckpointCorrupt, CheckpointFormat, RunUnreadable

if TYPE_CHECKING:
    from hyper_parallel.config import Lora
    from hyper_parallel.trainer.checkpoints.extra_state import CheckExtra

app = typer.Typer(
    name="checkpoint",
    help="List, verify, inspect, export and import checkpoints.",
    no_args_is_help=True,
)

RunDir = Annotated[
    Path,
    typer.Argument(
        help="Run directory written by `hyper-parallel train`, or its checkpoints directory.",
        show_default=False,
    ),
]


@app.command("list")
def list_(run_dir: RunDir) -> None:
    """Print one line per checkpoint. File sizes are compared with the manifest; contents are not read."""
    _print_steps(run_dir, contents=False)


@app.command()
def verify(run_dir: RunDir) -> None:
    """Compare every file with its checksum, and print one line per checkpoint.

    Exit with status 1 if a checkpoint is damaged, has an unknown file, or has an earlier format.
    """
    if not _print_steps(run_dir, contents=True):
        raise typer.Exit(1)


@app.command()
def inspect(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print the contents of a checkpoint: step and other values, and tensors with shape, dtype and shards per dim."""
    from hyper_parallel.serde import flatten
    from hyper_parallel.trainer.checkpoints import manifest as files
    from hyper_parallel.trainer.checkpoints.extra_state import read_extra
    from hyper_parallel.trainer.files import Damaged

    directory = _checkpoints(run_dir)
    steps = files.steps(directory)
    if step is not None and step not in steps:
        raise CheckpointCorrupt(
            f"the run has no checkpoint of step {step}",
            where=str(directory),
            got=step,
            allowed=steps,
            hint=f"--step {min(steps, key=lambda known: abs(known - step))}",
        )
    path = directory / files.step_name(steps[-1] if step is None else step)
    try:
        manifest, index = files.check(path, contents=False, check_extra=_extra_check(directory))
        extra = read_extra(path)
    except Damaged as error:
        raise CheckpointCorrupt(
            "the checkpoint is damaged",
            where=str(error),
            hint=f"hyper-parallel checkpoint list {shlex.quote(str(run_dir))}, then choose an intact one with --step",
        ) from None
    tensors = [
        {
            "name": name,
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            # Number of shards along each dim.
            "cut": [len({p.offset[d] for p in tensor.pieces}) for d in range(len(tensor.shape))],
            "files": sorted({p.file for p in tensor.pieces}),
        }
        for name, tensor in index.tensors.items()
    ]
    names = ("step", "world_size", "size_bytes", "fingerprint", "metrics")
    facts = {**{name: getattr(manifest, name) for name in names}, "extra": extra}
    if as_json:
        say(json.dumps(facts | {"tensors": tensors}, indent=1))
        return
    for key, value in flatten(facts):
        say(f"{key}: {json.dumps(value)}")
    for entry in tensors:
        shape, cut = ("x".join(map(str, entry[key])) or "number" for key in ("shape", "cut"))
        say(f"{entry['name']}  {shape}  {entry['dtype']}  shards {cut}")


@app.command("import")
def import_(
    model_dir: Annotated[
        Path,
        typer.Argument(help="Hugging Face directory with model weights or an adapter.", show_default=False),
    ],
    run_dir: Annotated[
        Path,
        typer.Argument(help="Directory to write; then train with checkpoint.from_dir=RUN_DIR."),
    ],
    dtype: Annotated[
        str,
        typer.Option(help="Parameter dtype: float32, or float64 for runs with training.dtype=float64."),
    ] = "float32",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a Hugging Face directory as the checkpoint of step 0, from which a run with any layout can start."""
    from hyper_parallel.trainer.checkpoints.conversion import import_checkpoint
    from hyper_parallel.trainer.files import written
    from hyper_parallel.trainer.run_directory import check_claimable, mark_run_directory

    check_claimable(run_dir)
    path = import_checkpoint(model_dir, run_dir / "checkpoints", dtype, trusted=trust_remote_code)
    with written(run_dir):
        mark_run_directory(run_dir)
    say(f"step 0: {path}")


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write. Default: RUN_DIR/export, or RUN_DIR/merged with --merge."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest intact one.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="config.json or its directory. Default: the model of the run."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer directory. Default: the run's or the model's tokenizer."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as trained.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="For a LoRA run: export the model with adapters merged.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory, or adapters as a peft directory. Runs in one process."""
    directory = _checkpoints(run_dir)
    lora = _lora_of(directory.parent)
    target = out if out is not None else directory.parent / ("merged" if merge else "export")
    if out is None:
        from hyper_parallel.trainer.run_directory import check_plain

        check_plain(target)
    if lora is None and merge:
        problem = "the run has no adapters to merge"
        raise BadValue(problem, where="--merge", got=str(run_dir), hint="leave out --merge")
    source = model or _base_model(directory.parent, has_adapters=lora is not None)
    tokenizer = tokenizer or _run_tokenizer(directory.parent)
    from hyper_parallel.trainer.checkpoints.conversion import export_checkpoint

    exported_step = export_checkpoint(
        directory, source, target, step, tokenizer, dtype,
        lora=lora, merge=merge, trusted=trust_remote_code,
    )  # fmt: skip
    say(f"step {exported_step}: {target}")


def _print_steps(run_dir: Path, *, contents: bool) -> bool:
    """Print one line per checkpoint, newest last; return whether all are intact.

    With `contents`, files are compared with their checksums instead of sizes, and an additional file counts as damage.
    """
    from hyper_parallel.trainer.checkpoints import manifest as files
    from hyper_parallel.trainer.files import Damaged
    from hyper_parallel.units import format_bytes, plural

    directory = _checkpoints(run_dir)
    check_extra, intact = _extra_check(directory), True
    for step in files.steps(directory):
        path = directory / files.step_name(step)
        try:
            manifest, index = files.check(path, contents=contents, check_extra=check_extra)
            if contents and (unexpected := files.unexpected(path, index)):
                raise Damaged(path / unexpected[0], "is not part of the checkpoint")
        except (Damaged, CheckpointFormat) as error:
            intact = False
            why = error.what if isinstance(error, CheckpointFormat) else error
            say(f"step {step:>8}  DAMAGED: {why}")
            continue
        state = "verified" if contents else "complete"
        size, ranks = format_bytes(manifest.size_bytes), plural(manifest.world_size, "rank")
        say(f"step {step:>8}  {state}  {size:>10}  saved by {ranks}")
    return intact


def _extra_check(directory: Path) -> CheckExtra | None:
    """Return the function that checks a checkpoint's values other than tensors; None without the run's config.yaml."""
    from hyper_parallel.trainer.checkpoints.extra_state import check_trainer_extra

    return check_trainer_extra if (directory.parent / "config.yaml").is_file() else None


def _checkpoints(run_dir: Path) -> Path:
    """Return the directory that contains the checkpoints of a run; raise RunUnreadable (HP603) if there are none."""
    from hyper_parallel.config import missing_run
    from hyper_parallel.trainer.checkpoints import manifest as files

    for directory in (run_dir / "checkpoints", run_dir):
        if files.steps(directory):
            return directory
    allowed = "a directory with checkpoints, such as checkpoints/step_00000010"
    command = "hyper-parallel train RECIPE.yaml checkpoint.every=10"
    raise missing_run(run_dir, "checkpoints", allowed, command)


def _lora_of(run_dir: Path) -> Lora | None:
    from hyper_parallel.config import Lora, validated

    path = run_dir / "config.yaml"
    if not path.is_file() or (settings := _recipe(path).get("lora")) is None:
        return None
    return validated(Lora, settings, lambda key: f"{path}: lora.{key}", lambda key, value, _: f"{key}: {value}")


def _base_model(run_dir: Path, *, has_adapters: bool) -> Path:
    """Return the model directory stored in a run directory; for adapters and older runs, `model.path` of the recipe."""
    if not has_adapters and (run_dir / "model" / "config.json").is_file():
        return run_dir / "model"
    return _model_path(run_dir / "config.yaml")


def _run_tokenizer(run_dir: Path) -> Path | None:
    from hyper_parallel.trainer.data import has_tokenizer

    return run_dir / "model" if has_tokenizer(run_dir / "model") else None


def _recipe(path: Path) -> dict[str, Any]:
    from hyper_parallel.config import read_mapping

    return read_mapping(path, RunUnreadable, "recipe of the run")


def _model_path(recipe: Path) -> Path:
    """Return `model.path` of the recipe of a run; raise RunUnreadable (HP603) if the recipe does not name a model."""
    from hyper_parallel.hub import fetch, parse_name

    model = _recipe(recipe).get("model") if recipe.is_file() else None
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        raise RunUnreadable(
            "the model of the run is unknown, because its config.yaml is missing or does not name one",
            where=str(recipe),
            hint=f"hyper-parallel checkpoint export {shlex.quote(str(recipe.parent))} --model MODEL_DIR",
        )
    name = parse_name(path)
    return Path(path) if name is None else fetch(name, "model", where=f"{recipe}: model.path")
