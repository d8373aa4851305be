"""Sharding of parameters over tensor-parallel and expert-parallel ranks, as DTensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel import ir
from hyper_parallel.backends.torch.weights.shard_ranges import select
from hyper_parallel.ir import Layout, Mesh, placements


def place_parameters(
    model: nn.Module,
    layouts: dict[str, Layout],
    tp_mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Move parameters and buffers to the device and shard parameters over ranks, without communication."""
    placed: dict[int, nn.Parameter] = {}  # tied parameters stay one
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, param in names.items():
        if id(param) not in placed:
            first_name = next(n for n, p in names.items() if p is param)
            layout = layouts[first_name]
            experts = "ep" in layout.sharding_axes and expert_mesh is not None
            mesh = expert_mesh["ep"] if experts else tp_mesh
            mesh = None if layout.one_of else mesh  # this rank alone of the axis has the parameter
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
    whole = DTensor.from_local(
        part,
        mesh,
        _dtensor_placements(layout, degrees),
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _dtensor_placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """Return the placements of a layout without partial sums in the types of DTensor."""
    entries: list[Placement] = []
    for entry in placements(layout, mesh):
        if isinstance(entry, ir.StridedShard):
            entries.append(_StridedShard(entry.dim, split_factor=entry.split_factor))
        else:
            entries.append(Shard(entry.dim) if isinstance(entry, ir.Shard) else Replicate())
    return entries
