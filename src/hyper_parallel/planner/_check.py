"""Whether one given strategy is legal for a model, a workload and a number of devices; coded errors if not."""

from __future__ import annotations

from hyper_parallel.cost import ModelNumbers, check_stage_layers
from hyper_parallel.errors import DegreesMismatch, NotDivisible
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.mpmd import check_pipeline
from hyper_parallel.planner._space import divisors


def check_degrees(strategy: Strategy, num_devices: int | None, where: str | None = None) -> None:
    """Raise when the degrees do not multiply to the number of devices.

    Raises:
        DegreesMismatch: HP301 with the degree of dp_shard that would fit, or the number of devices.
    """
    size = strategy.world_size
    if num_devices is None or size == num_devices:
        return
    others = size // strategy.dp_shard
    shown = " * ".join(f"{k}={v}" for k, v in strategy.mesh().axes if v > 1) or "all 1"
    raise DegreesMismatch(
        f"the degrees multiply to {size}, but there are {num_devices} ranks",
        where=where,
        got=shown,
        allowed=f"a product of {num_devices}",
        changes=None if num_devices % others else {"parallel.dp_shard": num_devices // others},
        hint=f"start {size} ranks, or lower the degrees to divisors of {num_devices}"
        if num_devices % others
        else None,
    )


def check_legal(
    numbers: ModelNumbers, workload: Workload, strategy: Strategy, where: str | None = None
) -> None:
    """Raise when a strategy has no exact meaning for a model and a resolved workload.

    Heads and widths are left to the layouts (`shard.plan_layouts`), which know the parameters.

    Raises:
        UnsupportedSharding: HP205 for expert parallelism without experts, and for virtual stages that the schedule
            does not have.
        NotDivisible: HP203 for layers and experts.
        BatchMismatch: HP308 for microbatches that the schedule cannot run.
    """
    s = strategy
    check_pipeline(s, numbers.layers, workload.accumulation_steps or 1, where)
    check_stage_layers(s, numbers.layers)
    if s.ep > 1:
        inner = s.dp_shard * s.cp * s.tp
        allowed = [e for e in divisors(max(1, numbers.experts)) if inner % e == 0]
        if s.ep not in allowed:
            raise NotDivisible(
                "ep must divide the experts and the ranks it folds over (dp_shard * cp * tp)",
                where=where,
                got=f"ep={s.ep}, experts={numbers.experts}, ranks={inner}",
                allowed=allowed,
                changes={"parallel.ep": max(allowed)},
            )
