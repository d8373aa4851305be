"""The folder of a run in which weights and completions pass between ranks that train and ranks that only sample."""

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

_LOOK_S: Final = 0.005  # short beside the steps of the smallest models, and a list of a folder takes microseconds
_SHARE: Final = re.compile(r"step_\d{8,}\.\d+\.safetensors")
_FOUND = TypeVar("_FOUND")


class RolloutFolder:
    """What passes between the roles of a run.

    Args:
        path: The folder.
        beat: Called while this rank waits, so that nobody takes it for one that hangs.
    """

    def __init__(self, path: Path, beat: Callable[[str], None] = lambda phase: None) -> None:
        self.path, self.policy, self._beat = path, path / "policy", beat

    @property
    def ended(self) -> bool:
        """Whether the ranks that train have ended."""
        return (self.path / "end").exists()

    def reset(self) -> None:
        """Before any role is started: nobody has begun, nobody has ended."""
        for name in ("begin.json", "end"):
            (self.path / name).unlink(missing_ok=True)

    def begin(self, begin: dict[str, Any], parts: int, *, exact: bool) -> None:
        """The ranks that train go on after step `done`; what later weights have left is not of this run.

        With `exact` it is: the same steps give the same weights again. Shares of another number of `parts` are not.

        Args:
            begin: `done`, `data` where it is read, `origin_s` of the timeline in seconds of `time.time`.
            parts: Shares of a step.
            exact: Completions are sampled by exactly the oldest version allowed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        done = begin["done"]
        for path in self._shares():
            sampled = _about(path)
            if sampled.get("parts") != str(parts) or (not exact and int(sampled["version"]) > done):
                path.unlink()
        for version in steps(self.policy):
            if not exact and version > done:
                remove(self.policy, version)
        for path in self.path.glob("timeline.*.json"):
            if path.suffixes[0][1:].isdigit():
                path.unlink()
        write_text(self.path / "begin.json", json.dumps(begin))

    def end(self) -> None:
        """The ranks that train have ended."""
        if self.path.is_dir():
            (self.path / "end").touch()

    def begun(self) -> dict[str, Any] | None:
        """Where the ranks that train go on from, as soon as they say so; None when they have ended."""
        path = self.path / "begin.json"
        return self.wait(lambda: read_json(path, Limits(MiB)) if path.exists() else None)

    def version(self, least: int, *, exact: bool) -> int | None:
        """The newest weights of version `least` or later, or exactly these; None when nobody trains any more."""

        def there() -> int | None:
            found = steps(self.policy)
            if exact:
                return least if least in found else None
            return found[-1] if found and found[-1] >= least else None

        return self.wait(there)

    def wait(self, there: Callable[[], _FOUND | None]) -> _FOUND | None:
        """What the other role is to give, as soon as it is there; None when nobody trains any more."""
        while (found := there()) is None:
            if self.ended:
                return None
            self._beat("rollout")
            time.sleep(_LOOK_S)
        return found

    def file(self, step: int, part: int) -> Path:
        """Where completions are: share `part` of a step."""
        return self.path / f"step_{step:08d}.{part}.safetensors"

    def newest(self) -> int:
        """The newest version of the weights; -1: there is none."""
        return max(steps(self.policy), default=-1)

    def write(
        self, step: int, part: int, parts: int, made: Completions, version: int, seconds: float
    ) -> None:
        """Publish a share of `parts`, whole or not at all, with the newest version that sampled any, and how long."""
        path = self.file(step, part)
        partial = path.with_suffix(".part")
        tensors = {f.name: getattr(made, f.name).cpu().contiguous() for f in fields(made)}
        about = {"version": str(version), "parts": str(parts), "seconds": str(seconds)}
        with tensors_written(partial):
            save_file(tensors, partial, about)
            partial.rename(path)

    def read(self, step: int, part: int) -> tuple[Completions, float]:
        """Completions as soon as they are there, and in how many seconds they were sampled."""
        path = self.file(step, part)
        self.wait(lambda: path if path.exists() else None)
        with safe_open(path, "pt") as opened:
            made = {f.name: opened.get_tensor(f.name) for f in fields(Completions)}
            return Completions(**made), float((opened.metadata() or {}).get("seconds", 0.0))

    def trim(self, before: int) -> None:
        """Remove completions of steps up to `before`, which no run goes back to."""
        for path in self._shares():
            if int(path.name[5:13]) <= before:
                path.unlink()

    def _shares(self) -> list[Path]:
        """Return the files of completions; a file of another name is nobody's business here."""
        return [p for p in self.path.glob("step_*.safetensors") if _SHARE.fullmatch(p.name)]


def _about(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())
