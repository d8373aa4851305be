"""Bounds on the numbers in a config.json, checked before a model, a plan or a transformers class is built from it.

Large numbers in a config would make reading it slow, because lists of layers, label names and expert modules are built
eagerly. Each bound is above the largest published value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from hyper_parallel.errors import abbreviated
from hyper_parallel.model._config_json import ConfigView
from hyper_parallel.received import Limits

CONFIG_LIMITS: Final = Limits(num_bytes=8 * 1024**2, num_elements=300_000, depth=30)
"""Limits of a config file."""


class _Count(NamedTuple):
    """Bound `most` on the magnitude of numbers whose config key matches `keys`; `published` is the largest in use."""

    label: str
    keys: re.Pattern[str]
    most: int
    published: str


_COUNTS: Final = (
    _Count("layers", re.compile(r"(?:^|_)n?_?(?:layers?|depths?|blocks)$"), 2**9, "315, in a merge of Llama 3.1"),
    _Count("labels", re.compile(r"(?:labels|classes|choices)$"), 100_000, "21,843, of ImageNet-21k"),
    _Count("experts", re.compile(r"experts"), 2**14, "2,048, in Switch-C"),
    _Count("vocabulary", re.compile(r"vocab"), 2**22, "1,114,112, in CANINE"),
    _Count("positions", re.compile(r"position|length|seq|window|context|max_"), 2**31 - 1, "10,485,760, in Llama 4"),
    _Count(
        "width", re.compile(r"size|dim|width|heads|hidden|channels|rank|features|embd|inner|^d_|state|groups|kernel"),
        2**20, "73,728, in PaLM",
    ),
)  # fmt: skip
"""Bounds by kind of number; a key belongs to the first matching row."""
_MOST_EXPERTS: Final = 2**17
"""Maximum product of layers and experts per layer; in Switch-C it is 30,720."""
_MOST: Final = 2**53
"""Largest allowed magnitude of all other whole numbers; other floats are not checked."""


def check_config(values: Mapping[str, Any], where: str) -> None:
    """Raise ModelUnreadable (HP305) if the magnitude of a number, or layers times experts, exceeds its bound."""
    config, largest = ConfigView(values, where), dict[str, int]()
    for key, number in _numbers(values, ""):
        name = key.rpartition(".")[2]
        kind = next((count for count in _COUNTS if count.keys.search(name)), None)
        limit = _MOST if kind is None else kind.most
        if isinstance(number, float) and (kind is None or kind.label == "positions"):
            continue  # not a count
        if not abs(number) <= limit:
            published = f"; the largest published is {kind.published}" if kind else ""
            config.refuse(
                f"`{key}` of the config is out of the range of all published models",
                got=abbreviated(number),
                allowed=f"at most {limit:,}{published}",
            )
        if kind is not None and isinstance(number, int):
            largest[kind.label] = max(largest.get(kind.label, 0), abs(number))
    experts = largest.get("experts", 0) * largest.get("layers", 0)
    if experts > _MOST_EXPERTS:
        config.refuse(
            "the config has more experts than any published model",
            got=f"{largest['layers']:,} layers, {largest['experts']:,} experts",
            allowed=f"at most {_MOST_EXPERTS:,} experts in all layers",
        )


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    """Yield every number in a config with its dotted key; a number in a list has the key of the list."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value
