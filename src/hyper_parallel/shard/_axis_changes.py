"""Recipe changes that use FSDP instead of another parallel axis, for the hints of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy

_AXES = {"parallel.pp": "pp", "parallel.cp": "cp", "parallel.tp": "tp", "parallel.tp_x": "tp", "parallel.ep": "ep"}
_PIPELINE = {"virtual_stages": 1, "stage_layers": (), "schedule_file": ""}
"""Settings that require a pipeline, with their defaults."""


def without_axes(strategy: Strategy, *axes: str) -> dict[str, object]:
    """Return recipe changes, as a dict from key to value, that remove `axes` (pp, cp, tp, ep) on the same ranks.

    Ranks of pp, cp and tp become ranks of `dp_shard`. Pipeline and overlap settings that then lack an axis get
    their defaults.
    """
    ranks = 1
    changes: dict[str, object] = {}
    for axis in axes:
        names = ("tp_x", "tp_y") if axis == "tp" else (axis,)
        changes |= {f"parallel.{name}": 1 for name in names}
        ranks *= 1 if axis == "ep" else getattr(strategy, axis)
    if ranks > 1:
        changes["parallel.dp_shard"] = strategy.dp_shard * ranks
    if "pp" in axes:
        values = {name: getattr(strategy, name) for name in _PIPELINE}
        changes |= {f"parallel.{n}": default for n, default in _PIPELINE.items() if values[n] != default}
    tp, ep = ("tp" not in axes and strategy.tp > 1), ("ep" not in axes and strategy.ep > 1)
    overlap = strategy.overlap
    if not tp and not ep and overlap != Overlap():
        changes["overlap"] = "none"
    elif not tp and overlap.block_executor != "serial":
        changes["overlap.tp"] = "none"
    elif not ep and overlap.ep_chunks > 1:
        changes["overlap.ep"] = "none"
    return changes


def _complete(error: UnsupportedSharding, strategy: Strategy) -> None:
    axes = dict.fromkeys(axis for key, axis in _AXES.items() if error.changes.get(key) == 1)
    used = [axis for axis in axes if getattr(strategy, axis) > 1]
    if used:
        removed = without_axes(strategy, *used)
        rest = {key: value for key, value in error.changes.items() if key not in (*_AXES, *removed)}
        error.changes = removed | rest
        error.hint = None


@contextmanager
def completed_changes(strategy: Strategy) -> Iterator[None]:
    """If an UnsupportedSharding raised in this context removes axes, add the changes of `without_axes` to its hint."""
    try:
        yield
    except UnsupportedSharding as error:
        _complete(error, strategy)
        raise
