"""Group relative policy optimisation: completions of a prompt are compared with each other, and rewarded.

Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; the sum over tokens of the whole step divided once is that of
DAPO, arXiv:2503.14476; without division by the standard deviation, Dr. GRPO, arXiv:2503.20783.

`num_iterations` optimizer steps per batch of completions:

    rollout   sample G completions of every prompt of the step, from the live model or on ranks of their own
    reward    functions of the texts; advantage = (reward - mean of its group) / standard deviation of its group
    learn     -sum over completion tokens of w x min(r x advantage, clip(r, 1 - eps, 1 + eps_high) x advantage), over
              the tokens of the step, and beta x (exp(ref - logp) - (ref - logp) - 1), the divergence from the model
              before the first step

This is decoupled PPO: q is the probability of a token now, p at the first step from its batch (the proximal policy), mu
when it was sampled. r = q / p is 1 in that first step. What weights of an earlier version have sampled is corrected by
w = min(p / mu, cap), truncated importance sampling, which is 1 for the newest weights. Or, with `mask`, tokens for
which p / mu is beyond the cap or below its inverse are left out, of the sum and of the count that it is divided by
(masked importance sampling): one more pass tells which, before the step learns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.backends.torch import TOKEN_MASK
from hyper_parallel.backends.torch.decode_slots import why_no_slots
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.data.batches import IGNORE_INDEX
from hyper_parallel.trainer.input_checksums import RunInputs
from hyper_parallel.trainer.stages._reference_weights import ReferenceWeights
from hyper_parallel.trainer.stages.model_reward import ModelReward
from hyper_parallel.trainer.stages.rewards import reward_functions, score, short_name
from hyper_parallel.trainer.stages.rollouts import Publisher, Sampler
from hyper_parallel.trainer.stages.sampling import (
    Completions,
    Weights,
    added,
    largest,
    logprobs_of,
)

_log = logging.getLogger(__name__)

_SMALL: Final = 1e-4
"""Added to the standard deviation of a group, as TRL does."""


@dataclass
class GrpoStage:
    """Turns rows of prompts with answers into microbatches of completions with advantages.

    Attributes:
        sampler: Samples from the live model; of settings and tokenizer also what the stage needs.
        plan: The plan of the run.
        rank: Data-parallel rank.
        others: Where completions come from that ranks of their own sample; None: this one samples.
        reference: Makes the model before the first step, when the step begins; None: nothing holds it there.
        run_inputs: Checksums of what the run reads.
    """

    sampler: Sampler
    plan: Plan
    rank: int
    others: Publisher | None = None
    reference: Callable[[], ReferenceWeights] | None = None
    run_inputs: RunInputs = field(default_factory=RunInputs)
    _record: dict[str, Any] = field(default_factory=dict)
    _off: list[Tensor] = field(default_factory=list)
    _ratios: list[Tensor] = field(default_factory=list)
    _divergence: list[Tensor] = field(default_factory=list)
    _clipped: list[Tensor] = field(default_factory=list)
    _proximal: list[Tensor] = field(default_factory=list)
    _kept: tuple[list[dict[str, Tensor]], int, dict[str, Any]] | None = None
    _first: bool = False
    _effective: float | None = None
    _before: ReferenceWeights | None = None

    def __post_init__(self) -> None:
        self.settings = self.sampler.settings
        self._rewards = reward_functions(self.settings.reward_funcs, "grpo.reward_funcs")
        for reward in self._rewards:
            if isinstance(reward, ModelReward):
                reward.loaded = self._check_reward

    def _check_reward(self, reward: ModelReward, checksum: str) -> None:
        """Refuse a reward model that is not the one of the checkpoint."""
        place = reward.directory.absolute()
        self.run_inputs.check(f"weights of the reward model {place}", checksum, place)

    def begin(self, batches: Any) -> None:
        """Keep where the data is read, and say where sampling takes longer than it should."""
        self._batches = batches
        if self.reference is not None:
            kept = self.reference()
            self._before = None if self.settings.reference_on_samplers else kept
        if (why := why_no_slots(self.sampler.model)) and self.rank == 0:
            _log.warning("every token of a completion reads all of it again: no cache, %s", why)

    def end(self) -> None:
        """Let the ranks that sample end."""
        if self.others is not None:
            self.others.end()

    def held_out(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], batches: Any
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """One completion of every prompt, by the weights as they are; the same draws at each evaluation.

        Its reward stands where training has an advantage, so that the loss is minus the mean reward.
        """
        size, names = len(microbatches[0]["input_ids"]), ("input_ids", "shift_labels")
        real = torch.from_numpy(rows >= 0).to(microbatches[0]["input_ids"].device)
        given = [{name: torch.cat([part[name] for part in microbatches])[real] for name in names}]
        made = self.sampler.complete(given, 0, self.rank * len(rows), size, Weights())
        rewards, each = self._reward(made, given, batches.sequences, rows[rows >= 0])
        lengths = made.sampled.sum(1).double()
        counts = [rewards.sum(), real.sum(), lengths.sum(), made.stopped.sum(), *each]
        reward, total, tokens, stopped, *named = self._sum(counts)
        self._record = {
            "reward": reward / total,
            "completion_tokens": tokens / total,
            "stopped": stopped / total,
            **self._named(named, total),
        }
        batch = self._batch(made, rewards)
        batch["weights"] = torch.where(made.sampled[:, 1:], 1 / (total * lengths)[:, None], 0.0)
        padded = {name: x.new_zeros(len(rows), *x.shape[1:]) for name, x in batch.items()}
        padded["shift_labels"].fill_(IGNORE_INDEX)
        for name, x in batch.items():
            padded[name][real] = x
        return _cut(padded, size), int(tokens)

    def inputs(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Complete the prompts of this rank's rows, reward the completions, and count their tokens.

        Rows repeat every prompt `num_generations` times in a row, and their labels are the answer. The microbatches
        returned have `advantages` [B], `weights` [B, S] and `rollout_logprobs` [B, S] beside the completions, and after
        the first step from them `proximal_logprobs` [B, S].
        """
        rollout, iteration = divmod(step - 1, self.settings.num_iterations)
        if iteration == 0 or self._kept is None:
            self._proximal.clear()
            parts, tokens = self._rollout(microbatches, rows, rollout + 1)
            if self.settings.num_iterations > 1:
                self._kept, self._first = (parts, tokens, self._record), True
            return parts, tokens
        self._begin()
        parts, tokens, self._record = self._kept
        return [
            {**part, "proximal_logprobs": logprobs}
            for part, logprobs in zip(parts, self._proximal, strict=True)
        ], tokens

    def _rollout(
        self, microbatches: list[dict[str, Tensor]], rows: NDArray[np.int64], step: int
    ) -> tuple[list[dict[str, Tensor]], int]:
        """New completions, of rollout `step`, from 1."""
        size = len(microbatches[0]["input_ids"])
        count = size * len(microbatches)
        if self.others is None:
            first = self.rank * count
            made = self.sampler.complete(microbatches, step, first, size, Weights(step - 1))
        else:
            self.others.publish(step - 1, self._batches.state_dict(step - 1))
            device = microbatches[0]["input_ids"].device
            made = self.others.take(step, self.rank * count, count, device)
        rewards, each = self._reward(made, microbatches, self._batches.sequences, rows)
        groups = rewards.view(-1, self.settings.num_generations)
        spread = groups.std(1, keepdim=True)
        advantages = groups - groups.mean(1, keepdim=True)
        if self.settings.scale_rewards:
            advantages = advantages / (spread + _SMALL)
        mine = made.sampled
        lengths = mine.sum(1).double()
        ages = (step - 1 - made.versions).double() * mine
        shared = self._sum(
            [
                groups.sum(),
                groups.square().sum(),
                (spread == 0).sum(),
                lengths.sum(),
                made.stopped.sum(),
                ages.sum(),
                *each,
            ]
        )
        total = count * self.plan.strategy.dp
        mean, squares, flat, tokens, stopped, aged, *named = shared
        self._record = {
            "reward": mean / total,
            "reward_std": max(squares / total - (mean / total) ** 2, 0.0) ** 0.5,
            "groups_without_spread": flat / (total / self.settings.num_generations),
            "completion_tokens": tokens / total,
            "stopped": stopped / total,
            **(
                {}
                if self.others is None
                else {
                    "age": largest(ages.max()),
                    "age_mean": aged / tokens,
                    "wait_s": self.others.waited_s,
                    "sample_s": self.others.sampled_s,
                }
            ),
            **self._named(named, total),
        }
        batch = self._batch(made, advantages.view(-1))
        counted = mine[:, 1:]
        if self.settings.importance_sampling == "mask":
            now = self._logprobs(batch, size)
            apart = (now - batch["rollout_logprobs"]).abs()
            counted = counted & (apart <= math.log(self.settings.importance_sampling_cap))
            lengths, sampled = counted.sum(1).double(), tokens
            (tokens,) = self._sum([lengths.sum()])
            self._record["masked"] = 1 - tokens / sampled
        per_token = lengths.new_full((count,), 1 / max(tokens, 1))
        if self.settings.loss_type == "grpo":
            per_token = 1 / (total * lengths)
        batch["weights"] = torch.where(counted, per_token[:, None], 0.0)
        if self._before is not None:
            with self._before.weights():
                batch["reference_logprobs"] = self._logprobs(batch, size)
        elif self.settings.reference_on_samplers:
            batch["reference_logprobs"] = made.reference_logprobs
        return _cut(batch, size), int(tokens)

    def _begin(self) -> None:
        """What the objective has measured before is of another step."""
        for measured in (self._off, self._ratios, self._divergence, self._clipped):
            measured.clear()
        self._effective, self._first = None, False

    def _batch(self, made: Completions, advantages: Tensor) -> dict[str, Tensor]:
        """What the objective reads beside `weights`."""
        self._begin()
        return {
            "input_ids": made.tokens[:, :-1],
            "shift_labels": made.labels,
            TOKEN_MASK: made.real,
            "advantages": advantages,
            "rollout_logprobs": made.logprobs[:, 1:],
        }

    def _named(self, sums: list[float], total: float) -> dict[str, float]:
        """The mean of each reward."""
        names = self.settings.reward_funcs
        return {f"reward_{short_name(n)}": x / total for n, x in zip(names, sums, strict=True)}

    def _logprobs(self, batch: dict[str, Tensor], size: int) -> Tensor:
        """[N, S] of sampled tokens, by the weights as they are."""
        return logprobs_of(self.sampler.model, batch["input_ids"], batch["shift_labels"], size)

    def objective(self, logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a microbatch, from [B, S] log-probabilities; in a first step minus the mean advantage."""
        settings, advantages = self.settings, batch["advantages"][:, None]
        proximal = batch.get("proximal_logprobs")
        if proximal is None:
            # The ratio is 1: its gradient is that of the log-probability.
            proximal = logprobs.detach()
            if self._first:
                self._proximal.append(proximal)
        ratio = (logprobs - proximal).exp()
        weights = batch["weights"] * advantages
        counts = batch["weights"] > 0
        off = (proximal - batch["rollout_logprobs"]) * counts
        self._off.append(off.abs().max())
        if self.settings.max_staleness:
            grown = off.exp()
            found = grown[counts].double()
            self._ratios.append(torch.stack([found.sum(), found.square().sum(), counts.sum()]))
            weights = weights * grown.clamp(max=settings.importance_sampling_cap)
        weights = weights.to(ratio.dtype)
        gain = ratio * weights
        if settings.num_iterations > 1:
            high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
            clipped = ratio.clamp(1 - settings.epsilon, 1 + high) * weights
            self._clipped.append(torch.stack([(clipped < gain).sum(), counts.sum()]))
            gain = torch.minimum(gain, clipped)
        loss = -gain.sum()
        if "reference_logprobs" not in batch:
            return loss
        # Schulman's estimate from one sample, never negative; weights without advantages add up to 1 over the step.
        apart = (batch["reference_logprobs"] - logprobs) * counts
        each = apart.exp() - apart - 1
        self._divergence.append(torch.stack([each.detach().double().sum(), counts.sum()]))
        return loss + self.settings.beta * (each * batch["weights"].to(ratio.dtype)).sum()

    def rejects(self) -> bool | None:
        """Whether too few samples are effective."""
        least = self.settings.min_effective_samples
        return None if least is None else self._effective_samples() < least

    def _effective_samples(self) -> float:
        """(sum u)^2 / (n sum u^2) over the tokens of the step, u = p / mu before it is truncated."""
        if self._effective is None:
            total, squares, count = self._sum(list(torch.stack(self._ratios).sum(0)))
            self._effective = total**2 / (count * squares)
        return self._effective

    def record(self) -> dict[str, Any]:
        """The rollout, with the largest distance of a log-probability from the one it was sampled by."""
        error = largest(torch.stack(self._off).max())
        found = {**self._record, "logprob_error": error}
        if self._ratios:
            found["effective_samples"] = self._effective_samples()
        if self._clipped:
            clipped, count = self._sum(list(torch.stack(self._clipped).sum(0)))
            found["clip_ratio"] = clipped / count
        if self._divergence:
            divergence, count = self._sum(list(torch.stack(self._divergence).sum(0)))
            found["kl"] = divergence / max(count, 1.0)
        return {"rollout": found}

    def _reward(
        self,
        made: Completions,
        microbatches: list[dict[str, Tensor]],
        sequences: Any,
        rows: NDArray[np.int64],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the weighted rewards [N] of this rank's completions, and the sum of each function.

        Args:
            made: The completions.
            microbatches: Rows of their prompts.
            sequences: The data.
            rows: Number of each of these rows in the data.
        """
        text, starts = self.sampler.text, self.sampler.prompts(microbatches)[1]
        spans = [*zip(made.tokens, starts.tolist(), made.ends.tolist(), strict=True)]
        records = sequences.records(rows)
        given = {
            **{name: [record.get(name) for record in records] for name in sequences.columns},
            "prompts": [text(row[:start]) for row, start, _ in spans],
            "completions": [text(row[start:end]) for row, start, end in spans],
            "completion_ids": [row[start:end].tolist() for row, start, end in spans],
        }
        names = self.settings.reward_funcs
        own = {
            "rows": [row[:end].tolist() for row, end in zip(made.tokens, made.ends, strict=True)],
            "stopped": made.stopped.tolist(),
            "environment_rewards": made.rewards.tolist(),
            "microbatch": self.plan.workload.microbatch or 1,
            "device": starts.device,
        }
        scores = [score(n, f, given, own) for n, f in zip(names, self._rewards, strict=True)]
        found = torch.tensor(scores, dtype=torch.float64, device=starts.device)
        weights = found.new_tensor(self.settings.reward_weights or [1.0] * len(names))
        return weights @ found, list(found.sum(1))

    def _sum(self, values: list[Tensor]) -> list[float]:
        """Sums over the data-parallel ranks; ranks that share rows count once."""
        ranks = self.plan.strategy.world_size / self.plan.strategy.dp
        return [value / ranks for value in added(torch.stack([v.double() for v in values]))]


def _cut(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Microbatches of so many rows."""
    parts = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]
