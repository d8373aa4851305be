"""Directory of a run: names that belong to the run, its lock, and checks before files are written or removed.

The marker is a small file that identifies the directory of a run. A missing or empty directory is created and marked. A
directory with other files but no marker is rejected before data is prepared or a rank starts. Exceptions are log files,
files such as `.gitkeep`, and the folders `data.cache_dir` and `offload.flash_dir`. In a marked directory the names
below belong to the run, and all other files are kept.

A part of a run consists of the steps trained by one process, with the same recipe and plan:

  RUN_DIR/parts/step_00000000/    config.yaml, plan.json, part.json of the steps after step 0
  RUN_DIR/parts/step_00000120/    the same files of a process that resumed from the checkpoint of step 120

config.yaml and plan.json in RUN_DIR belong to the last part that has trained a step.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import LoadedRecipe, Recipe, paths_read
from hyper_parallel.errors import Contradiction, OutputNotWritable, RunInUse, written
from hyper_parallel.owned_folder import (
    MARKER,
    Marker,
    Replacement,
    file_facts,
    foreign_files,
    read_marker,
    remove_files,
    remove_finished,
    unused_path,
    write_marker,
)
from hyper_parallel.received import holds_text
from hyper_parallel.serde import write_text
from hyper_parallel.trainer.checkpoints import manifest as checkpoints
from hyper_parallel.trainer.files import copy_files, inode

_log = logging.getLogger(__name__)

RUN: Final = "run"
_RECIPE: Final = "config.yaml"
_SAMPLE: Final = "sample.txt"
_KEPT_FILES: Final = (
    "config.yaml", "plan.json", "data.json", "predicted_timeline.json", "reference.npy", "reference_holdout.npy",
    "job.sbatch", "job.yaml", "comparison.html", ".run.lock", ".run.owner",
)  # fmt: skip
"""Files that a run replaces, but does not remove when it starts over (`checkpoint.resume=never`)."""
_CLEARED_FILES: Final = (
    "metrics.jsonl", "eval.jsonl", "timeline.json", "offload_predicted.json", "offload_measured.json", "sample.txt",
    "answers.json", "run.json", "report.html", "trace.json", "trackers.json",
)  # fmt: skip
"""Files that a run removes when it starts over."""
_CLEARED_FOLDERS: Final = {
    "tensorboard": r"events\.out\.tfevents\..*",
    "profile": r"rank\d+\.json",
    "parts": r"\.?step_\d+(\.tmp|\.old)?/(config\.yaml|(plan|part|\.hyper_parallel)\.json)",
    "rollouts": r"begin\.json|end|step_\d+\.\d+\.(safetensors|part)|timeline\.\d+\.json",
}
"""Folders that a run clears when it starts over, with patterns of the files that belong to the run."""
_OTHER_FOLDERS: Final = (
    "checkpoints", "reference", "export", "model", "merged", "logs", "wandb", "mlruns",
)  # fmt: skip
_FILLED: Final = ("data.cache_dir", "offload.flash_dir")
"""Recipe keys of folders that a run fills; they may be inside the run directory."""
_LOGS: Final = re.compile(r".*\.(log|out|err)|error\.json|nohup\.out")
_HARMLESS: Final = re.compile(
    r"lost\+found|\.gitkeep|\.keep|\.gitignore|\.DS_Store|\.nfs\w+|"
    rf"\.run\.(lock|owner)|\.{re.escape(MARKER)}\.\d+\.part"
)
_PARTIAL: Final = re.compile(r"\.(.+)\.\d+\.part")
"""Names of partial files that `write_text` creates."""
_RANK_LOG: Final = re.compile(r"logs/(rank_\d+\.log|restart_\d+(/.*)?)")


def check_run_directory(loaded: LoadedRecipe) -> None:
    """Check, without changes on disk, that a run can use its output directory without loss of other files.

    Raises:
        OutputNotWritable: HP105 for a directory with files but no marker, symbolic links among its outputs, or other
            files in a folder that would be replaced.
        Contradiction: HP104 when the recipe reads files that the run would replace.
    """
    recipe = loaded.recipe
    place = Path(recipe.output_dir)
    check_claimable(place, recipe)
    if marked := _is_marked(place):
        _check_links(place)
    _check_sources(loaded, place)
    if not marked:
        return
    if not keeps_model(recipe):
        Replacement(place / "model", "model", "the model directory of the run").check()
    if recipe.checkpoint.export or recipe.checkpoint.resume == "never":
        Replacement(place / "export", "export", "the export directory", ("export", "adapter")).check()
    if recipe.checkpoint.resume == "never":
        _check_checkpoints(place / "checkpoints")


def mark_run_directory(place: Path) -> None:
    """Write the marker of a run, unless it exists, into a directory that has passed `check_run_directory`."""
    if not _is_marked(place):
        write_marker(place, Marker(RUN))


def claim_run_directory(place: Path, recipe: Recipe) -> None:
    """Create a run directory and write its marker, unless the directory already has a marker.

    Raises:
        OutputNotWritable: HP105 for a directory with other files but without a marker.
    """
    place.mkdir(parents=True, exist_ok=True)
    check_claimable(place, recipe)
    mark_run_directory(place)


def write_editable(path: Path, text: str) -> None:
    """Write a text file of a run; a file that the user has edited to another text is renamed, not overwritten."""
    place = path.parent
    known = _known(place)
    is_edited = path.is_file() and file_facts(path) != known.get(path.name)
    if is_edited and not holds_text(path, text):
        names = (place / f"{path.stem}.edited-{n}{path.suffix}" for n in itertools.count(1))
        edited = next(name for name in names if not os.path.lexists(name))
        path.rename(edited)
        _log.warning("%s was edited after the run wrote it; the edited file is kept as %s", path, edited.name)
    write_text(path, text)
    write_marker(place, Marker(RUN, {**known, path.name: file_facts(path)}))


def _known(place: Path) -> Mapping[str, tuple[int, str]]:
    """Return size and checksum of each file written by `write_editable`, by file name."""
    marker = read_marker(place)
    return {} if marker is None or marker.files is None else marker.files


def keeps_model(recipe: Recipe) -> bool:
    """Return whether `model.path` of the recipe is in the run's own `model` folder, which must then be kept."""
    model_dir = Path(recipe.output_dir, "model")
    return model_dir.is_dir() and _relative(Path(recipe.model.path), model_dir) is not None


