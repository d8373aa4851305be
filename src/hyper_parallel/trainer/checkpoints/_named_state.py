"""State of a model and its optimizer as named tensors and JSON values.

Parameters and buffers are named `model.NAME`. Optimizer state is named `optimizer.state.NAME.KEY`, where NAME is the
name of the parameter. Names do not depend on the layout. Each parameter group is stored as the names of its parameters
and its hyperparameters, such as the learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.weights.initialization import canonical_name, is_adapter
from hyper_parallel.backends.torch.weights.lora import has_adapters
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.checkpoints.extra_state import json_value
from hyper_parallel.trainer.checkpoints.index import MODEL, SLOTS, StoredGroup
from hyper_parallel.trainer.checkpoints.pieces import dtype_name


@dataclass(frozen=True, slots=True)
class State:
    """State of one rank to save: tensors by name, non-tensor optimizer state by name, and parameter groups."""

    tensors: dict[str, Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    groups: tuple[StoredGroup, ...] = ()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model, by name with the prefix `model.`.

    For a model with adapters, return only the adapters and the other trained parameters.

    Raises:
        BadValue: HP102 for a module whose extra state (`get_extra_state`) is neither a tensor nor None.
    """
    tensors = {}
    trained = None
    if has_adapters(model):
        trained = {n for n, p in model.named_parameters() if p.requires_grad or is_adapter(n)}
    for name, value in model.state_dict(keep_vars=True).items():
        if trained is not None and name not in trained:
            continue
        if isinstance(value, Tensor):
            tensors[MODEL + canonical_name(name)] = value
        elif value is not None:
            raise BadValue(
                f"`{name}` of the model's state dict cannot be saved: it is not a tensor",
                got=type(value).__name__,
                allowed="tensors, as parameters and buffers",
                hint="replace `get_extra_state` by a buffer: `module.register_buffer(name, tensor)`",
            )
    return tensors


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """Return the state of a model and its optimizer on this rank; without an optimizer, only that of the model.

    Raises:
        BadValue: HP102 for state that is neither a tensor nor a JSON value, or for an optimizer with a parameter that
            is not part of the model.
    """
    state = State(model_tensors(model))
    if optimizer is None:
        return state
    groups = []
    for group, members in groups_of(model, optimizer):
        for name, parameter in members.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                full = f"{SLOTS}{name}.{key}"
                if isinstance(value, Tensor):
                    state.tensors[full] = value
                else:
                    state.values[full] = json_value(full, value)
        groups.append(StoredGroup(tuple(members), _values(group)))
    return State(state.tensors, state.values, tuple(groups))


def trained_tensors(model: nn.Module, state: State) -> set[str]:
    """Return the names of the tensors in `state` that are trained parameters or optimizer state."""
    trained = {canonical_name(n) for n, p in model.named_parameters() if p.requires_grad}
    return {n for n in state.tensors if n.startswith(SLOTS) or n.removeprefix(MODEL) in trained}


def group_keys(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """Return a dict from parameter name to the hyperparameter keys of its parameter group, such as `lr`."""
    return {name: list(_values(group)) for group, members in groups_of(model, optimizer) for name in members}


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Return (group, dict from name to parameter) for each nonempty parameter group of an optimizer.

    Raises:
        BadValue: HP102 when the optimizer has a parameter that is not part of the model.
    """
    names = {id(p): canonical_name(n) for n, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(p) not in names for p in group["params"]):
            raise BadValue(
                "the optimizer has a parameter that does not belong to the model",
                allowed="parameters of the model that is saved or loaded",
                hint="create the optimizer from `model.parameters()`, after `hp.parallelize`",
            )
        if group["params"]:
            groups.append((group, {names[id(p)]: p for p in group["params"]}))
    return groups


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: json_value(f"optimizer.{key}", value.item() if isinstance(value, Tensor) else value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def tensor_facts(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return a dict from tensor name to (shape, dtype name)."""
    return {name: (tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}


def joined_groups(groups: list[StoredGroup]) -> tuple[StoredGroup, ...]:
    """Merge parameter groups with equal hyperparameters, such as those of several pipeline stages."""
    merged: dict[str, tuple[dict[str, None], dict[str, Any]]] = {}
    for group in groups:
        names, _ = merged.setdefault(json.dumps(group.values, sort_keys=True), ({}, group.values))
        names.update(dict.fromkeys(group.parameters))
    return tuple(StoredGroup(tuple(names), values) for names, values in merged.values())
