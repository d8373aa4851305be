"""Read a run directory: the plan, the metrics, the measured timeline and the evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from hyper_parallel.config import read_mapping, run_hint
from hyper_parallel.errors import RunUnreadable
from hyper_parallel.ir import Plan, Timeline, joined
from hyper_parallel.received import Limits, parse_json, read_text
from hyper_parallel.reports._run_parts import PartRecord, read_parts
from hyper_parallel.reports.data_section import read_data_facts
from hyper_parallel.reports.stage_terms import StageTerms, stage_terms
from hyper_parallel.serde import DecodeError, read
from hyper_parallel.units import MiB

_STRICT: Final = ConfigDict(strict=True, extra="allow")
_Number = Annotated[float, Field(allow_inf_nan=False)]


@with_config(_STRICT)
class _Offloaded(TypedDict):
    """What is read of a step with offload."""

    difference_bytes: int
    dram_bytes: int
    flash_bytes: int
    replanned: bool


@with_config(_STRICT)
class _Row(TypedDict):
    """What is read of a line of metrics.jsonl or eval.jsonl."""

    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    loss: NotRequired[_Number | None]
    grad_norm: NotRequired[_Number | None]
    lr: NotRequired[_Number | None]
    tps: NotRequired[_Number | None]
    mfu: NotRequired[_Number | None]
    step_s: NotRequired[_Number | None]
    memory_bytes: NotRequired[int | None]
    tokens: NotRequired[int]
    skipped: NotRequired[int | None]
    rollout: NotRequired[dict[str, _Number | None] | None]
    preference: NotRequired[dict[str, _Number | None] | None]
    offload: NotRequired[_Offloaded]


@with_config(_STRICT)
class _About(TypedDict):
    """What is read of run.json."""

    device: NotRequired[str]
    memory: NotRequired[str]
    python: NotRequired[str]
    torch: NotRequired[str]
    transformers: NotRequired[str]
    training_s: NotRequired[_Number]


_ROW: Final[TypeAdapter[_Row]] = TypeAdapter(_Row)
_ABOUT: Final[TypeAdapter[_About]] = TypeAdapter(_About)
_READ: Final = tuple(_Row.__annotations__)
_FILE: Final = Limits(64 * MiB, num_elements=4_000_000)
_LINES: Final = Limits(256 * MiB)
"""Of the metrics of about half a million steps."""
_LINE: Final = Limits(MiB, num_elements=100_000)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything a report shows of one run.

    Attributes:
        directory: The run directory.
        plan: What was predicted, for the last part of the run.
        metrics: One mapping per training step, in step order.
        evals: One mapping per evaluation with a finite loss, in step order; empty when there was none.
        timeline: Measured spans of a window of steps, or None.
        parts: Steps between two resumes, each with its plan; at least one.
        data: Facts about the data, as data.json has them; None for a run of an earlier version.
        samplers: The same of ranks that only sample, on the same clock; None: there are none.
        simulated: One step of the plan, event by event, with the lanes of its pipeline ranks; or None.
        config: Text of the resolved recipe.
        settings: The same by dotted keys.
        sample: Text the model wrote after training, or "".
        run_info: Facts the trainer wrote about machine and versions.
        offload: Predicted and measured timeline of one planned step; None without offload.
    """

    directory: Path
    plan: Plan
    metrics: tuple[dict[str, Any], ...]
    evals: tuple[dict[str, Any], ...]
    timeline: Timeline | None
    simulated: Timeline | None
    config: str
    settings: dict[str, Any]
    sample: str
    run_info: dict[str, Any]
    parts: tuple[PartRecord, ...]
    offload: tuple[Timeline, Timeline] | None = None
    samplers: Timeline | None = None
    data: dict[str, Any] | None = None

    @property
    def last(self) -> PartRecord:
        """The last part: what its plan predicted is compared with what its steps measured."""
        return self.parts[-1]

    @property
    def terms(self) -> StageTerms:
        """Words of the stage."""
        return stage_terms(self.settings)

    @property
    def rewards(self) -> list[str]:
        """Keys of the rewards in the records of rollouts, the weighted sum first; none where nothing is rewarded."""
        shared = [{**(row.get("rollout") or {})} for row in self.metrics] or [{}]
        keys = [key for key in shared[0] if all(row.get(key) is not None for row in shared)]
        named = [k for k in keys if k.startswith("reward_") and k != "reward_std"]
        return ["reward", *named] if "reward" in keys else []

    @property
    def busy(self) -> dict[str, float]:
        """Share of the time in which each role works, where ranks only sample."""
        keys = "step_s", "wait_s", "sample_s"
        rows = self.last.rows[self.last.warm_up :]
        steps = [{**m, **(m.get("rollout") or {})} for m in rows]
        apart = [
            [float(m[k]) for k in keys] for m in steps if all(m.get(k) is not None for k in keys)
        ]
        if not any(step_s for step_s, _, _ in apart):
            return {}
        whole, waited, sampled = (sum(values) for values in zip(*apart, strict=True))
        return {"ranks that train": 1 - waited / whole, "ranks that sample": sampled / whole}

    @property
    def fullest_rank(self) -> str | None:
        """Name of the rank whose recorded memory is largest; None when none was recorded."""
        samples = (
            [c for c in self.timeline.counters if c.lane.endswith("/memory")]
            if self.timeline
            else []
        )
        return max(samples, key=lambda c: c.value).lane.partition("/")[0] if samples else None


