"""Model and optimizer of a recorded step, and detection of changes since the recording.

A program repeats the recorded step, so it cannot react to changes of Python state: a new learning rate, `eval()`, a
hook, a frozen parameter, another parameter group. Such changes are therefore refused before a planned step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hyper_parallel.backends.torch.memory._untracked_effects import TORCH_ATTRIBUTES, python_attributes
from hyper_parallel.errors import StepChanged

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_RECAPTURE = "undo the change, or call `step.close()` and create the step again with `hp.offload`"
_CONSTANT = "the recorded step uses it as a constant; for `OneCycleLR`, pass `cycle_momentum=False`"
_OF_GROUP = {
    "lr": "make it a tensor before the capture, as in `lr=torch.tensor(1e-3)`: every step reads its value",
    "momentum": _CONSTANT,
    "betas": _CONSTANT,
}

_LISTS = (list, tuple, set, frozenset, deque)
_CONTAINERS = (dict, *_LISTS)
_Fact = tuple[tuple[str, ...], str, Any]
"""(parts of the name of a module, parameter, ...; property; value). The empty property is the object's identity."""


class _Identity(int):
    """`id` of an object; error messages do not show it."""


def _path(owner: Sequence[str]) -> str:
    return ".".join(filter(None, owner)) or "the model"


