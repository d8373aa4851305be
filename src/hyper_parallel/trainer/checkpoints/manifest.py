"""Checkpoint directories on disk: names, manifest, verification, publication, replacement. Imports no framework.

checkpoints/
    step_00000010/               published: complete, or damaged after it was written
        manifest.json            format, step, fingerprint, checksums of the other JSON files and of itself
        index.json               shapes and dtypes of tensors; file, bytes and checksum of their pieces
        extra.json               JSON values of the trainer or of a user's loop, such as the position in the data
        rank_00000.safetensors   pieces of tensors, at most one file per rank
    .step_00000020.tmp/          in progress, or left over from a killed run
    .step_00000010.old/          replaced by a newer checkpoint of the same step, until that is published
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from hyper_parallel import serde
from hyper_parallel.errors import CheckpointFormat, OutputNotWritable
from hyper_parallel.owned_folder import move_away, remove_files
from hyper_parallel.received import Limits, parse_json, read_json, read_text
from hyper_parallel.trainer.checkpoints.extra_state import (
    EXTRA,
    EXTRA_LIMITS,
    CheckExtra,
    read_extra,
)
from hyper_parallel.trainer.checkpoints.index import (
    INDEX,
    Index,
    check_pieces,
    most_index_bytes,
    read_index,
)
from hyper_parallel.trainer.files import Damaged, FileEntry, check_files, inode
from hyper_parallel.units import MiB

MANIFEST = "manifest.json"
FORMAT = 2
START_OVER: Final = "checkpoint.resume=never checkpoint.from_dir=null"
"""Recipe overrides with which a run starts over, also if its recipe sets `checkpoint.from_dir`; for hints."""

_LIMITS: Final = Limits(MiB, num_elements=10_000)
_Count = Annotated[int, Field(ge=0)]

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(tmp|old)")
_FILES = re.compile(r"(manifest|index|extra)\.json|rank_\d{5,}\.safetensors")
"""Pattern of the names of a checkpoint's files."""
_KEYS = {"manifest.json": "fingerprint", "index.json": "tensors"}
"""Key by which each of these files is recognized, because other software writes files of the same names."""
_READ_LIMITS: Final = Limits(num_bytes=1 << 26, num_elements=5_000_000)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a complete checkpoint.

    Attributes:
        format: Version of the checkpoint format.
        step: Number of completed optimizer steps.
        world_size: Number of ranks that saved the checkpoint.
        size_bytes: Bytes of all files except the manifest.
        fingerprint: Values about model and optimizer that must be equal in a run that resumes from the checkpoint.
        metrics: Metrics at this step if the run keeps the best checkpoint, else empty.
        files: Sizes and checksums of the index and the extra values, by file name.
    """

    format: int
    step: _Count
    world_size: Annotated[int, Field(ge=1)]
    size_bytes: _Count
    fingerprint: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)


def step_name(step: int) -> str:
    """Return the directory name of a step, for example `step_00000010`."""
    return f"step_{step:08d}"


def temporary(directory: Path, step: int) -> Path:
    """Return the hidden path at which the checkpoint of a step is written before it is published."""
    return directory / f".{step_name(step)}.tmp"


def steps(directory: Path) -> list[int]:
    """Return the steps with a published checkpoint, in ascending order; [] if the directory does not exist."""
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(p.name) for p in directory.iterdir() if p.is_dir())
    return sorted(int(m.group(1)) for m in matches if m)


def write_synced(path: Path, text: str) -> None:
    """Write a text file and fsync it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def json_text(value: Any) -> str:
    """Return indented JSON text of a value, with sorted keys."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def encode_manifest(manifest: Manifest) -> str:
    """Return the manifest as JSON text that includes its own checksum."""
    values = serde.encode(manifest)
    own = hashlib.sha256(json_text(values).encode()).hexdigest()
    return json_text(values | {"sha256": own})


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify the manifest of a published checkpoint.

    Raises:
        Damaged: The manifest is missing, altered, or belongs to another step or format.
        CheckpointFormat: HP740 when an earlier version wrote it.
    """
    path = checkpoint / MANIFEST
    try:
        text = read_text(path, _LIMITS)
        values = parse_json(text, _LIMITS)
        own_checksum = values.pop("sha256", None)
        if own_checksum is None and values.get("format") == 1:
            raise CheckpointFormat(
                "the checkpoint was written in an earlier format, whose index is a pickle",
                where=str(checkpoint),
                got="format 1",
                allowed=f"format {FORMAT}",
                hint="run `hyper-parallel checkpoint export` of the version that wrote it, and train the export",
            )
        manifest = serde.decode(Manifest, values)
    except FileNotFoundError:
        raise Damaged(path, "missing") from None
    except (OSError, ValueError, AttributeError) as error:
        raise Damaged(path, f"not readable as a manifest ({error})") from None
    if encode_manifest(manifest) != text:
        raise Damaged(path, "content differs from its checksum")
    if manifest.format != FORMAT or step_name(manifest.step) != checkpoint.name:
        got = f"format {manifest.format} and step {manifest.step}"
        raise Damaged(path, f"{got} in {checkpoint.name}; this version reads format {FORMAT}")
    return manifest


