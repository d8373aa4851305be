"""FSDP around the layers of a model, and around its experts over the ranks that hold the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Strategy

FLAT = "dp_shard_cp"
"""Mesh axis that FSDP cuts parameters over when there is context parallelism: dp_shard x cp as one."""


def shard_data_parallel(
    model: nn.Module,
    layers: Sequence[nn.Module],
    experts: Sequence[str],
    layouts: dict[str, Layout],
    plan: Plan,
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
) -> tuple[nn.Module, ...]:
    """FSDP around experts, every layer and the root, when ranks share data or formats differ.

    Layers, and modules of experts by name, are those on this rank. Returns the modules that FSDP manages, root last.
    """
    strategy, workload = plan.strategy, plan.workload
    mixed = workload.compute_dtype != workload.param_dtype
    if mesh is None:
        return ()
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, workload.compute_dtype) if mixed else None,
        reduce_dtype=getattr(torch, workload.reduce_dtype),
    )
    sharded: list[nn.Module] = []
    alone = strategy.dp * strategy.cp == 1 and not mixed
    if expert_mesh is not None and (not alone or expert_mesh["edp"].size() > 1):
        sharded += _shard_experts(model, experts, layouts, strategy, expert_mesh, policy)
    if not alone:
        options: dict[str, Any] = {"mesh": fsdp_mesh(mesh, strategy), "mp_policy": policy}
        columns = _cut_by_columns(model, layouts, strategy)
        if columns:
            options["shard_placement_fn"] = lambda p: Shard(1) if id(p) in columns else Shard(0)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=strategy.frees_gathered, **options)
        fully_shard(model, reshard_after_forward=False, **options)
        model.register_forward_hook(_refuse_hidden_outputs)
        sharded += [*layers, model]
    for module in sharded:
        # The loss is already divided by the number of tokens of the whole step: gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return tuple(sharded)


def _shard_experts(
    model: nn.Module,
    names: Iterable[str],
    layouts: dict[str, Layout],
    strategy: Strategy,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> list[nn.Module]:
    """FSDP around every module of experts, over the ranks that hold the same ones."""
    over = mesh[("dp_replicate", "edp") if strategy.dp_replicate > 1 else ("edp",)]
    # Inputs keep their format: a router may weigh in a wider one than the experts work in.
    policy = replace(policy, cast_forward_inputs=False)
    modules = [model.get_submodule(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        cut = {
            id(p): next((d for d, axes in enumerate(layouts[n].axes) if "edp" in axes), 0)
            for n, p in model.named_parameters()
            if n.startswith(f"{name}.")
        }
        fully_shard(
            module,
            mesh=over,
            mp_policy=policy,
            reshard_after_forward=strategy.frees_gathered,
            shard_placement_fn=lambda param, cut=cut: Shard(cut[id(param)]),
        )
    return modules


def _cut_by_columns(
    model: nn.Module, layouts: dict[str, Layout], strategy: Strategy
) -> frozenset[int]:
    """Parameters whose columns FSDP cuts, because tensor parallelism cuts their rows part by part."""
    axes = set(strategy.fsdp_axes)
    return frozenset(
        id(param)
        for name, param in model.named_parameters()
        if len(param.shape) > 1 and axes & set(layouts[name].axes[1])
    )


def fsdp_mesh(mesh: DeviceMesh, strategy: Strategy) -> DeviceMesh:
    """The mesh FSDP works on: replicas outside, inside the ranks that shard parameters, dp_shard x cp as one axis."""
    if strategy.cp == 1:
        return mesh[("dp_replicate", "dp_shard") if strategy.dp_replicate > 1 else ("dp_shard",)]
    inner = mesh["dp_shard", "cp"]._flatten(FLAT)  # exists: all ranks of the world made it
    if strategy.dp_replicate == 1:
        return inner
    return DeviceMesh._concatenate([mesh["dp_replicate"], inner])


def _refuse_hidden_outputs(model: nn.Module, _: Any, output: Any) -> None:
    """FSDP learns from the gradients of outputs that backward runs; an object it cannot look into hides them."""
    leaves = tree_leaves(output)
    if not torch.is_grad_enabled() or any(
        isinstance(x, Tensor) and x.requires_grad for x in leaves
    ):
        return
    hidden = [x for x in leaves if not isinstance(x, (Tensor, int, float, str, type(None)))]
    if hidden and any(p.requires_grad for p in model.parameters()):
        raise UnsupportedSharding(
            "the model returns its tensors inside an object that FSDP cannot look into",
            where=type(model).__name__,
            got=type(hidden[0]).__name__,
            allowed="tensors, and tuples, named tuples, lists, dicts and Hugging Face outputs of them",
        )


def set_last_backward(modules: Sequence[nn.Module], strategy: Strategy, last: bool) -> None:
    """Say whether the next backward pass is the last of its step: reductions that can wait for it wait.

    Gradients of each microbatch are reduce-scattered, so that they stay sharded; the all-reduce over replicas happens
    once. When only optimizer states are sharded (zero=1), the reduce-scatter waits as well, and gathered parameters
    stay.
    """
    if strategy.zero_stage == 1:
        for module in modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
    if modules and strategy.dp_replicate > 1:
        modules[-1].set_requires_all_reduce(last)


def hold_reductions(
    modules: Sequence[nn.Module],
    before: dict[int, nn.Module],
    keeps_gathered: bool,
    root: nn.Module,
) -> None:
    """Keep gradients until `reduce_now`, and parameters with `keeps_gathered`; `before`: layer id to the one before."""
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(False, recurse=False)
        if module is root or keeps_gathered:
            module.set_reshard_after_backward(False, recurse=False)
        # FSDP expects the reverse of its last forward; with several microbatches under way that is not what comes.
        module.set_modules_to_backward_prefetch([before.get(id(module), module)])


def reduce_now(module: nn.Module) -> None:
    """FSDP's own reduction, now instead of in a backward pass; frees the gathered parameters."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(True, recurse=False)
    module.set_reshard_after_backward(True, recurse=False)
    state = fully_shard.state(module)
    # torch 2.11 has at most one group in a module
    groups = (
        state._fsdp_param_groups
        if hasattr(state, "_fsdp_param_groups")
        else filter(None, [state._fsdp_param_group])
    )
    for group in groups:
        group.post_backward()


def end_backward(modules: Sequence[nn.Module]) -> None:
    """Let the root end its backward pass: wait for reductions, forget what it prefetched."""
    for module in modules:
        state = fully_shard.state(module)
        if state._is_root:
            state._root_post_backward_final_callback()
