"""Trainer: data, optimisation, checkpoints, metrics, generation."""

from hyper_parallel.trainer._calibrate import calibrate_local
from hyper_parallel.trainer._console import startup_panel
from hyper_parallel.trainer._dryrun import DryRun, dry_run
from hyper_parallel.trainer._job import Job, prepare_job, rank_command, under_torchrun
from hyper_parallel.trainer._metrics import EvalRecord, StepRecord
from hyper_parallel.trainer._optimizer import build_optimizer, parameter_groups
from hyper_parallel.trainer._probe import short_step
from hyper_parallel.trainer._rank import Summary, train_rank
from hyper_parallel.trainer._run import run_job
from hyper_parallel.trainer._sample import write_sample
from hyper_parallel.trainer._schedule import Schedule
from hyper_parallel.trainer._trace import TracedRank, differences, trace_rank

__all__ = [
    "DryRun",
    "EvalRecord",
    "Job",
    "Schedule",
    "StepRecord",
    "Summary",
    "TracedRank",
    "build_optimizer",
    "calibrate_local",
    "differences",
    "dry_run",
    "parameter_groups",
    "prepare_job",
    "rank_command",
    "run_job",
    "short_step",
    "startup_panel",
    "trace_rank",
    "train_rank",
    "under_torchrun",
    "write_sample",
]
