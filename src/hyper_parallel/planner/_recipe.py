"""The plan of a recipe: its explicit degrees, or with `parallel: auto` the planner's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hyper_parallel.config import Recipe
from hyper_parallel.errors import DegreesMismatch
from hyper_parallel.ir import Plan, Rule, Strategy, Workload
from hyper_parallel.planner._check import check_degrees
from hyper_parallel.planner._context import Context, resolve
from hyper_parallel.planner._plan import evaluate, search
from hyper_parallel.planner._space import DEGREES, Limits


def plan_recipe(
    recipe: Recipe, world_size: int | None = None, where: Callable[[str], str] = str
) -> Plan:
    """The plan that a recipe trains with.

    With explicit degrees exactly those are planned. With `parallel: auto` the degrees that the recipe does not name
    are chosen, among the axes that this version can run, for the number of tokens that the recipe names; where it
    names none, one sequence per rank and step, so that the choice of axes does not change the training.

    Args:
        recipe: The run.
        world_size: Ranks that were already started; None: the product of explicit degrees; with auto
            `parallel.world_size`, else every accelerator of the topology, or 4 on a machine without one.
        where: Tells where the value of a key was set, for errors; `LoadedRecipe.where`.

    Raises:
        DegreesMismatch: HP301 when explicit degrees do not multiply to the ranks.
        HyperParallelError: What `plan` raises.
    """
    parallel = recipe.parallel
    strategy = _strategy(recipe)
    if not parallel.auto:
        culprit = where(_culprit(strategy))
        check_degrees(strategy, parallel.world_size, where("parallel.world_size"))
        check_degrees(strategy, world_size, culprit)
        context = resolve(
            recipe.model.path, recipe.topology, _workload(recipe), strategy.world_size
        )
        return evaluate(_keep_batch(context, recipe, None), strategy, culprit)
    if None not in (world_size, parallel.world_size) and world_size != parallel.world_size:
        raise DegreesMismatch(
            f"the recipe plans for {parallel.world_size} ranks, but {world_size} were started",
            where=where("parallel.world_size"),
            got=parallel.world_size,
            allowed=world_size,
            hint=f"parallel.world_size={world_size}",
        )
    context = resolve(
        recipe.model.path, recipe.topology, _workload(recipe), world_size or parallel.world_size
    )
    context = replace(_keep_batch(context, recipe, context.num_devices), from_recipe=True)
    given = parallel.model_fields_set
    limits = Limits(
        context.num_devices,
        {name: getattr(parallel, name) for name in DEGREES if name in given},
        (),
        executable=True,
        recompute=_choices("recompute" in recipe.training.model_fields_set, recipe),
        reshard=(int(parallel.reshard_after_forward),)
        if "reshard_after_forward" in given
        else (1, 0),
    )
    return search(context, limits, base=Strategy(rules=strategy.rules))


def _culprit(strategy: Strategy) -> str:
    """Key of the degree that an error of this strategy is most likely about."""
    degrees = strategy.degrees()
    suspects = ("pp", "cp", "tp_y", "ep", "tp_x", "dp_shard", "dp_replicate")
    return "parallel." + next((axis for axis in suspects if degrees[axis] > 1), "dp_shard")


def _choices(given: bool, recipe: Recipe) -> tuple[int, ...]:
    return (int(recipe.training.recompute == "full"),) if given else (0, 1)


def _strategy(recipe: Recipe) -> Strategy:
    p = recipe.parallel
    return Strategy(
        **{name: getattr(p, name) for name in DEGREES},
        rules=tuple(Rule(pattern, style) for pattern, style in p.rules.items()),
        recompute=recipe.training.recompute,
        reshard_after_forward=p.reshard_after_forward,
    )


def _workload(recipe: Recipe) -> Workload:
    t = recipe.training
    stored = "float64" if t.dtype == "float64" else "float32"
    return Workload(
        recipe.data.seq_len,
        tokens_per_step=t.tokens_per_step,
        microbatch=t.microbatch,
        accumulation_steps=t.accumulation_steps,
        compute_dtype=t.dtype,
        param_dtype=stored,
        reduce_dtype=stored,
    )


def _keep_batch(context: Context, recipe: Recipe, ranks: int | None) -> Context:
    """The recipe's own batch numbers: one sequence per rank when it names none, never the planner's assumption."""
    workload = _workload(recipe)
    none_given = (workload.tokens_per_step, workload.microbatch, workload.accumulation_steps) == (
        None,
    ) * 3
    notes = context.model.notes
    if none_given and ranks is not None:
        workload = replace(workload, tokens_per_step=workload.seq_len * ranks)
        notes += (f"tokens per step assumed: one sequence per rank, {workload.tokens_per_step}",)
    return replace(context, workload=workload, notes=notes)
