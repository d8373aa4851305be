"""When a given strategy is refused: follow the changes that the refusals name until the strategy is legal.

Every check knows the nearest legal value of what it checks, not what the next check asks of it. Followed to the end,
their changes become one: all that make the strategy legal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Strategy, Workload

MOST_REFUSALS: Final = 12


def follow_changes(
    error: HyperParallelError,
    strategy: Strategy,
    workload: Workload,
    check: Callable[[Strategy, Workload], None],
) -> dict[str, object]:
    """Recipe keys and values that make a refused strategy legal; empty when the refusals do not lead there.

    Args:
        error: The refusal.
        strategy: What was refused.
        workload: Its workload.
        check: Raises when a strategy with a workload is not legal.
    """
    changes: dict[str, object] = {}
    for _ in range(MOST_REFUSALS):
        if not error.changes:
            return {}
        strategy, workload = _changed(strategy, workload, error.changes)
        changes |= error.changes
        try:
            check(strategy, workload)
        except HyperParallelError as refused:
            error = refused
        else:
            return changes
    return {}


def _changed(
    strategy: Strategy, workload: Workload, changes: Mapping[str, Any]
) -> tuple[Strategy, Workload]:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if section == "training":
            workload = replace(workload, **{name: value})
        else:
            strategy = replace(strategy, **{"tp_x" if name == "tp" else name: value})
    return strategy, workload
