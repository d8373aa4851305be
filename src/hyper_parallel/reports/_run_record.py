"""Reader of a run directory: plan, metrics, measured timeline and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from hyper_parallel.config import missing_run, read_mapping
from hyper_parallel.errors import RunUnreadable
from hyper_parallel.ir import Plan, Timeline, merge_timelines
from hyper_parallel.received import Limits, parse_json, read_text
from hyper_parallel.reports._run_parts import PartRecord, read_parts, unreadable
from hyper_parallel.reports.data_section import read_answers, read_data_facts, read_record
from hyper_parallel.reports.terms import StageTerms, stage_terms
from hyper_parallel.serde import DecodeError, flatten, read
from hyper_parallel.units import MiB

_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Offloaded(TypedDict):
    """Metrics of a step with offload that a report uses."""

    difference_bytes: int
    outside_bytes: int
    dram_bytes: int
    flash_bytes: int
    sim_step_s: _Number
    pred_sim_step_s: _Number
    wait_s: _Number
    pred_wait_s: _Number
    join_s: NotRequired[_Number]
    pred_join_s: NotRequired[_Number]
    replanned: bool


class _Overlap(TypedDict):
    """Metrics of exposed communication that a report uses; see `ir.masking`."""

    exposed_s: NotRequired[dict[str, _Number]]
    masking_timeline: NotRequired[_Number | None]
    masking_wait: NotRequired[_Number | None]


class _Balance(TypedDict):
    """Imbalance of media tokens in a step, in the order of the data and after balancing."""

    media_tokens: _Number
    in_order: _Number
    balanced: _Number


class _Row(TypedDict):
    """Fields of a line of metrics.jsonl or eval.jsonl that a report uses."""

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
    token_accuracy: NotRequired[_Number]
    answer_accuracy: NotRequired[_Number]
    offload: NotRequired[_Offloaded]
    overlap: NotRequired[_Overlap]
    balance: NotRequired[_Balance]


class _FusedKernel(TypedDict):
    """Kernel that a back end generated from several operators."""

    name: str
    operators: list[str]


class _ProgramMemory(TypedDict):
    """Prediction for a step program with a memory plan."""

    peak_bytes: _Number
    unplanned_bytes: _Number
    host_bytes: _Number
    seconds: _Number
    unplanned_s: _Number
    origin: str


class _About(TypedDict):
    """Fields of run.json that a report uses."""

    device: NotRequired[str]
    memory: NotRequired[str]
    python: NotRequired[str]
    torch: NotRequired[str]
    transformers: NotRequired[str]
    training_s: NotRequired[_Number]
    fused_kernels: NotRequired[list[_FusedKernel]]
    program_memory: NotRequired[_ProgramMemory]


_ROW: Final[TypeAdapter[_Row]] = TypeAdapter(_Row)
_ABOUT: Final[TypeAdapter[_About]] = TypeAdapter(_About)
_READ: Final = tuple(_Row.__annotations__)
_FILE: Final = Limits(64 * MiB, num_elements=4_000_000)
_LINES: Final = Limits(256 * MiB)
"""Limits of metrics.jsonl and eval.jsonl."""
_LINE: Final = Limits(MiB, num_elements=100_000)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Contents of a run directory for a report.

    Attributes:
        directory: The run directory.
        plan: Plan of the last part of the run.
        metrics: One mapping per training step, without null values, in step order.
        evals: One mapping per evaluation with a finite loss, in step order; may be empty.
        timeline: Measured spans of a window of steps; None without measurements.
        parts: Parts of the run between two resumes, each with its plan; at least one.
        data: Facts about the data from data.json; None without the file.
        samplers: Measured spans of sampling ranks, on the same clock as `timeline`; None without sampling ranks.
        simulated: Simulated events of one step of the plan, with lanes of pipeline ranks; None without simulation.
        config: Text of the resolved recipe; "" without config.yaml.
        settings: Values of the resolved recipe by dotted key; empty without config.yaml.
        sample: Text that the model generated after training; "" without a sample.
        answers: Held-out conversations with the expected and the generated answer; empty without answers.json.
        run_info: Machine, versions and other facts from run.json; empty without the file.
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
    answers: Sequence[Mapping[str, Any]] = ()

    @property
    def last(self) -> PartRecord:
        """Last part of the run; its measurements are compared with the plan."""
        return self.parts[-1]

    @property
    def model_name(self) -> str:
        """Name of the model; for a model exported by another run, with the name of that run."""
        name, path = self.plan.model.name, Path(str(self.settings.get("model.path", "")))
        is_export = path.name == name and name in ("export", "merged")
        return "/".join(path.parts[-2:]) if is_export else name

    @property
    def fused_kernels(self) -> list[dict[str, Any]]:
        """Generated kernels that fuse several operators, each with `name` and `operators`; [] if there are none."""
        return list(self.run_info.get("fused_kernels", []))

    @property
    def terms(self) -> StageTerms:
        """Names of the loss and the records of this run's stage."""
        return stage_terms(self.settings)

    @property
    def rewards(self) -> list[str]:
        """Keys of the rewards that the rollout records of all steps have, the weighted sum first; empty without any."""
        shared = [{**(row.get("rollout") or {})} for row in self.metrics] or [{}]
        keys = [key for key in shared[0] if all(row.get(key) is not None for row in shared)]
        named = [k for k in keys if k.startswith("reward_") and k != "reward_std"]
        return ["reward", *named] if "reward" in keys else []

    @property
    def busy(self) -> dict[str, float]:
        """Fractions of the last part's step time in which training and sampling ranks work; {} if not measured."""
        keys = "step_s", "wait_s", "sample_s"
        rows = self.last.rows[self.last.warm_up :]
        steps = [{**m, **(m.get("rollout") or {})} for m in rows]
        times = [[float(m[k]) for k in keys] for m in steps if all(m.get(k) is not None for k in keys)]
        if not any(step_s for step_s, _, _ in times):
            return {}
        total_s, waited, sampled = (sum(values) for values in zip(*times, strict=True))
        return {"ranks that train": 1 - waited / total_s, "ranks that sample": sampled / total_s}

    @property
    def fullest_rank(self) -> str | None:
        """Name of the rank with the largest recorded memory, such as `rank 0`; None without records."""
        samples = [c for c in self.timeline.counters if c.lane.endswith("/memory")] if self.timeline else []
        return max(samples, key=lambda c: c.value).lane.partition("/")[0] if samples else None


