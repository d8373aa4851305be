"""Planner: search for the fastest strategy to train a model on a machine, and construction and simulation of plans."""

from hyper_parallel.planner._explain import half_width
from hyper_parallel.planner._objective import plan
from hyper_parallel.planner._recipe import parse_strategy, plan_recipe
from hyper_parallel.planner._simulate import gantt, plan_tasks, simulate_plan
from hyper_parallel.planner.request import default_workload
from hyper_parallel.planner.saved_plan import check_saved_plan, launch_settings, plan_overrides
from hyper_parallel.planner.submodels import MEDIA

__all__ = [
    "MEDIA",
    "check_saved_plan",
    "default_workload",
    "gantt",
    "half_width",
    "launch_settings",
    "parse_strategy",
    "plan",
    "plan_overrides",
    "plan_recipe",
    "plan_tasks",
    "simulate_plan",
]
