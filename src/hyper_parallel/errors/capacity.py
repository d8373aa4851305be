"""Capacity errors, HP4xx: what does not fit."""

from collections.abc import Mapping
from types import MappingProxyType

from hyper_parallel.errors._base import HyperParallelError


class DoesNotFit(HyperParallelError):
    """The predicted peak memory exceeds a tier of the machine.

    Fix: the hint names the nearest change that fits: more devices, recompute, or a smaller microbatch.
    """

    code = "HP401"


class BudgetImpossible(HyperParallelError):
    """No memory plan fits the byte budget.

    An operator needs all its operands on the device at once, so no plan can go below the largest working set. The
    message says that bound and the least peak the planner reached. Fix: raise the budget, or make the largest
    operator smaller (a chunked loss, a smaller microbatch).
    """

    code = "HP402"
    least_bytes: int = 0
    """A budget that a plan was found for."""


class TierFull(HyperParallelError):
    """A memory tier cannot hold what the plan or the run puts there.

    A plan that is refused names, for each tier, the bytes with which one was made while the other tiers stay as they
    are. Fix: allow more bytes in the tier, add a flash tier, or raise the device budget so that less is moved.
    """

    code = "HP403"
    enough_bytes: Mapping[str, int] = MappingProxyType({})
    """By tier, bytes with which a plan was found while the other tiers stay as they are."""


class MemoryPlanInvalid(HyperParallelError):
    """A memory plan is not legal: an action uses bytes that are not where it needs them.

    A plan is checked by replay before it runs. Fix: plan again for this program.
    """

    code = "HP404"
