"""Where a run writes: files that a reader never sees half of, directories that are checked first."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from hyper_parallel.errors import OutputNotWritable
from hyper_parallel.ir import Timeline
from hyper_parallel.serde import encode


def write_text(path: Path, text: str) -> None:
    """Write a file under another name and rename it into place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write a timeline as JSON."""
    write_text(path, json.dumps(encode(timeline)))


def check_writable(directory: Path, key: str) -> None:
    """Raise when a directory cannot be created or written; leaves nothing behind.

    Args:
        directory: It, or what it will be.
        key: What the user has named it with, such as `output_dir`.

    Raises:
        OutputNotWritable: HP105.
    """
    target = existing = directory.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        problem = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"no permission to write {existing}"
    else:
        problem = _try_to_create(target.relative_to(existing), existing)
    if not problem:
        return
    equals = " " if key.startswith("--") else "="
    raise OutputNotWritable(
        f"the directory of `{key}` cannot be written",
        where=f"{key}{equals}{directory}",
        got=problem,
        hint=f"{key}{equals}<a directory you can write>",
    )


def _try_to_create(path: Path, parent: Path) -> str:
    """Create `path` under a directory of its own in `parent`, and remove it again; what went wrong, or "".

    Ranks that another launcher started all check at the same time: none may see what another one creates.
    """
    if path == Path():
        return ""
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=parent) as probe:
            (Path(probe) / path).mkdir(parents=True)
    except OSError as error:
        return f"{parent / path}: {error.strerror}"
    return ""
