"""FSDP around the layers of a model, and around its experts over the ranks that hold the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.data.unit_order import groups_of
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
    average: bool,
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
    # Columns, where tensor parallelism cuts the rows part by part.
    axes = {*strategy.fsdp_axes, "edp"}
    dims = {
        id(param): next((d for d, on in enumerate(layouts[name].axes) if axes & {*on}), 0)
        for name, param in model.named_parameters()
    }
    sharded: list[nn.Module] = []

    def shard(
        module: nn.Module, over: DeviceMesh, frees: bool, policy: MixedPrecisionPolicy
    ) -> None:
        fully_shard(
            module,
            mesh=over,
            mp_policy=policy,
            reshard_after_forward=frees,
            shard_placement_fn=lambda param: Shard(dims[id(param)]),
        )
        # The loss is already divided by the number of tokens of the whole step: gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if average:
            # Not FSDP's own factor, by which it divides twice where only replicas differ in their data.
            module.set_all_reduce_hook(lambda gradients: gradients.div_(strategy.dp))
        sharded.append(module)

    alone = strategy.dp * strategy.cp == 1 and not mixed
    if expert_mesh is not None and (not alone or expert_mesh["edp"].size() > 1):
        over = expert_mesh[("dp_replicate", "edp") if strategy.dp_replicate > 1 else ("edp",)]
        # Inputs keep their format: a router may weigh in a wider one than the experts work in.
        uncast = replace(policy, cast_forward_inputs=False)
        for module in [model.get_submodule(name) for name in experts]:
            shard(module, over, strategy.frees_gathered, uncast)
    if not alone:
        over = fsdp_mesh(mesh, strategy)
        for layer in _unshared(layers, model):
            shard(layer, over, strategy.frees_gathered, policy)
        shard(model, over, False, policy)
        model.register_forward_hook(_refuse_hidden_outputs)
        model.register_forward_hook(lambda *_: _free_gathered(sharded))
    return tuple(sharded)


def _unshared(layers: Sequence[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Layers all of whose parameters are theirs alone: FSDP would make two of one that is in two of its groups."""

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    everywhere = uses(model)
    for layer in layers:
        if all(everywhere[key] == count for key, count in uses(layer).items()):
            yield layer


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


def _free_gathered(modules: Sequence[FSDPModule]) -> None:
    """After a pass without gradients show the sharded parameters again, which optimizers and `zero_grad` mean."""
    if not torch.is_grad_enabled():
        for module in modules:
            module.reshard()


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
    for group in groups_of(fully_shard.state(module)):
        group.post_backward()


def gathered(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The tensors of gathered parameters, which FSDP empties and refills in place."""
    for module in modules:
        for group in groups_of(fully_shard.state(module)):
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs


def end_backward(modules: Sequence[nn.Module]) -> None:
    """Let the root end its backward pass: wait for reductions, forget what it prefetched."""
    for module in modules:
        state = fully_shard.state(module)
        if state._is_root:
            state._root_post_backward_final_callback()
