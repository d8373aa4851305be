"""Apply a plan to a model: shard parameters as DTensors, replace forwards, wrap modules with FSDP, audit layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel import ir
from hyper_parallel.backends.torch._flow_checks import check_flow
from hyper_parallel.backends.torch._forwards import ShardedModel, replace_forwards
from hyper_parallel.backends.torch._logits_hook import replace_loss
from hyper_parallel.backends.torch.data.fsdp import FLAT, shard_data_parallel
from hyper_parallel.backends.torch.data.unit_order import order_units
from hyper_parallel.backends.torch.experts.apply import count_experts
from hyper_parallel.backends.torch.experts.balance_loss import (
    BalanceLoss,
    disable_model_router_loss,
)
from hyper_parallel.backends.torch.experts.expert_list import shard_expert_lists
from hyper_parallel.backends.torch.experts.routing import ExpertState, Routing, checked_loss
from hyper_parallel.backends.torch.half_batch import check_half_batches
from hyper_parallel.backends.torch.model_layouts import is_reversible, resolve_layouts
from hyper_parallel.backends.torch.parallel_handle import Handle, Ranks, attach, handle
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.pipeline.stages import split_model
from hyper_parallel.backends.torch.tensor.apply import tensor_mesh, watch_gradients
from hyper_parallel.backends.torch.tensor.block_executors import check_token_overlap
from hyper_parallel.backends.torch.tensor.symmetric_memory import check_symmetric_memory
from hyper_parallel.backends.torch.weights.shard_ranges import local_runs, select
from hyper_parallel.errors import AuditError
from hyper_parallel.ir import Layout, Mesh, Plan, merge, placements
from hyper_parallel.shard import completed_changes


def apply_plan(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    routing: Routing | None = None,
    *,
    average: bool = False,
    one_order: bool = True,
    sync_replicas: bool = True,
) -> nn.Module:
    """Apply the layouts and the strategy of a plan to a model, in place.

    Args:
        model: Model whose parameters have equal values on every rank, or are on the meta device.
        plan: The plan; its layouts must equal those that sharding rules give for the model.
        ranks: Ranks of the model, with process groups and device meshes.
        routing: Options of expert routing; None: the model's own routing.
        average: See `hyper_parallel.parallelize`.
        one_order: See `hyper_parallel.parallelize`.
        sync_replicas: Whether to all-reduce gradients over dp_replicate; if False, the caller must sum them.

    Returns:
        `model` itself, with this rank's shards of the parameters of its pipeline stages, under unchanged names.

    Raises:
        PlanMismatch: HP307 when the layouts of the plan differ from those of the model.
        NotDivisible, RuleError: HP203 or HP204; see `resolve_layouts`.
        UnsupportedSharding: HP205 when the model does not support an axis or option of the plan.
        MissingDependency: HP501 for half-batches if `greenlet` is not installed.
        AuditError: HP206 when a parameter does not have its planned layout afterwards.
    """
    strategy = plan.strategy
    with completed_changes(strategy):
        sharded = _shard_parameters(model, plan, ranks, routing or Routing())
        tp, context, halves, layers = replace_forwards(model, plan, ranks.mesh, sharded)
    stages, experts, balance = sharded.stages, sharded.experts, sharded.balance
    hook = replace_loss(model, tp, context, balance)
    if stages is not None:
        stages.install(model)
    # The backward of reversible layers recomputes them without FSDP's hooks: only the root gathers parameters.
    units = [] if is_reversible(model) else layers
    synced = plan if sync_replicas else replace(plan, strategy=replace(strategy, dp_replicate=1))
    own = units, sharded.expert_modules, sharded.layouts
    meshes = (None if ranks.traced else ranks.mesh), ranks.expert_mesh
    fsdp = shard_data_parallel(model, *own, synced, *meshes, average)
    if halves is not None:
        halves.replace_unit_hooks(fsdp)
    if strategy.pp == 1 and sync_replicas:
        unskippable = sharded.expert_modules if strategy.ep > 1 else ()
        order_units(model, fsdp, ranks.world_group, unskippable, one_order)
    pipeline = None
    if stages is not None:
        pipeline = Pipeline(model, stages, strategy, tp, context, balance, fsdp)
    if tp is not None:
        watch_gradients(model, sharded.layouts, tp, sharded.trials.tensor)
    parts = (tp, context, experts, balance, pipeline, fsdp, hook, halves, average)
    attach(model, Handle(plan, ranks, sharded.layouts, sharded.shapes, *parts))
    if not ranks.traced:
        audit(model)
    return model


def _shard_parameters(model: nn.Module, plan: Plan, ranks: Ranks, routing: Routing) -> ShardedModel:
    """Check the model against its plan, then shard its parameters in place over the axes tp, pp and ep."""
    strategy, mesh = plan.strategy, ranks.mesh
    shard_plan = resolve_layouts(model, plan)
    alone = strategy.world_size == 1
    balance, facts = None, checked_loss(model, routing, alone=alone)
    if facts is not None:
        own = strategy, mesh, ranks.world_group, ranks.device
        balance = BalanceLoss.from_facts(facts, routing, *own)
    check_half_batches(model, strategy, balance is not None)
    check_token_overlap(model, strategy)
    disable_model_router_loss(model, routing, alone, balance is not None)
    tp_mesh = tensor_mesh(mesh, strategy)
    if strategy.overlap.block_executor == "symmetric":
        check_symmetric_memory(tp_mesh.get_group(), ranks.device)
    trials = check_flow(model, plan, shard_plan)
    expert_group = None if ranks.expert_mesh is None else ranks.expert_mesh["ep"].get_group()
    counts, experts = count_experts(model, shard_plan.styles), None
    if counts:
        groups = expert_group, ranks.world_group
        options = strategy.pp > 1, ranks.device, strategy.overlap.ep_chunks
        experts = ExpertState(counts, routing, *groups, *options)
    stages = split_model(model, plan, trials.flow, mesh, ranks.device)
    shard_expert_lists(model, experts)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layouts = {name: shard_plan.layouts[name] for name in shapes}
    dtype = getattr(torch, plan.workload.param_dtype)
    place_parameters(model, layouts, tp_mesh, ranks.expert_mesh, ranks.device, dtype)
    return ShardedModel(shard_plan, layouts, shapes, stages, trials, experts, balance)


def audit(model: nn.Module) -> None:
    """Raise HP206 if a parameter was added or removed, or if its shape or local index ranges differ from the plan."""
    attached = handle(model)
    plan, rank = attached.plan, attached.ranks.rank
    main, experts = _with_flat_fsdp_axis(plan.mesh, rank), plan.strategy.expert_mesh()
    params = dict(model.named_parameters())
    for name in sorted(params.keys() ^ attached.layouts.keys()):
        raise AuditError(
            "a parameter was added or removed after hp.parallelize",
            where=name,
            got="in the model" if name in params else "only in the plan",
            hint="add and remove parameters before hp.parallelize(model, plan)",
        )
    for name, param in params.items():
        layout, shape = _flat(attached.layouts[name]), attached.shapes[name]
        is_expert = "ep" in layout.sharding_axes
        mesh, coordinate = (experts, experts.coordinate(rank)) if is_expert else main
        wanted = tuple(merge(runs) for runs in layout.ranges(shape, mesh, coordinate))
        stored = local_runs(param, name)
        if tuple(param.shape) != shape or stored != wanted:
            raise AuditError(
                "after hp.parallelize, a parameter does not have its planned layout",
                where=name,
                got=f"shape {tuple(param.shape)}, index ranges {stored}",
                allowed=f"shape {shape}, index ranges {wanted}, layout {layout}",
            )


def _with_flat_fsdp_axis(mesh: Mesh, rank: int) -> tuple[Mesh, dict[str, int]]:
    """Return the mesh with dp_shard and cp merged into FSDP's axis, and the coordinate of `rank` on this mesh.

    FSDP splits once into dp_shard * cp slices. For uneven sizes, a split by dp_shard and then by cp would differ.
    """
    coordinate, cp = mesh.coordinate(rank), mesh.degree("cp")
    names = [name for name in mesh.names if name not in ("dp_shard", "cp")]
    flat = Mesh((*((n, mesh.degree(n)) for n in names), (FLAT, mesh.degree("dp_shard") * cp)))
    index = coordinate["dp_shard"] * cp + coordinate["cp"]
    return flat, {**{n: coordinate[n] for n in names}, FLAT: index}


def _flat(layout: Layout) -> Layout:
    dims = [tuple(FLAT if a in ("dp_shard", "cp") else a for a in axes) for axes in layout.axes]
    return replace(layout, axes=tuple(tuple(dict.fromkeys(axes)) for axes in dims))


def place_parameters(
    model: nn.Module,
    layouts: dict[str, Layout],
    tp_mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Shard parameters over tp and ep ranks without communication, cast them to `dtype`, and move them to the device.

    Buffers are moved too. Integer parameters keep their dtype. Meta tensors stay on the meta device.
    """
    placed: dict[int, nn.Parameter] = {}  # by id of the original, so that tied parameters stay tied
    for name, param in [*model.named_parameters(remove_duplicate=False)]:
        if id(param) not in placed:
            layout = layouts[name]
            experts = "ep" in layout.sharding_axes and expert_mesh is not None
            mesh = expert_mesh["ep"] if experts else tp_mesh
            mesh = None if layout.one_of else mesh  # no other rank of the axes `one_of` has the parameter
            placed[id(param)] = _shard(param, layout, mesh, device, dtype)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = placed[id(param)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _shard(
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
        part = data.to(target, wanted)
        return param if part is data else nn.Parameter(part, requires_grad=param.requires_grad)
    names = mesh.mesh_dim_names or ()
    layout = replace(layout, axes=tuple(tuple(a for a in dim if a in names) for dim in layout.axes))
    degrees = Mesh(tuple((name, mesh[name].size()) for name in names))
    coordinate = {name: mesh.get_local_rank(name) for name in names}
    part = select(data, layout.ranges(data.shape, degrees, coordinate))
    # A slice shares the storage of the full tensor: copy it, so that the full tensor can be freed.
    part = part.to(target, wanted, copy=part is not data).contiguous()
    size = {"shape": data.shape, "stride": data.stride()}
    entries = [_dtensor_placement(entry) for entry in placements(layout, degrees)]
    whole = DTensor.from_local(part, mesh, entries, run_check=False, **size)
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _dtensor_placement(entry: Any) -> Placement:
    if isinstance(entry, ir.StridedShard):
        return _StridedShard(entry.dim, split_factor=entry.split_factor)
    return Shard(entry.dim) if isinstance(entry, ir.Shard) else Replicate()
