"""Apply a plan to a model: shard parameters, replace forwards, wrap modules with FSDP, audit the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.data.fsdp import shard_data_parallel
from hyper_parallel.backends.torch.data.unit_order import order_units
from hyper_parallel.backends.torch.experts.apply import apply_to_experts, expert_state
from hyper_parallel.backends.torch.experts.balance_loss import (
    BalanceLoss,
    disable_model_router_loss,
)
from hyper_parallel.backends.torch.experts.expert_list import shard_expert_lists
from hyper_parallel.backends.torch.experts.routing import ExpertState, Routing, check_routing
from hyper_parallel.backends.torch.forward_state import reset_before_calls
from hyper_parallel.backends.torch.forward_variants import (
    keep_float64,
    loop_over_experts,
    recompute_layers,
)
from hyper_parallel.backends.torch.half_batch import HalfBatch, check_half_batches
from hyper_parallel.backends.torch.layer_flow import trace_layer_flow
from hyper_parallel.backends.torch.model_layouts import is_reversible, resolve_layouts
from hyper_parallel.backends.torch.model_structure import decoder_of, layers_of
from hyper_parallel.backends.torch.parallel_handle import Handle, Ranks, attach
from hyper_parallel.backends.torch.partial_use import refuse_random_modules
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.pipeline.stages import StageModules, split_model, trace_stages
from hyper_parallel.backends.torch.rotary_lengths import document_lengths, rotate_by_document
from hyper_parallel.backends.torch.tensor.apply import (
    apply_tensor_parallel,
    tensor_mesh,
    tensor_state,
    watch_gradients,
)
from hyper_parallel.backends.torch.tensor.partial_gradients import TensorTrial, try_forward
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.token_rows import Tokens, watch_padding
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import (
    has_causal_loss,
    loss_function,
    use_loss_function,
)
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Strategy
from hyper_parallel.shard import ShardPlan


def check_flow(model: nn.Module, plan: Plan) -> None:
    """Raise for a model whose forward pass does not support the axes of its plan; needs no other ranks.

    Args:
        model: Model with real or meta parameters; not changed.
        plan: The plan.

    Raises:
        UnsupportedSharding: HP205 naming the axis and the reason.
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
    """Return the result of `try_forward` for replicated activations; None for sharded activations or without tp."""
    if strategy.tp == 1 or not (shard_plan.whole_stream or decoder_of(model) is None):
        return None
    return try_forward(model, shard_plan.layouts, shard_plan.styles, strategy)


