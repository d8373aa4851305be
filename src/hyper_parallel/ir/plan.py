"""Plan: the result of planning and the input of a run, a JSON file that people can read, compare and edit.

A plan for reinforcement learning has a `RolesPlan`: the split of the devices into samplers and learners. A plan for a
multimodal model may have a `SubmodelsPlan`: the ranks of its parts, which are the language part and the towers. A tower
is an encoder of images or audio. Loading a file refuses numbers that are out of range.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from hyper_parallel.errors import HyperParallelError, PlanUnreadable
from hyper_parallel.ir import _text
from hyper_parallel.ir.layout import Layout, Mesh
from hyper_parallel.ir.strategy import MOST_RANKS, Strategy, Workload
from hyper_parallel.ir.timeline import Task, TaskGraph
from hyper_parallel.model import ModelProperties
from hyper_parallel.received import Limits, parse_json, read_text
from hyper_parallel.serde import DecodeError, decode, encode, write_text


@dataclass(frozen=True, slots=True)
class RejectedRoles:
    """Split of the devices into samplers and learners that was not chosen (see `RolesPlan`), and the reason."""

    rollout_ranks: int
    rollout_tp: int
    max_staleness: int
    step_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RolesPlan:
    """Split of the devices into sampling and learning ranks, with predicted times.

    Attributes:
        rollout_ranks: Ranks that only sample; 0: learners sample between steps (colocated).
        rollout_tp: Tensor-parallel ranks of one sampler replica.
        max_staleness: Number of rollouts that samplers may run ahead of learning.
        sample_s: Seconds to sample one rollout, while ranks of the other role are idle.
        learn_s: Seconds to learn from one rollout, while ranks of the other role are idle: optimizer steps and extra
            forward passes, such as those of the reference model.
        step_s: Steady-state seconds per optimizer step, sampling included.
        sampler_bytes: Peak bytes of a rank while it samples.
        rejected: The next best splits of the chosen mode, and the best split of every other mode. The mode is the
            staleness, and whether sampling is colocated with learning.
    """

    rollout_ranks: Annotated[int, Field(ge=0, le=MOST_RANKS)]
    rollout_tp: int
    max_staleness: int
    sample_s: float
    learn_s: float
    step_s: Annotated[float, Field(gt=0)]
    sampler_bytes: int
    rejected: tuple[RejectedRoles, ...] = ()


def role_tasks(
    sample_s: float,
    learn_s: float,
    max_staleness: int | None,
    steps: int,
    ranks: tuple[int, int] = (1, 1),
) -> TaskGraph:
    """Return the task graph of several RL steps, on lanes `rank r/learner` and `rank r/sampler`.

    Completions of step t are sampled with the weights after step t - 1 - `max_staleness`. Learning of step t starts
    when all its completions are sampled.

    Args:
        sample_s: Seconds of a sampling rank per step.
        learn_s: Seconds of a learning rank per step.
        max_staleness: Steps that sampling may run ahead; None: learners sample between steps, on their own lanes.
        steps: Number of steps.
        ranks: (number of learning ranks, number of sampling ranks). Ranks of one role work in lockstep, so the numbers
            matter only if ranks share cores.
    """
    learners = [f"rank {i}/learner" for i in range(ranks[0])]
    samplers = [f"rank {i}/sampler" for i in range(ranks[0], sum(ranks))]
    tasks: list[Task] = []
    learned: list[tuple[int, ...]] = []

    def add(kind: str, lanes: list[str], seconds: float, deps: tuple[int, ...]) -> tuple[int, ...]:
        ns, first = round(seconds * 1e9), len(tasks)
        tasks.extend(Task(f"{kind} {step}", lane, ns, kind, deps) for lane in lanes)
        return tuple(range(first, len(tasks)))

    for step in range(steps):
        ahead = max_staleness or 0
        before = learned[step - 1 - ahead] if step > ahead else ()
        sampling = add("sample", learners if max_staleness is None else samplers, sample_s, before)
        learned.append(add("learn", learners, learn_s, sampling))
    return TaskGraph(tuple(tasks))


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Ranks of one part of a multimodal model, and its predicted time and memory.

    Attributes:
        name: `language`, `vision` or `audio`.
        ranks: Ranks of the part.
        degrees: Strategy of the part as text.
        forward_s: Seconds of all forwards of a step on one rank of the part; in a pipeline, on its busiest rank.
            Exposed collectives of the language part are not included.
        backward_s: Seconds of all backwards on that rank; 0 for a frozen part.
        memory: Terms of the predicted peak of one rank, for this part only; empty: not predicted.
    """

    name: str
    ranks: Annotated[tuple[int, ...], Field(min_length=1)]
    degrees: str
    forward_s: float
    backward_s: float
    memory: tuple[MemoryTerm, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmodelsPlan:
    """Parts of a multimodal model with their ranks, and a simulated step without gradient reductions and optimizer.

    Attributes:
        parts: All parts, the language part first.
        step_s: Simulated seconds of a step.
        bubble: Fraction of the step in which ranks are idle, as a mean over the ranks.
        lower_s: Lower bound of the seconds of a step, for any order of the same work on these ranks.
        schedule: Pipeline schedule of all parts, as extended CSV (`Schedule.to_csv`). Empty: towers run on the first
            stage if `inline`, else in rounds, and every tower rank encodes one microbatch per round.
        wait_s: Seconds by which the step is longer than that of the language part alone.
        lanes: Chart of the simulated step, as lines of text.
        certificate: `Plan.whole_step_s` and a lower bound of it over all assignments of ranks; None without a search.
        inline: Whether the ranks of the first pipeline stage also run the towers.
    """

    parts: Annotated[tuple[PartPlan, ...], Field(min_length=1)]
    step_s: Annotated[float, Field(gt=0)]
    bubble: float
    lower_s: float
    schedule: str = ""
    wait_s: float = 0.0
    lanes: tuple[str, ...] = ()
    certificate: Certificate | None = None
    inline: bool = False


PLAN_VERSION: Final = 2
_LIMITS: Final = Limits()
RESERVED: Final = ("device context", "fragmentation")
"""Memory terms without tensors: driver context with communicators, and memory that the allocator cannot use."""


@dataclass(frozen=True, slots=True)
class CostTerm:
    """Term of the predicted step time.

    Attributes:
        name: `compute`, `tp communication`, ...
        seconds: Contribution to the step, exposed time only.
        formula: The formula in words and symbols.
        inputs: Values of the formula's variables.
        source: Paper, specification or measurement behind the constants.
    """

    name: str
    seconds: float
    formula: str
    inputs: dict[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Term of the predicted peak memory of the fullest device, in bytes of one memory tier."""

    name: str
    tier: Literal["hbm", "dram", "flash"]
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Collective:
    """Predicted collectives of one kind and purpose over one group of mesh axes, in one step.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or send_recv.
        axes: Mesh axes of the group.
        purpose: `Purpose` of the collectives.
        count: Calls per rank and step.
        sent_bytes: Bytes that one rank sends per step in ring algorithms, padding included.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    count: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Strategy that was not chosen, with the reason and its predicted time and memory; None: not predicted."""

    strategy: Strategy
    reason: str
    step_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Name, sizes and fingerprint of the model of a plan. `flops_per_token` counts forward and backward."""

    name: str
    family: str
    num_params: int
    num_active_params: int
    flops_per_token: float
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one microbatch on one pipeline stage.

    F is the forward, I the input gradient, W the weight gradient, B the full backward (I and W).

    Attributes:
        forward_s: Seconds of F.
        input_grad_s: Seconds of I.
        weight_grad_s: Seconds of W.
        send_forward_s: Seconds on the link to send the output to the next stage; 0 for the last stage.
        send_backward_s: Seconds on the link to send the gradient to the previous stage; 0 for the first stage.
        activation_bytes: Bytes resident from the start of F to the end of B or I.
        weight_grad_input_bytes: Part of `activation_bytes` that is resident until the end of W.
        unshard_s: Seconds to gather the parameters.
        reduce_grad_s: Seconds to reduce the gradients.
        offload_s: Unused; kept because plan files contain it.
        parameter_bytes: Bytes of gathered parameters, resident from UNSHARD to RESHARD.
        exposed_forward_s: Seconds of exposed collectives in the forward.
        exposed_backward_s: Seconds of exposed collectives in the backward (B or I).
        update_s: Seconds of the optimizer on the parameters of the stage, once per step.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    activation_bytes: int = 0
    weight_grad_input_bytes: int = 0
    unshard_s: float = 0.0
    reduce_grad_s: float = 0.0
    offload_s: float = 0.0
    parameter_bytes: int = 0
    exposed_forward_s: float = 0.0
    exposed_backward_s: float = 0.0
    update_s: float = 0.0

    @property
    def microbatch_s(self) -> float:
        """Seconds of one microbatch, forward and backward, exposed collectives included."""
        own = self.forward_s + self.input_grad_s + self.weight_grad_s
        return own + self.exposed_forward_s + self.exposed_backward_s


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage of a plan, possibly virtual.

    Attributes:
        first_layer: Index of the first decoder layer of the stage.
        layers: Number of decoder layers. The first stage also has the embedding, the last stage the head.
        recomputed: Number of layers to which `Strategy.recompute` applies.
        cost: Cost of one microbatch.
    """

    first_layer: int
    layers: int
    recomputed: int
    cost: StageCost


@dataclass(frozen=True, slots=True)
class Certificate:
    """Seconds per step of the chosen strategy and a lower bound: proof of the distance from the optimum.

    Attributes:
        objective: Objective of the search: `step-time`, `memory`, ...
        value: Seconds per step of the chosen strategy.
        bound: Lower bound of the seconds per step over all strategies of the search space.
        priced: Number of complete strategies that were priced.
        simulated: Number of strategies whose schedule was simulated.
        cut: Dict from reason to the number of pruned partial strategies (nodes of the branch and bound).
        ruled_out: Dict from reason to the number of illegal combinations.
    """

    objective: str
    value: float
    bound: float
    priced: int
    simulated: int = 0
    cut: dict[str, int] = field(default_factory=dict)
    ruled_out: dict[str, int] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Relative gap between value and bound, 1 - bound / value; 0 if they are equal."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value else 0.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """Strategy on the Pareto front of step time and memory, with its sequences per microbatch."""

    strategy: Strategy
    microbatch: int
    step_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Factor on a hardware constant, such as a bandwidth, at which another strategy becomes the fastest."""

    constant: str
    factor: float
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Plan:
    """Strategy and layouts for training a model on a machine, with predicted time and memory.

    Attributes:
        model: The model the plan is for.
        topology: Name of the machine.
        peak_flops: Peak FLOP/s of one device in the compute dtype.
        workload: Batch numbers and number formats, all resolved.
        strategy: Degrees and choices.
        layouts: Parameter name pattern (`*` for the layer index) to layout; empty if this version cannot run the plan.
        step_s: Predicted seconds per step.
        cost: Terms whose sum is `step_s`.
        memory: Terms of the predicted peak of the fullest device.
        memory_capacity_bytes: Bytes of device memory (HBM) of one device.
        collectives: Predicted collectives of one step.
        rejected: Faster strategies that exceed memory, then runners-up, best first.
        stages: Pipeline stages, virtual stages included, with the cost of one microbatch.
        pace: Speed of a pipeline rank while 1, 2, ... pipeline ranks are busy, relative to its speed while all are
            busy. Empty if every rank has its own cores.
        certificate: Proof of optimality; None for a strategy that the user fixed.
        pareto: Pareto front of time and memory among strategies with less memory than the chosen one, fastest first.
        sensitivity: Hardware constants whose change would change the chosen strategy, smallest change first.
        roles: Sampling and learning ranks of an RL step. The costs above are those of learning only.
        submodels: Ranks and costs of the parts of a multimodal model, for the images or recordings of the first step.
            The costs above are those of the language part only.
        properties: Measured properties of the model's class, for packing and KV caches; None: not measured.
        notes: Assumptions, and layouts that deviate from the model's own sharding plan.
        version: Schema version.
    """

    model: ModelRef
    topology: str
    peak_flops: float
    workload: Workload
    strategy: Strategy
    layouts: dict[str, Layout]
    step_s: Annotated[float, Field(gt=0)]
    cost: tuple[CostTerm, ...]
    memory: tuple[MemoryTerm, ...]
    memory_capacity_bytes: Annotated[int, Field(gt=0)]
    collectives: tuple[Collective, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    stages: tuple[Stage, ...] = ()
    pace: tuple[float, ...] = ()
    certificate: Certificate | None = None
    pareto: tuple[Alternative, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    roles: RolesPlan | None = None
    submodels: SubmodelsPlan | None = None
    properties: ModelProperties | None = None
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    @property
    def mesh(self) -> Mesh:
        """The mesh of the strategy."""
        return self.strategy.mesh()

    @property
    def memory_bytes(self) -> int:
        """Predicted peak bytes in the device memory of the fullest device."""
        return sum(term.bytes for term in self.memory if term.tier == "hbm")

    @property
    def reserved_bytes(self) -> int:
        """Bytes of `memory_bytes` without tensors: device context and fragmentation."""
        return sum(term.bytes for term in self.memory if term.name in RESERVED)

    @property
    def tensor_bytes(self) -> int:
        """Predicted peak bytes of tensors on the fullest device, comparable with a memory trace."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def fingerprint(self) -> str:
        """Hash of model, workload, strategy and layouts, as 16 hexadecimal digits."""
        inputs = [encode(v) for v in (self.model, self.workload, self.strategy, self.layouts)]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def whole_step_s(self) -> float:
        """Predicted seconds per step, including the sampling of an RL step and waits for towers."""
        if self.submodels is not None:
            return self.step_s + self.submodels.wait_s
        return self.step_s if self.roles is None else self.roles.step_s

    @property
    def num_ranks(self) -> int:
        """Number of ranks that train: the size of the mesh, or the ranks of all parts of a multimodal model."""
        if self.submodels is None:
            return self.strategy.world_size
        return len({rank for part in self.submodels.parts for rank in part.ranks})

    @property
    def degrees(self) -> str:
        """Text of the strategy, or of the strategies of all parts of a multimodal model."""
        if self.submodels is None:
            return str(self.strategy)
        return ", ".join(f"{part.name} {part.degrees}" for part in self.submodels.parts)

    @property
    def predicted_mfu(self) -> float:
        """Predicted model FLOP/s utilization (MFU) of the ranks that train; 0 if the workload is not resolved."""
        tokens = self.workload.tokens_per_step or 0
        peak = self.peak_flops * self.num_ranks
        capacity = self.whole_step_s * peak
        return self.model.flops_per_token * tokens / capacity if capacity else 0.0

    __str__ = _text.brief
    _repr_html_ = _text.html
    summary = _text.panel
    one_line = _text.one_line
    explain = _text.explain
    diff = _text.diff

    def to_json(self) -> str:
        """Return the plan and its fingerprint as indented JSON with keys in field order, the content of a plan file."""
        return json.dumps({**encode(self), "fingerprint": self.fingerprint}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Return the plan in a JSON text, without checking its fingerprint; `where` names the file in errors.

        Raises:
            PlanUnreadable: HP306 if the text is not JSON, exceeds a limit, has another schema version, or has a value
                of a wrong type or range, or a layout that its class does not allow.
        """
        try:
            data = parse_json(text, _LIMITS)
        except ValueError as error:  # also raised beyond a limit of `_LIMITS`
            at = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise _unreadable("cannot be read as JSON", f"{where}{at}", str(error)[:120]) from error
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            version = data.get("version") if isinstance(data, dict) else type(data).__name__
            problem = f"does not have the schema version {PLAN_VERSION}"
            raise _unreadable(problem, where, version, data)
        data.pop("fingerprint", None)
        try:
            plan = decode(cls, data)
            if problem := next(_range_problems(plan), ""):
                raise DecodeError(problem)
        except (DecodeError, TypeError, HyperParallelError) as error:
            raise _unreadable("contains an invalid value", where, str(error), data) from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which is replaced atomically; raise OSError if that fails."""
        write_text(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan in a file; raise PlanUnreadable (HP306) if it cannot be read, else as in `from_json`."""
        try:
            text = read_text(Path(path), _LIMITS)
        except (OSError, ValueError) as error:
            raise _unreadable("cannot be read", str(path), str(error)[:120]) from error
        return cls.from_json(text, where=str(path))


def _unreadable(problem: str, where: str, got: object, data: object = None) -> PlanUnreadable:
    """Return the error for a plan file with the content `data`; the hint plans again for its model and topology."""
    words = ["MODEL"]
    match data:
        case {"model": {"name": str(model)}, "topology": str(topology)}:
            words = [model, "--topology", topology]
    hint = shlex.join(["hyper-parallel", "plan", *words, "-o", "new-plan.json"])
    return PlanUnreadable(f"the plan file {problem}", where=where, got=got, hint=hint)


_MOST_STAGES: Final = 1 << 16


def _range_problems(plan: Plan) -> Iterator[str]:
    strategies = {"$.strategy": plan.strategy}
    for name in ("rejected", "pareto", "sensitivity"):
        rows = enumerate(getattr(plan, name))
        strategies |= {f"$.{name}[{i}].strategy": row.strategy for i, row in rows}
    for path, strategy in strategies.items():
        if strategy.overlap.tp_symmetric and strategy.overlap.tp_chunks > 1:
            yield f"{path}.overlap: tp_symmetric with tp_chunks"
        if strategy.world_size > MOST_RANKS:
            yield f"{path}: degrees of {strategy.world_size} ranks, more than {MOST_RANKS}"
        if strategy.stages > _MOST_STAGES:
            yield f"{path}: {strategy.stages} pipeline stages, more than {_MOST_STAGES}"
    if len(plan.stages) > _MOST_STAGES:
        yield f"$.stages: {len(plan.stages)} stages, more than {_MOST_STAGES}"