def check(
    checkpoint: Path,
    *,
    contents: bool = True,
    share: tuple[int, int] = (0, 1),
    check_extra: CheckExtra | None = None,
) -> tuple[Manifest, Index]:
    """Verify a checkpoint; return its manifest and index.

    Args:
        checkpoint: Directory of the checkpoint.
        contents: Whether to compare the bytes of tensors with their checksums, in addition to file sizes.
        share: (i, n): compare only every n-th piece, so that n ranks can divide the reading.
        check_extra: Validator of the extra values. With a validator, a checkpoint of a step after 0 must also have
            optimizer state. None: accept any values and a missing optimizer state.

    Raises:
        Damaged: For the first file that is missing, differs from its checksum or has invalid content.
        CheckpointFormat: HP740 when an earlier version wrote it.
    """
    manifest = read_manifest(checkpoint)
    expected = {INDEX, EXTRA}
    if set(manifest.files) != expected:
        raise Damaged(checkpoint / MANIFEST, f"lists {sorted(manifest.files)}, not {sorted(expected)}")
    limits = {INDEX: most_index_bytes(checkpoint), EXTRA: EXTRA_LIMITS.num_bytes}
    for name, entry in manifest.files.items():
        if entry.size_bytes > limits[name]:
            raise Damaged(checkpoint / name, f"{entry.size_bytes:,} bytes, more than {limits[name]:,}")
    check_files(checkpoint, manifest.files, sorted(expected))
    extra = read_extra(checkpoint)
    if check_extra is not None and (problem := check_extra(manifest.step, extra)):
        raise Damaged(checkpoint / EXTRA, problem)
    index = read_index(checkpoint)
    if check_extra is not None and manifest.step and not index.groups:
        raise Damaged(checkpoint / INDEX, "no state of the optimizer, which the trainer saves")
    if contents:
        check_pieces(checkpoint, index, share)
    return manifest, index


def unexpected(checkpoint: Path, index: Index) -> list[str]:
    """Return the names of files in a checkpoint folder that are not part of the checkpoint with this index."""
    known = {MANIFEST, INDEX, EXTRA, *index.by_file()}
    return sorted(p.name for p in checkpoint.iterdir() if p.name not in known)


def foreign(checkpoint: Path) -> list[str]:
    """Return the names of entries in a folder that belong to no checkpoint; [] if the path is not a folder.

    Files of a checkpoint, which may be damaged, are recognized by name. If neither manifest nor index has its expected
    key, all entries are returned. For a symbolic link, return a text that says so.
    """
    if checkpoint.is_symlink():
        return ["a symbolic link"]
    if not checkpoint.is_dir():
        return []
    entries = sorted(checkpoint.iterdir())
    strange = [p.name for p in entries if not _FILES.fullmatch(p.name) or not _is_plain(p)]
    if strange or not entries or any(_has_key(checkpoint / n, k) for n, k in _KEYS.items()):
        return strange
    return [p.name for p in entries]


def check_own(checkpoint: Path) -> None:
    """Raise OutputNotWritable (HP105) if a folder to replace is a link or has files that belong to no checkpoint."""
    if entries := foreign(checkpoint):
        raise OutputNotWritable(
            "the checkpoint would replace a folder with files that are not part of a checkpoint",
            where=str(checkpoint),
            got=entries[:3],
            hint=move_away(checkpoint),
        )


