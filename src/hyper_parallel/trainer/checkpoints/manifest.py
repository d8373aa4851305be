"""Checkpoint directories on disk: names, manifest, verification, publication. No framework.

checkpoints/
    step_00000010/               published: complete, or damaged after it was written
        manifest.json            format, step, fingerprint, checksums of the other JSON files and of itself
        index.json               which bytes of which file hold which part of which tensor, and their checksums
        extra.json               trainer state: position in the data, random state
        rank_00000.safetensors   pieces of tensors, one file per rank
    .step_00000020.tmp/          being written, or left over from a run that was killed
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from hyper_parallel import serde
from hyper_parallel.errors import CheckpointFormat, OutputNotWritable
from hyper_parallel.owned_folder import remove_files
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
from hyper_parallel.trainer.files import Damaged, FileEntry, check_files
from hyper_parallel.units import MiB

MANIFEST = "manifest.json"
FORMAT = 2

_LIMITS: Final = Limits(MiB, num_elements=10_000)
_Count = Annotated[int, Field(ge=0)]

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(tmp|old)")
_FILES = re.compile(r"(manifest|index|extra)\.json|rank_\d{5,}\.safetensors")
"""Files of a checkpoint."""
_KEYS = {"manifest.json": "fingerprint", "index.json": "tensors"}
"""A key by which a JSON file of a checkpoint is told from a file of the same name of somebody else."""
_TOLD: Final = Limits(num_bytes=1 << 26, num_elements=5_000_000)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of, and which run it belongs to."""

    format: int
    step: _Count
    world_size: Annotated[int, Field(ge=1)]
    size_bytes: _Count
    fingerprint: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)


def step_name(step: int) -> str:
    """Directory name of a step: `step_00000010`."""
    return f"step_{step:08d}"


def temporary(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is published."""
    return directory / f".{step_name(step)}.tmp"


def steps(directory: Path) -> list[int]:
    """Published steps, ascending; empty when the directory does not exist."""
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(p.name) for p in directory.iterdir() if p.is_dir())
    return sorted(int(m.group(1)) for m in matches if m)


def write_synced(path: Path, text: str) -> None:
    """Write a text file and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def json_text(value: Any) -> str:
    """Readable JSON of a value, the same text for equal values."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def encode_manifest(manifest: Manifest) -> str:
    """The manifest as text, with the checksum of itself."""
    values = serde.encode(manifest)
    own = hashlib.sha256(json_text(values).encode()).hexdigest()
    return json_text(values | {"sha256": own})


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a published checkpoint.

    Raises:
        Damaged: It is missing, altered, or of another step.
        CheckpointFormat: HP740 when another version wrote it.
    """
    path = checkpoint / MANIFEST
    try:
        text = read_text(path, _LIMITS)
        values = parse_json(text, _LIMITS)
        found = values.pop("sha256", None)
        if found is None and values.get("format") == 1:
            raise CheckpointFormat(
                "the checkpoint was written in an earlier format, whose index is a pickle",
                where=str(checkpoint),
                got="format 1",
                allowed=f"format {FORMAT}",
                hint="checkpoint.resume=never",
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
    """Manifest and index of a checkpoint that agree with each other and with all files.

    Args:
        checkpoint: Its directory.
        contents: Compare the bytes of tensors with their checksums.
        share: Which part of these bytes, where several ranks share the reading: number, of how many.
        check_extra: What the values beside the tensors have to be, in a checkpoint of the trainer; None: any object.

    Raises:
        Damaged: With the first file that is missing or differs.
        CheckpointFormat: HP740 when another version wrote it.
    """
    manifest = read_manifest(checkpoint)
    needed = {INDEX, EXTRA}
    if set(manifest.files) != needed:
        raise Damaged(
            checkpoint / MANIFEST, f"lists {sorted(manifest.files)}, not {sorted(needed)}"
        )
    most = {INDEX: most_index_bytes(checkpoint), EXTRA: EXTRA_LIMITS.num_bytes}
    for name, entry in manifest.files.items():
        if entry.size_bytes > most[name]:
            raise Damaged(
                checkpoint / name, f"{entry.size_bytes:,} bytes, more than {most[name]:,}"
            )
    check_files(checkpoint, manifest.files, sorted(needed))
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
    """Names of files that do not belong to a checkpoint."""
    known = {MANIFEST, INDEX, EXTRA, *index.by_file()}
    return sorted(p.name for p in checkpoint.iterdir() if p.name not in known)


def foreign(checkpoint: Path) -> list[str]:
    """Return the entries of a step's folder that were not written as parts of a checkpoint; empty: all were.

    Files are told by their names, and the folder by the keys of one of its JSON files, as others may be damaged.
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
    """Raise OutputNotWritable (HP105) when a folder that a checkpoint would replace holds files of somebody else."""
    if found := foreign(checkpoint):
        raise OutputNotWritable(
            "the folder of the checkpoint holds files of somebody else, and would be replaced",
            where=str(checkpoint),
            got=found[:3],
            hint=f"mv {checkpoint} {checkpoint}.moved",
        )


def publish(directory: Path, step: int) -> None:
    """Rename the written checkpoint to its final name, in place of an earlier one of its step.

    Raises:
        OutputNotWritable: HP105 when a folder of that name is no checkpoint.
    """
    written, target = temporary(directory, step), directory / step_name(step)
    replaced = directory / f".{step_name(step)}.old"
    for place in (target, replaced):
        check_own(place)
    _sync(written)
    remove_parts(replaced)
    if target.exists():
        target.rename(replaced)
    written.rename(target)
    _sync(directory)
    remove_parts(replaced)


def remove(directory: Path, step: int) -> None:
    """Remove a published checkpoint; hidden first, so that a killed run leaves no visible broken one.

    A folder with files of somebody else stays, and a warning names them.
    """
    target, hidden = directory / step_name(step), temporary(directory, step)
    if found := foreign(target):
        _log.warning("%s is not removed: it holds %s", target, ", ".join(found[:3]))
        return
    target.rename(hidden)
    remove_parts(hidden)


def remove_all(directory: Path) -> None:
    """Remove all checkpoints of a folder, what killed runs left of some, and the folder when it is empty."""
    if not directory.is_dir():
        return
    for step in steps(directory):
        remove(directory, step)
    for path in _hidden(directory):
        remove_parts(path)
    remove_files(directory, lambda name: False)


def clean(directory: Path) -> None:
    """Remove what a killed run left behind; a checkpoint that was just being replaced is put back."""
    for path in _hidden(directory):
        target = directory / path.name[1:].partition(".")[0]
        if path.suffix == ".old" and not target.exists() and not foreign(path):
            path.rename(target)
        else:
            remove_parts(path)


def _hidden(directory: Path) -> list[Path]:
    """Return the folders that a killed run has left of steps, which hold nothing but files of a checkpoint."""
    found = [p for p in directory.iterdir() if _HIDDEN.fullmatch(p.name) and not p.is_symlink()]
    return [p for p in found if p.is_dir()]


def remove_parts(checkpoint: Path) -> None:
    """Unlink the files of a checkpoint, and remove its folder when nothing else is in it."""
    remove_files(checkpoint, lambda name: bool(_FILES.fullmatch(name)))


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _has_key(path: Path, key: str) -> bool:
    """Return whether a JSON file is an object with a key; of a larger one than `_TOLD` only the beginning is read."""
    try:
        if path.stat().st_size > _TOLD.num_bytes:
            with path.open("rb") as file:
                return file.read(1) == b"{"
        return key in read_json(path, _TOLD)
    except (OSError, ValueError, TypeError):
        return False


def _sync(directory: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
