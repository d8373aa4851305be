"""What a search may choose, resolved for a model: the space, and what the layouts say to a strategy."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Strategy
from hyper_parallel.planner._context import Context
from hyper_parallel.planner._limits import CHOICES, Limits
from hyper_parallel.planner._space import Rules, Space


def space_of(context: Context, limits: Limits) -> Space:
    """The space within limits, whose `tp` and `ep` are filled in here.

    What must run is asked of the layouts themselves, so that the search needs no copy of their rules.

    Args:
        context: Model, machine and workload.
        limits: What may be chosen.
    """
    runs, base, usual = limits.executable, limits.base, Strategy()
    # What the strategy to start with says beyond the usual is as good as a pin.
    said = {
        name: allowed.index(getattr(base, name))
        for name in ("attention_scatter", "gathered_inputs")
        if (allowed := CHOICES[name]) and getattr(base, name) != getattr(usual, name)
    }
    limits = replace(
        limits,
        pins={**said, **limits.pins},
        tp=context.tp_degrees(limits.num_devices, runs),
        ep=context.ep_degrees(limits.num_devices) if runs else None,
    )

    def refusal(strategy: Strategy) -> str | None:
        try:
            context.shard(strategy)
        except HyperParallelError as error:
            return error.what
        return None

    offload = context.offload is not None and context.machine.host_bytes_s > 0
    rules = Rules.of(context.model, context.workload, offload)
    return Space(rules, context.workload, limits, refusal if runs else None)
