"""Reports: one self-contained HTML page and a Perfetto trace from a run directory; imports no framework."""

import json
from pathlib import Path

from hyper_parallel.reports._page import render
from hyper_parallel.reports._run_record import RunRecord, load_run
from hyper_parallel.reports._timeline import chrome_trace, one_step, predicted_timeline

__all__ = [
    "RunRecord",
    "chrome_trace",
    "load_run",
    "one_step",
    "predicted_timeline",
    "render",
    "write_report",
]


def write_report(directory: str | Path) -> tuple[Path, Path]:
    """Write `report.html` and `trace.json` into a run directory and return their paths.

    Raises:
        RunUnreadable: HP603 when the directory is not a run.
    """
    run = load_run(directory)
    page, trace = run.directory / "report.html", run.directory / "trace.json"
    _replace(page, render(run))
    _replace(trace, json.dumps(chrome_trace(run.timeline, run.plan, run.simulated)) + "\n")
    return page, trace


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one, never a half."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
