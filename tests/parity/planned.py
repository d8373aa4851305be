"""Plans of tiny models without the planner, and what parity tests read of them and of gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import Collective, ModelRef, Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec
from hyper_parallel.shard import family_rules, plan_layouts

ByGroup = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(kind, axes) of collectives to calls and bytes sent."""


def make_plan(spec: ModelSpec, strategy: Strategy, workload: Workload) -> Plan:
    """A plan as planning makes it: starred names, rules of the family table, no framework."""
    params = {p.name: p for b in spec.blocks for p in b.params}
    attention = next(b.attention for b in spec.blocks if b.attention)
    planned = plan_layouts(
        [(p.name, p.shape, p.dims) for p in params.values()], family_rules(spec.family), strategy,
        num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads,
        head_dim=attention.qk_head_dim, vocab_size=spec.vocab_size,
        tied={p.name: p.tied_to for p in params.values() if p.tied_to},
    )  # fmt: skip
    reference = ModelRef("tiny", spec.family, spec.num_params, spec.num_params, 0.0, "")
    return Plan(
        reference, "local", 0.0, workload.resolve(strategy.dp), strategy, planned.layouts,
        0.0, (), (), 0,
        collectives=step_collectives(spec, planned.layouts, strategy, workload),
    )  # fmt: skip


def by_group(collectives: Iterable[Collective]) -> ByGroup:
    """Predicted calls and bytes, added up."""
    total: ByGroup = {}
    for item in collectives:
        calls, sent = total.get((item.kind, item.axes), (0, 0))
        total[item.kind, item.axes] = (calls + item.count, sent + item.sent_bytes)
    return total


def whole(grad: Tensor) -> Tensor:
    """A copy of the whole gradient, wherever its parts are."""
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