def unsplit_axes(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the axes of `pp` and `cp` that a model's forward pass does not support, with reasons.

    Args:
        model: Model with real or meta parameters; not changed.
    """
    trials: dict[str, Callable[[], object]] = {
        "pp": lambda: trace_layer_flow(model),
        "cp": lambda: count_attention_calls(model, Strategy(cp=2)),
    }
    unsupported = []
    for axis, trial in trials.items():
        try:
            trial()
        except UnsupportedSharding as error:
            unsupported.append((axis, error.what))
    return tuple(unsupported)


@dataclass(frozen=True, slots=True)
class _ShardedModel:
    """State after the parameters are sharded: the model has this rank's parameters only.

    Attributes:
        shard_plan: Layouts and styles of the complete model.
        layouts: Layouts of this rank's parameters.
        shapes: Logical shapes of this rank's parameters.
        decoder: Base module and decoder layers, or None.
        stages: Pipeline stages of this rank, or None.
        attention_calls: Calls of the attention interface per layer, for context parallelism.
        trial: Result of the tensor-parallel trial, or None.
        experts: Expert-parallel state, or None.
        balance: Auxiliary loss of experts, or None.
    """

    shard_plan: ShardPlan
    layouts: dict[str, Layout]
    shapes: dict[str, tuple[int, ...]]
    decoder: tuple[nn.Module, nn.ModuleList] | None
    stages: StageModules | None
    attention_calls: tuple[int, ...]
    trial: TensorTrial | None
    experts: ExpertState | None
    balance: BalanceLoss | None

    @property
    def expert_modules(self) -> tuple[str, ...]:
        """Names of the modules of routed experts."""
        return () if self.experts is None else self.experts.modules


def apply_plan(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    routing: Routing | None = None,
    *,
    average: bool = False,
    one_order: bool = True,
) -> nn.Module:
    """Apply the layouts and the strategy of a plan to a model, in place.

    Args:
        model: Model with real parameters, equal on every rank, or with meta parameters.
        plan: The plan; its layouts must equal those of the model's own rules.
        ranks: Ranks of the model.
        routing: Options of expert routing; None: the behavior of the model.
        average: See `hyper_parallel.parallelize`.
        one_order: See `hyper_parallel.parallelize`.

    Returns:
        The same model: same class, same parameter names.

    Raises:
        PlanMismatch: HP307 when the plan is for another model.
        AuditError: HP206 when a parameter does not have its planned layout afterwards.
    """
    strategy = plan.strategy
    sharded = _shard_parameters(model, plan, ranks, routing or Routing())
    stages, experts, balance = sharded.stages, sharded.experts, sharded.balance
    tp, context, halves, layers = _apply_model_axes(model, plan, ranks, sharded)
    hook = _replace_loss(model, tp, context, balance)
    if stages is not None:
        stages.install(model)
    # A reversible backward recomputes layers without FSDP's hooks: only the root gathers parameters.
    fsdp = shard_data_parallel(
        model,
        [] if is_reversible(model) else layers,
        sharded.expert_modules,
        sharded.layouts,
        plan,
        ranks.mesh,
        ranks.expert_mesh,
        average,
    )
    if strategy.pp == 1:
        unskippable = sharded.expert_modules if strategy.ep > 1 else ()
        order_units(model, fsdp, ranks.world_group, unskippable, one_order)
    pipeline = None
    if stages is not None and ranks.mesh is not None:
        group = ranks.mesh["pp"].get_group()
        pipeline = Pipeline(
            model, stages, strategy, group, ranks.device, tp, context, balance, fsdp
        )
    if tp is not None:
        watch_gradients(model, sharded.layouts, tp, sharded.trial)
    state = (tp, context, experts, balance, pipeline, fsdp, hook, halves)
    attach(model, Handle(plan, ranks, sharded.layouts, sharded.shapes, *state, average))
    audit(model)
    return model


def _shard_parameters(
    model: nn.Module, plan: Plan, ranks: Ranks, routing: Routing
) -> _ShardedModel:
    """Check the model against its plan, and keep and shard the parameters of this rank."""
    strategy, mesh = plan.strategy, ranks.mesh
    shard_plan = resolve_layouts(model, plan)
    check_routing(model, routing, alone=strategy.world_size == 1)
    balance = BalanceLoss.from_model(
        model, routing, strategy, mesh, ranks.world_group, ranks.device
    )
    check_half_batches(model, strategy, balance is not None)
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
        strategy.overlap.ep_chunks,
    )
    calls = count_attention_calls(model, strategy)
    trial = _tensor_trial(model, shard_plan, strategy)
    stages = split_model(model, plan, mesh)
    shard_expert_lists(model, experts)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layouts = {name: shard_plan.layouts[name] for name in shapes}
    dtype = getattr(torch, plan.workload.param_dtype)
    tp_mesh = tensor_mesh(mesh, strategy)
    place_parameters(model, layouts, tp_mesh, ranks.expert_mesh, ranks.device, dtype)
    decoder = decoder_of(model)
    return _ShardedModel(
        shard_plan, layouts, shapes, decoder, stages, calls, trial, experts, balance
    )


def _apply_model_axes(
    model: nn.Module, plan: Plan, ranks: Ranks, sharded: _ShardedModel
) -> tuple[TpState | None, ContextState | None, HalfBatch | None, list[nn.Module]]:
    """Replace forwards for tensor, context and expert parallelism, half-batches and recomputation.

    Returns:
        State of tensor parallelism, state of context parallelism, half-batches, and the layers of this rank.
    """
    strategy, mesh, decoder = plan.strategy, ranks.mesh, sharded.decoder
    compute = getattr(torch, plan.workload.compute_dtype)
    exact = compute == torch.float64
    shard_plan, stages = sharded.shard_plan, sharded.stages
    tp_mesh = tensor_mesh(mesh, strategy)
    tp = tensor_state(tp_mesh, strategy, shard_plan.hidden_cut, shard_plan.whole_stream)
    running_layers = None if stages is None else stages.layers_running
    calls = sharded.attention_calls
    context = apply_context_parallel(model, decoder, strategy, mesh, running_layers, calls)

    rotate_by_document(model, document_lengths if context is None else context.local_lengths)
    reset_before_calls(model)

    # From the innermost forward to the outermost: recomputed code runs on tokens that are already sharded.
    if context is None and decoder is not None:
        mask_documents(decoder[0], compute)
    per_module = tp is not None and (decoder is None or tp.replicated_activations)
    by_stage = [layers_of(model)] if stages is None else list(stages.layers.values())
    tokens = Tokens(None if tp is not None and tp.replicated_activations else tp, context)
    layers = [layer for stage in by_stage for layer in stage]
    halves = None
    if strategy.overlap.half_batch:
        # Wrappers around a layer's forward must not return before the layer is done.
        halves = HalfBatch(strategy.overlap, tp, per_module or strategy.recompute != "none")
        halves.install(layers)
        halves.watch(model)
    if tp is not None and per_module:
        apply_tensor_parallel(model, decoder, shard_plan.styles, tp, strategy, sharded.trial)
    watch_padding(model, tokens)
    recompute_layers(by_stage, strategy, tp, context, exact, tokens)
    if exact:
        keep_float64(model)
    loop_over_experts(model, compute)
    if sharded.experts is not None:
        apply_to_experts(model, sharded.experts, tokens, in_decoder=decoder is not None)
    if sharded.balance is not None:
        sharded.balance.watch(model, tokens)
    if tp is not None and not per_module:
        apply_tensor_parallel(model, decoder, shard_plan.styles, tp, strategy, sharded.trial)
    return tp, context, halves, layers


def _replace_loss(
    model: nn.Module,
    tp: TpState | None,
    context: ContextState | None,
    balance: BalanceLoss | None,
) -> LogitsHook | None:
    """Replace the loss of a causal language model or of a token scorer; return None for other models."""
    hook = None
    if has_causal_loss(model):
        default_loss = loss_function(tp, None if balance is None else balance.loss_hook)
        model.loss_function = hook = LogitsHook(default_loss, tp, context)
        use_loss_function(model)
    elif scores_tokens(model):
        model.loss_function = hook = LogitsHook(loss_function(tp, None), tp, context)
    return hook
