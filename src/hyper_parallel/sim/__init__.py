"""Simulated clock: start times of tasks on lanes, appended one by one, for many cost vectors, or event by event."""

from hyper_parallel.sim.events import peaks, simulate, steady_step_s
from hyper_parallel.sim.schedule import LaneProgram, Ranks, Schedule

__all__ = ["LaneProgram", "Ranks", "Schedule", "peaks", "simulate", "steady_step_s"]
