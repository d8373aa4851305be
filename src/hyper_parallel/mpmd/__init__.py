"""Pipeline schedules: construction, lowering to communication, verification and task graphs. No framework."""

from hyper_parallel.ir import StageCost
from hyper_parallel.mpmd._assignment import (
    Assignment,
    Choice,
    Devices,
    SubModel,
    assign_submodels,
    lanes_text,
    search_by_bound,
)
from hyper_parallel.mpmd._list_schedule import list_schedule
from hyper_parallel.mpmd._lower import lower, one_by_one
from hyper_parallel.mpmd._schedules import (
    SCHEDULES,
    in_flight_limit,
    is_legal,
    legal_microbatches,
    make_schedule,
)
from hyper_parallel.mpmd._strategy import (
    check_pipeline,
    check_virtual,
    forward_schedule,
    schedule_name,
    step_schedule,
)
from hyper_parallel.mpmd._submodel_schedule import (
    JointLayout,
    TowerLanes,
    check_submodel_schedule,
    forward_part,
    inline_schedule,
    rounds_schedule,
    submodel_bound_s,
    submodel_schedule,
)
from hyper_parallel.mpmd._tasks import (
    action_costs,
    bubble_fraction,
    makespan_s,
    nanoseconds,
    on_shared_cores,
    replay,
    schedule_tasks,
    unit_starts,
)
from hyper_parallel.mpmd._verify import held_bytes, in_flight, verify

__all__ = [
    "SCHEDULES",
    "Assignment",
    "Choice",
    "Devices",
    "JointLayout",
    "StageCost",
    "SubModel",
    "TowerLanes",
    "action_costs",
    "assign_submodels",
    "bubble_fraction",
    "check_pipeline",
    "check_submodel_schedule",
    "check_virtual",
    "forward_part",
    "forward_schedule",
    "held_bytes",
    "in_flight",
    "in_flight_limit",
    "inline_schedule",
    "is_legal",
    "lanes_text",
    "legal_microbatches",
    "list_schedule",
    "lower",
    "make_schedule",
    "makespan_s",
    "nanoseconds",
    "on_shared_cores",
    "one_by_one",
    "replay",
    "rounds_schedule",
    "schedule_name",
    "schedule_tasks",
    "search_by_bound",
    "step_schedule",
    "submodel_bound_s",
    "submodel_schedule",
    "unit_starts",
    "verify",
]
