"""RolesPlan: what a step of reinforcement learning takes, and which devices sample and which learn."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.ir.taskgraph import Task, TaskGraph, simulate


@dataclass(frozen=True, slots=True)
class RejectedRoles:
    """Another split of the devices, or another staleness of the same, and why it is not the plan's."""

    rollout_ranks: int
    rollout_tp: int
    max_staleness: int
    step_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RolesPlan:
    """The roles of a step: who samples, who learns, and what both take.

    Attributes:
        rollout_ranks: Ranks that only sample; 0: those that learn sample in turn.
        rollout_tp: So many of them share a copy.
        max_staleness: Rollouts that they run ahead.
        sample_s: Seconds in which the completions of a rollout are sampled, by nobody disturbed.
        learn_s: Seconds of the rest: all optimizer steps from it, passes of the reference and of a mask.
        step_s: Simulated seconds per optimizer step of both, once the first steps are over.
        sampler_bytes: Peak of a rank while it samples.
        rejected: Other splits, the best of every mode among them.
    """

    rollout_ranks: int
    rollout_tp: int
    max_staleness: int
    sample_s: float
    learn_s: float
    step_s: float
    sampler_bytes: int
    rejected: tuple[RejectedRoles, ...] = ()


def role_tasks(
    sample_s: float,
    learn_s: float,
    max_staleness: int | None,
    steps: int,
    ranks: tuple[int, int] = (1, 1),
) -> TaskGraph:
    """The task graph of some steps of sampling and learning, on lanes `rank r/learner` and `rank r/sampler`.

    Completions of step t are sampled by weights of step t - 1 - `max_staleness`, in order, and learned from when they
    are there.

    Args:
        sample_s: Seconds of a rank that samples, for one step.
        learn_s: Seconds of a rank that learns, for one step.
        max_staleness: Steps that sampling runs ahead; None: the ranks that learn sample in turn.
        steps: How many steps.
        ranks: Ranks that learn and that sample. All of one role do the same at the same time, so more than one of each
            makes a difference only where they share cores.
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
        made = add("sample", learners if max_staleness is None else samplers, sample_s, before)
        learned.append(add("learn", learners, learn_s, made))
    return TaskGraph(tuple(tasks))


def steady_step_s(graph: TaskGraph, max_staleness: int | None) -> float:
    """Seconds per step of a graph of `role_tasks`, between ends of learning.

    Without the first steps, for which sampling could begin at once, and the last ones, beside which nothing is sampled
    any more: where roles share cores these are faster.

    Args:
        graph: Of more than twice as many steps as `max_staleness` + 2.
        max_staleness: As in `role_tasks`.
    """
    ends: dict[str, float] = {}
    for span in simulate(graph).spans:
        if span.category == "learn":
            ends[span.name] = max(ends.get(span.name, 0.0), span.end_s)
    first = (max_staleness or 0) + 2
    last = len(ends) - 1 - first
    return (ends[f"learn {last}"] - ends[f"learn {first}"]) / (last - first)
