"""The trace of torch.profiler, which a run can do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyper_parallel.errors import Unwritten, not_writable


def write_profile(profiler: Any, path: Path, unwritten: Unwritten) -> None:
    """Write a trace in Chrome's format.

    Args:
        profiler: A `torch.profiler.profile` that has ended.
        path: The file; its directory is created.
        unwritten: Keeps the failure of the write.
    """
    with unwritten.spare(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profiler.export_chrome_trace(str(path))
        except RuntimeError as error:  # the library that writes the trace has no OSError
            raise not_writable(OSError(f"{error!s:.200}"), path) from error
