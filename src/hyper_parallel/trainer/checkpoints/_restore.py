"""Restoring a model and an optimizer from a checkpoint: compare names and shapes, allocate optimizer state, read.

The fingerprint of a checkpoint is a dict of JSON values, such as the parameter dtype and the name of the optimizer. A
resumed run must have the same fingerprint. The index lists the stored tensors and parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.backends.torch.weights.shard_ranges import copy_parts, local, local_boxes
from hyper_parallel.backends.torch.weights.tensor_files import Stored, open_tensors
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.ir import Box
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints._named_state import groups_of
from hyper_parallel.trainer.checkpoints.index import (
    MODEL,
    SLOTS,
    Index,
    Piece,
    StoredTensor,
    piece_key,
)

_SCHEDULER_KEYS: Final = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Keys that torch's learning-rate schedulers add to the parameter groups of an optimizer."""

WITHOUT_OPTIMIZER: Final = type(None).__name__.lower()
"""Name of the optimizer in the fingerprint of a checkpoint without optimizer."""

_DECAY: Final = "weight_decay"
_OTHER_MODEL: Final = f"load a checkpoint of this model, or start over with `{files.START_OVER}`"
_OTHER_RUN: Final = f"use the settings of the saved run, or start over with `{files.START_OVER}`"


def _mismatch(problem: str, path: Path | None = None, hint: str = _OTHER_RUN, **values: Any) -> CheckpointMismatch:
    where = None if path is None else str(path)
    return CheckpointMismatch(problem, where=where, hint=hint, **values)


def compare_fingerprints(saved: dict[str, Any], expected: dict[str, Any], path: Path, index: Index) -> None:
    """Raise CheckpointMismatch (HP702) for the first key whose value differs between two fingerprints.

    The key `optimizer` is ignored if the checkpoint has no optimizer state.
    """
    for key in [*expected, *(k for k in saved if k not in expected)]:
        if key == "optimizer" and not index.groups:
            continue
        if saved.get(key) != expected.get(key):
            problem = f"the checkpoint was saved by a run with another `{key}`"
            values = {"got": expected.get(key), "allowed": saved.get(key)}
            raise _mismatch(problem, path / files.MANIFEST, **values)


def compare_tensors(expected: dict[str, Any], index: Index, path: Path) -> None:
    """Raise CheckpointMismatch (HP702) if names, shapes or dtypes of the model's tensors differ from the index.

    `expected` is a dict from the model's tensor names, over all ranks, to (shape, dtype name).
    """
    saved = {k: (t.shape, t.dtype) for k, t in index.tensors.items() if k.startswith(MODEL)}
    for key in expected:
        if key not in saved:
            problem = f"the checkpoint has no tensor `{key}`, which the model needs"
            raise _mismatch(problem, path, _OTHER_MODEL)
    for key, stored in saved.items():
        if key not in expected:
            problem = f"the checkpoint holds `{key}`, which the model does not have"
            raise _mismatch(problem, path, _OTHER_MODEL)
        if expected[key] != stored:
            problem = f"`{key}` has a different shape or dtype in the checkpoint"
            got, allowed = (f"{shape} {dtype}" for shape, dtype in (expected[key], stored))
            raise _mismatch(problem, path, _OTHER_MODEL, got=got, allowed=allowed)


def check_groups(saved: Mapping[str, Any], index: Index, path: Path) -> None:
    """Raise CheckpointMismatch (HP702) if the fingerprint names an optimizer but the index has no optimizer state."""
    name = saved.get("optimizer")
    if not index.groups and name not in (None, WITHOUT_OPTIMIZER):
        hint = f"load another checkpoint, or start over with `{files.START_OVER}`"
        problem = "the checkpoint contains no optimizer state"
        raise _mismatch(problem, path, hint, allowed=f"the state of {name}")


