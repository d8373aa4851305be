"""Apply a plan to a model: layouts onto parameters, forwards onto modules, FSDP around both, then the audit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch._audit import audit
from hyper_parallel.backends.torch._collectives import sum_forward
from hyper_parallel.backends.torch._forward import keep_float64, loop_over_experts, recompute
from hyper_parallel.backends.torch._handle import FLAT, Handle, TpState, attach
from hyper_parallel.backends.torch._loss import cross_entropy_sum, shifted
from hyper_parallel.backends.torch._resolve import decoder_of, layers_of, resolve_layouts
from hyper_parallel.backends.torch.context._apply import Context
from hyper_parallel.backends.torch.context._attention import register
from hyper_parallel.backends.torch.context._documents import mask_documents
from hyper_parallel.backends.torch.data._gradients import TpGradients
from hyper_parallel.backends.torch.experts._apply import apply_to_experts, shard_experts
from hyper_parallel.backends.torch.experts._balance_loss import aux_loss, stage_balance
from hyper_parallel.backends.torch.experts._list import divide_lists
from hyper_parallel.backends.torch.experts._routing import Routing, check_routing
from hyper_parallel.backends.torch.pipeline._apply import Pipeline, cut_model
from hyper_parallel.backends.torch.pipeline._stages import Stages
from hyper_parallel.backends.torch.tensor._mesh import (
    TP_AXES,
    summed_parameters,
    tensor_group,
    tensor_mesh,
    tensor_parallel,
)
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Plan, Purpose, Strategy


def apply_plan(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None,
    rank: int,
    device: torch.device,
    world_group: dist.ProcessGroup | None,
    expert_mesh: DeviceMesh | None = None,
    routing: Routing | None = None,
) -> nn.Module:
    """Lay a model out as its plan says, in place.

    Args:
        model: Real parameters, equal on every rank, or parameters on the meta device.
        plan: The plan; its layouts must agree with those the model's own rules give.
        mesh: Device mesh of the strategy; None on one rank.
        rank: Rank of this process on the mesh.
        device: Where real parameters go.
        world_group: All ranks of the mesh.
        expert_mesh: The same ranks with axes pp, dp_replicate, edp, ep; None when ep is 1.
        routing: Choices about the routing of experts; None: what the model does by itself.

    Returns:
        The same model: same class, same parameter names.

    Raises:
        PlanMismatch: HP307 when the plan is for another model.
        AuditError: HP206 when a parameter does not lie as planned in the end.
    """
    shard_plan = resolve_layouts(model, plan)
    strategy = plan.strategy
    check_routing(model, routing or Routing())
    stages = cut_model(model, plan, mesh) if mesh is not None and strategy.pp > 1 else None
    if expert_mesh is not None and strategy.ep > 1:
        experts = [name for name, style in shard_plan.styles.items() if style == "experts"]
        divide_lists(model, experts, expert_mesh["ep"].get_group())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layouts = {name: shard_plan.layouts[name] for name in shapes}
    found = Handle(
        plan, mesh, layouts, shard_plan.styles, shapes, rank, device, world_group=world_group
    )
    decoder = decoder_of(model)
    layers = stages.own_layers if stages else list(decoder[1]) if decoder else []
    tp_mesh = tensor_mesh(mesh, strategy)
    dtype = getattr(torch, plan.workload.param_dtype)
    _place(model, layouts, tp_mesh, expert_mesh, device, dtype)
    compute = getattr(torch, plan.workload.compute_dtype)
    exact = compute == torch.float64
    if tp_mesh is not None:
        found.tp = TpState(tensor_group(tp_mesh, TP_AXES))
        found.tp.regather = strategy.gathered_inputs == "re-gather"
        found.gradients = TpGradients()
    if mesh is not None and strategy.cp > 1:
        found.context = _context_parallel(model, decoder, stages, strategy, mesh)
    elif decoder is not None:
        mask_documents(decoder[0], compute)
    # Before tensor parallelism: the tokens are cut outside of what is made again.
    by_stage = list(stages.layers.values()) if stages else [layers or layers_of(model)]
    for layer in _recomputed(strategy, by_stage):
        recompute(layer, found.tp, exact, found.context)
    if exact:
        keep_float64(model)
    loop_over_experts(model, compute)
    apply_to_experts(model, found, expert_mesh, routing, decoder)
    if found.tp is not None and found.gradients is not None:
        parallel = tensor_parallel(model, found, tp_mesh)
        if decoder is None:
            parallel.apply_to_modules()
        else:
            parallel.apply_to_decoder(*decoder)
    if hasattr(type(model), "loss_function"):
        model.loss_function = _loss_function(found)
    if stages is not None and mesh is not None:
        stages.install(model)
        found.pipeline = Pipeline(stages, found, mesh["pp"].get_group(), stage_balance(found, mesh))
        found.pipeline.guard(model)
    _shard_data_parallel(model, layers, found, expert_mesh)
    if found.gradients is not None and decoder is not None:
        gradients = found.gradients
        gradients.watch(lambda: summed_parameters(model, found, tp_mesh))
        # After FSDP's own hook, so that its callback at the end of backward comes first.
        model.register_forward_hook(lambda _, __, output: gradients.forward_ends(output))
    attach(model, found)
    audit(model)
    return model


def _place(
    model: nn.Module,
    layouts: dict[str, Layout],
    tp_mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Move parameters and buffers to the device and cut parameters over tensor-parallel ranks; no communication."""
    replaced: dict[int, nn.Parameter] = {}  # tied parameters stay one
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, param in names.items():
        if id(param) not in replaced:
            kept = next(n for n, p in names.items() if p is param)
            layout = layouts[kept]
            experts = "ep" in layout.sharding_axes and expert_mesh is not None
            on = expert_mesh["ep"] if experts else tp_mesh
            on = None if layout.one_of else on  # whole here, and on no other rank of the axis
            replaced[id(param)] = _placed(param, layout, on, device, dtype)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = replaced[id(param)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _placed(
    param: nn.Parameter,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Parameter:
    data = param.data
    target = data.device if data.is_meta else device
    wanted = dtype if data.is_floating_point() else data.dtype
    if mesh is None:
        if data.device == target and data.dtype == wanted:
            return param
        return nn.Parameter(data.to(target, wanted), requires_grad=param.requires_grad)
    part, placements = data, []
    for axis in mesh.mesh_dim_names or ():
        dim = next((i for i, axes in enumerate(layout.axes) if axis in axes), None)
        if dim is None:
            placements.append(Replicate())
            continue
        size, rank, parts = mesh[axis].size(), mesh.get_local_rank(axis), layout.parts_of(dim)
        part = torch.cat([p.chunk(size, dim)[rank] for p in part.chunk(parts, dim)], dim)
        placements.append(_StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim))
    # A slice shares the whole tensor's storage: copy it, so that the whole can be freed.
    part = part.to(target, wanted, copy=part is not data).contiguous()
    whole = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=data.shape, stride=data.stride()
    )
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _context_parallel(
    model: nn.Module,
    decoder: tuple[nn.Module, nn.ModuleList] | None,
    stages: Stages | None,
    strategy: Strategy,
    mesh: DeviceMesh,
) -> Context:
    if decoder is None:
        raise UnsupportedSharding(
            "context parallelism needs a Hugging Face model with a list of decoder layers",
            where=type(model).__name__,
            hint=f"parallel.cp=1 parallel.dp_shard={strategy.dp_shard * strategy.cp}",
        )
    register()
    context = Context.of(strategy, mesh["cp"].get_group())
    context.attach(model, *decoder)
    if stages is None:
        layers = len(decoder[1])
        context.wrap_root(model, lambda: layers)
    else:
        context.wrap_root(model, lambda: len(stages.layers[stages.passing.stage]), joins=False)
    return context


