"""Folder in which training ranks and sampling ranks exchange weights and completions; see module `rollouts`."""

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
from hyper_parallel.runtime import HeartbeatWriter
from hyper_parallel.serde import write_text
from hyper_parallel.trainer.checkpoints.manifest import remove, steps
from hyper_parallel.trainer.files import tensors_written
from hyper_parallel.trainer.stages.sampling import Completions
from hyper_parallel.units import MiB

_POLL_S: Final = 0.005
"""Seconds between polls: short compared with a step of a small model, long compared with listing a folder."""
_FILE_NAME: Final = re.compile(r"step_\d{8,}\.\d+\.safetensors")
_T = TypeVar("_T")


class RolloutFolder:
    """Folder of files that training ranks and sampling ranks exchange; its subfolder `policy` has the weights.

    Args:
        path: Path of the folder.
        heartbeat: Heartbeat of this rank, so that a waiting rank is not reported as hung; None: no heartbeat.
    """

    def __init__(self, path: Path, heartbeat: HeartbeatWriter | None = None) -> None:
        self.path, self.policy, self._heartbeat = path, path / "policy", heartbeat

    @property
    def ended(self) -> bool:
        """True after the training ranks have ended."""
        return (self.path / "end").exists()

    def reset(self) -> None:
        """Remove `begin.json` and `end` of an earlier start of the run; call before any rank starts."""
        for name in ("begin.json", "end"):
            (self.path / name).unlink(missing_ok=True)

    def begin(self, begin: dict[str, Any], parts: int, *, exact: bool) -> None:
        """Mark the start of training, and remove outdated files of an earlier start of the run.

        Outdated are weights of versions above `done`, which training computes again, and completions sampled with them.
        With `exact`, they stay, because training computes the same weights again. Timelines of sampling ranks, and
        completions of steps that were divided into another number of parts, are always removed.

        Args:
            begin: Dict with the last finished step `done`, the data position `data`, and the start of the timeline
                `origin_s` in seconds since the epoch.
            parts: Number of parts into which the prompts of a step are divided.
            exact: Whether sampling ranks use exactly the oldest allowed version of the weights.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        done = begin["done"]
        for path in self._completion_files():
            metadata = _metadata(path)
            if metadata.get("parts") != str(parts) or (not exact and int(metadata["version"]) > done):
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
        """Wait for the start of training; return the dict that was passed to `begin`, or None if training has ended."""
        path = self.path / "begin.json"
        return self.wait(lambda: read_json(path, Limits(MiB)) if path.exists() else None)

    def version(self, least: int, *, exact: bool) -> int | None:
        """Wait for weights of version `least` or newer; return the newest version, or None if training has ended.

        With `exact`, wait for version `least` itself.
        """

        def newest() -> int | None:
            versions = steps(self.policy)
            if exact:
                return least if least in versions else None
            return versions[-1] if versions and versions[-1] >= least else None

        return self.wait(newest)

    def wait(self, poll: Callable[[], _T | None]) -> _T | None:
        """Call `poll` until it returns a value other than None; return this value, or None if training has ended."""
        while (value := poll()) is None:
            if self.ended:
                return None
            if self._heartbeat is not None:
                self._heartbeat.begin_phase("rollout")
            time.sleep(_POLL_S)
        return value

    def file(self, step: int, part: int) -> Path:
        """Return the path of the completions of one part of a step."""
        return self.path / f"step_{step:08d}.{part}.safetensors"

    def newest(self) -> int:
        """Return the newest version of the published weights; -1 before the first version."""
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
        """Publish one of `parts` parts of a step's completions atomically.

        `version` is the newest version of the weights that sampled a token; `seconds` is the sampling time.
        """
        path = self.file(step, part)
        partial = path.with_suffix(".part")
        tensors = {f.name: getattr(completions, f.name).cpu().contiguous() for f in fields(completions)}
        metadata = {"version": str(version), "parts": str(parts), "seconds": str(seconds)}
        with tensors_written(partial):
            save_file(tensors, partial, metadata)
            partial.rename(path)

    def read(self, step: int, part: int) -> tuple[Completions, float]:
        """Wait for one part of a step; return its completions and the sampling time in seconds."""
        path = self.file(step, part)
        self.wait(lambda: path if path.exists() else None)
        with safe_open(path, "pt") as file:
            tensors = {f.name: file.get_tensor(f.name) for f in fields(Completions)}
            return Completions(**tensors), float((file.metadata() or {}).get("seconds", 0.0))

    def trim(self, last: int) -> None:
        """Remove completions of all steps up to and including `last`, which resumed runs do not need."""
        for path in self._completion_files():
            if int(path.name[5:13]) <= last:
                path.unlink()

    def _completion_files(self) -> list[Path]:
        return [p for p in self.path.glob("step_*.safetensors") if _FILE_NAME.fullmatch(p.name)]


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())