def check_optimizer(group_keys: Mapping[str, list[str]], index: Index, path: Path) -> None:
    """Raise CheckpointMismatch (HP702) if this run lacks a saved parameter or hyperparameter, or adds a parameter.

    Hyperparameters that only a learning-rate scheduler adds may be missing. `group_keys` is a dict from parameter name,
    over all ranks, to the hyperparameter names of its parameter group, such as `lr`.
    """
    saved = {name: group.values for group in index.groups for name in group.parameters}
    for name in group_keys:
        if name not in saved:
            raise _mismatch(
                f"the checkpoint has no optimizer state for `{name}`, which the saved run did not train",
                path,
                f"train the parameters of the saved run, or start over with `{files.START_OVER}`",
            )
    for name, values in saved.items():
        keys = group_keys.get(name)
        for key in [""] if keys is None else [k for k in values if k not in keys]:
            what = f"`optimizer.{name}`" if keys is None else f"`optimizer.{key}` of `{name}`"
            if key not in _SCHEDULER_KEYS:
                problem = f"the checkpoint holds {what}, which this run does not have"
                raise _mismatch(problem, path)


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, index: Index, path: Path
) -> dict[str, Tensor]:
    """Restore an optimizer's hyperparameters and non-tensor state from a checkpoint, and allocate its state tensors.

    A parameter without saved state gets empty state. If the saved weight decay differs within a parameter group, the
    weight decay of the group does not change.

    Returns:
        State tensors of this rank by stored name, for the caller to fill.

    Raises:
        CheckpointMismatch: HP702 for a hyperparameter of a different type, for other hyperparameters that differ within
            a group, or for state of a sharded parameter with another shape.
        BadValue: HP102 when the optimizer has a parameter that is not part of the model.
    """
    saved = {name: group.values for group in index.groups for name in group.parameters}
    stored: dict[str, dict[str, StoredTensor | Any]] = {}
    for full, entry in [*index.tensors.items(), *index.values.items()]:
        if full.startswith(SLOTS):
            name, _, key = full.removeprefix(SLOTS).rpartition(".")
            stored.setdefault(name, {})[key] = entry
    targets = {}
    for group, members in groups_of(model, optimizer):
        values = dict(saved[next(iter(members))])
        if any(saved[n].get(_DECAY) != values.get(_DECAY) for n in members):
            # The saved run grouped parameters differently by weight decay.
            values.pop(_DECAY, None)
        numbers = {n: {k: v for k, v in saved[n].items() if k in values} for n in members}
        if mismatched := next((n for n in members if numbers[n] != values), None):
            raise _mismatch(
                f"the saved optimizer settings of `{mismatched}` differ from those of other parameters in its group",
                path,
            )
        for key, value in values.items():
            old = group.get(key)
            if key in group and not _fits(old, value):
                problem = f"`optimizer.{key}` has a value of a different type in the checkpoint"
                allowed = f"a value of the type of {old!r:.80}"
                raise _mismatch(problem, path, got=f"{value!r:.80}", allowed=allowed)
            if isinstance(old, Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(old, tuple) else value
        for name, parameter in members.items():
            slots = stored.get(name, {})
            previous = optimizer.state.pop(parameter, {})
            if slots:
                optimizer.state[parameter] = {}
            for key, entry in slots.items():
                value = entry
                if isinstance(entry, StoredTensor):
                    value = _state_tensor(f"{SLOTS}{name}.{key}", entry, previous.get(key), parameter, group)
                    targets[f"{SLOTS}{name}.{key}"] = value
                optimizer.state[parameter][key] = value
    return targets


def _fits(old: object, value: object) -> bool:
    """Return whether a saved `value` may replace the hyperparameter `old`; numbers must be finite, None fits all."""
    if old is None or value is None:
        return True
    if isinstance(old, (list, tuple)):
        same = isinstance(value, list) and len(value) == len(old)
        return same and all(map(_fits, old, value))  # type: ignore[arg-type]
    if isinstance(old, (bool, str, dict)):
        return isinstance(value, type(old))
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _state_tensor(name: str, stored: StoredTensor, old: object, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return `old` if shape and dtype match, else a new uninitialized tensor.

    Raise HP702 for state of a sharded parameter whose shape differs from the parameter's shape.
    """
    dtype = getattr(torch, stored.dtype)
    if isinstance(old, Tensor) and tuple(old.shape) == stored.shape and old.dtype == dtype:
        return old
    if name.endswith(".step"):
        on_device = group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        return torch.empty(stored.shape, dtype=dtype, device=device)
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if isinstance(parameter, DTensor):
        problem = f"`{name}` has a different shape than its parameter, which is sharded"
        raise _mismatch(problem, got=stored.shape, allowed=tuple(parameter.shape))
    return torch.empty(stored.shape, dtype=dtype, device=parameter.device)


@torch.no_grad()
def read_tensors(targets: dict[str, Tensor], index: Index, path: Path) -> None:
    """Read this rank's shards of `targets`, a dict from stored name to tensor, in place from the checkpoint `path`."""
    opened: dict[str, dict[str, Stored]] = {}

    def read(piece: Piece, box: Box) -> Tensor:
        if piece.file not in opened:
            opened[piece.file] = open_tensors(path / piece.file)
        stored = opened[piece.file][piece_key(box.name, piece.offset)]
        return stored.read(box.within(piece.box(box.name)))

    for name, target in targets.items():
        stored = [(piece, piece.box(name)) for piece in index.tensors[name].pieces]
        copy_parts(local(target).detach(), local_boxes(target, name), stored, read)


def stored_dtypes(index: Index) -> dict[str, torch.dtype]:
    """Return the dtype of each stored parameter and buffer, by its name in the model."""
    return {
        name.removeprefix(MODEL): getattr(torch, tensor.dtype)
        for name, tensor in index.tensors.items()
        if name.startswith(MODEL)
    }