def publish(directory: Path, step: int) -> None:
    """Rename a written checkpoint to its final name, replacing an earlier checkpoint of the same step.

    Raises:
        OutputNotWritable: HP105 when an existing folder of that name has files that belong to no checkpoint.
    """
    written, target = temporary(directory, step), directory / step_name(step)
    replaced = directory / f".{step_name(step)}.old"
    for place in (target, replaced):
        check_own(place)
    serde.sync_directory(written)
    remove_parts(replaced)
    if target.exists():
        target.rename(replaced)
    written.rename(target)
    serde.sync_directory(directory)
    remove_parts(replaced)


def remove(directory: Path, step: int) -> None:
    """Remove a published checkpoint.

    The folder is hidden by a rename first, so a killed run leaves no partial checkpoint. A folder with files that
    belong to no checkpoint stays, and a warning names these files.
    """
    target, hidden = directory / step_name(step), temporary(directory, step)
    if entries := foreign(target):
        _log.warning("%s is not removed: it holds %s", target, ", ".join(entries[:3]))
        return
    target.rename(hidden)
    remove_parts(hidden)


def remove_all(directory: Path) -> None:
    """Remove all checkpoints in a folder, leftovers of killed runs, and the folder itself if no other files remain."""
    if not directory.is_dir():
        return
    for step in steps(directory):
        remove(directory, step)
    for path in _hidden(directory):
        remove_parts(path)
    remove_files(directory, lambda name: False)


def clean(directory: Path) -> None:
    """Remove leftovers of killed runs, and restore checkpoints whose replacement was interrupted."""
    for path in _hidden(directory):
        target = directory / path.name[1:].partition(".")[0]
        if path.suffix == ".old" and not target.exists() and not foreign(path):
            path.rename(target)
        else:
            remove_parts(path)


def _hidden(directory: Path) -> list[Path]:
    """Return the hidden checkpoint folders, such as `.step_00000010.tmp`."""
    matches = [p for p in directory.iterdir() if _HIDDEN.fullmatch(p.name) and not p.is_symlink()]
    return [p for p in matches if p.is_dir()]


def remove_parts(checkpoint: Path) -> None:
    """Remove the files of a checkpoint, and its folder if that is then empty."""
    remove_files(checkpoint, lambda name: bool(_FILES.fullmatch(name)))


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _has_key(path: Path, key: str) -> bool:
    """Return whether a file is a JSON object with `key`; for a file above 64 MiB, whether it begins with `{`."""
    try:
        if path.stat().st_size > _READ_LIMITS.num_bytes:
            with path.open("rb") as file:
                return file.read(1) == b"{"
        return key in read_json(path, _READ_LIMITS)
    except (OSError, ValueError, TypeError):
        return False


class CheckpointDirectory:
    """Folder in which checkpoints are written; detects that the folder or its parent was removed or replaced.

    Args:
        path: The folder, created by `prepare` if needed. The parent folder is created only if it did not exist at
            construction. A run directory that was removed during the run is therefore not recreated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identities: dict[Path, tuple[int, int] | None] = {}
        if path.parent.is_dir():
            self._identities[path.parent] = inode(path.parent)

    def prepare(self, step: int) -> None:
        """Remove leftovers of killed runs, and create the hidden folder for the checkpoint of `step`.

        Raises:
            OutputNotWritable: HP105 when the folder was replaced, or its parent removed or replaced, during the run,
                or when the checkpoint would replace a folder with files that belong to no checkpoint.
        """
        for folder, identity in self._identities.items():
            if folder == self._path and not folder.exists():
                _log.warning("%s was removed with its checkpoints; it is created again", folder)
            elif inode(folder) != identity:
                raise OutputNotWritable(
                    "the checkpoint directory or its parent was removed or replaced during the run",
                    where=str(folder),
                    hint=f"ls -ld {shlex.quote(str(folder))}",
                )
        self._path.mkdir(parents=self._path.parent not in self._identities, exist_ok=True)
        self._identities = {folder: inode(folder) for folder in (self._path.parent, self._path)}
        clean(self._path)
        check_own(self._path / step_name(step))
        temporary(self._path, step).mkdir()
