"""Trace of torch.profiler, an optional output of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyper_parallel.errors import Unwritten, not_writable


def write_profile(profiler: Any, path: Path, unwritten: Unwritten) -> None:
    """Write a trace in Chrome's format.

    Args:
        profiler: Finished `torch.profiler.profile`.
        path: Path of the file; its directory is created.
        unwritten: Collects a write failure.
    """
    with unwritten.spare(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:  # the trace library raises RuntimeError for I/O errors
            raise not_writable(OSError(f"{error!s:.200}"), path) from error
