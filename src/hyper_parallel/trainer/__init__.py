"""Trainer: data, optimisation, checkpoints, metrics, generation."""

from hyper_parallel.trainer._console import startup_panel
from hyper_parallel.trainer._job import Job, prepare_job, rank_command, under_torchrun
from hyper_parallel.trainer._metrics import EvalRecord, StepRecord
from hyper_parallel.trainer._optimizer import build_optimizer, parameter_groups
from hyper_parallel.trainer._rank import Summary, train_rank
from hyper_parallel.trainer._run import run_job
from hyper_parallel.trainer._sample import write_sample
from hyper_parallel.trainer._schedule import Schedule

__all__ = [
    "EvalRecord",
    "Job",
    "Schedule",
    "StepRecord",
    "Summary",
    "build_optimizer",
    "parameter_groups",
    "prepare_job",
    "rank_command",
    "run_job",
    "startup_panel",
    "train_rank",
    "under_torchrun",
    "write_sample",
]
