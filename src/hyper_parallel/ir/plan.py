"""Plan: the one artefact between planning and running, a JSON file that people can read, compare and edit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hyper_parallel.errors import PlanUnreadable
from hyper_parallel.ir import _text
from hyper_parallel.ir.layout import Layout
from hyper_parallel.ir.mesh import Mesh
from hyper_parallel.ir.search import Alternative, Certificate, Sensitivity
from hyper_parallel.ir.stage import Stage
from hyper_parallel.ir.strategy import Strategy
from hyper_parallel.ir.workload import Workload
from hyper_parallel.serde import DecodeError, decode, encode

PLAN_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class CostTerm:
    """One term of the predicted step time, with its formula and where its inputs come from.

    Attributes:
        name: `compute`, `tp communication`, ...
        seconds: Contribution to the step, exposed time only.
        formula: The formula in words and symbols.
        inputs: Values put into the formula.
        source: Paper, specification or measurement the constants come from.
    """

    name: str
    seconds: float
    formula: str
    inputs: dict[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One term of the predicted peak memory of the fullest device."""

    name: str
    tier: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind on one group of axes during one step, as the formulas count them.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast.
        axes: Mesh axes of the group.
        purpose: What it is for, a `Purpose`.
        count: Calls per rank and step.
        sent_bytes: Bytes one rank sends per step in ring algorithms, padding included.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    count: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A strategy that was considered and lost, and why."""

    strategy: Strategy
    reason: str
    step_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What a plan remembers of its model: enough to refuse another one."""

    name: str
    family: str
    num_params: int
    num_active_params: int
    flops_per_token: float
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved answer to: how does this model train on this machine.

    Attributes:
        model: The model the plan is for.
        topology: Name of the machine.
        peak_flops: Peak FLOP/s of one device in the compute dtype.
        workload: Batch numbers and number formats, all resolved.
        strategy: Degrees and choices.
        layouts: Parameter name pattern (`*` for the layer index) to layout.
        step_s: Predicted seconds per step.
        cost: Terms whose sum is `step_s`.
        memory: Terms of the predicted peak of the fullest device.
        memory_capacity_bytes: Capacity of the fullest device's first tier.
        collectives: Communication of one step, by formula.
        rejected: Runners-up, best first.
        stages: What one microbatch costs on every virtual stage; `planner.simulate_plan` runs them.
        pace: Speed of a pipeline rank while 1, 2, ... of them work, against all of them at work; empty where every
            rank has its own cores.
        certificate: Why the search found nothing better; None for a strategy that was given.
        pareto: The front of time and memory near the chosen strategy, fastest first.
        sensitivity: Constants that would change the choice, the smallest change first.
        notes: Sentences a reader should know: assumptions, layouts that deviate from the model's own plan.
        version: Schema version.
    """

    model: ModelRef
    topology: str
    peak_flops: float
    workload: Workload
    strategy: Strategy
    layouts: dict[str, Layout]
    step_s: float
    cost: tuple[CostTerm, ...]
    memory: tuple[MemoryTerm, ...]
    memory_capacity_bytes: int
    collectives: tuple[Collective, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    stages: tuple[Stage, ...] = ()
    pace: tuple[float, ...] = ()
    certificate: Certificate | None = None
    pareto: tuple[Alternative, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    @property
    def mesh(self) -> Mesh:
        """The mesh of the strategy."""
        return self.strategy.mesh()

    @property
    def memory_bytes(self) -> int:
        """Predicted peak bytes on the fullest device, first tier."""
        return sum(term.bytes for term in self.memory if term.tier == "hbm")

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides what runs: model, workload, strategy and layouts."""
        what = [encode(v) for v in (self.model, self.workload, self.strategy, self.layouts)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def predicted_mfu(self) -> float:
        """Model FLOP/s utilisation the prediction implies, against the dense peak."""
        tokens = self.workload.tokens_per_step or 0
        peak = self.peak_flops * self.strategy.world_size
        return (
            self.model.flops_per_token * tokens / (self.step_s * peak)
            if self.step_s and peak
            else 0.0
        )

    def explain(self) -> str:
        """The plan as text: time and memory by term, layouts, collectives, why the runners-up lost."""
        return _text.explain(self)

    def diff(self, other: Plan) -> str:
        """What differs from another plan, one line per value; empty when nothing does."""
        return _text.diff(self, other)

    def to_json(self) -> str:
        """The file form: indented JSON, keys in field order."""
        return json.dumps({**encode(self), "fingerprint": self.fingerprint}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read the file form.

        Raises:
            PlanUnreadable: HP306 with the path of the first value that does not fit.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanUnreadable(
                "the plan is not JSON", where=f"{where}:{error.lineno}", got=error.msg
            ) from error
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            raise PlanUnreadable(
                "the plan has another schema version",
                where=where,
                got=data.get("version") if isinstance(data, dict) else type(data).__name__,
                allowed=PLAN_VERSION,
                hint="make it again with `hyper-parallel plan MODEL -o plan.json`",
            )
        data.pop("fingerprint", None)
        try:
            return decode(cls, data)
        except (DecodeError, TypeError) as error:
            raise PlanUnreadable(
                "the plan holds a value that does not fit", where=where, got=str(error)
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; see `from_json` for the errors."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanUnreadable(
                "the plan cannot be read", where=str(path), got=error.strerror
            ) from error
        return cls.from_json(text, where=str(path))
