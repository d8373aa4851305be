"""Group relative policy optimization (GRPO): completions of one prompt form a group, whose rewards are compared.

A rollout samples and rewards completions of the prompts of one batch. `num_iterations` optimizer steps train on it:

  sample    G completions of every prompt, from the trained model in place or on dedicated sampling ranks
  reward    weighted sum of reward functions; advantage = (reward - mean of its group) / standard deviation of its group
            (with `scale_rewards: false`, without the division)
  train     loss = mean over the completion tokens (with `loss_type: grpo`, mean of the means of completions) of
              -w x min(r x advantage, clip(r, 1 - eps, 1 + eps_high) x advantage)
              + beta x (exp(ref - logp) - (ref - logp) - 1), the divergence from the reference model

The symbols are, per token: mu, the probability when it was sampled; p, the probability at the first optimizer step of
the rollout (proximal policy); q, the current probability; logp = log q; ref, the log-probability under the reference
model; r = q / p; and w = min(p / mu, cap), the weight of truncated importance sampling for completions that were
sampled with stale weights. eps, eps_high, beta and cap are keys of section `grpo` of the recipe: `epsilon`,
`epsilon_high`, `beta` and `importance_sampling_cap`.

This is decoupled PPO: r is 1 at the first optimizer step of a rollout. With `max_staleness: 0`, w is 1 for all tokens.
Masked importance sampling (`mask`) excludes from the mean all tokens whose p / mu is above cap or below 1 / cap. The
number of remaining tokens must be known before the step, so `mask` costs one more forward pass for p.

Sources: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; mean over all tokens of the step: DAPO, arXiv:2503.14476;
no division by the standard deviation: Dr. GRPO, arXiv:2503.20783.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from hyper_parallel.backends.torch.decode_slots import slot_cache_refusal
from hyper_parallel.backends.torch.token_rows import TOKEN_MASK
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.input_checksums import RunInputs
from hyper_parallel.trainer.stages import LearningStage, Microbatches, Rows, StageInputs
from hyper_parallel.trainer.stages.model_reward import ModelReward
from hyper_parallel.trainer.stages.reference import ReferenceWeights
from hyper_parallel.trainer.stages.rewards import reward_functions, score
from hyper_parallel.trainer.stages.rollouts import Publisher, Sampler
from hyper_parallel.trainer.stages.sampling import (
    Completions,
    Weights,
    all_reduce_max,
    logprobs_of,
    sum_over_data_ranks,
)

_log = logging.getLogger(__name__)

_EPSILON: Final = 1e-4
"""Added to the standard deviation of a group, as in TRL."""


@dataclass
class GrpoStage(LearningStage):
    """GRPO learning stage: samples completions of prompts, and computes their rewards, advantages and loss.

    Attributes:
        sampler: Sampler of the trained model, with settings and tokenizer.
        plan: Parallel layout and batch sizes of the run.
        rank: Data-parallel rank.
        publisher: Exchange with dedicated sampling ranks; None: the training ranks sample.
        reference: Function that creates the reference weights, called by `begin`; None: loss without divergence.
        run_inputs: Checksums of the run's input models.
    """

    inputs_span: ClassVar = ("rollout", "compute")

    sampler: Sampler
    plan: Plan
    rank: int
    publisher: Publisher | None = None
    reference: Callable[[], ReferenceWeights] | None = None
    run_inputs: RunInputs = field(default_factory=RunInputs)
    _record: dict[str, Any] = field(default_factory=dict)
    _measured: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _proximal_logprobs: list[Tensor] = field(default_factory=list)
    _cached_rollout: tuple[Microbatches, int, dict[str, Any]] | None = None
    _is_first_iteration: bool = False
    _effective: float | None = None
    _reference_weights: ReferenceWeights | None = None

    def __post_init__(self) -> None:
        self.settings = self.sampler.settings
        self._rewards = reward_functions(self.settings.reward_funcs, "grpo.reward_funcs")
        for reward in self._rewards:
            if isinstance(reward, ModelReward):
                reward.inputs = self.run_inputs

    def begin(self, batches: Any) -> None:
        """Create and save the reference weights, if any; warn if sampling runs without a key-value cache."""
        if self.reference is not None:
            weights = self.reference()
            self._reference_weights = None if self.settings.reference_on_samplers else weights
        if (reason := slot_cache_refusal(self.sampler.model)) and self.rank == 0:
            _log.warning("sampling has no key-value cache, so every token recomputes its prefix: %s", reason)

    def end(self) -> None:
        """Mark the end of training for dedicated sampling ranks, which then end; no effect without them."""
        if self.publisher is not None:
            self.publisher.end()

    def _held_out(self, microbatches: Microbatches, rows: Rows, sequences: Any) -> StageInputs:
        """Sample and reward one completion per held-out prompt; return inputs whose loss is minus the mean reward.

        Every evaluation uses the same random numbers.
        """
        size, names = len(microbatches[0]["input_ids"]), ("input_ids", "shift_labels")
        real = torch.from_numpy(rows >= 0).to(microbatches[0]["input_ids"].device)
        prompts = [{name: torch.cat([part[name] for part in microbatches])[real] for name in names}]
        completions = self.sampler.complete(prompts, 0, self.rank * len(rows), size, Weights())
        rewards, each = self._reward(completions, prompts, sequences, rows[rows >= 0])
        lengths = completions.sampled.sum(1).double()
        counts = [real.sum(), rewards.sum(), lengths.sum(), completions.stopped.sum(), *each]
        total, *sums = self._sum(counts)
        tokens = sums[1]
        self._record = self._means(sums, total)
        batch = self._objective_inputs(completions, rewards)
        batch["weights"] = torch.where(completions.sampled[:, 1:], 1 / (total * lengths)[:, None], 0.0)
        padded = {name: x.new_zeros(len(rows), *x.shape[1:]) for name, x in batch.items()}
        padded["shift_labels"].fill_(IGNORE_INDEX)
        for name, x in batch.items():
            padded[name][real] = x
        return _split_batch(padded, size), int(tokens)

    def inputs(self, microbatches: Microbatches, rows: Rows, batches: Any, step: int | None) -> StageInputs:
        """Sample and reward completions; return them as microbatches, and the number of trained tokens on all ranks.

        In `microbatches`, each prompt fills `num_generations` consecutive rows, whose labels are the reference answer.
        Returned microbatches also have `advantages` [B], `weights` [B, S] and `rollout_logprobs` [B, S], and, if `beta`
        is not 0, `reference_logprobs` [B, S]. Later optimizer steps of a rollout return the same completions, with
        `proximal_logprobs` [B, S]. An evaluation has one completion per prompt, and its loss is minus the mean reward.
        """
        if step is None:
            return self._held_out(microbatches, rows, batches.sequences)
        rollout, iteration = divmod(step - 1, self.settings.num_iterations)
        if iteration == 0 or self._cached_rollout is None:
            self._proximal_logprobs.clear()
            parts, tokens = self._rollout(microbatches, rows, batches, rollout + 1)
            if self.settings.num_iterations > 1:
                self._cached_rollout, self._is_first_iteration = (parts, tokens, self._record), True
            return parts, tokens
        self._clear_measurements()
        parts, tokens, self._record = self._cached_rollout
        return [
            {**part, "proximal_logprobs": logprobs}
            for part, logprobs in zip(parts, self._proximal_logprobs, strict=True)
        ], tokens

    def _rollout(self, microbatches: Microbatches, rows: Rows, batches: Any, step: int) -> tuple[Microbatches, int]:
        """Sample and reward rollout `step`, counted from 1; return its microbatches and trained tokens on all ranks."""
        size = len(microbatches[0]["input_ids"])
        completions = self._sample(microbatches, batches, step)
        rewards, sums = self._reward(completions, microbatches, batches.sequences, rows)
        groups = rewards.view(-1, self.settings.num_generations)
        advantages = groups - groups.mean(1, keepdim=True)
        if self.settings.scale_rewards:
            advantages = advantages / (groups.std(1, keepdim=True) + _EPSILON)
        tokens = self._record_rollout(completions, groups, sums, step)
        batch = self._objective_inputs(completions, advantages.view(-1))
        batch["weights"], tokens = self._token_weights(batch, completions.sampled, tokens, size)
        if self._reference_weights is not None:
            with self._reference_weights.weights():
                batch["reference_logprobs"] = self._logprobs(batch, size)
        elif self.settings.reference_on_samplers:
            batch["reference_logprobs"] = completions.reference_logprobs
        return _split_batch(batch, size), int(tokens)

    def _sample(self, microbatches: Microbatches, batches: Any, step: int) -> Completions:
        size = len(microbatches[0]["input_ids"])
        count = size * len(microbatches)
        first = self.rank * count
        if self.publisher is None:
            return self.sampler.complete(microbatches, step, first, size, Weights(step - 1))
        self.publisher.publish(step - 1, batches.state_dict(step - 1))
        return self.publisher.collect(step, first, count, microbatches[0]["input_ids"].device)

    def _record_rollout(self, completions: Completions, groups: Tensor, sums: list[Tensor], step: int) -> float:
        """Record statistics of rollout `step`; return its number of sampled tokens over all ranks.

        `groups` is [prompts, G] weighted rewards; `sums` has each reward function's sum over this rank's completions.
        """
        lengths = completions.sampled.sum(1).double()
        ages = (step - 1 - completions.versions).double() * completions.sampled
        flat = (groups.std(1) == 0).sum()
        counts = [groups.sum(), lengths.sum(), completions.stopped.sum(), *sums]
        squares, flat_groups, age, *totals = self._sum([groups.square().sum(), flat, ages.sum(), *counts])
        total, tokens = groups.numel() * self.plan.strategy.dp, totals[1]
        self._record = record = self._means(totals, total)
        record["reward_std"] = max(squares / total - record["reward"] ** 2, 0.0) ** 0.5
        record["groups_without_spread"] = flat_groups / (total / self.settings.num_generations)
        if self.publisher is not None:
            record["age"] = all_reduce_max(ages.max())
            record["age_mean"] = age / tokens
            record["wait_s"] = self.publisher.waited_s
            record["sample_s"] = self.publisher.sampled_s
        return tokens

    def _token_weights(
        self, batch: dict[str, Tensor], sampled: Tensor, tokens: float, size: int
    ) -> tuple[Tensor, float]:
        """Return [N, S] weights of tokens in the loss, and the number of tokens with loss on all ranks.

        `sampled` is the [N, S + 1] mask of sampled tokens, and `tokens` is their number on all ranks. A forward pass
        takes `size` rows.
        """
        counted, count = sampled[:, 1:], len(sampled)
        lengths = sampled.sum(1).double()
        if self.settings.importance_sampling == "mask":
            differences = (self._logprobs(batch, size) - batch["rollout_logprobs"]).abs()
            counted = counted & (differences <= math.log(self.settings.importance_sampling_cap))
            lengths = counted.sum(1).double()
            (unmasked,) = self._sum([lengths.sum()])
            self._record["masked"] = 1 - unmasked / tokens
            tokens = unmasked
        per_token = lengths.new_full((count,), 1 / max(tokens, 1))
        if self.settings.loss_type == "grpo":
            per_token = 1 / (count * self.plan.strategy.dp * lengths)
        return torch.where(counted, per_token[:, None], 0.0), tokens

    def _clear_measurements(self) -> None:
        self._measured.clear()
        self._effective, self._is_first_iteration = None, False

    def _objective_inputs(self, completions: Completions, advantages: Tensor) -> dict[str, Tensor]:
        """Clear the previous step's measurements; return the objective's inputs [N, ...] without `weights`."""
        self._clear_measurements()
        return {
            "input_ids": completions.tokens[:, :-1],
            "shift_labels": completions.labels,
            TOKEN_MASK: completions.real,
            "advantages": advantages,
            "rollout_logprobs": completions.logprobs[:, 1:],
        }

    def _means(self, sums: list[float], total: float) -> dict[str, float]:
        functions = [f"reward_{name}" for name in self.settings.reward_names]
        names = ["reward", "completion_tokens", "stopped", *functions]
        return {name: value / total for name, value in zip(names, sums, strict=True)}

    def _logprobs(self, batch: dict[str, Tensor], size: int) -> Tensor:
        return logprobs_of(self.sampler.model, batch["input_ids"], batch["shift_labels"], size)

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a microbatch from the [B, S] log-probabilities of its tokens; see the module docstring."""
        settings, advantages = self.settings, batch["advantages"][:, None]
        proximal = batch.get("proximal_logprobs")
        if proximal is None:
            # First optimizer step of the rollout: the value of the ratio is 1, with the gradient of `logprobs`.
            proximal = logprobs.detach()
            if self._is_first_iteration:
                self._proximal_logprobs.append(proximal)
        ratio = (logprobs - proximal).exp()
        weights = batch["weights"] * advantages
        counts = batch["weights"] > 0
        log_ratio = (proximal - batch["rollout_logprobs"]) * counts
        self._measured["logprob_error"].append(log_ratio.abs().max())
        if self.settings.max_staleness:
            importance = log_ratio.exp()
            counted = importance[counts].double()
            sums = torch.stack([counted.sum(), counted.square().sum(), counts.sum()])
            self._measured["ratio"].append(sums)
            weights = weights * importance.clamp(max=settings.importance_sampling_cap)
        weights = weights.to(ratio.dtype)
        gain = ratio * weights
        if settings.num_iterations > 1:
            high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
            clipped = ratio.clamp(1 - settings.epsilon, 1 + high) * weights
            self._measured["clip_ratio"].append(torch.stack([(clipped < gain).sum(), counts.sum()]))
            gain = torch.minimum(gain, clipped)
        loss = -gain.sum()
        if "reference_logprobs" not in batch:
            return loss
        # Schulman's k3 estimator, which is never negative; `batch["weights"]` sum to 1 over the step.
        log_ratio_to_reference = (batch["reference_logprobs"] - logprobs) * counts
        divergence = log_ratio_to_reference.exp() - log_ratio_to_reference - 1
        sums = torch.stack([divergence.detach().double().sum(), counts.sum()])
        self._measured["kl"].append(sums)
        return loss + self.settings.beta * (divergence * batch["weights"].to(ratio.dtype)).sum()

    def rejects(self) -> bool | None:
        """Return whether the effective sample size is below `grpo.min_effective_samples`; None without this limit."""
        least = self.settings.min_effective_samples
        return None if least is None else self._effective_samples() < least

    def _effective_samples(self) -> float:
        """Return the effective sample size (sum u)^2 / (n sum u^2), as a fraction of the n tokens of the step.

        u is the importance ratio p / mu of a token; see the module docstring.
        """
        if self._effective is None:
            total, squares, count = self._measured_sums("ratio")
            self._effective = total**2 / (count * squares)
        return self._effective

    def record(self) -> dict[str, Any]:
        """Return the statistics of the rollout and of the loss by name, as {"rollout": {...}}."""
        error = all_reduce_max(torch.stack(self._measured["logprob_error"]).max())
        rollout = {**self._record, "logprob_error": error}
        if self._measured["ratio"]:
            rollout["effective_samples"] = self._effective_samples()
        for name in ("clip_ratio", "kl"):  # sum of a value over tokens, and number of tokens
            if self._measured[name]:
                total, count = self._measured_sums(name)
                rollout[name] = total / max(count, 1.0)
        return {"rollout": rollout}

    def _reward(
        self,
        completions: Completions,
        microbatches: Microbatches,
        sequences: Any,
        rows: Rows,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return [N] weighted sums of the reward functions, and each function's sum over this rank's completions."""
        text, starts = self.sampler.text, self.sampler.prompts(microbatches)[1]
        spans = [*zip(completions.tokens, starts.tolist(), completions.ends.tolist(), strict=True)]
        records = sequences.records(rows)
        keywords = {
            **{name: [record.get(name) for record in records] for name in sequences.columns},
            "prompts": [text(row[:start]) for row, start, _ in spans],
            "completions": [text(row[start:end]) for row, start, end in spans],
            "completion_ids": [row[start:end].tolist() for row, start, end in spans],
        }
        names = self.settings.reward_funcs
        internal = {
            "rows": [row[:end].tolist() for row, end in zip(completions.tokens, completions.ends, strict=True)],
            "stopped": completions.stopped.tolist(),
            "environment_rewards": completions.rewards.tolist(),
            "microbatch": self.plan.workload.microbatch or 1,
            "device": starts.device,
        }
        scores = [score(n, f, keywords, internal) for n, f in zip(names, self._rewards, strict=True)]
        values = torch.tensor(scores, dtype=torch.float64, device=starts.device)
        weights = values.new_tensor(self.settings.reward_weights or [1.0] * len(names))
        return weights @ values, list(values.sum(1))

    def _measured_sums(self, name: str) -> list[float]:
        return self._sum(list(torch.stack(self._measured[name]).sum(0)))

    def _sum(self, values: list[Tensor]) -> list[float]:
        """Return the sum of each scalar over data-parallel ranks; ranks that hold the same rows count once."""
        return sum_over_data_ranks(torch.stack([v.double() for v in values]), self.plan.strategy)


def _split_batch(batch: dict[str, Tensor], size: int) -> Microbatches:
    parts = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]
