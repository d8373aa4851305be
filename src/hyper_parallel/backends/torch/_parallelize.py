"""Apply a plan to a model: layouts onto parameters, forwards onto modules, FSDP around both, then the audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyper_parallel.backends.torch._audit import audit
from hyper_parallel.backends.torch._comm import sum_forward
from hyper_parallel.backends.torch._forward import keep_float64, recompute
from hyper_parallel.backends.torch._gradients import TpGradients
from hyper_parallel.backends.torch._loss import cross_entropy_sum, shifted
from hyper_parallel.backends.torch._resolve import decoder_of, resolve_layouts
from hyper_parallel.backends.torch._state import Handle, TpState, attach
from hyper_parallel.backends.torch._tensor_parallel import TensorParallel
from hyper_parallel.ir import Layout, Plan

TP = "tp_x"


def apply_plan(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None,
    rank: int,
    device: torch.device,
    world_group: dist.ProcessGroup | None,
) -> nn.Module:
    """Lay a model out as its plan says, in place.

    Args:
        model: Real parameters, equal on every rank, or parameters on the meta device.
        plan: The plan; its layouts must agree with those the model's own rules give.
        mesh: Device mesh of the strategy; None on one rank.
        rank: Rank of this process on the mesh.
        device: Where real parameters go.
        world_group: All ranks of the mesh.

    Returns:
        The same model: same class, same parameter names.

    Raises:
        PlanMismatch: HP307 when the plan is for another model.
        AuditError: HP206 when a parameter does not lie as planned in the end.
    """
    shard_plan = resolve_layouts(model, plan)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = Handle(
        plan, mesh, shard_plan.layouts, shard_plan.styles, shapes, rank, device,
        world_group=world_group,
    )  # fmt: skip
    strategy = plan.strategy
    decoder = decoder_of(model)
    tp_mesh = mesh[TP] if mesh is not None and strategy.tp > 1 else None
    dtype = getattr(torch, plan.workload.param_dtype)
    _place(model, shard_plan.layouts, tp_mesh, device, dtype)
    exact = getattr(torch, plan.workload.compute_dtype) == torch.float64
    if tp_mesh is not None:
        found.tp = TpState(tp_mesh.get_group())
        found.gradients = TpGradients(found.tp.group)
    if decoder is not None and strategy.recompute == "full":
        # Before tensor parallelism: the tokens are cut outside of what is made again.
        for layer in decoder[1]:
            recompute(layer, found.tp, exact)
    if exact:
        keep_float64(model)
    if found.tp is not None and found.gradients is not None:
        parallel = TensorParallel(model, shard_plan.styles, found.tp, found.gradients)
        if decoder is None:
            parallel.apply_to_modules()
        else:
            parallel.apply_to_decoder(*decoder)
    if hasattr(type(model), "loss_function"):
        model.loss_function = _loss_function(found.tp)
    _shard_data_parallel(model, decoder[1] if decoder else None, found)
    if found.gradients is not None and decoder is not None:
        gradients = found.gradients
        gradients.watch(
            lambda: (
                p for n, p in model.named_parameters() if TP not in found.layouts[n].sharding_axes
            )
        )
        # After FSDP's own hook, so that its callback at the end of backward comes first.
        model.register_forward_hook(lambda _, __, output: gradients.forward_ends(output))
    attach(model, found)
    audit(model)
    return model


def _place(
    model: nn.Module,
    layouts: dict[str, Layout],
    tp_mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Move parameters and buffers to the device and cut parameters over tensor-parallel ranks; no communication."""
    replaced: dict[int, nn.Parameter] = {}  # tied parameters stay one
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, param in names.items():
        if id(param) not in replaced:
            kept = next(n for n, p in names.items() if p is param)
            replaced[id(param)] = _placed(param, layouts[kept], tp_mesh, device, dtype)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = replaced[id(param)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _placed(
    param: nn.Parameter,
    layout: Layout,
    tp_mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Parameter:
    data = param.data
    target = data.device if data.is_meta else device
    wanted = dtype if data.is_floating_point() else data.dtype
    if tp_mesh is None:
        if data.device == target and data.dtype == wanted:
            return param
        return nn.Parameter(data.to(target, wanted), requires_grad=param.requires_grad)
    dim = next((i for i, axes in enumerate(layout.axes) if TP in axes), None)
    part = data if dim is None else data.chunk(tp_mesh.size(), dim)[tp_mesh.get_local_rank()]
    # A slice shares the whole tensor's storage: copy it, so that the whole can be freed.
    part = part.to(target, wanted, copy=dim is not None).contiguous()
    placement = Replicate() if dim is None else Shard(dim)
    whole = DTensor.from_local(
        part, tp_mesh, (placement,), run_check=False, shape=data.shape, stride=data.stride()
    )
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _loss_function(tp: TpState | None) -> Callable[..., Tensor]:
    """The loss a Hugging Face model calls, for logits as this layout leaves them."""

    def causal_lm_loss(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        targets = shifted(labels, ignore_index) if shift_labels is None else shift_labels
        targets = targets.to(logits.device).reshape(-1)
        count = num_items_in_batch
        if count is None:
            count = (targets != ignore_index).sum().clamp(min=1)
        split = None if tp is None or tp.head == "whole" else tp.head
        if tp is not None:
            tp.loss_taken = True
        columns = logits.shape[-1]
        if split == "tokens":
            rows = logits.shape[-2]
            missing = rows * tp.degree - targets.shape[0]
            targets = torch.nn.functional.pad(targets, (0, missing), value=ignore_index)
            targets = targets[tp.rank * rows : (tp.rank + 1) * rows]
        total = cross_entropy_sum(
            logits.reshape(-1, columns),
            targets,
            ignore_index=ignore_index,
            first=tp.rank * columns if split == "vocabulary" else 0,
            group=tp.group if split == "vocabulary" else None,
        )
        if split == "tokens":
            total = sum_forward(total, tp.group)
        if isinstance(count, Tensor):
            count = count.to(total.device)
        return total / count

    return causal_lm_loss


def _shard_data_parallel(model: nn.Module, layers: nn.ModuleList | None, found: Handle) -> None:
    """FSDP around every decoder layer and the root, when ranks share data or formats differ."""
    strategy, workload = found.plan.strategy, found.plan.workload
    mixed = workload.compute_dtype != workload.param_dtype
    if found.mesh is None or (strategy.dp == 1 and not mixed):
        return
    axes = ("dp_replicate", "dp_shard") if strategy.dp_replicate > 1 else ("dp_shard",)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, workload.compute_dtype) if mixed else None,
        reduce_dtype=getattr(torch, workload.reduce_dtype),
    )
    options: dict[str, Any] = {"mesh": found.mesh[axes], "mp_policy": policy}
    for layer in layers or ():
        fully_shard(layer, reshard_after_forward=strategy.reshard_after_forward, **options)
        found.fsdp.append(layer)
    fully_shard(model, reshard_after_forward=False, **options)
    found.fsdp.append(model)
    for module in found.fsdp:
        # The loss is already divided by the number of tokens of the whole step: gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
