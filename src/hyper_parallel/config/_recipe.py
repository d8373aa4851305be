"""The recipe: all sections of one training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from hyper_parallel.config._launch_section import Launch
from hyper_parallel.config._lora_section import Lora
from hyper_parallel.config._offload_section import Offload
from hyper_parallel.config._preference_sections import Dpo, Grpo, Kto, Orpo, Rm
from hyper_parallel.config._sections import (
    Checkpoint,
    Data,
    Model,
    Moe,
    Overlap,
    Parallel,
    Section,
    Training,
)
from hyper_parallel.config.foreign_keys import FOREIGN_KEYS, FOREIGN_VALUES, ForeignKey


class Recipe(Section):
    """Configuration of one training run."""

    FOREIGN_KEYS: ClassVar[Mapping[str, ForeignKey]] = FOREIGN_KEYS
    FOREIGN_VALUES: ClassVar[Mapping[str, Mapping[str, Any]]] = FOREIGN_VALUES

    # Factories, because a default instance would build the validators of every section on import.

    model: Model
    """Model and source of its weights."""
    stage: Literal["pt", "sft", "dpo", "orpo", "kto", "rm", "grpo"] = "pt"
    """Training stage. pt: loss on every token. sft: loss on the assistant's tokens of conversations. dpo, orpo:
    preference between two answers. rm: a score per answer, learned from preferences, instead of next tokens. kto:
    answers labelled good or bad. grpo: rewards of the model's own answers to prompts."""
    backend: Literal["torch", "mindspore"] = "torch"
    """Framework that computes the steps. mindspore: steps of the torch model are captured as programs of operators, and
    MindSpore runs them."""
    data: Data = Field(default_factory=Data)
    """Training and evaluation data."""
    training: Training = Field(default_factory=Training)
    """Optimization."""
    parallel: Parallel = Field(default_factory=lambda: Parallel(auto=True))
    """Layout over ranks."""
    dpo: Dpo = Field(default_factory=Dpo)
    """Settings of `stage: dpo`."""
    orpo: Orpo = Field(default_factory=Orpo)
    """Settings of `stage: orpo`."""
    kto: Kto = Field(default_factory=Kto)
    """Settings of `stage: kto`."""
    rm: Rm = Field(default_factory=Rm)
    """Settings of `stage: rm`."""
    grpo: Grpo = Field(default_factory=Grpo)
    """Settings of `stage: grpo`."""
    lora: Lora | None = None
    """Low-rank adapters; the weights of the base model are frozen. None: train all weights."""
    moe: Moe = Field(default_factory=Moe)
    """Routing of tokens to experts."""
    overlap: Overlap = Field(default_factory=Overlap)
    """Communication that runs during computation."""
    offload: Offload = Field(default_factory=Offload)
    """Planned device memory: offload and recomputation."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Checkpoints and export."""
    launch: Launch = Field(default_factory=Launch)
    """Launcher and machines."""
    topology: str = "local"
    """Machine description: `local`, a preset name, or a YAML file."""
    output_dir: str = "runs/run"
    """Directory of the run: metrics, checkpoints, export and report."""
    sample_prompt: str | None = None
    """Text to continue after training. A chat model answers it as a user's message. None: no sample."""
    sample_answers: int = Field(default=0, ge=0, le=64)
    """Held-out conversations that the exported model answers after training, for the report (stage `sft`)."""

    @property
    def disables_dropout(self) -> bool:
        """True if the model trains without dropout."""
        choice = self.training.disable_dropout
        return self.stage not in ("pt", "sft") if choice is None else choice
