"""Rollouts on dedicated sampling ranks, and the exchange of weights and completions with the training ranks.

The exchange uses only files in a folder of the run, on a file system that all ranks share. Restarted ranks and resumed
runs therefore continue from these files:

  rollouts/policy/step_00000012          weights after 12 steps as a checkpoint, loadable on any layout
  rollouts/step_00000013.0.safetensors   completions of step 13, part 0, and the weight version of each token
  rollouts/begin.json                    step and data position at which training starts
  rollouts/end                           empty file that exists after training has ended
  rollouts/timeline.0.json               measured timeline of the ranks that sample part 0

In these files, a step is one rollout with its `num_iterations` optimizer steps. The prompts of a step are divided into
equal parts, one per data-parallel sampling rank. Version v of the weights exists after v steps. Completions of step t
are sampled with version t - 1 - `max_staleness` or newer. Sampling ranks wait until this version exists.

With `training.deterministic`, sampling ranks use exactly version t - 1 - `max_staleness` (at least 0), else the newest
version. With `partial_rollout`, unfinished completions continue under newer weights.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import data_share, materialize
from hyper_parallel.config import Grpo
from hyper_parallel.ir import Workload
from hyper_parallel.model import GENERATION
from hyper_parallel.runtime import Deadlines, World, gather_objects, parallelize, plan_of
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.data import IGNORE_INDEX, load_tokenizer, stop_ids
from hyper_parallel.trainer.engine.recipe_model import build_model, routing_of
from hyper_parallel.trainer.engine.step_gauges import SpanRecorder
from hyper_parallel.trainer.files import write_timeline
from hyper_parallel.trainer.input_checksums import RunInputs
from hyper_parallel.trainer.stages.environments import WHERE, Environments
from hyper_parallel.trainer.stages.reference import ReferenceWeights
from hyper_parallel.trainer.stages.rollout_folder import RolloutFolder
from hyper_parallel.trainer.stages.sampling import (
    Completions,
    Weights,
    environment_seed,
    logprobs_of,
    sample,
    uniform,
)
from hyper_parallel.trainer.user_code import load_function

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job


@dataclass(frozen=True)
class Sampler:
    """Sampler of completions, used on training ranks and on dedicated sampling ranks.

    Attributes:
        model: Causal language model passed through `parallelize`.
        tokenizer: Tokenizer of the run.
        settings: Section `grpo` of the recipe.
        seed: `training.seed`.
        eos: `eos_token_id` of the model's generation config.
    """

    model: nn.Module
    tokenizer: Any
    settings: Grpo
    seed: int
    eos: int | Sequence[int] | None = None

    @classmethod
    def of_job(cls, job: Job, model: nn.Module) -> Sampler:
        """Return the sampler of a run, with `eos_token_id` of the run's generation config."""
        tokenizer, recipe = load_tokenizer(job.packed.tokenizer_dir), job.recipe
        eos = json.loads(job.model_files.get(GENERATION, "{}")).get("eos_token_id")
        return cls(model, tokenizer, recipe.grpo, recipe.training.seed, eos)

    def prompts(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the right-padded prompts [N, S + 1] and their lengths [N]; the target tokens follow the prompt."""
        ids = torch.cat([part["input_ids"] for part in microbatches])
        labels = torch.cat([part["shift_labels"] for part in microbatches])
        # Labels are shifted: the first one is at the last token of the prompt.
        starts = (labels != IGNORE_INDEX).int().argmax(1) + 1
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        ids = torch.nn.functional.pad(ids, (0, 1), value=pad)
        positions = torch.arange(ids.shape[1], device=ids.device)
        return torch.where(positions < starts[:, None], ids, pad), starts

    def answers(self, microbatches: list[dict[str, Tensor]]) -> list[str]:
        """Return the text of each row's reference answer."""
        labels = torch.cat([part["shift_labels"] for part in microbatches])
        return [self.text(row[row != IGNORE_INDEX]) for row in labels]

    def text(self, ids: Tensor) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def complete(
        self,
        microbatches: list[dict[str, Tensor]],
        step: int,
        first: int,
        microbatch: int,
        weights: Weights,
    ) -> Completions:
        """Sample a completion of each row's prompt in step `step`; a forward pass takes `microbatch` rows.

        The random numbers of row i depend on its index in the step, `first + i`.
        """
        length = self.settings.max_completion_length
        prompts, starts = self.prompts(microbatches)
        draws = uniform(self.seed, step, first, len(prompts), length)
        environments = None
        if self.settings.environment:
            environments = Environments(
                load_function(self.settings.environment, WHERE),
                self.tokenizer,
                [self.text(row[:start]) for row, start in zip(prompts, starts, strict=True)],
                self.answers(microbatches),
                [environment_seed(self.seed, step, first + row) for row in range(len(prompts))],
            )
        return sample(
            self.model,
            prompts,
            starts,
            stops=stop_ids(self.tokenizer, self.eos),
            max_completion_length=length,
            draws=torch.from_numpy(draws).to(prompts.device),
            microbatch=microbatch,
            weights=weights,
            environments=environments,
            exact=self.settings.exact_logprobs,
        )


class Publisher:
    """Training side of the exchange with sampling ranks: publishes weights and reads completions.

    Args:
        job: Prepared run.
        world: Training ranks.
        model: Model of the training ranks.
        done: Number of rollouts finished before this process started.
        origin_s: Start of the run's timeline, in seconds since the epoch.

    Attributes:
        waited_s: Seconds that the last `collect` waited.
        sampled_s: Longest sampling time of the parts in the last `collect`, in seconds.
    """

    def __init__(self, job: Job, world: World, model: nn.Module, done: int, origin_s: float) -> None:
        self._folder = RolloutFolder(job.output_dir / "rollouts", world.heartbeat)
        self._job, self._world, self._model, self._done = job, world, model, done
        self._origin_s = origin_s
        self._settings, self._exact = job.recipe.grpo, job.recipe.training.deterministic
        self._checkpoints: Checkpointer | None = None
        self.waited_s = self.sampled_s = 0.0

    def publish(self, version: int, data: dict[str, Any]) -> None:
        """Publish the current weights as `version`; collective over the training ranks.

        The first call also writes `begin.json` with the data position `data`, and removes outdated files of an earlier
        start of the run. Every call removes completions that a resumed run does not need. In deterministic mode, a
        version that is already published is left as it is.
        """
        first = self._world.rank == 0
        if self._checkpoints is None:
            if first:
                begin = {"done": self._done, "data": data, "origin_s": self._origin_s}
                self._folder.begin(begin, self._settings.shares, exact=self._exact)
            keep = self._settings.max_staleness + 2
            self._checkpoints = Checkpointer(self._folder.policy, keep=keep, asynchronous=False, fingerprint={})
            if self._world.world_size > 1:
                dist.barrier()
        is_published = self._exact and version in steps(self._folder.policy)
        if self._world.world_size > 1:
            dist.barrier()  # all ranks must check before any rank publishes
        if not is_published:
            self._checkpoints.save(version, self._model, None, {})
        if first:
            saved = steps(self._job.checkpoint_dir)
            self._folder.trim(saved[-1] // self._settings.num_iterations if saved else version)

    def collect(self, step: int, first: int, count: int, device: torch.device) -> Completions:
        """Wait for the completions of sequences `first` to `first + count - 1` of a step; return them on `device`."""
        begin = time.perf_counter()
        parts = self._settings.shares
        work = self._job.plan.workload
        share_size = (work.tokens_per_step or 0) // work.seq_len // parts
        shares = [
            self._folder.read(step, part) for part in range(first // share_size, -(-(first + count) // share_size))
        ]
        self.waited_s = time.perf_counter() - begin
        self.sampled_s = max(seconds for _, seconds in shares)
        offset = first - first // share_size * share_size
        tensors = (torch.cat([getattr(one, f.name) for one, _ in shares]) for f in fields(Completions))
        return Completions(*(x[offset : offset + count].to(device) for x in tensors))

    def end(self) -> None:
        """Mark the end of training, and close the checkpoint writer."""
        if self._world.rank == 0:
            self._folder.end()
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None


def sample_rank(job: Job, replica: int) -> None:
    """Run one rank of sampling replica `replica`: sample one part of every step, until training ends.

    SIGINT, SIGTERM and SIGHUP are ignored, because the training ranks end the run.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    training = job.recipe.training
    deadlines = Deadlines(training.timeout_s, training.first_step_timeout_s)
    with World.join(deadlines=deadlines, worlds=job.worlds) as world:
        if training.deterministic:
            torch.use_deterministic_algorithms(True)
        _SamplingRank(job, world, replica).run()


class _SamplingRank:
    """State of a sampling rank, which samples the same part of every step."""

    def __init__(self, job: Job, world: World, replica: int) -> None:
        self._job, self._world, self._grpo = job, world, job.recipe.grpo
        work, grpo = job.plan.workload, self._grpo
        self._rows = (work.tokens_per_step or 0) // work.seq_len // grpo.shares
        self._microbatch = math.gcd(self._rows, work.microbatch or 1)
        self._model = _build_replica(job, world, self._microbatch)
        self._part = replica * grpo.rollout_dp_shard + data_share(self._model)[0]
        self._writes = world.rank % grpo.copy_tp == 0
        self._folder = RolloutFolder(job.output_dir / "rollouts", world.heartbeat)
        self._sampler = Sampler.of_job(job, self._model)
        self._published = Checkpointer(self._folder.policy, keep=1, asynchronous=False, fingerprint=None)
        self._weights = Weights(-1)

    def run(self) -> None:
        """Wait for the start of training, then sample this rank's part of every step that lacks it."""
        begin = self._folder.begun()
        if begin is None:
            return
        job, grpo, weights = self._job, self._grpo, self._weights
        batches, first = job.train_batches(), begin["done"] * grpo.num_iterations
        batches.load_state_dict(begin["data"])
        recorder = SpanRecorder(self._part, self._world.device, first + 1, self._world.heartbeat, "sampler")
        timeline = self._folder.path / f"timeline.{self._part}.json"
        reference = None
        if grpo.reference_on_samplers:  # saved by the training ranks at the start of the run
            directory = job.output_dir
            reference = ReferenceWeights(self._model, directory, directory, RunInputs())
        if grpo.partial_rollout:
            weights.due = lambda: self._folder.newest() > weights.version
            weights.renew = self._renew
        last = -(-job.recipe.training.steps // grpo.num_iterations)
        for step in range(begin["done"] + 1, last + 1):
            if all(gather_objects(self._folder.file(step, self._part).exists())):
                continue
            recorder.begin_step((step - 1) * grpo.num_iterations + 1)
            if recorder.over and self._writes and not timeline.exists():
                write_timeline(recorder.own(begin["origin_s"]), timeline)
            if not self._load_weights(step, recorder):
                break
            self._sample(step, self._inputs(batches, step), recorder, reference)
        if self._writes and not timeline.exists():
            write_timeline(recorder.own(begin["origin_s"]), timeline)

    def _renew(self) -> int:
        """Load the newest version of the weights that exists for all ranks of the replica; return the version."""
        # Ranks poll at different times; the oldest version seen by any of them exists for all.
        newer = min(gather_objects(self._folder.newest()))
        self._published.load(self._model, None, newer)
        return newer

    def _load_weights(self, step: int, recorder: SpanRecorder) -> bool:
        """Wait for weights that are new enough for `step`, and load them; return False if training has ended."""
        least = max(0, step - 1 - self._grpo.max_staleness)
        with recorder.span("wait for weights", "wait"):
            version = self._folder.version(least, exact=self._job.recipe.training.deterministic)
            version = min(gather_objects(-1 if version is None else version))
        if version < 0:
            return False
        if version != self._weights.version:
            with recorder.span("load weights", "communication"):
                self._published.load(self._model, None, version)
            self._weights.version = version
        return True

    def _inputs(self, batches: Any, step: int) -> list[dict[str, Tensor]]:
        parts = batches.microbatches(
            (step - 1) * self._grpo.num_iterations,
            self._part,
            self._grpo.shares,
            self._microbatch,
            self._rows // self._microbatch,
        )
        names = ("input_ids", "shift_labels")
        return [{name: torch.from_numpy(getattr(x, name)).to(self._world.device) for name in names} for x in parts]

    def _sample(
        self,
        step: int,
        inputs: list[dict[str, Tensor]],
        recorder: SpanRecorder,
        reference: ReferenceWeights | None,
    ) -> None:
        begin_s, microbatch = time.perf_counter(), self._microbatch
        with recorder.span("rollout", "compute"):
            completions = self._sampler.complete(inputs, step, self._part * self._rows, microbatch, self._weights)
        if reference is not None:
            with recorder.span("reference", "compute"), reference.weights():
                logprobs = logprobs_of(self._model, completions.tokens[:, :-1], completions.labels, microbatch)
            completions = replace(completions, reference_logprobs=logprobs)
        if self._writes:
            seconds = time.perf_counter() - begin_s
            version = self._weights.version
            self._folder.write(step, self._part, self._grpo.shares, completions, version, seconds)


def _build_replica(job: Job, world: World, microbatch: int) -> nn.Module:
    """Build the model with the layout of the sampling ranks, and initialize its weights from the run's seed."""
    recipe, work, grpo = job.recipe, job.plan.workload, job.recipe.grpo
    workload = Workload(
        work.seq_len,
        microbatch=microbatch,
        compute_dtype=work.compute_dtype,
        param_dtype=work.param_dtype,
        reduce_dtype=work.reduce_dtype,
    )
    model = build_model(recipe)
    degrees = {"tp": grpo.copy_tp, "dp_shard": grpo.rollout_dp_shard, "ep": grpo.rollout_ep}
    layout = " ".join(f"{axis}={degree}" for axis, degree in degrees.items())
    parallelize(model, plan_of(model, layout, workload), world, routing=routing_of(recipe))
    materialize(model, seed=recipe.training.seed, device=world.device)
    return model