def load_run(directory: str | Path) -> RunRecord:
    """Read a run directory.

    Raises:
        RunUnreadable: HP603 naming the missing or broken file.
        PlanUnreadable: HP306 for a broken plan.json.
    """
    root = Path(directory)
    if not (root / "metrics.jsonl").is_file():
        allowed, command = "the `output_dir` of a run", "hyper-parallel train RECIPE.yaml"
        raise missing_run(root, "metrics.jsonl", allowed, command)
    if not (root / "plan.json").is_file():
        raise RunUnreadable(
            "the run directory has no plan.json",
            where=str(root),
            hint="restore plan.json from a copy of the run",
        )
    sampler_timelines = [_timeline(path) for path in sorted((root / "rollouts").glob("timeline.*.json"))]
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
        answers=read_answers(root / "answers.json"),
        samplers=merge_timelines(t for t in sampler_timelines if t is not None) if sampler_timelines else None,
    )


def _text(path: Path, limits: Limits = _FILE) -> str:
    try:
        return read_text(path, limits) if path.is_file() else ""
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return dict(flatten(read_mapping(path, RunUnreadable, "recipe of the run")))


def _about(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] | None = read_record(path, _ABOUT, "recorded settings", _FILE)
    return facts or {}


def _json_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the last record of each step in a JSON lines file, sorted by step; skip an invalid last line."""
    rows: dict[int, dict[str, Any]] = {}
    lines = _text(path, _LINES).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, _LINE)
            _ROW.validate_python(row, strict=True)
            rows[row["step"]] = {k: row[k] for k in _READ if row.get(k) is not None}
        except ValueError as error:
            if number == len(lines):
                break  # a killed run may leave its last line unfinished
            raise RunUnreadable(
                "a line is not a metrics record",
                where=f"{path}:{number}",
                got=f"{line[:80]} ({error!s:.200})",
                hint="restore the file from a copy of the run, or remove this line",
            ) from error
    return tuple(rows[step] for step in sorted(rows))


def _timeline(path: Path) -> Timeline | None:
    if not path.is_file():
        return None
    try:
        return read(Timeline, path, _FILE)
    except (OSError, DecodeError) as error:
        raise RunUnreadable(
            "a timeline cannot be read",
            where=str(path),
            got=str(error),
            hint="remove the file, to write the report without it",
        ) from error
