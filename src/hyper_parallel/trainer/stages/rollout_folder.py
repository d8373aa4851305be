"""Folder of a run for the exchange of weights and completions between training ranks and sampling ranks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors import safe_open
from safetensors.torch import save_file

from hyper_parallel.received import Limits, read_json
from hyper_parallel.serde import write_text
from hyper_parallel.trainer.checkpoints.manifest import remove, steps
from hyper_parallel.trainer.files import tensors_written
from hyper_parallel.trainer.stages.sampling import Completions
from hyper_parallel.units import MiB

_POLL_S: Final = 0.005
"""Short compared to steps of the smallest models; listing a folder takes microseconds."""
_SHARE: Final = re.compile(r"step_\d{8,}\.\d+\.safetensors")
_T = TypeVar("_T")


class RolloutFolder:
    """Files exchanged between the roles of a run.

    Args:
        path: Path of the folder.
        beat: Heartbeat, called while this rank waits, so that it is not reported as hung.
    """

    def __init__(self, path: Path, beat: Callable[[str], None] = lambda phase: None) -> None:
        self.path, self.policy, self._beat = path, path / "policy", beat

    @property
    def ended(self) -> bool:
        """True if the training ranks have ended."""
        return (self.path / "end").exists()

    def reset(self) -> None:
        """Remove the begin and end marks of an earlier start; call before any role starts."""
        for name in ("begin.json", "end"):
            (self.path / name).unlink(missing_ok=True)

    def begin(self, begin: dict[str, Any], parts: int, *, exact: bool) -> None:
        """Mark the start of training after step `done`, and remove files that belong to later weights.

        With `exact`, the later files stay: repeated steps produce the same weights. Shares with another number of
        `parts` are removed in either case.

        Args:
            begin: `done`, the data position `data`, and `origin_s` of the timeline in seconds of `time.time`.
            parts: Shares of a step.
            exact: Whether completions are sampled by exactly the oldest version allowed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        done = begin["done"]
        for path in self._shares():
            metadata = _metadata(path)
            if metadata.get("parts") != str(parts) or (
                not exact and int(metadata["version"]) > done
            ):
                path.unlink()
        for version in steps(self.policy):
            if not exact and version > done:
                remove(self.policy, version)
        for path in self.path.glob("timeline.*.json"):
            if path.suffixes[0][1:].isdigit():
                path.unlink()
        write_text(self.path / "begin.json", json.dumps(begin))

    def end(self) -> None:
        """Mark the end of training."""
        if self.path.is_dir():
            (self.path / "end").touch()

    def begun(self) -> dict[str, Any] | None:
        """Wait for the start mark of the training ranks and return it; None if they have ended."""
        path = self.path / "begin.json"
        return self.wait(lambda: read_json(path, Limits(MiB)) if path.exists() else None)

    def version(self, least: int, *, exact: bool) -> int | None:
        """Wait for weights of version `least` and return the newest version, or `least` itself with `exact`.

        Returns None if training has ended.
        """

        def newest() -> int | None:
            versions = steps(self.policy)
            if exact:
                return least if least in versions else None
            return versions[-1] if versions and versions[-1] >= least else None

        return self.wait(newest)

    def wait(self, poll: Callable[[], _T | None]) -> _T | None:
        """Poll until `poll` returns a value, and return it; None if training has ended."""
        while (value := poll()) is None:
            if self.ended:
                return None
            self._beat("rollout")
            time.sleep(_POLL_S)
        return value

    def file(self, step: int, part: int) -> Path:
        """Return the path of the completions of share `part` of a step."""
        return self.path / f"step_{step:08d}.{part}.safetensors"

    def newest(self) -> int:
        """Return the newest version of the weights; -1 if there is none."""
        return max(steps(self.policy), default=-1)

    def write(
        self,
        step: int,
        part: int,
        parts: int,
        completions: Completions,
        version: int,
        seconds: float,
    ) -> None:
        """Publish a share atomically, with the newest version that sampled any of it and the sampling time."""
        path = self.file(step, part)
        partial = path.with_suffix(".part")
        tensors = {
            f.name: getattr(completions, f.name).cpu().contiguous() for f in fields(completions)
        }
        metadata = {"version": str(version), "parts": str(parts), "seconds": str(seconds)}
        with tensors_written(partial):
            save_file(tensors, partial, metadata)
            partial.rename(path)

    def read(self, step: int, part: int) -> tuple[Completions, float]:
        """Wait for a share and return its completions and their sampling time in seconds."""
        path = self.file(step, part)
        self.wait(lambda: path if path.exists() else None)
        with safe_open(path, "pt") as file:
            tensors = {f.name: file.get_tensor(f.name) for f in fields(Completions)}
            return Completions(**tensors), float((file.metadata() or {}).get("seconds", 0.0))

    def trim(self, before: int) -> None:
        """Remove completions of steps up to `before`, which resumed runs do not need."""
        for path in self._shares():
            if int(path.name[5:13]) <= before:
                path.unlink()

    def _shares(self) -> list[Path]:
        """Return the files of completions; files with other names are ignored."""
        return [p for p in self.path.glob("step_*.safetensors") if _SHARE.fullmatch(p.name)]


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())
