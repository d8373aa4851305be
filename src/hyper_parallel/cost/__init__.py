"""Cost: communication of a step by formula, to the byte."""

from hyper_parallel.cost._collectives import ring_bytes

__all__ = ["ring_bytes"]
