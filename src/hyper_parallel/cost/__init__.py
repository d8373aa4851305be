"""Cost model: step time, memory and communication of a strategy, each as terms with a formula and a source."""

from hyper_parallel.cost._collectives import LINEAR_ENTRY, ring_bytes, step_collectives

__all__ = ["LINEAR_ENTRY", "ring_bytes", "step_collectives"]
