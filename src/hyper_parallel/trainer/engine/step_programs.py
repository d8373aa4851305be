"""Capture of a training step as step programs, for back ends other than torch.

A step program is a graph of tensor operators with static shapes (`StepProgram`), which another framework compiles. A
step has three programs: loss, gradients and optimizer update. A block is one pipeline, or one tensor- or
expert-parallel group. All blocks run the same programs, so only the ranks of one block are captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends import BACKENDS
from hyper_parallel.backends.plan_sink import ProgramMemory, peak_bytes, plan_program
from hyper_parallel.backends.program_memory import planned, recompute_layers
from hyper_parallel.backends.program_runner import missing_for_fusion, unsupported_operators
from hyper_parallel.backends.step_program import StepProgram, group_name
from hyper_parallel.backends.torch import local, materialize, resolve_layouts
from hyper_parallel.backends.torch.dropout import has_dropout
from hyper_parallel.backends.torch.forward_variants import recomputed_layers
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.parallel_handle import attached
from hyper_parallel.backends.torch.pipeline.stages import StageModules
from hyper_parallel.backends.torch.program_capture import (
    Shards,
    capture_gradients,
    capture_loss,
    capture_stage,
    capture_update,
    sum_over,
)
from hyper_parallel.backends.torch.traced_groups import TRACED
from hyper_parallel.config import Recipe
from hyper_parallel.errors import (
    BudgetImpossible,
    Contradiction,
    MissingDependency,
    TierFull,
    UnsupportedSharding,
)
from hyper_parallel.ir import Layout, Plan, Strategy
from hyper_parallel.memory import with_capacity_hint
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.shard import completed_changes
from hyper_parallel.trainer.engine.offload_machine import OffloadMachine, budget_too_small
from hyper_parallel.trainer.engine.optimizer import build_optimizer
from hyper_parallel.trainer.engine.recipe_model import build_model, routing_of, torch_hint

VALID_TOKENS: Final = "valid_tokens"
"""Name of the batch value by which the loss is divided."""

AXES: Final = ("pp", "dp_replicate", "dp_shard", "edp")
"""Mesh axes that name the process groups of a program's collectives; other group names list ranks of the block."""

_FSDP: Final = ("dp_shard", "edp")
"""Axes that shard parameters between steps."""

