"""Audit of a parallelized model: every parameter has the layout of the plan."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hyper_parallel.backends.torch.data.fsdp import FLAT
from hyper_parallel.backends.torch.parallel_handle import handle
from hyper_parallel.backends.torch.weights.shard_ranges import local_runs
from hyper_parallel.errors import AuditError
from hyper_parallel.ir import Layout, Mesh, merge


def audit(model: nn.Module) -> None:
    """Check every parameter against its planned layout: logical shape, and index ranges of each dim on this rank.

    Raises:
        AuditError: HP206 with the first parameter that differs.
    """
    attached = handle(model)
    plan, rank = attached.plan, attached.ranks.rank
    main, experts = _with_flat_fsdp_axis(plan.mesh, rank), plan.strategy.expert_mesh()
    params = dict(model.named_parameters())
    for name in sorted(params.keys() ^ attached.layouts.keys()):
        raise AuditError(
            "a parameter was added or removed after parallelize",
            where=name,
            got="in the model" if name in params else "only in the plan",
        )
    for name, param in params.items():
        layout, shape = _flat(attached.layouts[name]), attached.shapes[name]
        is_expert = "ep" in layout.sharding_axes
        mesh, coordinate = (experts, experts.coordinate(rank)) if is_expert else main
        wanted = tuple(merge(runs) for runs in layout.ranges(shape, mesh, coordinate))
        stored = local_runs(param, name)
        if tuple(param.shape) != shape or stored != wanted:
            raise AuditError(
                "a parameter does not have its planned layout",
                where=name,
                got=f"shape {tuple(param.shape)}, index ranges {stored}",
                allowed=f"shape {shape}, index ranges {wanted}, layout {layout}",
            )


def _with_flat_fsdp_axis(mesh: Mesh, rank: int) -> tuple[Mesh, dict[str, int]]:
    """Return the mesh and a rank's coordinate with dp_shard x cp merged into the axis that FSDP shards over.

    For uneven sizes, one split into dp_shard * cp slices differs from two successive splits.
    """
    coordinate, cp = mesh.coordinate(rank), mesh.degree("cp")
    names = [name for name in mesh.names if name not in ("dp_shard", "cp")]
    flat = Mesh((*((n, mesh.degree(n)) for n in names), (FLAT, mesh.degree("dp_shard") * cp)))
    index = coordinate["dp_shard"] * cp + coordinate["cp"]
    return flat, {**{n: coordinate[n] for n in names}, FLAT: index}


def _flat(layout: Layout) -> Layout:
    dims = [tuple(FLAT if a in ("dp_shard", "cp") else a for a in axes) for axes in layout.axes]
    return replace(layout, axes=tuple(tuple(dict.fromkeys(axes)) for axes in dims))
