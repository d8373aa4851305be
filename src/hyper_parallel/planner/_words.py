"""A strategy from words: `dp_shard=4 tp=2`, with the keys, checks and errors of a recipe's `parallel` section."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from hyper_parallel.config import Parallel, problems, raise_all
from hyper_parallel.errors import BadValue
from hyper_parallel.ir import Strategy
from hyper_parallel.planner._recipe import strategy_of

_WHERE = "strategy"
_PREFIXES = ("parallel.", "training.")


class StrategyWords(Parallel):
    """The keys of a strategy: those of a recipe's `parallel` section, and what its `training` says of recompute."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations redone in backward."""
    recompute_layers: int | None = Field(default=None, ge=1)
    """Layers of every rank that it applies to. None: all."""


def parse_strategy(text: str) -> Strategy:
    """The strategy that words say.

    Args:
        text: Keys of a recipe as `key=value`, separated by spaces; values are YAML, and `parallel.` may be left out:
            `dp_shard=4 tp=2`, `pp=2 schedule=zb-h1 recompute=full`, `tp=2 rules.layers.*.up=colwise`.

    Raises:
        UnknownKey: HP101 with the nearest key. BadValue: HP102 for a word or value that is not allowed.
    """
    given: dict[str, Any] = {}
    for word in shlex.split(text):
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise BadValue(
                f"`{word}` is not a choice of a strategy",
                where=_WHERE,
                got=text,
                allowed="key=value",
                hint="dp_shard=4 tp=2",
            )
        for prefix in _PREFIXES:
            key = key.removeprefix(prefix)
        rule = key.removeprefix("rules.")
        if rule == key:
            given[key] = _value(key, value)
        else:
            given.setdefault("rules", {})[rule] = value
    try:
        words = StrategyWords.model_validate(given)
    except ValidationError as error:
        found = problems(
            error,
            StrategyWords,
            lambda key: f"{_WHERE}: {key}" if key else _WHERE,
            lambda key, value: f"{key}={value}",
        )
        raise_all(found)
        raise
    if words.auto or words.world_size is not None:
        raise BadValue(
            "a strategy names its degrees; nothing is searched",
            where=_WHERE,
            got=text,
            allowed="degrees, whose product is the number of ranks",
            hint="dp_shard=4 tp=2",
        )
    return strategy_of(words, recompute=words.recompute, recompute_layers=words.recompute_layers)


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as cause:
        raise BadValue(
            f"the value of `{key}` is not YAML", where=f"{_WHERE}: {key}", got=text
        ) from cause
