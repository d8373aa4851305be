"""Simulation of tasks on lanes: appended one by one, for many vectors of durations, or event by event.

A lane runs one task at a time, in FIFO order unless its tasks have priorities.
"""

from hyper_parallel.sim.events import peaks, simulate, steady_step_s
from hyper_parallel.sim.schedule import LaneProgram, Ranks, Schedule

__all__ = ["LaneProgram", "Ranks", "Schedule", "peaks", "simulate", "steady_step_s"]
