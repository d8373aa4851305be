"""LoRA section: low-rank adapters."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from hyper_parallel.config._maxima import MOST_RANK
from hyper_parallel.config._sections import Section, source_tag
from hyper_parallel.errors import abbreviated

NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
"""Linear modules that all-linear excludes when a model's experts are one parameter: peft addresses the experts by these
names."""

_NAMES: Final = re.compile(r"[\w.]+(\s*,\s*[\w.]+)+")
_LONGEST_PATTERN: Final = 10_000


class Lora(Section):
    """Low-rank adapters (LoRA), created and saved by peft. Keys have the names of its `LoraConfig`."""

    MAIN_KEY: ClassVar[str] = "r"

    r: int = Field(default=8, ge=1, le=MOST_RANK)
    """Rank of the adapters."""
    lora_alpha: float = Field(default=16, gt=0, allow_inf_nan=False)
    """Scale: the output of an adapter is multiplied by `lora_alpha / r`."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the inputs of an adapter."""
    target_modules: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[tuple[str, ...], Field(min_length=1), Tag("[list]")],
        Discriminator(source_tag),
    ] = "all-linear"
    """Linear modules with an adapter: name suffixes (`[q_proj, v_proj]`), a regular expression, or all-linear."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)` instead (rank-stabilized LoRA)."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=MOST_RANK)]] = Field(default_factory=dict)
    """Exceptions to `r`: module-name suffix or regular expression to rank."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Exceptions to `lora_alpha`, by the same patterns."""
    modules_to_save: tuple[str, ...] = ()
    """Name suffixes of modules that are trained in full and saved with the adapter, such as norms."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """Initialization of matrix A, as in peft; matrix B starts at 0."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _separate(cls, value: object) -> object:
        """Parse `q_proj,v_proj` (LlamaFactory's form) as a list; as a regular expression it would match no module."""
        if isinstance(value, str) and _NAMES.fullmatch(value):
            return [name.strip() for name in value.split(",")]
        return value

    @field_validator("target_modules", "rank_pattern", "alpha_pattern")
    @classmethod
    def _compiles(cls, value: object) -> object:
        patterns = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
        for pattern in patterns:
            try:
                if len(pattern) > _LONGEST_PATTERN:
                    raise ValueError(f"{len(pattern):,} characters, more than {_LONGEST_PATTERN:,}")
                re.compile(pattern)
            except (re.error, ValueError, OverflowError, RecursionError) as error:
                problem = f"{abbreviated(pattern)} is not a regular expression: {error!s:.120}"
                raise ValueError(problem) from None
        return value
