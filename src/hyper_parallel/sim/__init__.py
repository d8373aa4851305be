"""Simulation of tasks on lanes, in three forms.

`Schedule` computes start times as tasks are appended. `LaneProgram` evaluates one task graph for many vectors of
durations. `simulate` is event-driven.

A lane runs one task at a time, in list order; in `simulate`, a lane may run its tasks by priority instead.
"""

from hyper_parallel.sim.events import peaks, simulate, steady_step_s
from hyper_parallel.sim.schedule import LaneProgram, Ranks, Schedule

__all__ = ["LaneProgram", "Ranks", "Schedule", "peaks", "simulate", "steady_step_s"]
