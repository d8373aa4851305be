"""Plans from files: price an edited one again, and compare two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hyper_parallel.errors import PlanMismatch
from hyper_parallel.ir import Plan
from hyper_parallel.model import ModelSpec
from hyper_parallel.planner._plan import plan as make_plan
from hyper_parallel.topology import Supernode


def recheck(
    plan: Plan, model: str | Path | ModelSpec, topology: str | Supernode | None = None
) -> Plan:
    """A plan priced and checked again, for one that was loaded from a file and may have been edited.

    Degrees, recompute and the batch may be edited; layouts, cost and memory follow from them and are made anew.

    Args:
        plan: The plan as loaded.
        model: The model it is going to be applied to.
        topology: The machine; None: the one the plan names.

    Raises:
        PlanMismatch: HP307 when the plan was made for another model or another machine.
        HyperParallelError: What `plan` raises for an illegal strategy.
    """
    strategy = plan.strategy
    # Accumulation follows from the other two numbers, so editing a degree needs no second edit.
    workload = replace(plan.workload, accumulation_steps=None)
    again = make_plan(
        model, topology if topology is not None else plan.topology, workload, strategy=strategy
    )
    if again.model.fingerprint != plan.model.fingerprint:
        raise PlanMismatch(
            "the plan was made for another model",
            got=f"plan for {plan.model.name} ({plan.model.fingerprint})",
            allowed=f"{again.model.name} ({again.model.fingerprint})",
            hint=f"hyper-parallel plan {again.model.name} -o plan.json",
        )
    if again.topology != plan.topology:
        raise PlanMismatch(
            "the plan was made for another machine",
            got=plan.topology,
            allowed=again.topology,
            hint=f"hyper-parallel plan {again.model.name} --topology {again.topology} -o plan.json",
        )
    same = {**dict.fromkeys(plan.notes), **dict.fromkeys(again.notes)}
    notes = tuple(same)
    if again.layouts != plan.layouts:
        notes += ("layouts were made anew for the degrees in the file",)
    return replace(again, rejected=plan.rejected, notes=notes)


def diff(a: Plan, b: Plan) -> str:
    """What differs between two plans, one line per value: `strategy.tp_x: 4 -> 8`; empty when nothing does."""
    return a.diff(b)
