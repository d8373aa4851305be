"""Checks of the newest checkpoint against the resumed run, before any rank starts."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hyper_parallel.config import LoadedRecipe
from hyper_parallel.errors import Contradiction
from hyper_parallel.trainer.checkpoints.extra_state import check_trainer_extra, read_extra
from hyper_parallel.trainer.checkpoints.manifest import step_name, steps
from hyper_parallel.trainer.files import Damaged
from hyper_parallel.trainer.loop.resume import check_resume
from hyper_parallel.trainer.loop.run_facts import run_facts

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

_OPTIMIZER_ARGS: Final = "training.optimizer_args"


def check_newest(job: Job, loaded: LoadedRecipe) -> None:
    """Raise for a newest checkpoint that is beyond the last step, or that this run cannot continue.

    Raises:
        Contradiction: HP104 for the step.
        CheckpointMismatch: HP702 for a fact that must not change, or optimizer arguments that do not fit its state.
    """
    directory, last_step = job.resume_dir, job.recipe.training.steps
    saved_steps = [] if job.recipe.checkpoint.resume == "never" else steps(directory)
    if not saved_steps:
        return
    if saved_steps[-1] > last_step:
        raise Contradiction(
            "the checkpoint to continue from is beyond the last step of the run",
            where=loaded.where("training.steps"),
            got=f"steps={last_step}, the newest checkpoint of {directory} is of step {saved_steps[-1]}",
            hint=f"training.steps={2 * saved_steps[-1]}",
        )
    # Ranks check the checkpoint they load, possibly an older one; this check precedes the start of ranks.
    saved = None
    with suppress(Damaged):
        extra = read_extra(directory / step_name(saved_steps[-1]))
        if not check_trainer_extra(saved_steps[-1], extra):
            saved = extra.get("run")
    changed = check_resume(saved, run_facts(job), directory.parent)
    if _OPTIMIZER_ARGS in changed:
        from hyper_parallel.trainer.engine.optimizer import check_resumed_state

        saved_args = changed[_OPTIMIZER_ARGS][0]
        saved_args = saved_args if isinstance(saved_args, dict) else {}
        check_resumed_state(job.recipe.training, saved_args, directory)
