"""Coded errors: one class per code, rendered in one fixed form.

Families: configuration 1xx, layout 2xx, plan 3xx, capacity 4xx, back end 5xx, run 6xx, checkpoint 7xx. User
mistakes raise one of these; `assert` guards our own invariants.
"""

from hyper_parallel.errors._base import HyperParallelError, all_codes, overrides
from hyper_parallel.errors.backend import (
    CaptureUnsupported,
    DeviceUnavailable,
    MissingDependency,
    StepChanged,
    TransferFailed,
)
from hyper_parallel.errors.capacity import (
    BudgetImpossible,
    DoesNotFit,
    MemoryPlanInvalid,
    TierFull,
)
from hyper_parallel.errors.checkpoint import (
    CheckpointCorrupt,
    CheckpointMismatch,
    WeightsUninitialised,
    WeightsUnreadable,
)
from hyper_parallel.errors.config import (
    BadValue,
    Contradiction,
    OutputNotWritable,
    RecipeUnreadable,
    UnknownKey,
)
from hyper_parallel.errors.layout import (
    AuditError,
    LayoutError,
    MeshError,
    NotDivisible,
    RuleError,
    UnsupportedSharding,
)
from hyper_parallel.errors.plan import (
    BatchMismatch,
    CardUnreadable,
    DeadlineMissed,
    DegreesMismatch,
    ModelUnreadable,
    NoLegalStrategy,
    PlanMismatch,
    PlanUnreadable,
    RunsUnreadable,
    ScheduleError,
    TaskGraphError,
    TopologyTooSmall,
    TopologyUnreadable,
    UnknownDevice,
    UnknownModel,
    UnknownPeak,
    UnknownTopology,
)
from hyper_parallel.errors.run import (
    ForkUnsafe,
    LossNotFinite,
    NoData,
    RankFailed,
    RunUnreadable,
)

__all__ = [
    "AuditError",
    "BadValue",
    "BatchMismatch",
    "BudgetImpossible",
    "CaptureUnsupported",
    "CardUnreadable",
    "CheckpointCorrupt",
    "CheckpointMismatch",
    "Contradiction",
    "DeadlineMissed",
    "DegreesMismatch",
    "DeviceUnavailable",
    "DoesNotFit",
    "ForkUnsafe",
    "HyperParallelError",
    "LayoutError",
    "LossNotFinite",
    "MemoryPlanInvalid",
    "MeshError",
    "MissingDependency",
    "ModelUnreadable",
    "NoData",
    "NoLegalStrategy",
    "NotDivisible",
    "OutputNotWritable",
    "PlanMismatch",
    "PlanUnreadable",
    "RankFailed",
    "RecipeUnreadable",
    "RuleError",
    "RunUnreadable",
    "RunsUnreadable",
    "ScheduleError",
    "StepChanged",
    "TaskGraphError",
    "TierFull",
    "TopologyTooSmall",
    "TopologyUnreadable",
    "TransferFailed",
    "UnknownDevice",
    "UnknownKey",
    "UnknownModel",
    "UnknownPeak",
    "UnknownTopology",
    "UnsupportedSharding",
    "WeightsUninitialised",
    "WeightsUnreadable",
    "all_codes",
    "overrides",
]
