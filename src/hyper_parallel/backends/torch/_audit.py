"""The audit: every parameter really lies as its plan says."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.backends.torch._state import handle
from hyper_parallel.errors import AuditError
from hyper_parallel.ir import Layout


def audit(model: nn.Module) -> None:
    """Compare every parameter with its planned layout.

    Checks, for each parameter: its logical shape, the mesh axes that split it and the dim each splits, and the shape
    of the part this rank holds.

    Raises:
        AuditError: HP206 with the first parameter that differs.
    """
    found = handle(model)
    coordinate = found.plan.mesh.coordinate(found.rank)
    seen = dict(model.named_parameters())
    for name in sorted(seen.keys() ^ found.layouts.keys()):
        raise AuditError(
            "a parameter appeared or vanished after parallelize",
            where=name,
            got="in the model" if name in seen else "only in the plan",
        )
    for name, param in seen.items():
        layout, shape = found.layouts[name], found.shapes[name]
        wanted = layout.local_shape(shape, found.plan.mesh, coordinate)
        got_shape = tuple(param._local_tensor.shape if isinstance(param, DTensor) else param.shape)
        axes = {a for a in layout.sharding_axes if found.plan.mesh.degree(a) > 1}
        got_axes = _splitting_axes(param)
        wanted_axes = {a: d for d, on in enumerate(layout.axes) for a in on if a in axes}
        if tuple(param.shape) != shape or got_shape != wanted or got_axes != wanted_axes:
            raise AuditError(
                "a parameter does not lie as planned",
                where=name,
                got=f"shape {tuple(param.shape)}, local {got_shape}, split by {got_axes}",
                allowed=f"shape {shape}, local {wanted}, {_shown(layout)}",
            )


def _splitting_axes(param: Tensor) -> dict[str, int]:
    """Mesh axis to the dim it splits, axes of one rank left out."""
    if not isinstance(param, DTensor):
        return {}
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    return {
        name: placement.dim
        for i, (name, placement) in enumerate(zip(names, param.placements, strict=True))
        if mesh.size(i) > 1 and hasattr(placement, "dim")
    }


def _shown(layout: Layout) -> str:
    return f"layout {layout}"
