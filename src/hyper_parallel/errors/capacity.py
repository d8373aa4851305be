"""Capacity errors, HP4xx: what does not fit."""

from hyper_parallel.errors._base import HyperParallelError


class DoesNotFit(HyperParallelError):
    """The predicted peak memory exceeds a tier of the machine.

    Fix: the hint names the nearest change that fits: more devices, recompute, or a smaller microbatch.
    """

    code = "HP401"
