"""Training loop of a run: learning-rate schedule, metric records, trackers, terminal output. Imports no framework."""

from hyper_parallel.trainer.loop._display import Display, startup_panel
from hyper_parallel.trainer.loop._schedule import LrSchedule
from hyper_parallel.trainer.loop._trainer import Engine, StepResult, Summary, Trainer
from hyper_parallel.trainer.loop.callback import Callback
from hyper_parallel.trainer.loop.metrics import (
    EvalRecord,
    EvalResult,
    MetricsLog,
    StepRecord,
    log_line,
)

__all__ = [
    "Callback",
    "Display",
    "Engine",
    "EvalRecord",
    "EvalResult",
    "LrSchedule",
    "MetricsLog",
    "StepRecord",
    "StepResult",
    "Summary",
    "Trainer",
    "log_line",
    "startup_panel",
]
