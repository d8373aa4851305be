"""Application of a saved plan to a recipe: its layout and batch as overrides, and checks that both match."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hyper_parallel.config import DEGREES, Recipe
from hyper_parallel.errors import PlanMismatch
from hyper_parallel.ir import Plan
from hyper_parallel.planner._launch_settings import recipe_values


def plan_overrides(plan: Plan, recipe: Recipe, where: Callable[[str], str], file: str) -> list[str]:
    """Return overrides that make a recipe train with a plan.

    Args:
        plan: The saved plan.
        recipe: The recipe without the overrides.
        where: Origin of a key of the recipe.
        file: Path of the plan, for errors.

    Raises:
        PlanMismatch: HP307 when sequences, batch or formats of recipe and plan differ.
    """
    work, training = plan.workload, recipe.training
    tokens = training.tokens_per_step
    for key, own, planned in (
        ("data.seq_len", recipe.data.seq_len, work.seq_len),
        ("training.dtype", training.dtype, work.compute_dtype),
        ("training.tokens_per_step", tokens, work.tokens_per_step if tokens else None),
    ):
        if own != planned:
            raise PlanMismatch(
                "the saved plan is for another workload than the recipe",
                where=f"{file}; {where(key)}",
                got=f"{key}={own} in the recipe, {planned} in the plan",
                changes={key: planned},
            )
    values = recipe_values(plan)
    degrees = dict.fromkeys(DEGREES, 1) | plan.strategy.degrees()
    parallel = {name: degree for name, degree in degrees.items() if name in DEGREES}
    overrides: dict[str, object] = {f"parallel.{k}": v for k, v in parallel.items()}
    overrides |= {f"parallel.{k}": v for k, v in values["parallel"].items()}
    own_keys = ("microbatch", "accumulation_steps", "recompute", "recompute_layers")
    overrides |= {f"training.{k}": values["training"].get(k) for k in own_keys}
    overrides |= {
        "parallel.auto": False,
        "parallel.world_size": None,
        "training.tokens_per_step": None,
    }
    if plan.strategy.offload and not recipe.offload.on:
        overrides["offload.budget"] = "auto"
    return [f"{key}={_as_yaml(value)}" for key, value in overrides.items()]


def check_saved_plan(saved: Plan, run_plan: Plan, file: str) -> None:
    """Refuse a run whose plan differs from the saved plan.

    Args:
        saved: The saved plan.
        run_plan: The plan of the run, with the overrides of the saved plan.
        file: Path of the saved plan.

    Raises:
        PlanMismatch: HP307 naming model, batch or layout.
    """
    sizes = ("num_params", "num_active_params")
    facts: Mapping[str, tuple[object, object]] = {
        "model": (
            f"{saved.model.name}, {saved.model.num_params:,} parameters",
            f"{run_plan.model.name}, {run_plan.model.num_params:,} parameters",
        )
        if any(getattr(saved.model, n) != getattr(run_plan.model, n) for n in sizes)
        else (0, 0),
        "ranks": (saved.strategy.world_size, run_plan.strategy.world_size),
        "tokens per step": (saved.workload.tokens_per_step, run_plan.workload.tokens_per_step),
        "layout": (str(saved.strategy), str(run_plan.strategy)),
    }
    for name, (planned, own) in facts.items():
        if planned != own:
            raise PlanMismatch(
                f"the saved plan does not fit the run: it has another {name}",
                where=file,
                got=f"plan: {planned}; run: {own}",
                hint=f"hyper-parallel plan --recipe RECIPE.yaml -o {file}, with the recipe of the run",
            )


def _as_yaml(value: object) -> str:
    """Return a value as YAML text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
