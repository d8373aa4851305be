"""Sharding of parameters over tensor-parallel and expert-parallel ranks, as DTensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel.ir import Layout


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
    part, placements = data, []
    for axis in mesh.mesh_dim_names or ():
        dim = next((i for i, axes in enumerate(layout.axes) if axis in axes), None)
        if dim is None:
            placements.append(Replicate())
            continue
        size, rank, parts = mesh[axis].size(), mesh.get_local_rank(axis), layout.parts_of(dim)
        part = torch.cat([p.chunk(size, dim)[rank] for p in part.chunk(parts, dim)], dim)
        placements.append(_StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim))
    # A slice shares the storage of the full tensor: copy it, so that the full tensor can be freed.
    part = part.to(target, wanted, copy=part is not data).contiguous()
    whole = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=data.shape, stride=data.stride()
    )
    return nn.Parameter(whole, requires_grad=param.requires_grad)
