"""Checkpoint directories on disk: names, manifest, verification, publication, retention. No framework.

checkpoints/
    step_00000010/          published: complete, or damaged after it was written
        manifest.json       format, step, fingerprint, size and SHA-256 of every other file; written last
        extra.json          trainer state: position in the data, random state
        .metadata           index of torch.distributed.checkpoint
        __0_0.distcp ...    tensors, one or more files per rank
    .step_00000020.tmp/     being written, or left over from a run that was killed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel import serde

MANIFEST = "manifest.json"
EXTRA = "extra.json"
FORMAT = 1

_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of, and which run it belongs to."""

    format: int
    step: int
    world_size: int
    fingerprint: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)


class Damaged(Exception):
    """A file of a checkpoint is missing, truncated or altered; `path` names it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


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


def digest(path: Path) -> FileEntry:
    """Size and SHA-256 of a file, read back from disk."""
    with path.open("rb") as file:
        value = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, value)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True, allow_nan=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a published checkpoint.

    Raises:
        Damaged: It is missing or not a manifest of this format.
    """
    path = checkpoint / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        manifest = serde.decode(Manifest, data)
    except FileNotFoundError:
        raise Damaged(path, "missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(path, f"not readable as a manifest ({error})") from None
    if manifest.format != FORMAT:
        raise Damaged(path, f"format {manifest.format}, this version reads {FORMAT}")
    return manifest


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Compare the size of every file with the manifest.

    Raises:
        Damaged: With the first file that is missing or has another size.
    """
    for name, entry in sorted(manifest.files.items()):
        path = checkpoint / name
        if not path.is_file():
            raise Damaged(path, "missing")
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise Damaged(path, f"{size} bytes, the manifest says {entry.size_bytes}")


def check_contents(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the checksums of the files `names` with the manifest.

    Raises:
        Damaged: With the first file whose content differs.
    """
    for name in names:
        path = checkpoint / name
        try:
            same = digest(path) == manifest.files[name]
        except OSError as error:
            raise Damaged(path, f"not readable ({error.strerror})") from None
        if not same:
            raise Damaged(path, "content differs from the checksum in the manifest")


def publish(directory: Path, step: int, keep: int) -> None:
    """Rename the written checkpoint to its final name, then remove all but the `keep` newest."""
    target = directory / step_name(step)
    previous = directory / f".{step_name(step)}.old"
    if target.exists():
        target.rename(previous)
    temporary(directory, step).rename(target)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    shutil.rmtree(previous, ignore_errors=True)
    for old in steps(directory)[:-keep]:
        # Hidden first: a run killed half-way through the removal must not leave a visible broken checkpoint.
        hidden = directory / f".{step_name(old)}.tmp"
        (directory / step_name(old)).rename(hidden)
        shutil.rmtree(hidden)


def clean(directory: Path) -> None:
    """Remove what a killed run left behind; a checkpoint that was just being replaced is put back."""
    for path in directory.glob(".step_*.old"):
        target = directory / path.name.removeprefix(".").removesuffix(".old")
        if target.exists():
            shutil.rmtree(path)
        else:
            path.rename(target)
    for path in directory.glob(".step_*.tmp"):
        shutil.rmtree(path)
