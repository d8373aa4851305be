"""The section of a recipe for low-rank adapters."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from hyper_parallel.config._maxima import MOST_RANK
from hyper_parallel.config._sections import Section, source_tag
from hyper_parallel.errors import abbreviated

NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
"""Linear modules that all-linear leaves out of a model whose experts are one parameter: peft means experts by them."""

_NAMES: Final = re.compile(r"[\w.]+(\s*,\s*[\w.]+)+")
_LONGEST_PATTERN: Final = 10_000


class Lora(Section):
    """Low-rank adapters, made and written by peft: the keys are those of its `LoraConfig`."""

    MAIN_KEY: ClassVar[str] = "r"

    r: int = Field(default=8, ge=1, le=MOST_RANK)
    """Rank of the adapters."""
    lora_alpha: float = Field(default=16, gt=0, allow_inf_nan=False)
    """What an adapter adds is multiplied by `lora_alpha / r`."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the inputs of an adapter that is dropped."""
    target_modules: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[tuple[str, ...], Field(min_length=1), Tag("[list]")],
        Discriminator(source_tag),
    ] = "all-linear"
    """Linear modules that get one: ends of their names (`[q_proj, v_proj]`), a regular expression, or all-linear."""
    use_rslora: bool = False
    """Multiply by `lora_alpha / sqrt(r)` instead."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=MOST_RANK)]] = Field(default_factory=dict)
    """Other ranks: end of a module's name, or a regular expression, to the rank."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Other values of `lora_alpha`, likewise."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of the names of modules that are trained whole and written with the adapter, such as norms."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """First values of A, as peft draws them; B is 0."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _separate(cls, value: object) -> object:
        """Read `q_proj,v_proj`, which LlamaFactory writes, as a list; as an expression it would match no module."""
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
                what = f"{abbreviated(pattern)} is no regular expression: {error!s:.120}"
                raise ValueError(what) from None
        return value
