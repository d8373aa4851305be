"""Planner: legal strategies of a model on a machine, their cost, and the best Plan."""

from hyper_parallel.planner._context import default_workload
from hyper_parallel.planner._plan import plan
from hyper_parallel.planner._recheck import diff, recheck
from hyper_parallel.planner._recipe import plan_recipe

__all__ = ["default_workload", "diff", "plan", "plan_recipe", "recheck"]
