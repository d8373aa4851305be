"""Apply a plan to a model: layouts onto parameters, forwards onto modules, FSDP around both, then the audit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hyper_parallel.backends.torch._audit import audit
from hyper_parallel.backends.torch._logits_hook import LogitsHook
from hyper_parallel.backends.torch._placement import place_parameters
from hyper_parallel.backends.torch.context.apply import (
    apply_context_parallel,
    count_attention_calls,
    mask_documents,
)
from hyper_parallel.backends.torch.data.fsdp import shard_data_parallel
from hyper_parallel.backends.torch.data.unit_order import order_units
from hyper_parallel.backends.torch.experts.apply import apply_to_experts, expert_state
from hyper_parallel.backends.torch.experts.balance_loss import (
    BalanceLoss,
    disable_model_router_loss,
)
from hyper_parallel.backends.torch.experts.expert_list import shard_expert_lists
from hyper_parallel.backends.torch.experts.routing import Routing, check_routing
from hyper_parallel.backends.torch.forward_state import reset_before_calls
from hyper_parallel.backends.torch.forward_variants import (
    keep_float64,
    loop_over_experts,
    recompute_layers,
)
from hyper_parallel.backends.torch.layer_flow import trace_layer_flow
from hyper_parallel.backends.torch.model_layouts import is_reversible, resolve_layouts
from hyper_parallel.backends.torch.model_structure import decoder_of, layers_of
from hyper_parallel.backends.torch.parallel_handle import Handle, Ranks, attach
from hyper_parallel.backends.torch.partial_use import refuse_random_modules
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.pipeline.stages import split_model, trace_stages
from hyper_parallel.backends.torch.rotary_lengths import document_lengths, rotate_by_document
from hyper_parallel.backends.torch.tensor.apply import (
    apply_tensor_parallel,
    tensor_mesh,
    tensor_state,
    watch_gradients,
)
from hyper_parallel.backends.torch.tensor.partial_gradients import TensorTrial, try_forward
from hyper_parallel.backends.torch.token_rows import Tokens, watch_padding
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import (
    has_causal_loss,
    loss_function,
    use_loss_function,
)
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.shard import ShardPlan


def check_flow(model: nn.Module, plan: Plan) -> None:
    """Refuse, without any rank, a model whose forward pass does not fit the axes of its plan.

    Args:
        model: Parameters are real or on the meta device; it stays as it is.
        plan: The plan.

    Raises:
        UnsupportedSharding: HP205 naming the axis and what does not fit.
    """
    refuse_random_modules(model, plan.strategy)
    if plan.strategy.pp > 1:
        trace_stages(model, plan)
    count_attention_calls(model, plan.strategy)
    if plan.strategy.tp > 1:
        _tensor_trial(model, resolve_layouts(model, plan), plan.strategy)


def _tensor_trial(
    model: nn.Module, shard_plan: ShardPlan, strategy: Strategy
) -> TensorTrial | None:
    """Return the result of `try_forward` where activations are whole on every rank; None: they are cut, or no tp."""
    if strategy.tp == 1 or not (shard_plan.whole_stream or decoder_of(model) is None):
        return None
    return try_forward(model, shard_plan.layouts, shard_plan.styles, strategy)


def unsplit_axes(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Axes that a model's forward pass does not fit, with the reason: of `pp` and `cp`.

    Args:
        model: Parameters are real or on the meta device; it stays as it is.
    """
    trials: dict[str, Callable[[], object]] = {
        "pp": lambda: trace_layer_flow(model),
        "cp": lambda: count_attention_calls(model, Strategy(cp=2)),
    }
    found = []
    for axis, trial in trials.items():
        try:
            trial()
        except UnsupportedSharding as error:
            found.append((axis, error.what))
    return tuple(found)


