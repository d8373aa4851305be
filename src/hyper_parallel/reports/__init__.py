"""Reports of a run directory: a self-contained HTML page and a Perfetto trace. Imports no framework."""

import json
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.errors import written
from hyper_parallel.owned_folder import check_output_file
from hyper_parallel.reports._page import render as render
from hyper_parallel.reports._run_record import RunRecord as RunRecord
from hyper_parallel.reports._run_record import load_run as load_run
from hyper_parallel.reports._submodels import submodel_rows as submodel_rows
from hyper_parallel.reports._timeline import chrome_trace as chrome_trace
from hyper_parallel.reports._timeline import one_step as one_step
from hyper_parallel.reports._timeline import predicted_timeline as predicted_timeline
from hyper_parallel.serde import write_text


def write_report(directory: str | Path) -> tuple[Path, Path]:
    """Write `report.html` and `trace.json` into a run directory and return their paths.

    Raises:
        RunUnreadable: HP603 when the directory is not a run, or a file of it is broken.
        PlanUnreadable: HP306 for a broken plan.json.
        OutputNotWritable: HP105 when a file cannot be written, or exists and is not a report or trace.
    """
    run = load_run(directory)
    page, trace = run.directory / "report.html", run.directory / "trace.json"
    _check_written(page, trace)
    events = chrome_trace(run.timeline, run.plan, run.simulated, run.samplers)
    with written(run.directory):
        write_text(page, _page(run))
        write_text(trace, json.dumps(events) + "\n")
    return page, trace


def write_comparison(directories: Sequence[str | Path]) -> Path:
    """Write `comparison.html`, a page that compares several runs, into the first run's directory; return its path.

    Raises:
        RunUnreadable: HP603 when a directory is not a run, or a file of it is broken.
        PlanUnreadable: HP306 for a broken plan.json.
        OutputNotWritable: HP105 when a file cannot be written, or exists and is not a report.
    """
    runs = [load_run(directory) for directory in directories]
    page = runs[0].directory / "comparison.html"
    _check_written(page)
    with written(page):
        write_text(page, _page(*runs))
    return page


def _check_written(*paths: Path) -> None:
    for path in paths:
        check_output_file(path, _is_report, "a report or a trace of a run")


def _is_report(text: str) -> bool:
    return text.startswith('{"traceEvents"') or " - HyperParallel</title>" in text[:2000]


def _page(*runs: RunRecord) -> str:
    """Return the HTML page of one run or several, with lone surrogates escaped, which UTF-8 cannot encode."""
    return render(*runs).encode("utf-8", "backslashreplace").decode()
