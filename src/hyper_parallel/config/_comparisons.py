"""Sections of stages that compare answers."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from hyper_parallel.config._maxima import MOST_RANKS, MOST_REPEATS, MOST_SEQ_LEN
from hyper_parallel.config._sections import Section

COMPARED: Final = {
    "dpo": "pairs of answers",
    "orpo": "pairs of answers",
    "kto": "answers with labels",
    "rm": "pairs of answers",
    "grpo": "prompts with answers",
}
"""Stages that compare answers, and what they read."""
PAIRED: Final = ("dpo", "orpo", "kto", "rm")
"""Those of them whose rows of the data belong together in twos."""


class Grpo(Section):
    """Reinforcement learning with `stage: grpo`: completions of one prompt are compared with each other."""

    reward_funcs: tuple[str, ...] = Field(default=("exact_match",), min_length=1)
    """What is rewarded: `exact_match` (1 for the answer), `prefix_match` (share of its characters that are right before
    the first wrong one), `environment` (what `grpo.environment` gave), dotted paths of functions of `prompts`,
    `completions` and columns of the data, as TRL's, or directories of reward models, such as `stage: rm` exports."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward. None: 1."""
    num_generations: int = Field(default=8, ge=2, le=MOST_REPEATS)
    """Completions of every prompt, which are compared with each other."""
    max_completion_length: int = Field(default=256, ge=1, le=MOST_SEQ_LEN)
    """Most tokens of a completion; prompt and completion together have at most `data.seq_len` + 1."""
    scale_rewards: bool = True
    """Divide what a reward is above the mean of its group by the standard deviation of the group."""
    beta: float = Field(default=0.0, ge=0)
    """How much the divergence (KL) from the model before the first step counts; above 0 its weights are kept too."""
    rollout_ranks: Annotated[int, Field(ge=0, le=MOST_RANKS)] | Literal["auto"] = 0
    """Ranks beside those that train that only sample, each with a copy of the model. 0: those that train sample. auto:
    with `parallel: auto` the planner splits all ranks among both."""
    rollout_tp: Annotated[int, Field(ge=1, le=MOST_RANKS)] | Literal["auto"] = 1
    """So many of these ranks share a copy by tensor parallelism, and sample the same sequences. auto: as planned."""
    rollout_dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """So many of those share a copy, each with sequences of its own: parameters are gathered for every pass (FSDP)."""
    rollout_ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Ranks of a copy that share its experts, folded over `rollout_dp_shard` and `rollout_tp`."""
    reference_role: Literal["learner", "sampler"] = "learner"
    """With `beta`: who makes the pass of the reference, the ranks that train or those that only sample."""
    max_staleness: int = Field(default=0, ge=0, le=MOST_REPEATS)
    """Most rollouts that the weights which sampled may be behind: sampling runs ahead of training by so many."""
    exact_logprobs: bool = False
    """Sample by the forward pass that trains, over whole microbatches and without a cache: what a token was sampled by
    is then bitwise what it is learned from, so that any difference is staleness. Every token costs such a pass."""
    partial_rollout: bool = False
    """Completions that newer weights find half done go on under these, with what they have read read again."""
    environment: str | None = None
    """Dotted path of a class that answers what the model says, so that a completion has several turns."""
    importance_sampling_cap: float = Field(default=2.0, gt=0)
    """Most that the probability of a token may have grown since it was sampled and still weigh in full."""
    importance_sampling: Literal["truncate", "mask"] = "truncate"
    """truncate: a token whose probability has grown by more weighs as the cap does; mask: it is left out, also of the
    count, as is one whose probability has fallen by as much; that takes one more pass."""
    min_effective_samples: float | None = Field(default=None, gt=0, le=1)
    """A step is left out when the share of effective samples is lower: too much of it is off-policy. None: none is."""
    num_iterations: int = Field(default=1, ge=1, le=MOST_REPEATS)
    """Optimizer steps from the same completions (TRL's name)."""
    epsilon: float = Field(default=0.2, gt=0)
    """With more than one: what the probability of a token may have changed by, as a share of what it was at the first
    of them, and still be learned from in that direction (PPO's clip)."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """The same for growth. None: `epsilon`."""
    loss_type: Literal["grpo", "dapo"] = "dapo"
    """dapo: every token of the step counts alike; grpo: every completion does."""

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
        """Ranks that share a copy of the model to sample."""
        return self.copy_tp * self.rollout_dp_shard

    @property
    def copies(self) -> int:
        """Copies of the model that only sample."""
        return self.sampling_ranks // self.copy_ranks

    @property
    def shares(self) -> int:
        """Parts of a step's sequences that are sampled apart."""
        return self.copies * self.rollout_dp_shard

    @property
    def samplers_refer(self) -> bool:
        """Whether ranks that only sample give the log-probabilities of the reference."""
        return self.beta > 0 and self.reference_role == "sampler"


class Dpo(Section):
    """Learning from pairs of answers with `stage: dpo`."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"] = "sigmoid"
    """sigmoid is DPO's own; orpo and simpo need no reference."""
    beta: float = Field(default=0.1, gt=0)
    """How much a pair's margin counts; the weight of the odds ratio for orpo."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs that may be labelled the wrong way round (sigmoid)."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Margin that simpo wants."""


class Orpo(Section):
    """Learning from pairs of answers with `stage: orpo`: cross entropy and odds ratio at once, without a reference."""

    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio beside the cross entropy of the chosen answer."""


class Rm(Section):
    """Learning a score of answers from pairs of them with `stage: rm`."""

    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """How much it counts that the scores of a pair do not add up to 0 (TRL's name). None: 0."""


class Kto(Section):
    """Learning from answers that are each good or bad with `stage: kto`."""

    beta: float = Field(default=0.1, gt=0)
    """How much it counts that an answer has become likelier than the reference makes it."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of the good answers. The paper wants this times their number to be 1 to 4/3 of the other product."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of the bad answers."""
