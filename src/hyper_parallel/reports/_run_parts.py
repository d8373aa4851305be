"""Parts of a run: the steps between two resumes, trained with one recipe and one plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from hyper_parallel.errors import RunUnreadable
from hyper_parallel.ir import Plan
from hyper_parallel.received import Limits, read_json, read_text

WARM_UP_STEPS: Final = 3
"""Number of first steps of a part that medians exclude, because memory allocation and compilation slow them."""
_FOLDER: Final = re.compile(r"step_(\d{8,15})")
_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class PartRecord:
    """Steps of a run from its start or a resume up to the next resume or the end.

    Attributes:
        step: Number of steps before this part.
        plan: Plan of the steps of this part.
        rows: Metrics, one mapping per step.
        changed: [old, new] by dotted key: recipe values and other facts that changed at the resume; empty for the
            first part.
    """

    step: int
    plan: Plan
    rows: Sequence[dict[str, Any]] = ()
    changed: dict[str, Any] = field(default_factory=dict)

    @property
    def warm_up(self) -> int:
        """Number of first steps that medians exclude; 0 if the part has no other steps."""
        return WARM_UP_STEPS if len(self.rows) > WARM_UP_STEPS else 0

    def steady(self, key: str) -> float | None:
        """Return the median of a metric over the steps after the warm-up; None when no step has the metric."""
        values = [float(m[key]) for m in self.rows[self.warm_up :] if m.get(key) is not None]
        return median(values) if values else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """Largest measured memory of a step on its fullest rank, in bytes; None without measurements."""
        values = [int(m["memory_bytes"]) for m in self.rows if m.get("memory_bytes")]
        return max(values, default=None)


def read_parts(directory: Path, plan: Plan, rows: Sequence[dict[str, Any]]) -> tuple[PartRecord, ...]:
    """Return the parts of a run that contain steps, in order; always at least one part.

    Args:
        directory: Run directory. Without records of parts, as in runs of older versions, the run is a single part.
        plan: Plan of the last part.
        rows: Metrics of all steps.

    Raises:
        RunUnreadable: HP603 naming the broken file.
        PlanUnreadable: HP306 for a broken plan.
    """
    folder = directory / "parts"
    paths = list(folder.iterdir()) if folder.is_dir() else []
    starts = sorted((int(m[1]), path) for path in paths if (m := _FOLDER.fullmatch(path.name)))
    steps = [start for start, _ in starts]
    parts = []
    for number, (start, path) in enumerate(starts):
        end = steps[number + 1] if number + 1 < len(steps) else float("inf")
        part_rows = [row for row in rows if start < row["step"] <= end]
        if part_rows:
            is_last = number + 1 == len(starts)
            parts.append(_read_part(start, path, plan if is_last else None, part_rows))
    if not parts:
        first = rows[0]["step"] - 1 if rows else 0
        return (PartRecord(first, plan, tuple(rows)),)
    return tuple(parts)


def unreadable(path: Path, error: object, problem: str = "a file of the run cannot be read") -> RunUnreadable:
    """Return the error for a file of a run that is missing or damaged."""
    hint = "restore the file from a copy of the run"
    return RunUnreadable(problem, where=str(path), got=f"{error!s:.200}", hint=hint)


def _read_part(step: int, path: Path, plan: Plan | None, rows: Sequence[dict[str, Any]]) -> PartRecord:
    plan_path = path / "plan.json"
    try:
        facts = read_json(path / "part.json", _LIMITS)
        text = "" if plan is not None else read_text(plan_path, _LIMITS)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    changed = facts.get("changed") if isinstance(facts, dict) else None
    part_plan = plan if plan is not None else Plan.from_json(text, str(plan_path))
    return PartRecord(step, part_plan, tuple(rows), changed if isinstance(changed, dict) else {})