def load_run(directory: str | Path) -> RunRecord:
    """Read a run directory.

    Raises:
        RunUnreadable: HP603 naming the file that is missing or broken.
    """
    root = Path(directory)
    if not (root / "metrics.jsonl").is_file():
        what = "it is a file" if root.is_file() else "it does not exist"
        what = "it has no metrics.jsonl" if root.is_dir() else what
        raise RunUnreadable(
            f"this is not a run directory: {what}",
            where=str(root),
            allowed="the `output_dir` of a run",
            hint=run_hint(root) or "hyper-parallel train RECIPE.yaml",
        )
    if not (root / "plan.json").is_file():
        raise RunUnreadable("the run directory has no plan.json", where=str(root))
    apart = [_timeline(path) for path in sorted((root / "rollouts").glob("timeline.*.json"))]
    predicted = _timeline(root / "offload_predicted.json")
    measured = _timeline(root / "offload_measured.json")
    plan = Plan.from_json(_text(root / "plan.json"), str(root / "plan.json"))
    metrics = _json_lines(root / "metrics.jsonl")
    return RunRecord(
        directory=root,
        plan=plan,
        metrics=metrics,
        evals=tuple(e for e in _json_lines(root / "eval.jsonl") if e.get("loss") is not None),
        timeline=_timeline(root / "timeline.json"),
        simulated=_timeline(root / "predicted_timeline.json"),
        config=_text(root / "config.yaml"),
        settings=_settings(root / "config.yaml"),
        sample=_text(root / "sample.txt"),
        run_info=_about(root / "run.json"),
        parts=read_parts(root, plan, metrics),
        offload=(predicted, measured) if predicted and measured else None,
        data=read_data_facts(root / "data.json"),
        samplers=joined(t for t in apart if t is not None) if apart else None,
    )


def _text(path: Path) -> str:
    try:
        return read_text(path, _FILE) if path.is_file() else ""
    except (OSError, ValueError) as error:
        raise RunUnreadable(
            "a file of the run cannot be read", where=str(path), got=str(error)
        ) from error


def _settings(path: Path) -> dict[str, Any]:
    """A recipe by dotted keys; nothing of a run that has none."""
    if not path.is_file():
        return {}
    flat: dict[str, Any] = {}
    pending = [("", read_mapping(path, RunUnreadable, "recipe of the run"))]
    while pending:
        prefix, section = pending.pop(0)
        for key, value in section.items():
            if isinstance(value, dict) and value:
                pending.append((f"{prefix}{key}.", value))
            else:
                flat[f"{prefix}{key}"] = value
    return flat


def _about(path: Path) -> dict[str, Any]:
    """Facts about machine and versions; none where the trainer has written none."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(_text(path), _FILE)
        _ABOUT.validate_python(value)
    except ValueError as error:
        raise RunUnreadable(
            "the facts of the run cannot be read", where=str(path), got=f"{error!s:.200}"
        ) from error
    facts: dict[str, Any] = value
    return facts


def _json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Rows of a JSON-lines file; a resumed run writes some steps again, the later line counts."""
    rows: dict[int, dict[str, Any]] = {}
    lines = _lines(path)
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, _LINE)
            _ROW.validate_python(row)
            rows[row["step"]] = {k: row[k] for k in _READ if row.get(k) is not None}
        except ValueError as error:
            if number == len(lines):
                break  # a killed run may leave its last line unfinished
            raise RunUnreadable(
                "a line is not a metrics record",
                where=f"{path}:{number}",
                got=line[:80],
                allowed=f"{error!s:.200}",
            ) from error
    return tuple(rows[step] for step in sorted(rows))


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, _LINES).splitlines() if path.is_file() else []
    except (OSError, ValueError) as error:
        raise RunUnreadable(
            "a file of the run cannot be read", where=str(path), got=str(error)
        ) from error


def _timeline(path: Path) -> Timeline | None:
    if not path.is_file():
        return None
    try:
        return read(Timeline, path, _FILE)
    except (OSError, DecodeError) as error:
        raise RunUnreadable("a timeline cannot be read", where=str(path), got=str(error)) from error
