"""Simulated clock: start times of tasks on lanes, appended one by one, for many cost vectors, or event by event."""

from hyper_parallel.sim.events import peaks, simulate, steady_step_s
from hyper_parallel.sim.schedule import LaneProgram, Schedule

__all__ = ["LaneProgram", "Schedule", "peaks", "simulate", "steady_step_s"]
