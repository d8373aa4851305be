"""FSDP of the layers of a model, and of its experts over the ranks that hold the same experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.data.unit_order import gradient_of, groups_of
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Purpose, Strategy

FLAT = "dp_shard_cp"
"""Mesh axis over which FSDP shards parameters with context parallelism: dp_shard x cp, flattened."""


def shard_data_parallel(
    model: nn.Module,
    layers: Sequence[nn.Module],
    experts: Sequence[str],
    layouts: dict[str, Layout],
    plan: Plan,
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    average: bool,
) -> tuple[nn.Module, ...]:
    """Wrap experts, layers and the root module with FSDP; return the wrapped modules, the root after the others.

    Without a mesh, nothing is wrapped. Layers and root are wrapped if dp * cp > 1 or parameters are cast for
    computation. With an expert mesh, experts are wrapped in the same cases, and if edp > 1. A layer that shares
    parameters with other modules is not wrapped: the root's group contains its parameters.

    `experts` are the names of the modules with routed experts on this rank. With `average`, gradients are averaged over
    the data-parallel ranks instead of summed.
    """
    strategy, workload = plan.strategy, plan.workload
    mixed = workload.compute_dtype != workload.param_dtype
    if mesh is None:
        return ()
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, workload.compute_dtype) if mixed else None,
        reduce_dtype=getattr(torch, workload.reduce_dtype),
    )
    wrapper = _Wrapper(_sharded_dims(model, layouts, strategy), strategy.dp if average else None)
    is_single = strategy.dp * strategy.cp == 1 and not mixed
    if expert_mesh is not None and (not is_single or expert_mesh["edp"].size() > 1):
        axes = ("dp_replicate", "edp") if strategy.dp_replicate > 1 else ("edp",)
        # Inputs keep their dtype: router weights may be in a wider dtype than the experts.
        uncast = replace(policy, cast_forward_inputs=False)
        for module in [model.get_submodule(name) for name in experts]:
            wrapper.shard(module, expert_mesh[axes], strategy.frees_gathered, uncast)
    if not is_single:
        data_mesh = fsdp_mesh(mesh, strategy)
        for layer in _layers_without_shared_parameters(layers, model):
            wrapper.shard(layer, data_mesh, strategy.frees_gathered, policy)
        wrapper.shard(model, data_mesh, False, policy)
        model.register_forward_hook(_refuse_hidden_outputs)
        model.register_forward_hook(lambda *_: _free_gathered(wrapper.modules))
    return tuple(wrapper.modules)


def _sharded_dims(model: nn.Module, layouts: dict[str, Layout], strategy: Strategy) -> dict[int, int]:
    """Return the dim over which FSDP shards each parameter, by parameter id; 0 if the layout shards no dim."""
    axes = {*strategy.fsdp_axes, "edp"}
    return {
        id(param): next((d for d, dim in enumerate(layouts[name].axes) if axes & {*dim}), 0)
        for name, param in model.named_parameters()
    }


class _Wrapper:
    """Wrapper of modules with `fully_shard`, which collects the wrapped modules in `modules`.

    `dims` has the sharded dim of each parameter by id. Summed gradients are divided by `divisor`, unless it is None.
    """

    def __init__(self, dims: dict[int, int], divisor: int | None) -> None:
        self.modules: list[nn.Module] = []
        self._dims, self._divisor = dims, divisor

    def shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        frees_gathered: bool,
        policy: MixedPrecisionPolicy,
    ) -> None:
        dims, divisor = self._dims, self._divisor
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=frees_gathered,
            shard_placement_fn=lambda param: Shard(dims[id(param)]),
        )
        # The loss is already divided by the number of tokens of the step: gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if divisor is not None:
            # FSDP's own factor would divide twice if only replicas differ in their data.
            module.set_all_reduce_hook(lambda gradients: gradients.div_(divisor))
        self.modules.append(module)


def _layers_without_shared_parameters(layers: Sequence[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that share no parameter with other modules; FSDP would copy a shared parameter per module."""

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    model_uses = uses(model)
    for layer in layers:
        if all(model_uses[key] == count for key, count in uses(layer).items()):
            yield layer


