"""The tensor-parallel axes of a device mesh: their groups, and who sums which gradient over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._handle import Handle
from hyper_parallel.backends.torch.data._gradients import Summed
from hyper_parallel.backends.torch.tensor._apply import TensorParallel
from hyper_parallel.backends.torch.tensor._apply_2d import TensorParallel2d
from hyper_parallel.backends.torch.tensor._token_grid import TokenGrid
from hyper_parallel.ir import Strategy

TP_AXES = ("tp_x", "tp_y")


def tensor_mesh(mesh: DeviceMesh | None, strategy: Strategy) -> DeviceMesh | None:
    """The mesh parameters are cut on by tensor parallelism: one axis, or both; None without."""
    if mesh is None or strategy.tp == 1:
        return None
    return mesh[TP_AXES[0]] if strategy.tp_y == 1 else mesh[TP_AXES]


def tensor_group(tp_mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group over some tensor-parallel axes; axes the mesh lacks have one rank."""
    names = tuple(a for a in axes if a in (tp_mesh.mesh_dim_names or ()))
    if len(names) == 1:
        return tp_mesh.get_group(names[0])
    return tp_mesh[names]._flatten("_".join(names)).get_group()


def tensor_parallel(model: nn.Module, found: Handle, tp_mesh: DeviceMesh) -> TensorParallel:
    """Tensor parallelism of the strategy's number of axes, not applied yet."""
    assert found.tp is not None
    assert found.gradients is not None
    strategy = found.plan.strategy
    if strategy.tp_y == 1:
        return TensorParallel(model, found.styles, found.tp, found.gradients)
    x, y = (tensor_group(tp_mesh, (axis,)) for axis in TP_AXES)
    # Norms of the residual stream are the only vectors cut over y alone that no block owns.
    grid = TokenGrid(found.tp, x, y, hidden_cut(found), strategy.attention_shape == "weight")
    found.tp.order = grid.order if grid.by_sequence else None
    found.tp.shape = grid.shape
    return TensorParallel2d(model, found.styles, found.tp, found.gradients, grid, strategy)


def hidden_cut(found: Handle) -> bool:
    """Whether the residual stream is cut over y, which the layout of its norms says."""
    return any(
        layout.axes[0][:1] == ("tp_y",)
        for name, layout in found.layouts.items()
        if len(layout.axes) == 1 and found.styles.get(name.rpartition(".")[0]) != "rowwise"
    )


def summed_parameters(
    model: nn.Module, found: Handle, tp_mesh: DeviceMesh | None
) -> Iterator[Summed]:
    """Parameters that some tensor-parallel axis does not cut, with the ranks that hold the summands."""
    assert tp_mesh is not None
    for name, param in model.named_parameters():
        cuts = found.layouts[name].sharding_axes
        missing = [a for a in tp_mesh.mesh_dim_names or () if a not in cuts]
        # Experts are reduced over the ranks that hold the same ones.
        if missing and "ep" not in cuts:
            yield param, tensor_group(tp_mesh, missing)