def check_plain(path: Path) -> None:
    """Raise OutputNotWritable (HP105) if a folder of a run directory is a symbolic link."""
    if path.is_symlink():
        raise _linked_elsewhere(path.parent, [path.name])


def clear_run_directory(place: Path) -> list[str]:
    """Remove results, export, model and checkpoints of an earlier run; return the names of cleared entries.

    An edited sample.txt, logs and `_KEPT_FILES` stay.
    """
    removed = []
    known = _known(place)
    is_own = lambda path: path.name != _SAMPLE or known.get(_SAMPLE) == file_facts(path)  # noqa: E731
    for name in _CLEARED_FILES:
        path = place / name
        if path.is_file() and not path.is_symlink() and is_own(path):
            path.unlink()
            removed.append(name)
    for name, pattern in _CLEARED_FOLDERS.items():
        if (place / name).is_dir():
            checkpoints.remove_all(place / name / "policy")
            remove_files(place / name, lambda n, p=pattern: bool(re.fullmatch(p, n)))  # type: ignore[misc]
            removed.append(name)
    for name in ("export", "model"):
        if (place / name).is_dir():
            remove_finished(place / name)
            removed.append(name)
    if (place / "checkpoints").is_dir():
        checkpoints.remove_all(place / "checkpoints")
        removed.append("checkpoints")
    return removed


def _is_marked(place: Path) -> bool:
    marker = read_marker(place)
    return marker is not None and marker.kind == RUN


def check_claimable(place: Path, recipe: Recipe | None = None) -> None:
    """Raise OutputNotWritable (HP105) for a directory with files but without the marker of a run.

    Log files, files such as `.gitkeep`, and `data.cache_dir` and `offload.flash_dir` of the recipe, are permitted.
    """
    if not place.is_dir() or _is_marked(place):
        return
    own = set()
    for path in (recipe.data.cache_dir, recipe.offload.flash_dir) if recipe is not None else ():
        inside = None if path is None else _relative(Path(path), place)
        own.update(inside.parts[:1] if inside is not None else ())
    entries = list(itertools.islice(_foreign(place, own), 3))
    if not entries or _is_marked(place):  # rank 0 may have written the marker in the meantime
        return
    if MARKER in os.listdir(place) and os.environ.get("RANK", "0") != "0":  # noqa: PTH208
        return  # on a shared file system the marker's content may appear later than its name
    marker = read_marker(place)
    kind = "" if marker is None else f" (its marker says `{marker.kind}`)"
    raise OutputNotWritable(
        f"the output directory contains files, but is not the directory of a run{kind}",
        where=str(place) if recipe is None else f"output_dir={place}",
        got=entries,
        allowed="a missing or empty directory, or the directory of a run",
        hint=_alternative_hint(place, recipe),
    )