_STATES: Final[dict[type, tuple[str, ...]]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""Names of the state tensors that each optimizer keeps per parameter, as in torch."""


@dataclass(frozen=True, slots=True)
class StepPrograms:
    """Captured programs of a training step on one rank.

    Attributes:
        loss: Program for the forward of one microbatch. It returns the loss or, on all pipeline stages but the last,
            the activations `sent` to the next stage.
        gradients: Program for loss and gradients of one microbatch; see `capture_gradients`.
        update: Program for clipping and optimizer step. Inputs: `param.NAME`, `grad.NAME`, `STATE.NAME`, and the
            scalars of `update_scalars`. Outputs: `grad_norm`, `param.NAME` and `STATE.NAME`.
        memory: Prediction of the memory plan that `gradients` contains; None without `offload`.
    """

    loss: StepProgram
    gradients: StepProgram
    update: StepProgram
    memory: ProgramMemory | None = None

    def save(self, folder: Path) -> None:
        """Write the programs to subfolders `loss`, `gradients` and `update`, and `memory` to gradients/memory.json."""
        for name in ("loss", "gradients", "update"):
            getattr(self, name).save(folder / name)
        if self.memory is not None:
            text = json.dumps({"origin": "simulated", **asdict(self.memory)}, indent=1)
            (folder / "gradients" / "memory.json").write_text(text + "\n", encoding="utf-8")


def capture_programs(
    recipe: Recipe, plan: Plan, router_loss: str | None, where: Callable[[str], str]
) -> tuple[StepPrograms, ...]:
    """Capture the step programs of a recipe, for each rank of one block (see `program_block`).

    `router_loss` describes the auxiliary loss of expert routers; None: no auxiliary loss. `where` returns the origin of
    a recipe key, for errors.

    Raises:
        MissingDependency: HP501 when the back end, or a command that operator fusion needs, is not installed.
        Contradiction: HP104 for a recipe feature that step programs do not support, or for operators that the back end
            lacks.
        UnsupportedSharding: HP205 for an unsupported layout.
        BudgetImpossible, TierFull: HP402 or HP403 when no memory plan fits device or host memory.
    """
    backend = BACKENDS[recipe.backend]
    if find_spec(backend.framework) is None:
        raise MissingDependency(
            f"the back end {recipe.backend} needs the package `{backend.framework}`",
            where=where("backend"),
            got=f"backend={recipe.backend}",
            hint=backend.setup,
        )
    if recipe.training.compile and (commands := missing_for_fusion(recipe.backend)):
        raise MissingDependency(
            f"graph kernels need {', '.join(commands)}, which {recipe.backend} does not install",
            where=where("training.compile"),
            got=f"training.compile={recipe.training.compile}",
            hint=" && ".join(commands.values()),
        )
    _check_recipe(recipe, plan, router_loss, where)
    captured = []
    block = program_block(plan.strategy)
    for position in range(block.world_size):
        with completed_changes(plan.strategy), _traced_world(recipe, block, position) as world:
            model = build_model(recipe)
            layouts = resolve_layouts(model, plan).layouts
            _use_static_forms(model)
            if world is not None:
                parallelize(model, _block_plan(plan, block), world, routing=routing_of(recipe))
            materialize(model, seed=recipe.training.seed, device=torch.device("cpu"))
            captured.append(_capture(recipe, plan, model, layouts, where))
    missing: dict[str, str] = {}
    for program in (p for step in captured for p in (step.gradients, step.update, step.loss)):
        missing = unsupported_operators(recipe.backend, program) | missing
    if missing:
        raise Contradiction(
            f"{type(model).__name__} uses operators that the back end {recipe.backend} does not support",
            where=where("backend"),
            got=", ".join(f"{op} ({module})" if module else op for op, module in missing.items()),
            hint=torch_hint(recipe),
        )
    return tuple(captured)


def _capture(
    recipe: Recipe,
    plan: Plan,
    model: nn.Module,
    layouts: Mapping[str, Layout],
    where: Callable[[str], str],
) -> StepPrograms:
    if has_dropout(model):
        own = has_dropout(model, adapters=False)
        key = "training.disable_dropout" if own else "lora.lora_dropout"
        raise _refused(recipe.backend, "dropout", where(key), "training.disable_dropout=true")
    rows = plan.workload.microbatch or 1, recipe.data.seq_len
    ids = torch.zeros(rows, dtype=torch.int64)
    batch = {
        "input_ids": ids, "shift_labels": ids, "position_ids": ids,
        VALID_TOKENS: torch.ones((), dtype=torch.float32),
    }  # fmt: skip
    strategy, max_norm = plan.strategy, recipe.training.max_grad_norm
    shards = _shards(strategy, layouts)
    update = _update_program(
        model,
        build_optimizer(model, recipe.training),
        shards,
        _clip_function(model, strategy, layouts, max_norm),
    )
    parallel = attached(model)
    if parallel is not None and parallel.pipeline is not None:
        _check_shared(recipe, strategy, parallel.pipeline.stages, where("parallel.pp"))
        forward, gradients = capture_stage(model, batch, _loss_of_model)
    else:
        loss = _loss if parallel is None else _loss_of_model
        forward = capture_loss(model, batch, loss, shards)
        gradients = capture_gradients(model, batch, loss, shards)
    if layers := _recomputed_layers(model, strategy):
        gradients = planned(gradients, recompute_layers(gradients, layers))
    memory = None
    if recipe.offload.on:
        gradients, memory = _with_memory_plan(recipe, plan, gradients, update)
    return StepPrograms(forward, gradients, update, memory)


def _with_memory_plan(
    recipe: Recipe, plan: Plan, gradients: StepProgram, update: StepProgram
) -> tuple[StepProgram, ProgramMemory]:
    """Add the memory plan of `offload` to program `gradients`; return the new program and its predicted memory.

    Optimizer states, and all values of program `update`, stay on the device.
    """
    assumed = OffloadMachine.of(recipe, plan, torch.device("cpu"))
    states = sum(
        kind.num_bytes
        for name, (_, kind) in update.inputs.items()
        if name not in gradients.inputs and not name.startswith("grad.")
    )
    budget, least = assumed.budget_bytes, peak_bytes(update)
    enough = None if budget is None else max(budget, least)
    try:
        planned = plan_program(
            gradients,
            assumed.planned,
            assumed.roofline,
            budget_bytes=None if enough is None else enough - states,
            max_slowdown=assumed.choice.max_slowdown,
            recompute=assumed.choice.recompute,
            reorder=assumed.choice.reorder,
        )
    except BudgetImpossible as error:
        text = "no memory plan fits the device budget"
        raise budget_too_small(text, budget or 0, error.least_bytes + states) from error
    except TierFull as error:
        error.where, error.got = "offload.budget", f"{budget} bytes"
        device = error.enough_bytes["device"] + states
        raise with_capacity_hint(error, {**error.enough_bytes, "device": device}) from None
    if budget is not None and budget < least:
        raise budget_too_small("the optimizer update does not fit the device budget", budget, least)
    return planned


def _recomputed_layers(model: nn.Module, strategy: Strategy) -> list[str]:
    parallel = attached(model)
    pipeline = None if parallel is None else parallel.pipeline
    stages = [[*view_of(model).layers]] if pipeline is None else [*pipeline.stages.layers.values()]
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in recomputed_layers(stages, strategy)]


def program_block(strategy: Strategy) -> Strategy:
    """Return the strategy of a single block of ranks, as defined in the module docstring.

    Recompute is disabled in the returned strategy, because it is applied to the captured programs, not to the traced
    model.
    """
    return replace(
        strategy,
        dp_replicate=1,
        dp_shard=max(1, strategy.ep // strategy.tp),
        recompute="none",
        recompute_layers=None,
    )


def _block_plan(plan: Plan, block: Strategy) -> Plan:
    """Return the plan of a block, without sharding over data-parallel axes that have degree 1 in the block."""
    absent = [a for a in _FSDP if getattr(block, a, 1) == 1]
    layouts = {
        name: replace(layout, axes=tuple(tuple(a for a in dim if a not in absent) for dim in layout.axes))
        for name, layout in plan.layouts.items()
    }
    return replace(plan, strategy=block, layouts=layouts)


def _traced_world(recipe: Recipe, block: Strategy, position: int) -> AbstractContextManager[World | None]:
    """Return the context of a fake world for rank `position` of a block.

    For a block of one rank without `moe.capacity_factor`, the value of the context is None.
    """
    if block.world_size == 1 and recipe.moe.capacity_factor is None:
        return nullcontext()
    return World.fake(position, block.world_size, TRACED)


def _shards(strategy: Strategy, layouts: Mapping[str, Layout]) -> Shards:
    shards = {}
    for name, layout in layouts.items():
        dims = [(d, a) for d, axes in enumerate(layout.axes) for a in axes if a in _FSDP]
        for dim, axis in dims:
            shards[name] = Shards(strategy.mesh_of(layout).degree(axis), axis, dim)
    return Shards(others=shards)


def update_scalars(optimizer: torch.optim.Optimizer, step: int, lr: float) -> dict[str, float]:
    """Return the scalar inputs of program `update` by name, for step number `step`, counted from 1.

    For AdamW, `step_size` is `lr` divided by the first bias correction, and `root` is the square root of the second.
    For other optimizers, the only scalar is `lr`.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return {"lr": lr}
    first, second = optimizer.param_groups[0]["betas"]
    return {"lr": lr, "step_size": lr / (1 - first**step), "root": (1 - second**step) ** 0.5}


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the state tensors that the optimizer keeps per parameter."""
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.param_groups[0]["momentum"]:
        return ()
    return _STATES[type(optimizer)]


def _loss(model: nn.Module, shift_labels: Tensor, valid_tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Return the summed cross entropy of one microbatch divided by `valid_tokens` of the whole step."""
    logits = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / valid_tokens


def _loss_of_model(model: nn.Module, shift_labels: Tensor, valid_tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Return the loss that the model computes itself, also from logits that are sharded over tensor-parallel ranks."""
    labels = {"labels": shift_labels, "shift_labels": shift_labels}
    output = model(**inputs, **labels, num_items_in_batch=valid_tokens, use_cache=False)
    return output.loss


def _use_static_forms(model: nn.Module) -> None:
    for name, form in (
        ("set_attn_implementation", "eager"),
        ("set_experts_implementation", "batched_mm"),
    ):
        if hasattr(model, name):
            getattr(model, name)(form)


def _check_recipe(recipe: Recipe, plan: Plan, router_loss: str | None, where: Callable[[str], str]) -> None:
    training = recipe.training
    refused = {
        "stage": (recipe.stage not in ("pt", "sft"), f"stage={recipe.stage}", torch_hint(recipe)),
        "offload.flash_dir": (
            recipe.offload.on and recipe.offload.flash_dir is not None, "offload to files",
            "offload.flash_dir=null" + (" offload.flash=null" if recipe.offload.flash is not None else ""),
        ),
        "training.recompute": (
            plan.strategy.recompute == "selective", "recompute=selective", "training.recompute=full",
        ),
        "training.dtype": (training.dtype != "float32", f"dtype={training.dtype}", "training.dtype=float32"),
        "training.neftune_noise_alpha": (
            training.neftune_noise_alpha is not None, "embedding noise", "training.neftune_noise_alpha=null",
        ),
        "training.optimizer": (
            training.optimizer not in ("adamw", "sgd"), f"optimizer={training.optimizer}",
            "training.optimizer=adamw" + (" 'training.optimizer_args={}'" if training.optimizer_args else ""),
        ),
        "training.profile": (training.profile is not None, "torch.profiler", "training.profile=null"),
        "moe.bias_update_rate": (
            recipe.moe.bias_update_rate != 0, "updates of router biases", "moe.bias_update_rate=0",
        ),
        "moe.capacity_factor": (
            recipe.moe.capacity_factor is None and plan.strategy.ep > 1,
            "expert parallelism without `moe.capacity_factor`", "moe.capacity_factor=2",
        ),
        "moe.aux_loss_coef": (router_loss is not None, router_loss or "", "moe.aux_loss_coef=0"),
        "training.check_ranks_every": (
            bool(training.check_ranks_every), "`training.check_ranks_every`", "training.check_ranks_every=0",
        ),
    }  # fmt: skip
    for key, (applies, text, hint) in refused.items():
        if applies:
            raise _refused(recipe.backend, text, where(key), hint)
    _check_layout(recipe, plan.strategy, where("parallel"))


def _check_layout(recipe: Recipe, strategy: Strategy, where: str) -> None:
    """Raise UnsupportedSharding (HP205) for mesh axes that step programs do not support.

    The hint proposes a supported layout with the same world size.
    """
    if strategy.pp == strategy.world_size and strategy.stages > strategy.pp:
        raise UnsupportedSharding(
            f"the back end {recipe.backend} runs one pipeline stage per rank",
            where=where,
            got=str(strategy),
            changes={"parallel.schedule": "1f1b", "parallel.virtual_stages": 1} | _without_stages(recipe),
        )
    axes = [a for a in ("cp", "tp_y") if getattr(strategy, a) > 1]
    if 1 < strategy.pp < strategy.world_size:
        axes.append("pp")
    if strategy.tp > 1 and strategy.ep > 1:
        axes.append("ep")
    if not axes:
        return
    replicas = strategy.world_size // (strategy.dp_shard * strategy.tp_x)
    degrees = {"dp_replicate": replicas} | dict.fromkeys(axes, 1)
    raise UnsupportedSharding(
        f"the back end {recipe.backend} supports pp without other axes, or dp_replicate and dp_shard with either tp "
        "or ep",
        where=where,
        got=str(strategy),
        changes=_layout_changes(recipe, strategy, degrees),
    )


def _without_stages(recipe: Recipe) -> dict[str, object]:
    unset: dict[str, object] = {"stage_layers": [], "schedule_file": ""}
    return {f"parallel.{key}": value for key, value in unset.items() if getattr(recipe.parallel, key)}


def _layout_changes(recipe: Recipe, strategy: Strategy, degrees: Mapping[str, int]) -> dict[str, object]:
    """Return overrides that set the mesh `degrees` and adapt the keys that would contradict these degrees."""
    changes: dict[str, object] = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    if degrees.get("pp") == 1 and strategy.pp > 1:
        changes |= {"parallel.virtual_stages": 1} if recipe.parallel.virtual_stages > 1 else {}
        changes |= _without_stages(recipe)
    training, dp = recipe.training, degrees["dp_replicate"] * strategy.dp_shard
    if training.tokens_per_step is not None and dp != strategy.dp:
        unit = recipe.data.seq_len * dp * (training.microbatch or 1)
        if training.accumulation_steps is not None:
            changes["training.accumulation_steps"] = "null"
        if training.tokens_per_step % unit:
            changes["training.tokens_per_step"] = max(1, round(training.tokens_per_step / unit)) * unit
    return changes


def _check_shared(recipe: Recipe, strategy: Strategy, stages: StageModules, where: str) -> None:
    if stages.shared and strategy.pp > 2:
        raise UnsupportedSharding(
            "pipeline stages share parameters, such as tied embeddings, which is supported for two stages only",
            where=where,
            got=f"pp={strategy.pp}, {stages.shared[0]}",
            allowed="pp=1 or pp=2",
            changes=_layout_changes(recipe, strategy, {"pp": 1, "dp_replicate": strategy.pp}),
        )


def _refused(backend: str, feature: str, where: str, hint: str) -> Contradiction:
    return Contradiction(f"the back end {backend} does not support {feature}", where=where, got=feature, hint=hint)


def _clip_function(
    model: nn.Module,
    strategy: Strategy,
    layouts: Mapping[str, Layout],
    max_norm: float | None,
) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]:
    """Return a traceable function from a rank's gradients to their global norm and the clipped gradients.

    The function first sums the gradients over `dp_replicate`, and gradients of parameters that stages share over `pp`.
    `strategy` is the strategy of all ranks, and the keys of `layouts` are parameter names. With `max_norm` None, the
    gradients are not clipped.
    """
    parallel, tp = attached(model), strategy.tp
    first = 0 if parallel is None else parallel.ranks.rank // tp * tp
    pipeline = None if parallel is None else parallel.pipeline
    shared = () if pipeline is None else pipeline.stages.shared
    summed_axes = {
        "pp": strategy.pp,
        "dp_shard": strategy.dp_shard,
        group_name(range(first, first + tp)): tp,
    }
    copies = {}  # number of ranks in a model replica that hold the same shard
    for name, layout in layouts.items():
        mesh = strategy.mesh_of(layout)
        ranks = mesh.size // strategy.pp // strategy.dp_replicate
        stages = strategy.pp if name in shared else 1
        copies[name] = ranks * stages // mesh.degree(layout.sharding_axes)

    def clip(grads: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        grads = dict(grads)
        grads |= {name: sum_over(grads[name], "pp") for name in shared if name in grads}
        if strategy.dp_replicate > 1:
            grads = {name: sum_over(grad, "dp_replicate") for name, grad in grads.items()}
        squares = torch.stack([g.float().square().sum() / copies[n] for n, g in grads.items()]).sum()
        for axis, degree in summed_axes.items():
            squares = sum_over(squares, axis) if degree > 1 else squares
        norm = squares.sqrt()
        if max_norm is None:
            return norm, grads
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm, {name: grad * scale for name, grad in grads.items()}

    return clip


def _update_program(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shards: Shards,
    clip: Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]],
) -> StepProgram:
    names = {p: n for n, p in model.named_parameters()}
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    shapes = {
        name: torch.empty(shards.of(name).shape(local(p).shape), dtype=p.dtype)
        for p, name in names.items()
        if name in groups
    }
    kinds = ("param", "grad", *state_names(optimizer))
    example = {f"{kind}.{name}": shapes[name] for kind in kinds for name in shapes}
    example |= {name: torch.ones(()) for name in update_scalars(optimizer, 1, 1.0)}
    rule = _adamw if isinstance(optimizer, torch.optim.AdamW) else _sgd

    def update(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        norm, grads = clip({name: values[f"grad.{name}"] for name in shapes})
        results = {"grad_norm": norm}
        for name, group in groups.items():
            own = {k: values[f"{k}.{name}"] for k in ("param", *state_names(optimizer))}
            updated = rule(own, grads[name], values, group)
            results |= {f"{kind}.{name}": value for kind, value in updated.items()}
        return results

    return capture_update(update, example)


def _adamw(
    own: Mapping[str, Tensor], grad: Tensor, values: Mapping[str, Tensor], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    first, second = group["betas"]
    param = own["param"] * (1 - values["lr"] * group["weight_decay"])
    mean = own["exp_avg"] + (grad - own["exp_avg"]) * (1 - first)
    square = own["exp_avg_sq"] * second + grad * grad * (1 - second)
    step = values["step_size"] * mean / (square.sqrt() / values["root"] + group["eps"])
    return {"param": param - step, "exp_avg": mean, "exp_avg_sq": square}


def _sgd(
    own: Mapping[str, Tensor], grad: Tensor, values: Mapping[str, Tensor], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    grad = grad + group["weight_decay"] * own["param"]
    if "momentum_buffer" not in own:
        return {"param": own["param"] - values["lr"] * grad}
    buffer = group["momentum"] * own["momentum_buffer"] + grad
    direction = grad + group["momentum"] * buffer if group["nesterov"] else buffer
    return {"param": own["param"] - values["lr"] * direction, "momentum_buffer": buffer}