def _loss_function(found: Handle) -> Callable[..., Tensor]:
    """The loss a Hugging Face model calls, for logits as this layout leaves them."""
    tp = found.tp

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
            total = sum_forward(total, tp.group, Purpose.LOSS)
        if isinstance(count, Tensor):
            count = count.to(total.device)
        return _with_aux_loss(total / count, found)

    return causal_lm_loss


def _with_aux_loss(loss: Tensor, found: Handle) -> Tensor:
    """The loss and the load-balancing loss of one microbatch, which counts by its share of the step's microbatches."""
    state, strategy = found.experts, found.plan.strategy
    if state is None or strategy.pp > 1:
        return loss  # a pipeline adds it over the stages
    aux = aux_loss(state, found.tp, found.world_group, strategy.dp * strategy.cp)
    if aux is None:
        return loss
    times = found.plan.workload.accumulation_steps or 1
    return loss + aux.to(loss.dtype) * (state.aux_loss_coef / times)


def _recomputed(strategy: Strategy, stages: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """The layers of a rank that backward makes again."""
    layers = [layer for stage in stages for layer in stage]
    places = iter(range(len(layers)))
    again = strategy.recomputed([[next(places) for _ in stage] for stage in stages])
    return [layers[i] for i in sorted(again)]


def _shard_data_parallel(
    model: nn.Module,
    layers: list[nn.Module],
    found: Handle,
    expert_mesh: DeviceMesh | None,
) -> None:
    """FSDP around every decoder layer and the root, when ranks share data or formats differ."""
    strategy, workload = found.plan.strategy, found.plan.workload
    mixed = workload.compute_dtype != workload.param_dtype
    alone = strategy.dp * strategy.cp == 1 and not mixed
    if found.mesh is None or (alone and (expert_mesh is None or expert_mesh["edp"].size() == 1)):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, workload.compute_dtype) if mixed else None,
        reduce_dtype=getattr(torch, workload.reduce_dtype),
    )
    if found.experts is not None and expert_mesh is not None:
        shard_experts(model, found, expert_mesh, policy)
    if alone:
        _sum_gradients(found)
        return
    options: dict[str, Any] = {"mesh": fsdp_mesh(found.mesh, strategy), "mp_policy": policy}
    columns = _cut_by_columns(model, found.layouts, strategy)
    if columns:
        options["shard_placement_fn"] = lambda p: Shard(1) if id(p) in columns else Shard(0)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=strategy.frees_gathered, **options)
        found.fsdp.append(layer)
    fully_shard(model, reshard_after_forward=False, **options)
    model.register_forward_hook(_refuse_hidden_outputs)
    found.fsdp.append(model)
    _sum_gradients(found)


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


def _sum_gradients(found: Handle) -> None:
    for module in found.fsdp:
        # The loss is already divided by the number of tokens of the whole step: gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if found.pipeline is not None:
        found.pipeline.hold_fsdp()


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
