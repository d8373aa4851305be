"""Replacement of module forwards for tensor, context and expert parallelism, recomputation and half-batches.

A half-batch is one half of the sequences of a microbatch, see `half_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._flow_checks import ForwardTrials
from hyper_parallel.backends.torch.context.apply import apply_context_parallel, mask_documents
from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.experts.apply import apply_to_experts
from hyper_parallel.backends.torch.experts.balance_loss import BalanceLoss
from hyper_parallel.backends.torch.experts.routing import ExpertState
from hyper_parallel.backends.torch.forward_variants import (
    keep_float64,
    loop_over_experts,
    recompute_layers,
)
from hyper_parallel.backends.torch.half_batch import HalfBatch
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.pass_context import RunningPass
from hyper_parallel.backends.torch.pipeline.stages import StageModules
from hyper_parallel.backends.torch.rotary_lengths import (
    document_lengths,
    reset_before_calls,
    rotate_by_document,
)
from hyper_parallel.backends.torch.tensor.apply import (
    apply_tensor_parallel,
    tensor_mesh,
    tensor_state,
)
from hyper_parallel.backends.torch.tensor.block_executors import token_executor
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.token_rows import Tokens, watch_padding
from hyper_parallel.ir import Layout, Plan
from hyper_parallel.shard import ShardPlan


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Sharding of a model that contains only this rank's parameters.

    Attributes:
        shard_plan: Layouts and sharding styles of the complete model.
        layouts: Layout of each parameter on this rank's pipeline stages, by name.
        shapes: Unsharded shape of each of these parameters, by name.
        stages: Pipeline stages of this rank; None without pipeline parallelism.
        trials: Results of the trial forward passes.
        experts: State of expert parallelism and routing; None for a model without routed experts.
        balance: Load-balancing loss of experts; None without it.
    """

    shard_plan: ShardPlan
    layouts: dict[str, Layout]
    shapes: dict[str, tuple[int, ...]]
    stages: StageModules | None
    trials: ForwardTrials
    experts: ExpertState | None
    balance: BalanceLoss | None

    @property
    def expert_modules(self) -> tuple[str, ...]:
        """Names of the modules with routed experts."""
        return () if self.experts is None else self.experts.modules


def replace_forwards(
    model: nn.Module, plan: Plan, mesh: DeviceMesh | None, sharded: ShardedModel
) -> tuple[TpState | None, ContextState | None, HalfBatch | None, list[nn.Module]]:
    """Replace the forwards of a model's modules as its plan requires.

    Returns:
        State of tensor parallelism, state of context parallelism, executor of half-batches, and the decoder layers of
        this rank. The first three are None if the plan does not use them.
    """
    strategy, view = plan.strategy, view_of(model)
    compute = getattr(torch, plan.workload.compute_dtype)
    exact = compute == torch.float64
    shard_plan, stages, trials = sharded.shard_plan, sharded.stages, sharded.trials
    tp_mesh = tensor_mesh(mesh, strategy)
    running = RunningPass()
    executor = token_executor(strategy.overlap)
    tp = tensor_state(tp_mesh, strategy, shard_plan.hidden_cut, shard_plan.whole_stream, running, executor)
    stage_layers = None if stages is None else stages.layers_running
    context = apply_context_parallel(model, view, strategy, mesh, stage_layers, trials.attention_calls, running)

    rotate_by_document(model, document_lengths if context is None else context.local_lengths)
    reset_before_calls(model)

    # Wrap from the innermost forward to the outermost: recomputed code runs on tokens that are already sharded.
    if context is None and view.base is not None:
        mask_documents(view.base, compute)
    # With replicated activations, tensor parallelism wraps only projections, so its wrappers are the innermost ones.
    # With sharded activations it also wraps layers and the model, so its wrappers are the outermost ones.
    per_module = tp is not None and (view.base is None or tp.replicated_activations)
    by_stage = [[*view.layers]] if stages is None else list(stages.layers.values())
    tokens = Tokens(None if tp is not None and tp.replicated_activations else tp, context, running)
    layers = [layer for stage in by_stage for layer in stage]
    halves = None
    if strategy.overlap.half_batch:
        experts_group = None if sharded.experts is None else sharded.experts.group
        halves = HalfBatch(strategy.overlap, tp, per_module, experts_group)
        halves.watch(model)
    if tp is not None and per_module:
        apply_tensor_parallel(model, view, shard_plan.styles, tp, strategy, trials.tensor)
    watch_padding(model, tokens)
    recomputed = recompute_layers(by_stage, strategy, tp, exact, running)
    if halves is not None:
        halves.install(layers, recomputed)
    if exact:
        keep_float64(model)
    loop_over_experts(model, compute)
    if sharded.experts is not None:
        apply_to_experts(model, sharded.experts, tokens, in_decoder=view.base is not None)
    if sharded.balance is not None:
        sharded.balance.watch(model, tokens)
    if tp is not None and not per_module:
        apply_tensor_parallel(model, view, shard_plan.styles, tp, strategy, trials.tensor)
    return tp, context, halves, layers