class CaptureSource:
    """Properties of model and optimizer that a recorded step depends on.

    Args:
        model: Model of the step, right after the recording, or a `ModuleList` of several.
        optimizers: Optimizers of the models; none: inference.
    """

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers
        self._hooks: list[RemovableHandle] = []
        # Only the current keys are compared later, because a scheduler adds entries to the groups.
        self._keys = [[list(group) for group in item.param_groups] for item in optimizers]
        self._recorded = list(self._facts({}))
        self._stamp: _IdentityStamp | None = None

    def check(self) -> None:
        """Raise StepChanged (HP512) for the first property of model and optimizers that differs from the recording."""
        if self._stamp is not None and self._stamp.is_unchanged():
            return
        seen: dict[int, Any] = {}
        now = list(self._facts(seen))
        if now == self._recorded:
            self._stamp = _IdentityStamp(self._model, self._optimizers, seen)
            return
        pairs = zip(self._recorded, now, strict=False)
        changed = next(((a, b) for a, b in pairs if a != b), None)
        if changed is None:
            self._refuse_added(now)
        (owner, prop, recorded), (*place, value) = changed
        if (owner, prop) != tuple(place):
            self._refuse_added(now)
        shown = not isinstance(value, (_Identity, list))
        change = f"{prop} of {_path(owner)} has changed" if prop else f"{_path(owner)} has been replaced"
        raise StepChanged(
            f"{change} since the step was recorded",
            got=value if shown else None,
            allowed=recorded if shown else None,
            hint=_OF_GROUP.get(prop, _RECAPTURE) if owner[0].startswith("parameter group") else _RECAPTURE,
        )

    def _refuse_added(self, now: Sequence[_Fact]) -> NoReturn:
        before, after = (dict.fromkeys(owner for owner, *_ in facts) for facts in (self._recorded, now))
        added = next((owner for owner in after if owner not in before), None)
        gone = next((owner for owner in before if owner not in after), None)
        what = "a part" if added is None and gone is None else _path(added or gone or ())
        raise StepChanged(
            f"{what} of the model or the optimizer was added, removed or moved after the step was recorded",
            hint=_RECAPTURE,
        )

    def _facts(self, seen: dict[int, Any]) -> Iterator[_Fact]:
        """Yield properties of modules, optimizers, tensors and hooks; add the inspected objects to `seen` by id."""
        for name, module in self._model.named_modules():
            yield (name,), "`training`", module.training
            for key, value in python_attributes(module, seen):
                yield (name, key), "the value", value
            yield (name,), "", _Identity(id(module))
            hooks = [getattr(module, kind).items() for kind in _HOOKS]
            yield (name,), "the list of hooks", [k for kind in hooks for k, hook in kind if hook is not _refuse]
            for key, p in module._parameters.items():
                if p is not None:
                    yield (name, key), "", _Identity(id(p))
                    yield (name, key), "the gradient tensor", _Identity(id(p.grad))
                    yield (name, key), "`requires_grad`", p.requires_grad
                    hooks = p._backward_hooks, p._post_accumulate_grad_hooks
                    yield (name, key), "the list of hooks", [k for kind in hooks for k in kind or ()]
            for key, buffer in module._buffers.items():
                yield (name, key), "", _Identity(id(buffer))
        for item, keys in zip(self._optimizers, self._keys, strict=True):
            for number, group in enumerate(item.param_groups):
                for key in keys[number] if number < len(keys) else group:
                    value = list(map(id, group[key])) if key == "params" else group[key]
                    tensor = isinstance(value, torch.Tensor)
                    yield (f"parameter group {number}",), key, _Identity(id(value)) if tensor else value
            for number, slots in enumerate(item.state.values()):
                tensors = [id(v) for v in slots.values() if isinstance(v, torch.Tensor)]
                yield (f"optimizer parameter {number}",), "a state tensor", tensors

    def block_use(self) -> None:
        """Make model and optimizers raise HP512 when they are run, saved or loaded: their tensors have no bytes."""
        parts = self._model if isinstance(self._model, torch.nn.ModuleList) else ()
        for model in (self._model, *parts):
            if next(model.parameters(), None) is not None:  # excludes loss modules
                self._hooks.append(model.register_forward_pre_hook(_refuse, prepend=True))
            self._hooks.append(model.register_state_dict_pre_hook(_refuse))
            self._hooks.append(model.register_load_state_dict_pre_hook(_refuse))
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(_refuse))
            self._hooks.append(optimizer.register_state_dict_pre_hook(_refuse))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(_refuse))

    def allow_use(self) -> None:
        """Undo `block_use`, because model and optimizers own their bytes again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _IdentityStamp:
    """Identities of all objects on which the properties in `CaptureSource` depend.

    `seen` has, by id, the Python objects that were inspected to read the properties. Equal identities imply equal
    properties, and comparing identities in every step takes less time than comparing properties.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], seen: dict[int, Any]
    ) -> None:
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        # Attributes of a module except torch's own irrelevant ones; at least two, so that `itemgetter` returns a tuple.
        wanted = {"training", "_parameters", "_buffers", "_modules", *_HOOKS}
        self._get = [  # a module of `torch.compile` has its `training` flag in the wrapped module
            itemgetter("_modules", *wanted.intersection(vars(item)), *(set(vars(item)) - TORCH_ATTRIBUTES))
            for item in self._modules
        ]
        inside: list[Any] = list(seen.values())
        for module in self._modules:
            inside += [module._parameters, module._buffers, module._modules]
            inside += [getattr(module, kind) for kind in _HOOKS]
        for p in self._parameters:
            inside += filter(None, (p._backward_hooks, p._post_accumulate_grad_hooks))
        for optimizer in optimizers:
            groups = optimizer.param_groups
            inside += [optimizer, groups, *groups, *(group["params"] for group in groups)]
            inside += [optimizer.state, *optimizer.state.values()]
        leaves = [item for item in inside if not isinstance(item, _CONTAINERS)]
        self._owners = [item for item in leaves if hasattr(item, "__dict__")]
        self._arrays = [(item, item.tobytes()) for item in leaves if isinstance(item, np.ndarray)]
        containers = [item for item in inside if isinstance(item, _CONTAINERS)]
        containers += map(vars, self._owners)
        self._empty = [item for item in containers if not item]
        self._maps = [item for item in containers if item and isinstance(item, dict)]
        self._lists = [item for item in containers if item and not isinstance(item, dict)]
        self._objects_before, self._sizes = list(self._objects()), self._sizes_now()

    def is_unchanged(self) -> bool:
        try:
            return (
                not any(self._empty)
                and self._sizes_now() == self._sizes
                and all(map(is_, self._objects(), self._objects_before))
                and all(item.tobytes() == content for item, content in self._arrays)
            )
        except KeyError:  # an attribute has been deleted
            return False

    def _objects(self) -> Iterator[Any]:
        flatten = chain.from_iterable
        modules = (get(vars(item)) for get, item in zip(self._get, self._modules, strict=True))
        maps = chain(flatten(self._maps), flatten(map(dict.values, self._maps)))
        return chain(flatten(modules), map(vars, self._owners), maps, flatten(self._lists))

    def _sizes_now(self) -> list[Any]:
        """Return the sizes of all containers, and per parameter `requires_grad` and the ids of gradient and hooks."""
        own = [
            (id(p.grad), p.requires_grad, id(p._backward_hooks), id(p._post_accumulate_grad_hooks))
            for p in self._parameters
        ]
        containers = chain(map(vars, self._modules), self._maps, self._lists)
        return [*map(len, containers), *own]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise StepChanged(
        "a memory plan manages this model and its optimizer, so their tensors are empty outside of the planned step",
        hint="use them inside `with step.materialized():`, or call `step.close()`",
    )
