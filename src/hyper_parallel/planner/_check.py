"""Whether one given strategy is legal for a model, a workload and a number of devices; coded errors if not."""

from __future__ import annotations

from hyper_parallel.cost import ModelNumbers
from hyper_parallel.errors import (
    BatchMismatch,
    DegreesMismatch,
    NotDivisible,
    UnsupportedSharding,
)
from hyper_parallel.ir import Strategy, Workload
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
        hint=f"parallel.dp_shard={num_devices // others}"
        if num_devices % others == 0
        else f"start {size} ranks, or lower the degrees to divisors of {num_devices}",
    )


def check_legal(
    numbers: ModelNumbers, workload: Workload, strategy: Strategy, where: str | None = None
) -> None:
    """Raise when a strategy has no exact meaning for a model and a resolved workload.

    Heads and widths are left to the layouts (`shard.plan_layouts`), which know the parameters.

    Raises:
        UnsupportedSharding: HP205 for two-dimensional tensor parallelism and expert parallelism without experts.
        NotDivisible: HP203 for sequences, layers and experts.
        BatchMismatch: HP308 for fewer microbatches than pipeline stages.
    """
    s = strategy
    if s.tp_y > 1:
        raise UnsupportedSharding(
            "two-dimensional tensor parallelism is not planned yet",
            where=where,
            got=f"tp_x={s.tp_x}, tp_y={s.tp_y}",
            allowed="tp_y=1",
            hint=f"parallel.tp_x={s.tp} parallel.tp_y=1",
        )
    if s.pp > numbers.layers:
        raise NotDivisible(
            "a pipeline has more stages than the model has layers",
            where=where,
            got=f"pp={s.pp}, layers={numbers.layers}",
            allowed=f"pp up to {numbers.layers}",
            hint=f"parallel.pp={numbers.layers}",
        )
    if s.cp > 1 and workload.seq_len % (2 * s.cp * s.tp):
        unit = 2 * s.cp * s.tp
        raise NotDivisible(
            f"context parallelism cannot cut seq_len={workload.seq_len} into 2 cp slices for every tp rank",
            where=where,
            got=f"seq_len={workload.seq_len}, cp={s.cp}, tp={s.tp}",
            allowed=f"multiples of {unit}",
            hint=f"data.seq_len={max(1, round(workload.seq_len / unit)) * unit}",
        )
    if s.ep > 1:
        inner = s.dp_shard * s.cp * s.tp
        allowed = [e for e in divisors(max(1, numbers.experts)) if inner % e == 0]
        if s.ep not in allowed:
            raise NotDivisible(
                "ep must divide the experts and the ranks it folds over (dp_shard * cp * tp)",
                where=where,
                got=f"ep={s.ep}, experts={numbers.experts}, ranks={inner}",
                allowed=allowed,
                hint=f"parallel.ep={max(allowed)}",
            )
    steps = workload.accumulation_steps or 1
    if steps < s.pp:
        raise BatchMismatch(
            "a pipeline needs at least one microbatch for every stage",
            where=where,
            got=f"pp={s.pp}, microbatches per step={steps}",
            allowed=f"pp up to {steps}",
            hint=f"parallel.pp={steps}",
        )
