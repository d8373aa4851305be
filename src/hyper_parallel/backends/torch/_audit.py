"""The audit: every parameter really lies as its plan says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from hyper_parallel.backends.torch.data.fsdp import FLAT
from hyper_parallel.backends.torch.parallel_handle import handle
from hyper_parallel.backends.torch.weights.shard_ranges import local_ranges
from hyper_parallel.errors import AuditError
from hyper_parallel.ir import Layout, Mesh


def audit(model: nn.Module) -> None:
    """Compare every parameter with its planned layout: its logical shape, and the indices of each dim on this rank.

    Raises:
        AuditError: HP206 with the first parameter that differs.
    """
    attached = handle(model)
    plan, rank = attached.plan, attached.ranks.rank
    main, experts = _as_fsdp_sees(plan.mesh, rank), plan.strategy.expert_mesh()
    seen = dict(model.named_parameters())
    for name in sorted(seen.keys() ^ attached.layouts.keys()):
        raise AuditError(
            "a parameter appeared or vanished after parallelize",
            where=name,
            got="in the model" if name in seen else "only in the plan",
        )
    for name, param in seen.items():
        layout, shape = _flat(attached.layouts[name]), attached.shapes[name]
        on = (experts, experts.coordinate(rank)) if "ep" in layout.sharding_axes else main
        wanted = [_joined(runs) for runs in layout.ranges(shape, *on)]
        stored = [[(r.start, r.stop) for r in runs] for runs in local_ranges(param, name)]
        if tuple(param.shape) != shape or stored != wanted:
            raise AuditError(
                "a parameter does not lie as planned",
                where=name,
                got=f"shape {tuple(param.shape)}, of its dims {stored}",
                allowed=f"shape {shape}, of its dims {wanted}, layout {layout}",
            )


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges as one where they touch, without the empty ones."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        if start < stop:
            joined.append((start, stop))
    return joined


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
