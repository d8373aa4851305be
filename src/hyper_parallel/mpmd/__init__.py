"""Pipeline schedules: made, lowered, verified and turned into task graphs, before any process starts."""

from hyper_parallel.mpmd._generate import (
    SCHEDULES,
    in_flight_limit,
    is_legal,
    legal_microbatches,
    make_schedule,
)
from hyper_parallel.mpmd._lower import lower
from hyper_parallel.mpmd._replay import replay, unit_starts
from hyper_parallel.mpmd._tasks import StageCost, bubble_fraction, schedule_tasks
from hyper_parallel.mpmd._verify import in_flight, verify

__all__ = [
    "SCHEDULES",
    "StageCost",
    "bubble_fraction",
    "in_flight",
    "in_flight_limit",
    "is_legal",
    "legal_microbatches",
    "lower",
    "make_schedule",
    "replay",
    "schedule_tasks",
    "unit_starts",
    "verify",
]
