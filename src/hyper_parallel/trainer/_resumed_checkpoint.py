"""Checks of the newest checkpoint against the run that continues from it, before any rank starts."""

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
    """Refuse a newest checkpoint that is beyond the last step, or of a run that this one does not continue.

    Raises:
        Contradiction: HP104 for the step.
        CheckpointMismatch: HP702 for a fact that must not change, or arguments that the optimizer's state does not fit.
    """
    directory, wanted = job.resume_dir, job.recipe.training.steps
    found = [] if job.recipe.checkpoint.resume == "never" else steps(directory)
    if not found:
        return
    if found[-1] > wanted:
        raise Contradiction(
            "the checkpoint to continue from is beyond the last step of the run",
            where=loaded.where("training.steps"),
            got=f"steps={wanted}, the newest checkpoint of {directory} is of step {found[-1]}",
            hint=f"training.steps={2 * found[-1]}",
        )
    # Ranks check what they load, which may be an older one; a recipe that does not fit is refused before they start.
    saved = None
    with suppress(Damaged):
        extra = read_extra(directory / step_name(found[-1]))
        if not check_trainer_extra(found[-1], extra):
            saved = extra.get("run")
    changed = check_resume(saved, run_facts(job), directory.parent)
    if _OPTIMIZER_ARGS in changed:
        from hyper_parallel.trainer.engine.optimizer import check_resumed_state

        saved_args = changed[_OPTIMIZER_ARGS][0]
        saved_args = saved_args if isinstance(saved_args, dict) else {}
        check_resumed_state(job.recipe.training, saved_args, directory)
