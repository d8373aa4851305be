"""Checks, in one process, that a model's forward pass supports the parallel axes of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hyper_parallel.backends.torch.context.apply import count_attention_calls
from hyper_parallel.backends.torch.layer_flow import LayerFlow, trace_layer_flow
from hyper_parallel.backends.torch.model_layouts import resolve_layouts
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.partial_use import refuse_random_modules
from hyper_parallel.backends.torch.pipeline.stages import trace_stages
from hyper_parallel.backends.torch.tensor.partial_gradients import TensorTrial, try_forward
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.shard import ShardPlan, completed_changes


@dataclass(frozen=True, slots=True)
class ForwardTrials:
    """Results of trial forward passes of a model on meta tensors.

    Attributes:
        flow: Data flow between the layers; None without pipeline parallelism.
        attention_calls: Number of calls of transformers' attention interface in each layer; empty if cp is 1.
        tensor: Result for tensor parallelism; None without it, and for a decoder with sharded activations.
    """

    flow: LayerFlow | None
    attention_calls: tuple[int, ...]
    tensor: TensorTrial | None


def check_flow(model: nn.Module, plan: Plan, shard_plan: ShardPlan | None = None) -> ForwardTrials:
    """Run the trial forward passes that the axes of a plan need, in one process, and return their results.

    Raise HP205 if the forward does not support an axis; `trace_stages` and `resolve_layouts` raise further errors.
    `shard_plan` is the result of `resolve_layouts`; None: computed here if tensor parallelism needs it.
    """
    strategy = plan.strategy
    with completed_changes(strategy):
        refuse_random_modules(model, strategy)
        flow = trace_stages(model, plan) if strategy.pp > 1 else None
        calls, tensor = count_attention_calls(model, strategy), None
        if strategy.tp > 1:
            layouts = resolve_layouts(model, plan) if shard_plan is None else shard_plan
            if layouts.whole_stream or view_of(model).base is None:
                tensor = try_forward(model, layouts.layouts, layouts.styles, strategy)
    return ForwardTrials(flow, calls, tensor)


def unsplit_axes(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return (axis, reason) for each of the mesh axes pp and cp that a model's forward does not support."""
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
