"""A recipe: all sections of one training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from hyper_parallel.config._comparisons import Dpo, Grpo, Kto, Orpo, Rm
from hyper_parallel.config._launch_section import Launch
from hyper_parallel.config._low_rank import Lora
from hyper_parallel.config._offload_section import Offload
from hyper_parallel.config._sections import (
    Checkpoint,
    Data,
    Model,
    Moe,
    Parallel,
    Section,
    Training,
)
from hyper_parallel.config.foreign_keys import FOREIGN_KEYS, FOREIGN_VALUES, ForeignKey


class Recipe(Section):
    """One training run."""

    FOREIGN_KEYS: ClassVar[Mapping[str, ForeignKey]] = FOREIGN_KEYS
    FOREIGN_VALUES: ClassVar[Mapping[str, Mapping[str, Any]]] = FOREIGN_VALUES

    # Factories: a default made here would build the validators of every section when this module is imported.

    model: Model
    """Which model."""
    stage: Literal["pt", "sft", "dpo", "orpo", "kto", "rm", "grpo"] = "pt"
    """Loss on every token (pt), on the assistant's tokens of conversations (sft), on which of two answers is preferred
    (dpo, orpo; rm: of a score in place of next tokens), on which answers are good or bad (kto), or on the rewards of
    the model's own answers to prompts (grpo)."""
    data: Data = Field(default_factory=Data)
    """What it reads."""
    training: Training = Field(default_factory=Training)
    """How it learns."""
    parallel: Parallel = Field(default_factory=lambda: Parallel(auto=True))
    """How it is spread over ranks."""
    dpo: Dpo = Field(default_factory=Dpo)
    """How pairs of answers are compared."""
    orpo: Orpo = Field(default_factory=Orpo)
    """How pairs of answers are compared without a reference."""
    kto: Kto = Field(default_factory=Kto)
    """How good and bad answers are weighed."""
    rm: Rm = Field(default_factory=Rm)
    """How scores of answers are learned."""
    grpo: Grpo = Field(default_factory=Grpo)
    """How completions are made and rewarded."""
    lora: Lora | None = None
    """Low-rank adapters; the model's own weights stay as they are. None: all of the model is trained."""
    moe: Moe = Field(default_factory=Moe)
    """How tokens are routed to experts."""
    offload: Offload = Field(default_factory=Offload)
    """What leaves the device memory while nothing needs it."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When it is saved."""
    launch: Launch = Field(default_factory=Launch)
    """Who starts the ranks."""
    topology: str = "local"
    """The machine: `local`, a preset, or a YAML file."""
    output_dir: str = "runs/run"
    """Where everything of the run is written."""
    sample_prompt: str | None = None
    """Text to continue after training; a model of conversations answers it as a user's turn. None: no sample."""

    @property
    def disables_dropout(self) -> bool:
        """Whether the model trains without dropout."""
        choice = self.training.disable_dropout
        return self.stage not in ("pt", "sft") if choice is None else choice
