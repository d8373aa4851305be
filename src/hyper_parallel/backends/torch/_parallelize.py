"""Apply a plan to a model: shard parameters, replace forwards, wrap modules with FSDP, audit the result."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hyper_parallel.backends.torch._audit import audit
from hyper_parallel.backends.torch._flow_checks import try_axes
from hyper_parallel.backends.torch._forwards import ShardedModel, replace_forwards
from hyper_parallel.backends.torch._logits_hook import replace_loss
from hyper_parallel.backends.torch._placement import place_parameters
from hyper_parallel.backends.torch.data.fsdp import shard_data_parallel
from hyper_parallel.backends.torch.data.unit_order import order_units
from hyper_parallel.backends.torch.experts.apply import expert_state
from hyper_parallel.backends.torch.experts.balance_loss import (
    BalanceLoss,
    disable_model_router_loss,
)
from hyper_parallel.backends.torch.experts.expert_list import shard_expert_lists
from hyper_parallel.backends.torch.experts.routing import Routing, check_routing
from hyper_parallel.backends.torch.half_batch import check_half_batches
from hyper_parallel.backends.torch.model_layouts import is_reversible, resolve_layouts
from hyper_parallel.backends.torch.parallel_handle import Handle, Ranks, attach
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.pipeline.stages import split_model
from hyper_parallel.backends.torch.tensor.apply import tensor_mesh, watch_gradients
from hyper_parallel.backends.torch.tensor.chunked_tokens import check_token_chunks
from hyper_parallel.ir import Plan


def apply_plan(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    routing: Routing | None = None,
    *,
    average: bool = False,
    one_order: bool = True,
    sync_replicas: bool = True,
) -> nn.Module:
    """Apply the layouts and the strategy of a plan to a model, in place.

    Args:
        model: Model with real parameters, equal on every rank, or with meta parameters.
        plan: The plan; its layouts must equal those of the model's own rules.
        ranks: Ranks of the model.
        routing: Options of expert routing; None: the behavior of the model.
        average: See `hyper_parallel.parallelize`.
        one_order: See `hyper_parallel.parallelize`.
        sync_replicas: False: replicas run without collectives; the caller sums their gradients.

    Returns:
        The same model: same class, same parameter names.

    Raises:
        PlanMismatch: HP307 when the plan is for another model.
        AuditError: HP206 when a parameter does not have its planned layout afterwards.
    """
    strategy = plan.strategy
    sharded = _shard_parameters(model, plan, ranks, routing or Routing())
    stages, experts, balance = sharded.stages, sharded.experts, sharded.balance
    tp, context, halves, layers = replace_forwards(model, plan, ranks.mesh, sharded)
    hook = replace_loss(model, tp, context, balance)
    if stages is not None:
        stages.install(model)
    # A reversible backward recomputes layers without FSDP's hooks: only the root gathers parameters.
    synced = plan if sync_replicas else replace(plan, strategy=replace(strategy, dp_replicate=1))
    fsdp = shard_data_parallel(
        model,
        [] if is_reversible(model) else layers,
        sharded.expert_modules,
        sharded.layouts,
        synced,
        None if ranks.traced else ranks.mesh,
        ranks.expert_mesh,
        average,
    )
    if strategy.pp == 1 and sync_replicas:
        unskippable = sharded.expert_modules if strategy.ep > 1 else ()
        order_units(model, fsdp, ranks.world_group, unskippable, one_order)
    pipeline = None
    if stages is not None:
        pipeline = Pipeline(model, stages, strategy, tp, context, balance, fsdp)
    if tp is not None:
        watch_gradients(model, sharded.layouts, tp, sharded.trials.tensor)
    parts = (tp, context, experts, balance, pipeline, fsdp, hook, halves, average)
    attach(model, Handle(plan, ranks, sharded.layouts, sharded.shapes, *parts))
    if not ranks.traced:
        audit(model)
    return model


def _shard_parameters(model: nn.Module, plan: Plan, ranks: Ranks, routing: Routing) -> ShardedModel:
    """Check the model against its plan, and keep and shard the parameters of this rank."""
    strategy, mesh = plan.strategy, ranks.mesh
    shard_plan = resolve_layouts(model, plan)
    check_routing(model, routing, alone=strategy.world_size == 1)
    balance = BalanceLoss.from_model(
        model, routing, strategy, mesh, ranks.world_group, ranks.device
    )
    check_half_batches(model, strategy, balance is not None)
    check_token_chunks(model, strategy)
    disable_model_router_loss(model, routing, strategy)
    trials = try_axes(model, shard_plan, strategy)
    expert_group = None if ranks.expert_mesh is None else ranks.expert_mesh["ep"].get_group()
    experts = expert_state(
        model,
        shard_plan.styles,
        routing,
        expert_group,
        ranks.world_group,
        strategy.pp > 1,
        ranks.device,
        strategy.overlap.ep_chunks,
    )
    stages = split_model(model, plan, mesh, ranks.device)
    shard_expert_lists(model, experts)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layouts = {name: shard_plan.layouts[name] for name in shapes}
    dtype = getattr(torch, plan.workload.param_dtype)
    tp_mesh = tensor_mesh(mesh, strategy)
    place_parameters(model, layouts, tp_mesh, ranks.expert_mesh, ranks.device, dtype)
    return ShardedModel(shard_plan, layouts, shapes, stages, trials, experts, balance)
