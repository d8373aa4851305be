"""Workload: how much work one step is, of training or of generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hyper_parallel.errors import BadValue, BatchMismatch

PROMPT_CHUNK: Final = 512
"""Tokens of a prompt that one pass reads: it bounds the activations, and passes of this many are well filled. Not
measured."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Batch sizes and number formats of one optimizer step.

    Two of the three batch numbers (tokens per step, microbatch, accumulation steps) suffice; `resolve` derives the
    third from the data-parallel degree.

    Attributes:
        seq_len: Tokens per sequence.
        tokens_per_step: Tokens of one optimizer step over all ranks; None: derived.
        microbatch: Sequences per microbatch on one data-parallel rank; None: derived.
        accumulation_steps: Microbatches per step; None: derived.
        compute_dtype: Format of matmuls and activations.
        param_dtype: Format of the parameters the optimizer owns.
        reduce_dtype: Format of gradient reductions.
        optimizer: Name of the optimizer; memory and time are those of AdamW, with two states per parameter.
        trained: Ratio of elements with gradient and optimizer states, adapters included, to the model's parameters.
    """

    seq_len: int
    tokens_per_step: int | None = None
    microbatch: int | None = None
    accumulation_steps: int | None = None
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    optimizer: str = "adamw"
    trained: float = 1.0

    def resolve(self, dp: int) -> Workload:
        """Return the workload with all three batch numbers, for a data-parallel degree.

        Raises:
            BatchMismatch: HP308 when the numbers do not agree or do not divide.
        """
        tokens, micro, steps = self.tokens_per_step, self.microbatch, self.accumulation_steps
        if tokens is None:
            micro, steps = micro or 1, steps or 1
            tokens = micro * steps * dp * self.seq_len
        unit = self.seq_len * dp
        if tokens % unit:
            near = max(1, round(tokens / unit)) * unit
            raise BatchMismatch(
                "tokens_per_step does not divide into whole sequences for every data-parallel rank",
                got=f"tokens_per_step={tokens}, seq_len={self.seq_len}, data-parallel ranks={dp}",
                changes={"training.tokens_per_step": near},
            )
        per_rank = tokens // unit
        if micro is None:
            micro = per_rank // steps if steps else 1
        if steps is None:
            steps = per_rank // micro if micro else 0
        if micro < 1 or steps < 1 or micro * steps != per_rank:
            divisors = [d for d in range(1, per_rank + 1) if per_rank % d == 0]
            if self.microbatch and self.accumulation_steps:
                name = "tokens_per_step"
                value = self.microbatch * self.accumulation_steps * unit
            else:
                name = "microbatch" if self.microbatch else "accumulation_steps"
                requested = self.microbatch or self.accumulation_steps or 1
                value = min(divisors, key=lambda d: abs(d - requested))
            raise BatchMismatch(
                "tokens_per_step, microbatch and accumulation_steps do not agree",
                got=f"{per_rank} sequences per rank and step, microbatch={micro}, accumulation_steps={steps}",
                allowed=[f"microbatch={m}" for m in divisors],
                changes={f"training.{name}": value},
            )
        return replace(self, tokens_per_step=tokens, microbatch=micro, accumulation_steps=steps)


@dataclass(frozen=True, slots=True)
class GenerateWorkload:
    """Generation workload: prompts of one length, each continued by the same number of tokens.

    Attributes:
        prompts: Sequences, over all devices.
        prompt_len: Tokens of a prompt.
        new_tokens: Tokens of a continuation.
        dtype: Format of weights, activations and cache; None: as stored.

    Raises:
        BadValue: HP102 for a number below 1.
    """

    prompts: int = 32
    prompt_len: int = 512
    new_tokens: int = 128
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_len", "new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise BadValue(f"{name} is out of range", got=value, allowed="1 or more")

    @property
    def columns(self) -> int:
        """Tokens that the cache has space for: the last one is not fed back, and one column takes padding."""
        return self.prompt_len + self.new_tokens

    @property
    def prompt_passes(self) -> int:
        """Passes that read a prompt."""
        return -(-self.prompt_len // PROMPT_CHUNK)
