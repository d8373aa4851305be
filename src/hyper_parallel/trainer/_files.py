"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
