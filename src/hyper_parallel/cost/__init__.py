"""Cost model: step time, memory and communication of a strategy, each as terms with a formula and a source."""

from hyper_parallel.cost._candidates import Candidates
from hyper_parallel.cost._collectives import LINEAR_ENTRY, ring_bytes, step_collectives
from hyper_parallel.cost._machine import ACCELERATOR, CPU, Efficiency, Machine
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._score import Scores, peak_memory, score, step_cost

__all__ = [
    "ACCELERATOR",
    "CPU",
    "LINEAR_ENTRY",
    "Candidates",
    "Efficiency",
    "Machine",
    "ModelNumbers",
    "Scores",
    "peak_memory",
    "ring_bytes",
    "score",
    "step_collectives",
    "step_cost",
]
