"""The audit: every parameter really lies as its plan says."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.backends.torch._handle import handle
from hyper_parallel.backends.torch.data._fsdp import FLAT
from hyper_parallel.backends.torch.weights._ranges import local_ranges
from hyper_parallel.errors import AuditError
from hyper_parallel.ir import Layout, Mesh


def audit(model: nn.Module) -> None:
    """Compare every parameter with its planned layout.

    Checks, for each parameter: its logical shape, the mesh axes that split it and the dim each splits, and the shape
    of the part this rank holds; where parts are cut apart, also which rows these are.

    Raises:
        AuditError: HP206 with the first parameter that differs.
    """
    attached = handle(model)
    plan, rank = attached.plan, attached.ranks.rank
    main, coordinate = _as_fsdp_sees(plan.mesh, rank)
    experts = plan.strategy.expert_mesh()
    seen = dict(model.named_parameters())
    for name in sorted(seen.keys() ^ attached.layouts.keys()):
        raise AuditError(
            "a parameter appeared or vanished after parallelize",
            where=name,
            got="in the model" if name in seen else "only in the plan",
        )
    for name, param in seen.items():
        layout, shape = _flat(attached.layouts[name]), attached.shapes[name]
        mesh, where = main, coordinate
        if "ep" in layout.sharding_axes:
            mesh, where = experts, experts.coordinate(rank)
        wanted = layout.local_shape(shape, mesh, where)
        got_shape = tuple(param._local_tensor.shape if isinstance(param, DTensor) else param.shape)
        axes = {a for a in layout.sharding_axes if mesh.degree(a) > 1}
        got_axes = _splitting_axes(param)
        wanted_axes = {a: d for d, on in enumerate(layout.axes) for a in on if a in axes}
        if tuple(param.shape) != shape or got_shape != wanted or got_axes != wanted_axes:
            raise AuditError(
                "a parameter does not lie as planned",
                where=name,
                got=f"shape {tuple(param.shape)}, local {got_shape}, split by {got_axes}",
                allowed=f"shape {shape}, local {wanted}, layout {layout}",
            )
        if any(layout.parts_of(dim) > 1 for dim in range(len(shape))):
            ranges = layout.ranges(shape, mesh, where)
            stored = tuple(
                tuple((r.start, r.stop) for r in runs) for runs in local_ranges(param, name)
            )
            if stored != ranges:
                raise AuditError(
                    "a parameter holds other rows than planned",
                    where=name,
                    got=stored,
                    allowed=ranges,
                )


def _as_fsdp_sees(mesh: Mesh, rank: int) -> tuple[Mesh, dict[str, int]]:
    """The mesh and a rank's coordinate with dp_shard x cp as the one axis that FSDP cuts over.

    One cut into dp_shard * cp slices and two cuts in turn differ where the slices are uneven.
    """
    where, inner = mesh.coordinate(rank), mesh.degree("cp")
    names = [name for name in mesh.names if name not in ("dp_shard", "cp")]
    flat = Mesh((*((n, mesh.degree(n)) for n in names), (FLAT, mesh.degree("dp_shard") * inner)))
    return flat, {**{n: where[n] for n in names}, FLAT: where["dp_shard"] * inner + where["cp"]}


def _flat(layout: Layout) -> Layout:
    axes = [tuple(FLAT if a in ("dp_shard", "cp") else a for a in on) for on in layout.axes]
    return replace(layout, axes=tuple(tuple(dict.fromkeys(on)) for on in axes))


def _splitting_axes(param: Tensor) -> dict[str, int]:
    """Mesh axis to the dim it splits, axes of one rank left out."""
    if not isinstance(param, DTensor):
        return {}
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    return {
        FLAT if name == "dp_shard" else name: placement.dim
        for i, (name, placement) in enumerate(zip(names, param.placements, strict=True))
        if mesh.size(i) > 1 and hasattr(placement, "dim")
    }
