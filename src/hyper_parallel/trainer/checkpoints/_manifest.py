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

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel import serde
from hyper_parallel.trainer._files import Damaged, FileEntry, replace_directory

MANIFEST = "manifest.json"
EXTRA = "extra.json"
FORMAT = 1

_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of, and which run it belongs to."""

    format: int
    step: int
    world_size: int
    fingerprint: dict[str, Any] = field(default_factory=dict)
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


def publish(directory: Path, step: int, keep: int) -> None:
    """Rename the written checkpoint to its final name, then remove all but the `keep` newest."""
    replace_directory(temporary(directory, step), directory / step_name(step))
    for old in steps(directory)[:-keep]:
        # Hidden first: a run killed half-way through the removal must not leave a visible broken checkpoint.
        hidden = temporary(directory, old)
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
