"""Construction of the learning stage that `stage` in the recipe names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from hyper_parallel.backends.torch import data_share
from hyper_parallel.config import Dpo
from hyper_parallel.trainer.stages import LearningStage
from hyper_parallel.trainer.stages.dpo import WITHOUT_REFERENCE, DpoStage
from hyper_parallel.trainer.stages.grpo import GrpoStage
from hyper_parallel.trainer.stages.kto import KtoStage
from hyper_parallel.trainer.stages.reference import Reference, ReferenceWeights
from hyper_parallel.trainer.stages.reward_model import RewardModelStage
from hyper_parallel.trainer.stages.rollouts import Publisher, Sampler

if TYPE_CHECKING:
    from hyper_parallel.runtime import World
    from hyper_parallel.trainer.engine.step_gauges import SpanRecorder
    from hyper_parallel.trainer.input_checksums import RunInputs
    from hyper_parallel.trainer.job import Job


def build_stage(
    job: Job, world: World, model: nn.Module, done: int, recorder: SpanRecorder, inputs: RunInputs
) -> LearningStage | None:
    """Build the learning stage of a recipe; return None if the recipe trains with next-token cross entropy.

    `done` is the number of optimizer steps finished before this process started. The timelines of sampling ranks begin
    at the start time of `recorder`.
    """
    recipe = job.recipe
    resumed_directory = job.resume_dir.parent if done else None
    if recipe.stage == "grpo":
        sampler = Sampler.of_job(job, model)
        publisher = None
        if recipe.grpo.rollout_ranks:
            publisher = Publisher(job, world, model, done // recipe.grpo.num_iterations, recorder.origin_s)
        reference = (
            partial(ReferenceWeights, model, job.output_dir, resumed_directory, inputs) if recipe.grpo.beta else None
        )
        return GrpoStage(sampler, job.plan, data_share(model)[0], publisher, reference, inputs)
    writes = world.rank == 0
    reference = Reference(model, job.plan, writes, job.output_dir, resumed_directory, inputs)
    if recipe.stage in ("dpo", "orpo"):
        settings = recipe.dpo
        if recipe.stage == "orpo":
            settings = Dpo(loss_type="orpo", beta=recipe.orpo.beta)
        free = settings.loss_type in WITHOUT_REFERENCE
        return DpoStage(job.plan, world.device, settings, None if free else reference)
    if recipe.stage == "rm":
        return RewardModelStage(job.plan, world.device, recipe.rm)
    if recipe.stage == "kto":
        return KtoStage(job.plan, world.device, recipe.kto, reference)
    return None
