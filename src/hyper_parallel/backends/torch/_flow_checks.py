"""Checks of the forward pass of a model against the axes of a plan, on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hyper_parallel.backends.torch.context.apply import count_attention_calls
from hyper_parallel.backends.torch.layer_flow import trace_layer_flow
from hyper_parallel.backends.torch.model_layouts import resolve_layouts
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.partial_use import refuse_random_modules
from hyper_parallel.backends.torch.pipeline.stages import trace_stages
from hyper_parallel.backends.torch.tensor.partial_gradients import TensorTrial, try_forward
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Strategy
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


@dataclass(frozen=True, slots=True)
class ForwardTrials:
    """Results of the trials of a forward pass.

    Attributes:
        attention_calls: Calls of the attention interface per layer, for context parallelism.
        tensor: Result of the tensor-parallel trial, or None.
    """

    attention_calls: tuple[int, ...]
    tensor: TensorTrial | None


def try_axes(model: nn.Module, shard_plan: ShardPlan, strategy: Strategy) -> ForwardTrials:
    """Run the forward pass on meta tensors for context and tensor parallelism; raise as `check_flow` does."""
    refuse_random_modules(model, strategy)
    calls = count_attention_calls(model, strategy)
    return ForwardTrials(calls, _tensor_trial(model, shard_plan, strategy))


def _tensor_trial(
    model: nn.Module, shard_plan: ShardPlan, strategy: Strategy
) -> TensorTrial | None:
    """Return the result of `try_forward` for replicated activations; None for sharded activations or without tp."""
    if strategy.tp == 1 or not (shard_plan.whole_stream or view_of(model).base is None):
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
