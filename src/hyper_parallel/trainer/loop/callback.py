"""User callbacks of a run, called on every rank. Method names are those of transformers' `TrainerCallback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job


class Callback:
    """Base class of user callbacks; override the methods you need. Every rank creates an object and calls its methods.

    `metrics` has the keys of a line of metrics.jsonl or eval.jsonl. Return True from `on_step_end` or `on_evaluate` on
    any rank to stop training after the current step; the evaluation before step 1 stops it after step 1. All ranks then
    evaluate, save and export, as after the last step.

    Attributes:
        rank: Rank of this process.
    """

    rank: int = 0

    def on_train_begin(self, job: Job) -> None:
        """Handle the start, before the first evaluation and step."""

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> bool | None:
        """Handle the end of optimizer step `step`, counted from 1."""

    def on_evaluate(self, step: int, metrics: dict[str, Any]) -> bool | None:
        """Handle the end of an evaluation of held-out data after step `step`; 0: before the first step."""

    def on_save(self, step: int) -> None:
        """Handle the save of a checkpoint, which may continue in the background; not called for recovery snapshots."""

    def on_train_end(self, step: int) -> None:
        """Handle the end of training after step `step`; not called after an error.

        The last checkpoint may still be written in the background.
        """
