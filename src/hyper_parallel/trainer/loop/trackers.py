"""Experiment trackers (TensorBoard, wandb, mlflow) that show the metrics of a run; used on rank 0 only.

A resumed run continues the run of each tracker. The ids of wandb and mlflow runs are stored in `trackers.json`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import DISK_ERRORS, MissingDependency, RunDirectoryLost, TrackerFailed
from hyper_parallel.received import Limits
from hyper_parallel.serde import DecodeError, create_file, flatten, read, write_text
from hyper_parallel.units import MiB

_PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Name of the pip package, by name of tracker and module."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """Experiment tracker; `log` takes a step and a dict from metric name to value."""

    name: str
    log: Callable[[int, dict[str, float]], Any]
    close: Callable[[], Any]


def check_trackers(names: Sequence[str], where: str) -> None:
    """Raise MissingDependency (HP501) if the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingDependency(
                f"the tracker {name} needs a package that is not installed",
                where=where,
                got=f"no module {name}",
                hint=f"pip install {_PACKAGES[name]}, or leave it out: {_without(name, names)}",
            )


def _without(name: str, names: Sequence[str]) -> str:
    return shlex.quote(f"training.report_to=[{', '.join(n for n in names if n != name)}]")


def make_trackers(
    names: Sequence[str],
    directory: Path,
    resumed_step: int,
    recipe: Mapping[str, Any],
    check_directory: Callable[[], None] = lambda: None,
) -> list[Tracker]:
    """Start and return the trackers `names` of `training.report_to`.

    wandb and mlflow show the recipe values and name the run after its directory. `resumed_step` is the last finished
    step; 0 for a new run. `check_directory` raises HP721 if the run directory was removed, moved or replaced.

    Raises:
        RunDirectoryLost: HP721 from `check_directory`.
        TrackerFailed: HP632 when a tracker cannot start, or `trackers.json` of a resumed run cannot be read.
        OSError: The disk is full, broken or read-only.
    """
    ids_path, trackers = directory / "trackers.json", list[Tracker]()
    ids = _known_ids(ids_path) if resumed_step else {}
    for name in names:
        try:
            if name == "tensorboard":
                trackers.append(_tensorboard(directory / name, resumed_step, check_directory))
            else:
                make = {"wandb": _wandb, "mlflow": _mlflow}[name]
                trackers.append(make(directory, ids, recipe))
        except RunDirectoryLost:
            raise
        except Exception as error:  # every tracker has its own exception classes
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise  # as for other files of the run
            raise TrackerFailed(
                f"the tracker {name} cannot start a run",
                where="training.report_to",
                got=" ".join(str(error).split())[:800] or type(error).__name__,
                hint=_without(name, names),
            ) from error
    if ids:
        write_text(ids_path, json.dumps(ids) + "\n")
    return trackers


def _known_ids(path: Path) -> dict[str, str]:
    """Return the stored run ids by tracker, {} if the file is absent; raise HP632 if it cannot be read."""
    if not path.exists():
        return {}
    try:
        return read(dict[str, str], path, Limits(MiB, num_elements=100))
    except (OSError, DecodeError) as error:
        raise TrackerFailed(
            "the file with the trackers' run ids cannot be read",
            where=str(path),
            got=f"{error!s:.200}",
            hint=f"rm {shlex.quote(str(path))}, to begin new runs of trackers",
        ) from error


def _tensorboard(directory: Path, resumed_step: int, check_directory: Callable[[], None]) -> Tracker:
    """Return a TensorBoard tracker that appends to an open event file.

    TensorBoard's own writer is not used: its thread reopens the path for each record, and dies when the disk is full.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    check_directory()  # after the imports, which take long enough for a user to move the directory
    directory.mkdir(exist_ok=True)
    if resumed_step == 0:
        for old in directory.glob("events.out.tfevents.*"):
            if not old.is_symlink():
                old.unlink()
    now = time.time()
    name = f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.0"
    records = RecordWriter(create_file(directory / name).detach())

    def log(step: int, values: dict[str, float]) -> None:
        event = Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        try:
            records.write(event.SerializeToString())
            records.flush()
        except OSError:
            records.close()
            raise

    records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    # This event makes TensorBoard drop the points of an earlier process from this step on.
    start = SessionLog(status=SessionLog.START)
    first = Event(wall_time=now, step=resumed_step + 1, session_log=start)
    records.write(first.SerializeToString())
    records.flush()
    return Tracker("tensorboard", log, records.close)


def _wandb(directory: Path, ids: dict[str, str], recipe: Mapping[str, Any]) -> Tracker:
    import wandb

    known = {"id": ids["wandb"], "resume": "allow"} if "wandb" in ids else {}
    run = wandb.init(dir=directory, name=directory.name, config=dict(recipe), **known)
    ids["wandb"] = run.id
    return Tracker("wandb", lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(directory: Path, ids: dict[str, str], recipe: Mapping[str, Any]) -> Tracker:
    import mlflow

    run = mlflow.start_run(run_id=ids.get("mlflow"), run_name=directory.name)
    if "mlflow" not in ids:
        mlflow.log_params(dict(flatten(recipe)))
    ids["mlflow"] = run.info.run_id
    log = lambda step, values: mlflow.log_metrics(values, step=step)  # noqa: E731
    return Tracker("mlflow", log, mlflow.end_run)