def apply_plan(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    routing: Routing | None = None,
    *,
    average: bool = False,
    one_order: bool = True,
) -> nn.Module:
    """Lay a model out as its plan says, in place.

    Args:
        model: Real parameters, equal on every rank, or parameters on the meta device.
        plan: The plan; its layouts must agree with those the model's own rules give.
        ranks: Where it lives.
        routing: Choices about the routing of experts; None: what the model does by itself.
        average: See `hyper_parallel.parallelize`.
        one_order: See `hyper_parallel.parallelize`.

    Returns:
        The same model: same class, same parameter names.

    Raises:
        PlanMismatch: HP307 when the plan is for another model.
        AuditError: HP206 when a parameter does not have its planned layout in the end.
    """
    routing = routing or Routing()
    strategy, workload, mesh = plan.strategy, plan.workload, ranks.mesh
    tp_mesh = tensor_mesh(mesh, strategy)
    compute = getattr(torch, workload.compute_dtype)

    # What lies where; only this rank's part stays.
    shard_plan = resolve_layouts(model, plan)
    check_routing(model, routing, alone=strategy.world_size == 1)
    balance = BalanceLoss.from_model(
        model, routing, strategy, mesh, ranks.world_group, ranks.device
    )
    disable_model_router_loss(model, routing, strategy)
    refuse_random_modules(model, strategy)
    expert_group = None if ranks.expert_mesh is None else ranks.expert_mesh["ep"].get_group()
    experts = expert_state(
        model,
        shard_plan.styles,
        routing,
        expert_group,
        ranks.world_group,
        strategy.pp > 1,
        ranks.device,
    )
    calls = count_attention_calls(model, strategy)
    trial = _tensor_trial(model, shard_plan, strategy)
    stages = split_model(model, plan, mesh)
    shard_expert_lists(model, experts)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layouts = {name: shard_plan.layouts[name] for name in shapes}
    dtype = getattr(torch, workload.param_dtype)
    place_parameters(model, layouts, tp_mesh, ranks.expert_mesh, ranks.device, dtype)

    # What every parallel axis remembers of a forward pass.
    decoder = decoder_of(model)
    tp = tensor_state(tp_mesh, strategy, shard_plan.hidden_cut, shard_plan.whole_stream)
    stage_layers = None if stages is None else stages.layers_running
    context = apply_context_parallel(model, decoder, strategy, mesh, stage_layers, calls)

    rotate_by_document(model, document_lengths if context is None else context.local_lengths)
    reset_before_calls(model)

    # Forwards, from the inside out: tokens are cut outside of what is recomputed.
    if context is None and decoder is not None:
        mask_documents(decoder[0], compute)
    by_modules = tp is not None and (decoder is None or tp.replicated_activations)
    if tp is not None and by_modules:
        apply_tensor_parallel(model, decoder, shard_plan.styles, tp, strategy, trial)
    by_stage = [layers_of(model)] if stages is None else list(stages.layers.values())
    tokens = Tokens(None if tp is not None and tp.replicated_activations else tp, context)
    watch_padding(model, tokens)
    recompute_layers(by_stage, strategy, tp, context, compute == torch.float64, tokens)
    if compute == torch.float64:
        keep_float64(model)
    loop_over_experts(model, compute)
    if experts is not None:
        apply_to_experts(model, experts, tokens, in_decoder=decoder is not None)
    if balance is not None:
        balance.watch(model, tokens)
    if tp is not None and not by_modules:
        apply_tensor_parallel(model, decoder, shard_plan.styles, tp, strategy, trial)
    tap = None
    if has_causal_loss(model):
        usual = loss_function(tp, None if balance is None else balance.loss_hook)
        model.loss_function = tap = LogitsHook(usual, tp, context)
        use_loss_function(model)
    elif scores_tokens(model):
        model.loss_function = tap = LogitsHook(loss_function(tp, None), tp, context)
    if stages is not None:
        stages.install(model)

    # Around all of it: data parallelism, the schedule, and the sums at the end of backward.
    modules = () if experts is None else experts.modules
    # A backward that runs layers again calls none of FSDP's hooks: the root gathers all of it.
    layers = [] if is_reversible(model) else [layer for stage in by_stage for layer in stage]
    fsdp = shard_data_parallel(
        model, layers, modules, layouts, plan, mesh, ranks.expert_mesh, average
    )
    if strategy.pp == 1:
        experts_alone = modules if strategy.ep > 1 else ()
        order_units(model, fsdp, ranks.world_group, experts_alone, one_order)
    pipeline = None
    if stages is not None and mesh is not None:
        group = mesh["pp"].get_group()
        pipeline = Pipeline(
            model, stages, strategy, group, ranks.device, tp, context, balance, fsdp
        )
    if tp is not None:
        watch_gradients(model, layouts, tp, trial)

    rooms = (tp, context, experts, balance, pipeline, fsdp, tap)
    attach(model, Handle(plan, ranks, layouts, shapes, *rooms, average))
    audit(model)
    return model
