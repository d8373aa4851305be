"""Trackers: where the curves of a run go besides metrics.jsonl. Packages are imported when a run begins.

A tracker has `log(step, values)` and `close()`. Rank 0 holds it. A resumed run goes on in the same run of the tracker,
whose id is kept in `trackers.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from hyper_parallel.errors import MissingDependency, TrackerFailed
from hyper_parallel.trainer._files import write_text

_PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What pip installs for the module of the same name as the tracker."""


class Tracker(Protocol):
    """Draws curves."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points of a step, by the names of their curves."""

    def close(self) -> None:
        """Write what is still held."""


def check_trackers(names: Sequence[str], where: str) -> None:
    """Raise MissingDependency (HP501) for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingDependency(
                f"the tracker {name} needs a package that is not installed",
                where=where,
                got=f"no module {name}",
                hint=f"pip install {_PACKAGES[name]}",
            )


def make_trackers(
    names: Sequence[str], directory: Path, resumed_step: int, recipe: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of a run.

    Args:
        names: Those of `training.report_to`.
        directory: The run directory, by whose name trackers show the run.
        resumed_step: Last step the run already has, 0 for a new run.
        recipe: What is shown as its configuration.

    Raises:
        TrackerFailed: HP632 when one refuses.
    """
    kept, trackers = directory / "trackers.json", list[Tracker]()
    ids: dict[str, str] = json.loads(kept.read_text()) if resumed_step and kept.exists() else {}
    for name in names:
        try:
            if name == "tensorboard":
                trackers.append(_TensorBoard(directory / name, resumed_step))
            else:
                trackers.append({"wandb": _Wandb, "mlflow": _Mlflow}[name](directory, ids, recipe))
        except Exception as error:  # each raises classes of its own
            raise TrackerFailed(
                f"the tracker {name} cannot begin a run",
                where="training.report_to",
                got=" ".join(str(error).split())[:800] or type(error).__name__,
                hint="training.report_to=[tensorboard]",
            ) from error
    if ids:
        write_text(kept, json.dumps(ids) + "\n")
    return trackers


class _TensorBoard:
    """Event files in the run directory."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if resumed_step == 0:
            for old in directory.glob("events.out.tfevents.*"):
                old.unlink()
        self._event, self._board = Event, EventFileWriter(str(directory))
        # TensorBoard drops what an earlier run wrote from this step on.
        start = SessionLog(status=SessionLog.START)
        self._board.add_event(
            Event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._board.add_event(event)

    def close(self) -> None:
        self._board.close()


class _Wandb:
    """Weights & Biases; its environment variables say which project, and whether it is offline."""

    def __init__(self, directory: Path, ids: dict[str, str], recipe: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            dir=directory,
            name=directory.name,
            id=ids.get("wandb"),
            resume="allow" if "wandb" in ids else None,
            config=dict(recipe),
        )
        ids["wandb"] = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow; its environment variables say which server or directory, and which experiment."""

    def __init__(self, directory: Path, ids: dict[str, str], recipe: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        run = mlflow.start_run(run_id=ids.get("mlflow"), run_name=directory.name)
        if "mlflow" not in ids:
            mlflow.log_params(dict(_flat(recipe)))
        ids["mlflow"] = run.info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