def fsdp_mesh(mesh: DeviceMesh, strategy: Strategy) -> DeviceMesh:
    """Return the mesh of FSDP: dp_shard, flattened with cp if cp > 1, after the axis dp_replicate if it exists."""
    if strategy.cp == 1:
        return mesh[("dp_replicate", "dp_shard") if strategy.dp_replicate > 1 else ("dp_shard",)]
    inner = mesh["dp_shard", "cp"]._flatten(FLAT)  # returns the mesh that all ranks have created before
    if strategy.dp_replicate == 1:
        return inner
    return DeviceMesh._concatenate([mesh["dp_replicate"], inner])


def _refuse_hidden_outputs(model: nn.Module, _: Any, output: Any) -> None:
    """Raise HP205 if a model returns its tensors in an object in which FSDP cannot add hooks for backward."""
    leaves = tree_leaves(output)
    has_gradients = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    if has_gradients or not torch.is_grad_enabled():
        return
    hidden = [x for x in leaves if not isinstance(x, (Tensor, int, float, str, type(None)))]
    if hidden and any(p.requires_grad for p in model.parameters()):
        raise UnsupportedSharding(
            "the model returns its tensors inside an object that FSDP cannot traverse",
            where=type(model).__name__,
            got=type(hidden[0]).__name__,
            allowed="tensors, and tuples, named tuples, lists, dicts and Hugging Face outputs of them",
            hint="return a dict of the tensors from the forward of the model",
        )


def _free_gathered(modules: Sequence[FSDPModule]) -> None:
    """Reshard parameters after a forward pass without gradients, because no backward pass will reshard them."""
    if not torch.is_grad_enabled():
        for module in modules:
            module.reshard()


def set_last_backward(modules: Sequence[nn.Module], strategy: Strategy, last: bool) -> None:
    """Set whether the next backward is the last one of its step, in which deferred reductions run.

    The all-reduce over dp_replicate is deferred. The reduce-scatter over dp_shard runs for each microbatch, unless only
    optimizer states are sharded (ZeRO-1): then the reduce-scatter is deferred too, and parameters stay gathered.
    """
    if strategy.zero_stage == 1:
        for module in modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
    if modules and strategy.dp_replicate > 1:
        modules[-1].set_requires_all_reduce(last)


def defer_reductions(
    modules: Sequence[nn.Module],
    previous: dict[int, nn.Module],
    keeps_gathered: bool,
    root: nn.Module,
) -> None:
    """Defer the gradient reductions of modules that FSDP manages until `reduce_now` is called for each.

    `previous` maps the id of a layer to the preceding layer. With `keeps_gathered`, parameters stay gathered until
    `reduce_now`; those of the root always do.
    """
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(False, recurse=False)
        if module is root or keeps_gathered:
            module.set_reshard_after_backward(False, recurse=False)
        # FSDP prefetches in the reverse order of its last forward, which is wrong with several microbatches in flight.
        module.set_modules_to_backward_prefetch([previous.get(id(module), module)])


def reduce_now(module: nn.Module) -> None:
    """Reduce the deferred gradients of a module outside of backward, and free its gathered parameters."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(True, recurse=False)
    module.set_reshard_after_backward(True, recurse=False)
    for group in groups_of(fully_shard.state(module)):
        group.post_backward()


def complete_gradients(root: nn.Module, names: Set[str]) -> None:
    """Give parameters of the root that have gradients only on other ranks a zero gradient, before the reduction.

    `names` are the parameters that some ranks may not use; all ranks pass the same names.
    """
    for group in groups_of(fully_shard.state(root)):
        own = [p for p in group.fsdp_params if p._param_fqn in names]
        params = [p for p in own if p.unsharded_param.requires_grad]
        if not params:
            continue
        used = [gradient_of(p) is not None for p in params]
        uses = torch.tensor(used, dtype=torch.float32, device=params[0].unsharded_param.device)
        for axis in ("shard", "replicate"):
            ranks = getattr(group.mesh_info, f"{axis}_process_group", None)
            if ranks is not None:
                all_reduce(uses, ranks, Purpose.UNIT_ORDER)
        for p, is_used, count in zip(params, used, uses.tolist(), strict=True):
            if count and not is_used:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)


def gathered_parameters(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield FSDP's all-gather output tensors, whose storages FSDP frees and refills in place."""
    for module in modules:
        for group in groups_of(fully_shard.state(module)):
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs


def end_backward(modules: Sequence[nn.Module]) -> None:
    """Run FSDP's final backward callback of the FSDP roots in `modules`: await reductions, free prefetched weights."""
    for module in modules:
        state = fully_shard.state(module)
        if state._is_root:
            state._root_post_backward_final_callback()
