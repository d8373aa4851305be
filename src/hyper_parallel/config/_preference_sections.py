"""Sections of the preference stages: dpo, orpo, kto, rm and grpo."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from hyper_parallel.config._sections import Section
from hyper_parallel.config._values import MOST_RANKS, MOST_REPEATS, MOST_SEQ_LEN

PREFERENCE_STAGES: Final = {
    "dpo": "pairs of answers",
    "orpo": "pairs of answers",
    "kto": "answers with labels",
    "rm": "pairs of answers",
    "grpo": "prompts with answers",
}
"""Preference stages, with the kind of record that each reads."""
PAIRED_STAGES: Final = ("dpo", "orpo", "kto", "rm")
"""Preference stages in which two consecutive rows of a batch form a pair."""


class Grpo(Section):
    """Reinforcement learning with `stage: grpo`: advantages from comparing the completions of one prompt."""

    reward_funcs: tuple[str, ...] = Field(default=("exact_match",), min_length=1)
    """Rewards. exact_match: 1 if the completion equals the answer, else 0. prefix_match: length of the common prefix of
    completion and answer, divided by the larger of their lengths. Both ignore surrounding white space. environment: the
    sum of the rewards of `grpo.environment`. Otherwise: dotted paths of functions that take `prompts`, `completions`
    and data columns, as in TRL, or directories of reward models, as exported by `stage: rm`."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward. None: 1 each."""
    num_generations: int = Field(default=8, ge=2, le=MOST_REPEATS)
    """Completions sampled per prompt. These form a group, whose rewards are compared with each other."""
    max_completion_length: int = Field(default=256, ge=1, le=MOST_SEQ_LEN)
    """Maximum tokens of a completion. Prompt and completion together are limited to `data.seq_len` + 1."""
    scale_rewards: bool = True
    """Divide each advantage (reward minus group mean) by the standard deviation of its group."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference, which is the initial model. Above 0, a copy of the initial values
    of all trained parameters is kept in memory."""
    rollout_ranks: Annotated[int, Field(ge=0, le=MOST_RANKS)] | Literal["auto"] = 0
    """Extra ranks that only sample, in groups that each hold a model replica. 0: the training ranks sample. auto: with
    `parallel: auto` the planner divides all ranks between sampling and training."""
    rollout_tp: Annotated[int, Field(ge=1, le=MOST_RANKS)] | Literal["auto"] = 1
    """Tensor-parallel degree of a sampling replica; its ranks sample the same sequences. auto: chosen by the
    planner."""
    rollout_dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """FSDP degree of a sampling replica. Its ranks sample different sequences and gather parameters in every forward
    pass."""
    rollout_ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel degree of a sampling replica. It divides the ranks of `rollout_dp_shard` x `rollout_tp` among the
    experts, so it adds no ranks."""
    reference_role: Literal["learner", "sampler"] = "learner"
    """Ranks that run the forward pass of the reference model when `beta` > 0: the training ranks (learner) or the
    sampling ranks (sampler)."""
    max_staleness: int = Field(default=0, ge=0, le=MOST_REPEATS)
    """Maximum age of the sampling weights, in rollouts: sampling may run this far ahead of training. 0: always the
    newest weights."""
    exact_logprobs: bool = False
    """Sample with the training forward pass, on whole microbatches and without a KV cache. Sampling and training
    log-probabilities are then bitwise equal at equal weights, so any difference is staleness. Every token costs one
    full forward pass."""
    partial_rollout: bool = False
    """Continue unfinished completions with newer weights as soon as these arrive. The prefix is then computed again,
    and each token records the version that sampled it. false: weights change only between rollouts."""
    environment: str | None = None
    """Dotted path of an environment class that replies to the model, for completions with several turns."""
    importance_sampling_cap: float = Field(default=2.0, gt=0)
    """Upper bound of the importance ratio of a token: its probability under the training weights over that when
    sampled. Used with `max_staleness` > 0 or `importance_sampling: mask`."""
    importance_sampling: Literal["truncate", "mask"] = "truncate"
    """Treatment of tokens whose ratio exceeds the cap. truncate: their importance weight is the cap. mask: they are
    excluded from loss and token count, as are tokens with a ratio below 1 / cap; costs one extra forward pass."""
    min_effective_samples: float | None = Field(default=None, gt=0, le=1)
    """Skip a step as too far off-policy if its effective sample size, as a fraction of its tokens, is below this value.
    None: never."""
    num_iterations: int = Field(default=1, ge=1, le=MOST_REPEATS)
    """Optimizer steps on the same completions (key as in TRL)."""
    epsilon: float = Field(default=0.2, gt=0)
    """PPO clip range, used when `num_iterations` > 1. Ratios of current to old probability are clipped at 1 - epsilon;
    the old policy is that of the first iteration."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip range: ratios are clipped at 1 + epsilon_high. None: `epsilon`."""
    loss_type: Literal["grpo", "dapo"] = "dapo"
    """Normalization of the loss. dapo: every token of the step has equal weight. grpo: every completion has equal
    weight."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Last component of the dotted path or directory of each reward, for names of metrics."""
        return tuple(name.rstrip("/").rpartition("/")[2].rpartition(".")[2] for name in self.reward_funcs)

    @property
    def sampling_ranks(self) -> int:
        """`rollout_ranks`; 0 until the planner has chosen."""
        return 0 if self.rollout_ranks == "auto" else self.rollout_ranks

    @property
    def copy_tp(self) -> int:
        """`rollout_tp`; 1 until the planner has chosen."""
        return 1 if self.rollout_tp == "auto" else self.rollout_tp

    @property
    def copy_ranks(self) -> int:
        """Ranks of one sampling replica."""
        return self.copy_tp * self.rollout_dp_shard

    @property
    def copies(self) -> int:
        """Number of sampling replicas."""
        return self.sampling_ranks // self.copy_ranks

    @property
    def shares(self) -> int:
        """Number of parts into which a step's sequences are divided for sampling."""
        return self.copies * self.rollout_dp_shard

    @property
    def reference_on_samplers(self) -> bool:
        """True if the sampling ranks compute the log-probabilities of the reference model."""
        return self.beta > 0 and self.reference_role == "sampler"


class Dpo(Section):
    """Direct preference optimization with `stage: dpo`: learning from pairs of answers."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"] = "sigmoid"
    """Loss function. sigmoid is the original DPO loss; orpo and simpo need no reference model."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of a pair's margin. ipo: the target margin is 1 / (2 beta) instead. orpo: weight of the odds ratio."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with swapped labels (sigmoid only)."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Target margin of simpo."""


class Orpo(Section):
    """Odds-ratio preference optimization with `stage: orpo`: cross entropy plus odds ratio, without a reference."""

    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds-ratio term, relative to the cross entropy of the chosen answer."""


class Rm(Section):
    """Reward modelling with `stage: rm`: learning a score per answer from pairs of answers."""

    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """Weight of the penalty on the squared sum of a pair's scores, which centers scores at 0 (key as in TRL). None:
    0."""


class Kto(Section):
    """Kahneman-Tversky optimization with `stage: kto`: learning from answers that are each labelled good or bad."""

    beta: float = Field(default=0.1, gt=0)
    """Scale of the log-ratio between the model and the reference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Loss weight of good answers. The KTO paper recommends that the product of weight and number of the good answers
    be 1 to 4/3 times that of the bad answers."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Loss weight of bad answers."""
