"""Completions from ranks of their own: who samples, by which weights, and what passes between the roles.

All of it lies in one folder of the run, which every rank sees; nothing is sent. So a role that is started again finds
what was there, and a run that is killed goes on:

    rollouts/policy/step_00000012          weights after 12 steps, as in a checkpoint: any layout loads them
    rollouts/step_00000013.0.safetensors   completions of step 13, first share, and which versions sampled them
    rollouts/begin.json                    where the ranks that train go on from
    rollouts/end                           they have ended
    rollouts/timeline.0.json               what the ranks of the first share did in the recorded steps

Here a step is a rollout and what is learned from it, `num_iterations` optimizer steps. Version v is the weights after v
of them. Completions of step t are sampled by a version v >= t - 1 - `max_staleness`: who samples waits for it, so the
bound cannot be broken, and nothing that was sampled is thrown away.
With `training.deterministic` it is exactly that version, else the newest there is; with `partial_rollout` completions
that newer weights find half done go on under these, each token with its version.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import data_share, materialize
from hyper_parallel.config import Grpo
from hyper_parallel.ir import Workload
from hyper_parallel.runtime import Deadlines, World, parallelize, plan_of
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.data import load_tokenizer, stop_ids
from hyper_parallel.trainer.data.batches import IGNORE_INDEX
from hyper_parallel.trainer.engine.recipe_model import GENERATION, build_model, routing_of
from hyper_parallel.trainer.engine.step_gauges import SpanRecorder
from hyper_parallel.trainer.files import write_timeline
from hyper_parallel.trainer.input_checksums import RunInputs
from hyper_parallel.trainer.stages._reference_weights import ReferenceWeights
from hyper_parallel.trainer.stages.environments import WHERE, Environments
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
    """Samples completions of prompts; the same on ranks that train and on those that only sample.

    Attributes:
        model: A causal language model that passed through `parallelize`.
        tokenizer: Of the run.
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
        """Return the sampler of a run, which ends completions where `generate` ends the answers of its export."""
        tokenizer, recipe = load_tokenizer(job.packed.tokenizer_dir), job.recipe
        eos = json.loads(job.model_files.get(GENERATION, "{}")).get("eos_token_id")
        return cls(model, tokenizer, recipe.grpo, recipe.training.seed, eos)

    def prompts(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """[N, S + 1] prompts of rows whose labels are the answers, padded behind, and [N] their lengths."""
        ids = torch.cat([part["input_ids"] for part in microbatches])
        labels = torch.cat([part["shift_labels"] for part in microbatches])
        # The first label belongs to the token before the answer.
        starts = (labels != IGNORE_INDEX).int().argmax(1) + 1
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        ids = torch.nn.functional.pad(ids, (0, 1), value=pad)
        at = torch.arange(ids.shape[1], device=ids.device)
        return torch.where(at < starts[:, None], ids, pad), starts

    def answers(self, microbatches: list[dict[str, Tensor]]) -> list[str]:
        """Texts of the answers of the same rows."""
        labels = torch.cat([part["shift_labels"] for part in microbatches])
        return [self.text(row[row != IGNORE_INDEX]) for row in labels]

    def text(self, ids: Tensor) -> str:
        """Of tokens, without special ones."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def complete(
        self,
        microbatches: list[dict[str, Tensor]],
        step: int,
        first: int,
        microbatch: int,
        weights: Weights,
    ) -> Completions:
        """Completions of the prompts of rows that are the sequences of a step from number `first` on."""
        length = self.settings.max_completion_length
        prompts, starts = self.prompts(microbatches)
        draws = np.array(list(uniform(self.seed, step, first, len(prompts), length)))
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
            draws=torch.from_numpy(draws.reshape(-1, length)).to(prompts.device),
            microbatch=microbatch,
            weights=weights,
            environments=environments,
            exact=self.settings.exact_logprobs,
        )


class Publisher:
    """The side of the ranks that train: gives weights away and gets completions.

    Args:
        job: The run.
        world: The ranks that train.
        model: Their model.
        done: Rollouts that were learned from before this process.
        origin_s: Start of the run's timeline, in seconds of `time.time`.
    """

    def __init__(
        self, job: Job, world: World, model: nn.Module, done: int, origin_s: float
    ) -> None:
        beat = (lambda phase: None) if world.pulse is None else world.pulse.beat
        self._folder = RolloutFolder(job.output_dir / "rollouts", beat)
        self._job, self._world, self._model, self._done = job, world, model, done
        self._origin_s = origin_s
        self._settings, self._exact = job.recipe.grpo, job.recipe.training.deterministic
        self._checkpoints: Checkpointer | None = None
        self.waited_s = self.sampled_s = 0.0

    def publish(self, version: int, data: dict[str, Any]) -> None:
        """Weights after `version` steps; the first time, where the run goes on from."""
        first = self._world.rank == 0
        if self._checkpoints is None:
            if first:
                begin = {"done": self._done, "data": data, "origin_s": self._origin_s}
                self._folder.begin(begin, self._settings.shares, exact=self._exact)
            keep = self._settings.max_staleness + 2
            self._checkpoints = Checkpointer(
                self._folder.policy, keep=keep, asynchronous=False, fingerprint={}
            )
            if self._world.world_size > 1:
                dist.barrier()
        there = self._exact and version in steps(self._folder.policy)
        if self._world.world_size > 1:
            dist.barrier()  # nobody has published it before all have looked
        if not there:
            self._checkpoints.save(version, self._model, None, {})
        if first:
            saved = steps(self._job.checkpoint_dir)
            self._folder.trim(saved[-1] // self._settings.num_iterations if saved else version)

    def take(self, step: int, first: int, count: int, device: torch.device) -> Completions:
        """Completions of `count` sequences of a step from number `first` on."""
        begin = time.perf_counter()
        parts = self._settings.shares
        work = self._job.plan.workload
        each = (work.tokens_per_step or 0) // work.seq_len // parts
        read = [
            self._folder.read(step, part)
            for part in range(first // each, -(-(first + count) // each))
        ]
        self.waited_s = time.perf_counter() - begin
        self.sampled_s = max(seconds for _, seconds in read)
        at = first - first // each * each
        names = [f.name for f in fields(Completions)]
        whole = {name: torch.cat([getattr(one, name) for one, _ in read]) for name in names}
        return Completions(**{name: x[at : at + count].to(device) for name, x in whole.items()})

    def end(self) -> None:
        """The last step is over."""
        if self._world.rank == 0:
            self._folder.end()
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None


def sample_rank(job: Job, copy: int) -> None:
    """Sample a share of every step with weights as they are published, until the ranks that train have ended.

    Args:
        job: The run.
        copy: Number of the copy of the model that this rank belongs to.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the ranks that train end the run
    recipe, work = job.recipe, job.plan.workload
    training, grpo = recipe.training, recipe.grpo
    deadlines = Deadlines(training.timeout_s, training.first_step_timeout_s)
    with World.join(deadlines=deadlines, worlds=job.worlds) as world:
        if training.deterministic:
            torch.use_deterministic_algorithms(True)
        model = build_model(recipe)
        rows = (work.tokens_per_step or 0) // work.seq_len // grpo.shares
        microbatch = math.gcd(rows, work.microbatch or 1)
        alone = Workload(
            work.seq_len,
            microbatch=microbatch,
            compute_dtype=work.compute_dtype,
            param_dtype=work.param_dtype,
            reduce_dtype=work.reduce_dtype,
        )
        degrees = {"tp": grpo.copy_tp, "dp_shard": grpo.rollout_dp_shard, "ep": grpo.rollout_ep}
        layout = " ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        parallelize(model, plan_of(model, layout, alone), world, routing=routing_of(recipe))
        materialize(
            model, seed=training.seed, device=world.device
        )  # its values come with a version
        part = copy * grpo.rollout_dp_shard + data_share(model)[0]
        writes = world.rank % grpo.copy_tp == 0
        beat = (lambda phase: None) if world.pulse is None else world.pulse.beat
        folder = RolloutFolder(job.output_dir / "rollouts", beat)
        sampler = Sampler.of_job(job, model)
        published = Checkpointer(folder.policy, keep=1, asynchronous=False, fingerprint=None)
        if (begin := folder.begun()) is None:
            return
        batches, first = job.train_batches(), begin["done"] * grpo.num_iterations
        batches.load_state_dict(begin["data"])
        recorder = SpanRecorder(part, world.device, first + 1, world.pulse, "sampler")
        timeline = folder.path / f"timeline.{part}.json"
        weights, reference = Weights(-1), None
        if grpo.reference_on_samplers:  # whoever began the run has kept it
            reference = ReferenceWeights(model, job.output_dir, job.output_dir, RunInputs())

        def renew() -> int:
            # Ranks of one copy have looked at different times: the oldest that one of them found is there for all.
            newer = _agreed(folder.newest())
            published.load(model, None, newer)
            return newer

        if grpo.partial_rollout:
            weights.due, weights.renew = lambda: folder.newest() > weights.version, renew
        last = -(-training.steps // grpo.num_iterations)
        for step in range(begin["done"] + 1, last + 1):
            if _agreed(folder.file(step, part).exists()):
                continue
            recorder.begin_step((step - 1) * grpo.num_iterations + 1)
            if recorder.over and writes and not timeline.exists():
                write_timeline(recorder.own(begin["origin_s"]), timeline)
            least = max(0, step - 1 - grpo.max_staleness)
            with recorder.span("wait for weights", "wait"):
                version = folder.version(least, exact=training.deterministic)
                version = _agreed(-1 if version is None else version)
            if version < 0:
                break
            if version != weights.version:
                with recorder.span("load weights", "communication"):
                    published.load(model, None, version)
                weights.version = version
            parts = batches.microbatches(
                (step - 1) * grpo.num_iterations,
                part,
                grpo.shares,
                microbatch,
                rows // microbatch,
            )
            given = [
                {
                    name: torch.from_numpy(getattr(one, name)).to(world.device)
                    for name in ("input_ids", "shift_labels")
                }
                for one in parts
            ]
            started = time.perf_counter()
            with recorder.span("rollout", "compute"):
                made = sampler.complete(given, step, part * rows, microbatch, weights)
            if reference is not None:
                with recorder.span("reference", "compute"), reference.weights():
                    before = logprobs_of(model, made.tokens[:, :-1], made.labels, microbatch)
                made = replace(made, reference_logprobs=before)
            if writes:
                seconds = time.perf_counter() - started
                folder.write(step, part, grpo.shares, made, weights.version, seconds)
        if writes and not timeline.exists():
            write_timeline(recorder.own(begin["origin_s"]), timeline)


def _agreed(value: int) -> int:
    """The least value of the ranks that share a copy of the model."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)