def _foreign(place: Path, own: Collection[str]) -> Iterator[str]:
    """Yield the entries of a directory except names in `own`, logs, empty folders, and files such as `.gitkeep`."""
    for path in sorted(place.iterdir()):
        name = path.name
        if name in own or (_HARMLESS.fullmatch(name) and not path.is_symlink()):
            continue
        if path.is_dir() and not path.is_symlink():
            files = [f"{name}/{inner}" for inner in itertools.islice(foreign_files(path, ()), 10_000)]
            logs = (_LOGS.fullmatch(Path(f).name) and not _RANK_LOG.fullmatch(f) for f in files)
            if files and not all(logs):
                yield f"{name}/"
        elif not _LOGS.fullmatch(name) or path.is_symlink():
            yield name


def _unused_name(place: Path) -> Path:
    """Return a path that does not exist: next to `place`, or inside `place` if the current directory is in `place`."""
    inside = Path.cwd().is_relative_to(os.path.realpath(place))
    base = place / "run" if inside else place
    names = (Path(f"{base}-{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([base] if inside else [], names) if not os.path.lexists(p))


def _alternative_hint(place: Path, recipe: Recipe | None) -> str:
    """Return a hint with an unused directory: recipe overrides or, without a recipe, a sentence.

    The overrides include `checkpoint.from_dir` if `place` has checkpoints to resume.
    """
    if recipe is None:
        return f"choose another directory, such as {shlex.quote(str(_unused_name(place)))}"
    words = [f"output_dir={_unused_name(place)}"]
    if (
        recipe.checkpoint.resume != "never"
        and checkpoints.steps(place / "checkpoints")
        and (place / "config.yaml").is_file()
    ):
        words.append(f"checkpoint.from_dir={place}")
    return shlex.join(words)


def _check_links(place: Path) -> None:
    """Raise HP105 if an output of a run is a symbolic link, through which the run would write elsewhere."""
    names = (*_KEPT_FILES, *_CLEARED_FILES, *_CLEARED_FOLDERS, *_OTHER_FOLDERS)
    links = [name for name in names if (place / name).is_symlink()]
    for name in ("logs", *_CLEARED_FOLDERS, "checkpoints"):
        if not links and (place / name).is_dir():
            links += _links_below(place / name, 1 if name == "checkpoints" else 3)
    if links:
        raise _linked_elsewhere(place, links)


def _linked_elsewhere(place: Path, links: list[str]) -> OutputNotWritable:
    return OutputNotWritable(
        "outputs in the run directory are symbolic links, so files would be written outside of the directory",
        where=str(place),
        got=links[:3],
        allowed="`output_dir` itself may be a link to another disk",
        hint=shlex.join(["rm", *(str(place / link) for link in links[:50])]),
    )


def _links_below(folder: Path, depth: int) -> list[str]:
    """Return the symbolic links up to `depth` levels below a folder, as paths that begin with the folder's name."""
    links = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                links.append(f"{folder.name}/{entry.name}")
            elif depth > 1 and entry.is_dir():
                links += [f"{folder.name}/{n}" for n in _links_below(Path(entry.path), depth - 1)]
    return links


def _check_sources(loaded: LoadedRecipe, place: Path) -> None:
    """Raise HP104 if the run would replace or remove a file that its recipe reads."""
    recipe = loaded.recipe
    read = [*paths_read(recipe), ("recipe", str(loaded.path))]
    parents = {o.partition(" ")[2] for o in loaded.origins.values() if o.startswith("extends ")}
    read += [("extends", str(loaded.path.parent / name)) for name in parents]
    filled = dict(zip(_FILLED, (recipe.data.cache_dir, recipe.offload.flash_dir), strict=True))
    hard = {inode(place / name) for name in (*_CLEARED_FILES, *_KEPT_FILES) if name != _RECIPE} - {None}
    over = recipe.checkpoint.resume == "never"
    for key, name in (*read, *filled.items()):
        path = None if name is None else Path(name).expanduser()
        if path is None or not (key in filled or path.exists()):
            continue
        targets = [_relative(p, place) for p in (path, *_linked(path))]
        if any(_is_written(p, key, over=over) for p in targets) or inode(path) in hard:
            is_key = key in loaded.origins
            files = f"files of `{key}`, which are" if is_key else "the recipe or its parent, which is"
            raise Contradiction(
                f"the run would replace or remove {files} among the outputs in `output_dir`",
                where=loaded.where(key) if is_key else str(loaded.path),
                got=f"{key}={path}, output_dir={place}" + (", checkpoint.resume=never" if over else ""),
                hint=shlex.quote(f"output_dir={_unused_name(place)}"),
            )


def _is_written(path: Path | None, key: str, *, over: bool) -> bool:
    """Return whether the run would replace or remove the input of recipe key `key`.

    `path` is relative to the run directory; None: outside of it. With `over`, the run removes an earlier run.
    """
    if path is None or (key == "recipe" and path == Path(_RECIPE)):
        return False  # the recipe is rewritten with the same values
    if not over and key == "checkpoint.from_dir" and path == Path():
        return False
    names = (*_CLEARED_FILES, *_KEPT_FILES, *_CLEARED_FOLDERS, *_OTHER_FOLDERS)
    if not path.parts:
        return key not in _FILLED
    if not over and path.parts[0] == "model" and key in ("model.path", "data.tokenizer"):
        return False  # the folder is kept, or its files are copied before replacement
    return path.parts[0] in names


def _check_checkpoints(folder: Path) -> None:
    for step in checkpoints.steps(folder):
        name = checkpoints.step_name(step)
        if foreign := checkpoints.foreign(folder / name):
            raise OutputNotWritable(
                "`checkpoint.resume=never` would remove a checkpoint folder that contains other files",
                where=str(folder / name),
                got=foreign[:3],
                hint=shlex.join(["mv", str(folder / name), str(unused_path(folder.parent / f"{name}.moved"))]),
            )


def _linked(path: Path) -> Iterator[Path]:
    """Yield the symbolic links among the first 1,000 entries of a folder, for example links to weight files."""
    if path.is_dir():
        with os.scandir(path) as entries:
            yield from (Path(e.path) for e in itertools.islice(entries, 1000) if e.is_symlink())


def _relative(path: Path, folder: Path) -> Path | None:
    """Return `path` relative to `folder`, after resolving symbolic links; None if `path` is not in `folder`."""
    real, base = Path(os.path.realpath(path.expanduser())), Path(os.path.realpath(folder))
    return real.relative_to(base) if real.is_relative_to(base) else None


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Create a run directory, lock it inside the context, and remove incomplete files of a killed process.

    If this process is killed, the lock holds until the last rank that it forked has ended.

    Raises:
        RunInUse: HP720 naming the process that holds the lock.
        OutputNotWritable: HP105 when the directory cannot be written.
    """
    from filelock import FileLock, Timeout

    lock, owner = FileLock(directory / ".run.lock"), directory / ".run.owner"
    with written(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            owner_text = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
            raise RunInUse(
                "another run writes to this directory",
                where=str(directory),
                got=owner_text,
                hint=f"wait until it ends, or set {shlex.quote(f'output_dir={_unused_name(directory)}')}",
            ) from None
        write_text(owner, f"process {os.getpid()} on {platform.node()}")
    _remove_partials(directory)
    try:
        yield
    finally:
        with suppress(OSError):
            owner.unlink(missing_ok=True)
        lock.release()


def _remove_partials(directory: Path) -> None:
    for path in directory.glob(".*.part"):
        match = _PARTIAL.fullmatch(path.name)
        is_own = match is not None and match[1] in (*_CLEARED_FILES, *_KEPT_FILES)
        if is_own and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                path.unlink()


_PARTS: Final = "parts"
_PART_FILES: Final = ("config.yaml", "plan.json")
_PART_FOLDER: Final = re.compile(r"step_(\d{8,15})")


class RunPart:
    """Part of a run: the steps trained by one process, which starts or resumes after `step`.

    `changed` contains the values of `run_facts` that differ from those in the checkpoint from which the part resumes.

    Attributes:
        is_late: Whether config.yaml and plan.json in the run directory describe an earlier part until this part has
            trained a step.
    """

    def __init__(self, directory: Path, step: int, changed: dict[str, Any]) -> None:
        self._directory, self._step, self._changed = directory, step, changed
        self.is_late = step > 0 and (directory / _PART_FILES[0]).is_file()

    def keep(self) -> None:
        """Copy config.yaml and plan.json into the folder of this part, add part.json, and remove later parts."""
        parts = self._directory / _PARTS
        parts.mkdir(exist_ok=True)
        for path in parts.iterdir():
            match = _PART_FOLDER.fullmatch(path.name)
            if match and int(match[1]) > self._step:
                remove_finished(path)
        folder = Replacement(parts / f"step_{self._step:08d}", "part", "the record of this part")
        partial = folder.open()
        with folder.discarded_on_error():
            copy_files(self._directory, partial, _PART_FILES)
            facts = {"step": self._step, "changed": self._changed}
            write_text(partial / "part.json", json.dumps(facts, indent=1) + "\n")
            folder.publish()
