"""Which stage a recipe names, for one rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from hyper_parallel.backends.torch import data_share
from hyper_parallel.config import Dpo
from hyper_parallel.trainer.stages import LearningStage
from hyper_parallel.trainer.stages._reference_weights import ReferenceWeights
from hyper_parallel.trainer.stages.dpo import WITHOUT_REFERENCE, DpoStage
from hyper_parallel.trainer.stages.grpo import GrpoStage
from hyper_parallel.trainer.stages.kto import KtoStage
from hyper_parallel.trainer.stages.pair_scores import PairScores
from hyper_parallel.trainer.stages.reference import Reference
from hyper_parallel.trainer.stages.reward_model import RewardModelStage
from hyper_parallel.trainer.stages.rollouts import Publisher, Sampler

if TYPE_CHECKING:
    from hyper_parallel.runtime import World
    from hyper_parallel.trainer.engine.step_gauges import SpanRecorder
    from hyper_parallel.trainer.input_checksums import RunInputs
    from hyper_parallel.trainer.job import Job


def build_stage(
    job: Job,
    world: World,
    model: nn.Module,
    done: int,
    recorder: SpanRecorder,
    inputs: RunInputs,
) -> LearningStage | None:
    """What steps learn from; None where it is the tokens of the data.

    Args:
        job: The run.
        world: The ranks.
        model: The model as it is laid out.
        done: Steps before the first one of this process.
        recorder: Has the start of the run's timeline.
        inputs: Checksums of what the run reads.
    """
    recipe, (share, _) = job.recipe, data_share(model)
    before = job.resume_dir.parent if done else None
    if recipe.stage == "grpo":
        sampler = Sampler.of_job(job, model)
        others = None
        if recipe.grpo.rollout_ranks:
            others = Publisher(
                job, world, model, done // recipe.grpo.num_iterations, recorder.origin_s
            )
        reference = (
            partial(ReferenceWeights, model, job.output_dir, before, inputs)
            if recipe.grpo.beta
            else None
        )
        return GrpoStage(sampler, job.plan, share, others, reference, inputs)
    writes = world.rank == 0
    place = job.output_dir, before
    reference = Reference(model, job.plan, share, writes, *place, world.device, inputs)
    scores = PairScores(job.plan, world.device)
    if recipe.stage in ("dpo", "orpo"):
        settings = recipe.dpo
        if recipe.stage == "orpo":
            settings = Dpo(loss_type="orpo", beta=recipe.orpo.beta)
        free = settings.loss_type in WITHOUT_REFERENCE
        return DpoStage(settings, scores, None if free else reference)
    if recipe.stage == "rm":
        return RewardModelStage(recipe.rm, scores)
    if recipe.stage == "kto":
        return KtoStage(recipe.kto, reference)
    return None
