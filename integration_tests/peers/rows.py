"""The table of comparisons with TRL: one row is one run on each side.

To add a row, append a `Row` to `ROWS`: which trainer, which records, which model, and what both sides are told beyond
`TRAINERS`. Then run `build/peers/bin/python tools/peers.py NAME`. A row whose sides are not equal has to say why in
`reason`, and is wrong again as soon as they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from integration_tests.peers import inputs
from integration_tests.peers.inputs import Records

STEPS: Final = 4
SEQ_LEN: Final = 96
LEARNING_RATE: Final = 1e-3
EPSILON: Final = 1e-3
"""Of AdamW. TRL computes log-probabilities in float32 whatever the model is, and AdamW scales the rounding of the least
gradients up to the size of all others: with its usual 1e-8 some weights would be apart by 2e-5 of an update."""


@dataclass(frozen=True)
class Trainer:
    """A stage of ours and TRL's trainer for it.

    Attributes:
        stage: `stage` of the recipe.
        trainer: Dotted path of TRL's trainer; its config is beside it, `...Config`.
        recipe: Recipe keys of every row.
        config: Fields of TRL's config of every row.
        rows_per_record: Sequences that a record becomes on our side.
    """

    stage: str
    trainer: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rows_per_record: int = 1


_UNPACKED = {"data.packing": False}
_LENGTH = {"max_length": SEQ_LEN + 1}
TRAINERS: Final[dict[str, Trainer]] = {
    "sft": Trainer("sft", "trl.SFTTrainer", _UNPACKED, _LENGTH),
    "pt": Trainer("pt", "trl.SFTTrainer", _UNPACKED, _LENGTH),
    "dpo": Trainer("dpo", "trl.DPOTrainer", _UNPACKED, _LENGTH, 2),
    "simpo": Trainer(
        "dpo",
        "trl.experimental.cpo.CPOTrainer",
        _UNPACKED | {"dpo.loss_type": "simpo"},
        _LENGTH | {"loss_type": "simpo", "cpo_alpha": 0.0},
        2,
    ),
    "orpo": Trainer("orpo", "trl.experimental.orpo.ORPOTrainer", _UNPACKED, _LENGTH, 2),
    "orpo of answers": Trainer(
        "orpo",
        "integration_tests.peers.orpo_of_answers.OrpoOfAnswersTrainer",
        _UNPACKED,
        _LENGTH,
        2,
    ),
    "kto": Trainer("kto", "trl.KTOTrainer", _UNPACKED, _LENGTH, 2),
    "rm": Trainer("rm", "trl.RewardTrainer", _UNPACKED, _LENGTH, 2),
    "grpo": Trainer(
        "grpo",
        "trl.GRPOTrainer",
        _UNPACKED
        | {
            "grpo.num_generations": 4,
            "grpo.max_completion_length": 12,
            "grpo.reward_funcs": ["integration_tests.peers.rewards.many_kinds"],
            "grpo.rollout_ranks": 1,
            "training.callbacks": ["integration_tests.peers.keep_completions.KeepCompletions"],
        },
        {"num_generations": 4, "max_completion_length": 12, "shuffle_dataset": False},
        4,
    ),
}


@dataclass(frozen=True)
class Row:
    """One comparison. Every step learns from all records, so that their order does not matter.

    Attributes:
        name: What is compared; also how the command line names it.
        trainer: Key of `TRAINERS`.
        records: Function of `inputs` that makes the data.
        model: Key of `inputs.MODELS`.
        template: Key of `inputs.TEMPLATES`.
        recipe: Recipe keys beyond the trainer's, by dotted name.
        config: Fields of TRL's config beyond the trainer's.
        count: Records.
        packed_rows: Rows into which all records are packed on our side; 0: they are not packed.
        accumulation: Microbatches of a step on both sides.
        steps_per_epoch: Steps that read all records once.
        ranks: Data-parallel ranks on our side; TRL's trainer runs in one process.
        without_last_tokens: Leave the last token of every sequence out of TRL's forward pass, as ours is without it.
        reason: Why the numbers differ, for the table of the docs. Empty: they have to be equal.
    """

    name: str
    trainer: str
    records: Records
    model: str = "llama"
    template: str = "marked"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    count: int = 8
    packed_rows: int = 0
    accumulation: int = 1
    steps_per_epoch: int = 1
    ranks: int = 1
    without_last_tokens: bool = False
    reason: str = ""

    @property
    def sequences(self) -> int:
        """Sequences of a step on our side."""
        whole = self.packed_rows or self.count * TRAINERS[self.trainer].rows_per_record
        return whole // self.steps_per_epoch

    @property
    def samples(self) -> int:
        """Most samples of a step as TRL counts them: a pair is one, a completion is one, and so is a packed row."""
        if self.trainer == "grpo":
            return self.sequences
        return self.count // self.steps_per_epoch


_CHATS = {"assistant_only_loss": True}
_PACKED = {"data.packing": True}
_BFD = {"packing": True, "packing_strategy": "bfd"}
_BETA = {"beta": 0.3}
# Gradients of IPO are tens of times as large as those of the other losses, and so is their rounding beside epsilon.
_IPO = {"dpo.loss_type": "ipo", "training.eps": 100 * EPSILON}
_TRL_IPO = {"loss_type": ["ipo"], "adam_epsilon": 100 * EPSILON}

_ALL_TURNS = (
    "TRL learns from all that follows the prompt, turns of the user and headers of turns too; here from the turns of"
    " the assistant"
)
_LINE_BREAK = "TRL learns the line break behind the end marker too; here an answer ends with its marker"
_ROUTED = (
    "TRL routes the last token of every sequence too, which predicts nothing, and counts it in the router's loss; the"
    " row with `last tokens left out` compares the rest"
)
_OF_MICROBATCHES = (
    "TRL averages the router's losses of the microbatches; here a microbatch weighs as in the cross entropy, by its"
    " targets"
)
_PLAIN_COEFFICIENT = (
    "TRL adds the router's loss where the config has a coefficient; here, as in transformers, where the config has"
    " `output_router_logits` too"
)

ROWS: Final[tuple[Row, ...]] = (
    # Supervised fine-tuning.
    Row("sft", "sft", inputs.conversations, config=_CHATS),
    Row("sft packed", "sft", inputs.conversations, recipe=_PACKED, config=_CHATS | _BFD, packed_rows=2),
    Row("sft accumulated", "sft", inputs.conversations, config=_CHATS, accumulation=4),
    Row("sft on two ranks", "sft", inputs.conversations, config=_CHATS, ranks=2),
    Row("sft packed on two ranks", "sft", inputs.conversations, recipe=_PACKED, config=_CHATS | _BFD, packed_rows=2,
        ranks=2),
    Row("sft qwen3, tied", "sft", inputs.conversations, model="qwen3, tied", config=_CHATS),
    Row("sft gemma2", "sft", inputs.conversations, model="gemma2", config=_CHATS),
    Row("sft gemma2 packed", "sft", inputs.conversations, model="gemma2", recipe=_PACKED, config=_CHATS | _BFD,
        packed_rows=2),
    Row("sft gemma2 with a short window", "sft", inputs.conversations, model="gemma2 with a short window",
        config=_CHATS,
        reason="transformers gives NaN on padding tokens in whose window nothing is real, and TRL's loss becomes NaN"),
    Row("sft gpt2", "sft", inputs.conversations, model="gpt2 without dropout", config=_CHATS),
    Row("sft gpt2 with dropout", "sft", inputs.conversations, model="gpt2 with dropout", config=_CHATS,
        reason="dropout stays on when fine-tuning on both sides, and both draw other random numbers"),
    Row("sft clipped", "sft", inputs.conversations, recipe={"training.max_grad_norm": 0.1},
        config=_CHATS | {"max_grad_norm": 0.1}),
    Row("sft weight decay", "sft", inputs.conversations, recipe={"training.weight_decay": 0.1},
        config=_CHATS | {"weight_decay": 0.1}),
    Row("sft gpt2 weight decay", "sft", inputs.conversations, model="gpt2 without dropout",
        recipe={"training.weight_decay": 0.1}, config=_CHATS | {"weight_decay": 0.1}),
    Row("sft gpt_oss weight decay", "sft", inputs.conversations, model="gpt_oss",
        recipe={"training.weight_decay": 0.1}, config=_CHATS | {"weight_decay": 0.1},
        reason="transformers decays the sinks of attention; here vectors are not decayed (reference/optimization.md)"),
    *(
        Row(f"sft {kind} schedule", "sft", inputs.conversations,
            recipe={"training.lr_schedule": kind, "training.min_lr_ratio": 0.0},
            config=_CHATS | {"lr_scheduler_type": kind})
        for kind in ("linear", "cosine")
    ),
    Row("sft linear schedule with warm-up", "sft", inputs.conversations,
        recipe={"training.lr_schedule": "linear", "training.warmup_steps": 2, "training.min_lr_ratio": 0.0},
        config=_CHATS | {"lr_scheduler_type": "linear", "warmup_steps": 2},
        reason="the learning rate of the first of w steps of warm-up is 0 in transformers and 1/w of the peak here"),
    Row("sft qwen3_moe", "sft", inputs.conversations, model="qwen3_moe", config=_CHATS, reason=_ROUTED),
    Row("sft qwen3_moe packed", "sft", inputs.conversations, model="qwen3_moe", recipe=_PACKED, config=_CHATS | _BFD,
        packed_rows=2, reason=_ROUTED),
    Row("sft qwen3_moe, last tokens left out", "sft", inputs.conversations, model="qwen3_moe", config=_CHATS,
        without_last_tokens=True),
    Row("sft qwen3_moe packed, last tokens left out", "sft", inputs.conversations, model="qwen3_moe", recipe=_PACKED,
        config=_CHATS | _BFD, packed_rows=2, without_last_tokens=True),
    Row("sft qwen3_moe on two ranks, last tokens left out", "sft", inputs.conversations, model="qwen3_moe",
        config=_CHATS, ranks=2, without_last_tokens=True),
    Row("sft qwen3_moe accumulated, last tokens left out", "sft", inputs.conversations, model="qwen3_moe",
        config=_CHATS, accumulation=4, without_last_tokens=True, reason=_OF_MICROBATCHES),
    Row("sft mixtral, last tokens left out", "sft", inputs.conversations, model="mixtral", config=_CHATS,
        without_last_tokens=True),
    Row("sft mixtral packed, last tokens left out", "sft", inputs.conversations, model="mixtral", recipe=_PACKED,
        config=_CHATS | _BFD, packed_rows=2, without_last_tokens=True),
    Row("sft qwen3_moe, loss not asked for", "sft", inputs.conversations, model="qwen3_moe, loss not asked for",
        config=_CHATS, without_last_tokens=True, reason=_PLAIN_COEFFICIENT),
    Row("sft prompt and completion", "sft", inputs.prompts_with_completions),
    Row("sft prompt of several turns and completion", "sft", inputs.long_prompts_with_completions),
    Row("sft prompt of several turns and completion, packed", "sft", inputs.long_prompts_with_completions,
        recipe=_PACKED, config=_BFD, packed_rows=2),
    Row("sft prompt and completion, template without marks", "sft", inputs.long_prompts_with_completions,
        template="unmarked"),
    Row("sft prompt and completion, line break after the end marker", "sft", inputs.prompts_with_completions,
        template="line_break",
        reason=_LINE_BREAK),
    Row("sft text and completion", "sft", inputs.text_completions, template="plain"),
    # Pre-training on texts.
    Row("pt", "pt", inputs.texts),
    Row("pt packed", "pt", inputs.texts, recipe=_PACKED | {"data.mask_documents": True}, config=_BFD, packed_rows=3),
    Row("pt in one stream", "pt", inputs.texts, recipe=_PACKED, config={"packing": True, "packing_strategy": "wrapped"},
        packed_rows=2,
        reason="here the pieces of the stream share a token, so that each is a target, and the rest that fills no piece"
        " is left out; TRL's pieces share none, and the rest is a shorter one"),
    # Pairs of answers.
    *(
        Row(f"dpo {kind}", "dpo", inputs.pairs, recipe={"dpo.loss_type": kind}, config={"loss_type": [kind]})
        for kind in ("sigmoid", "hinge")
    ),
    Row("dpo ipo", "dpo", inputs.pairs, recipe=_IPO, config=_TRL_IPO),
    Row("dpo beta", "dpo", inputs.pairs, recipe={"dpo.beta": 0.3}, config=_BETA),
    Row("dpo accumulated", "dpo", inputs.pairs, accumulation=4),
    Row("dpo on two ranks", "dpo", inputs.pairs, ranks=2),
    Row("dpo texts", "dpo", inputs.text_pairs, template="plain"),
    Row("dpo prompt of several turns", "dpo", inputs.long_prompt_pairs),
    Row("dpo answers of several turns", "dpo", inputs.long_answer_pairs),
    Row("dpo ipo, answers of several turns", "dpo", inputs.long_answer_pairs,
        recipe=_IPO, config=_TRL_IPO, reason=_ALL_TURNS),
    Row("dpo implicit prompt", "dpo", inputs.implicit_pairs),
    Row("dpo implicit prompt, apart from the first answer on", "dpo", inputs.early_apart_pairs, reason=_ALL_TURNS),
    Row("dpo line break after the end marker", "dpo", inputs.pairs, template="line_break",
        reason=_LINE_BREAK),
    Row("dpo gpt2 with dropout", "dpo", inputs.pairs, model="gpt2 with dropout"),
    Row("dpo llama with attention dropout", "dpo", inputs.pairs, model="llama with attention dropout",
        reason="TRL switches dropout modules off, and the attention of this model has dropout as a number; here"
        " none is left"),
    Row("dpo qwen3_moe", "dpo", inputs.pairs, model="qwen3_moe", reason=_ROUTED),
    Row("dpo qwen3_moe, last tokens left out", "dpo", inputs.pairs, model="qwen3_moe", without_last_tokens=True),
    Row("dpo mixtral, last tokens left out", "dpo", inputs.pairs, model="mixtral", without_last_tokens=True),
    Row("simpo", "simpo", inputs.pairs),
    Row("simpo gpt2 with dropout", "simpo", inputs.pairs, model="gpt2 with dropout"),
    Row("orpo", "orpo", inputs.pairs,
        reason="TRL's cross entropy is a mean over tokens, those of the prompts too; here, as in LlamaFactory, it is"
        " the mean over answers of the mean over their tokens"),
    Row("orpo, cross entropy of answers", "orpo of answers", inputs.pairs),
    Row("orpo gpt2 with dropout", "orpo of answers", inputs.pairs, model="gpt2 with dropout"),
    Row("orpo qwen3_moe, last tokens left out", "orpo of answers", inputs.pairs, model="qwen3_moe",
        without_last_tokens=True),
    # Good and bad answers.
    Row("kto", "kto", inputs.answers),
    Row("kto weights", "kto", inputs.answers,
        recipe={"kto.beta": 0.3, "kto.desirable_weight": 1.25, "kto.undesirable_weight": 0.75},
        config=_BETA | {"desirable_weight": 1.25, "undesirable_weight": 0.75}),
    Row("kto prompt of several turns", "kto", inputs.long_prompt_answers),
    Row("kto two steps an epoch", "kto", inputs.answers, steps_per_epoch=2,
        reason="TRL takes the answers of the KL term from the same microbatch; here from the record before"),
    Row("kto accumulated", "kto", inputs.answers, accumulation=2,
        reason="TRL's KL term is that of a microbatch; here it is that of the step"),
    Row("kto gpt2 with dropout", "kto", inputs.answers, model="gpt2 with dropout"),
    Row("kto qwen3_moe, last tokens left out", "kto", inputs.answers, model="qwen3_moe", without_last_tokens=True),
    # Reward models.
    Row("rm", "rm", inputs.pairs),
    Row("rm prompt of several turns", "rm", inputs.long_prompt_pairs),
    Row("rm answers of several turns", "rm", inputs.long_answer_pairs),
    Row("rm implicit prompt", "rm", inputs.early_apart_pairs),
    Row("rm centred", "rm", inputs.pairs, recipe={"rm.center_rewards_coefficient": 0.1},
        config={"center_rewards_coefficient": 0.1}),
    Row("rm margin", "rm", inputs.pairs_with_margin),
    Row("rm accumulated", "rm", inputs.pairs, accumulation=4),
    Row("rm on two ranks", "rm", inputs.pairs, ranks=2),
    Row("rm line break after the end marker", "rm", inputs.pairs, template="line_break"),
    Row("rm gpt2 with dropout", "rm", inputs.pairs, model="gpt2 with dropout"),
    Row("rm qwen3_moe", "rm", inputs.pairs, model="qwen3_moe"),
    # Reinforcement learning, on the completions of our run.
    *(
        Row(f"grpo {kind}", "grpo", inputs.text_completions, template="plain", count=4,
            recipe={"grpo.loss_type": kind}, config={"loss_type": kind})
        for kind in ("dapo", "grpo")
    ),
    Row("grpo rewards not scaled", "grpo", inputs.text_completions, template="plain", count=4,
        recipe={"grpo.scale_rewards": False}, config={"scale_rewards": "none"}),
    Row("grpo divergence", "grpo", inputs.text_completions, template="plain", count=4, recipe={"grpo.beta": 0.2},
        config={"beta": 0.2, "use_bias_correction_kl": False}),
    Row("grpo divergence, TRL's correction", "grpo", inputs.text_completions, template="plain", count=4,
        recipe={"grpo.beta": 0.2}, config={"beta": 0.2, "use_bias_correction_kl": True},
        reason="TRL's default multiplies the divergence by the ratio of probabilities, which has a gradient; here it is"
        " taken as in the paper"),
    Row("grpo several iterations", "grpo", inputs.text_completions, template="plain", count=4,
        recipe={"grpo.num_iterations": 2, "grpo.epsilon": 0.01, "grpo.epsilon_high": 0.02},
        config={"num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02}),
    Row("grpo on two ranks", "grpo", inputs.text_completions, template="plain", count=4, ranks=2),
    Row("grpo gpt2 with dropout", "grpo", inputs.even_text_completions, template="plain", count=4,
        model="gpt2 with dropout", config={"disable_dropout": True}),
    Row("grpo gpt2, prompts of several lengths", "grpo", inputs.text_completions, template="plain", count=4,
        model="gpt2 without dropout",
        reason="TRL pads prompts on the left, which moves the learned positions of the tokens behind; here positions"
        " begin at 0 with every prompt, as in generation"),
    Row("grpo qwen3_moe", "grpo", inputs.text_completions, template="plain", count=4, model="qwen3_moe",
        without_last_tokens=True),
)  # fmt: skip
