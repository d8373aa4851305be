"""When a given strategy is refused: follow the hints of the refusals until the strategy is legal.

Every check knows the nearest legal value of what it checks, not what the next check says to it. Followed to the end,
their hints become one: all the changes that make the strategy legal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Strategy, Workload

MOST_REFUSALS: Final = 12
_CHANGE: Final = re.compile(r"\b((?:parallel|training)\.\w+)=(\[[^\]]*\]|[\w-]+)")


def follow_hints(
    error: HyperParallelError,
    strategy: Strategy,
    workload: Workload,
    check: Callable[[Strategy, Workload], None],
) -> str | None:
    """Changes that make a refused strategy legal, as overrides of a recipe; None when the hints do not lead there.

    Args:
        error: The refusal.
        strategy: What was refused.
        workload: Its workload.
        check: Raises when a strategy with a workload is not legal.
    """
    changes: dict[str, str] = {}
    for _ in range(MOST_REFUSALS):
        found = dict(_CHANGE.findall(error.hint or ""))
        if not found:
            return None
        strategy, workload = _changed(strategy, workload, found)
        changes |= found
        try:
            check(strategy, workload)
        except HyperParallelError as refused:
            error = refused
        else:
            return " ".join(_pasteable(key, value) for key, value in changes.items())
    return None


def _changed(
    strategy: Strategy, workload: Workload, changes: dict[str, str]
) -> tuple[Strategy, Workload]:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if section == "training":
            number: Any = int(value)
            workload = replace(workload, **{name: number})
            continue
        name = {"tp": "tp_x"}.get(name, name)
        known: Any = getattr(strategy, name)
        new: Any = value
        if isinstance(known, tuple):
            new = tuple(json.loads(value))
        elif isinstance(known, int):
            new = int(value)
        strategy = replace(strategy, **{name: new})
    return strategy, workload


def _pasteable(key: str, value: str) -> str:
    return f"'{key}={value}'" if value.startswith("[") else f"{key}={value}"
