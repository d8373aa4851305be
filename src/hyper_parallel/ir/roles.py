"""RolesPlan: times of a reinforcement-learning step, and the division of devices into samplers and learners."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.ir.taskgraph import Task, TaskGraph


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
    """Sampling and learning ranks of a step, and their times.

    Attributes:
        rollout_ranks: Ranks that only sample; 0: learners sample between steps (colocated).
        rollout_tp: Tensor-parallel ranks of one copy of the sampler.
        max_staleness: Rollouts that samplers run ahead of learning.
        sample_s: Seconds to sample one rollout, without contention.
        learn_s: Seconds to learn from one rollout: its optimizer steps and the passes of the reference.
        step_s: Simulated seconds per optimizer step of both, in the steady state.
        sampler_bytes: Peak bytes of a sampling rank.
        rejected: Other splits, among them the best of every mode.
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
    """Return the task graph of several RL steps, on lanes `rank r/learner` and `rank r/sampler`.

    Completions of step t are sampled in order with the weights of step t - 1 - `max_staleness`, and learned from when
    complete.

    Args:
        sample_s: Seconds of a sampling rank per step.
        learn_s: Seconds of a learning rank per step.
        max_staleness: Steps that sampling runs ahead; None: learners sample between steps.
        steps: Number of steps.
        ranks: Numbers of learning and sampling ranks. Ranks of one role work in lockstep, so more than one of each
            matters only if they share cores.
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
