"""Models, optimizers and schedulers that a user's step refers to, directly or through functions that it calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def models_of(step: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a step refers to, except submodules of others."""
    modules = _referenced_objects(step, torch.nn.Module)
    inside = {id(part) for value in modules for part in [*value.modules()][1:]}
    return [value for value in modules if id(value) not in inside]


def optimizers_of(step: Callable[..., Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a step refers to."""
    return _referenced_objects(step, torch.optim.Optimizer)


def schedulers_of(step: Callable[..., Any]) -> list[Any]:
    """Return the learning-rate schedulers that a step refers to."""
    return _referenced_objects(step, torch.optim.lr_scheduler.LRScheduler)


def _referenced_objects(step: Callable[..., Any], kind: type) -> list[Any]:
    return list({id(v): v for v in _values(step, set()) if isinstance(v, kind)}.values())


def _values(step: Callable[..., Any], seen: set[int]) -> Iterator[Any]:
    """Yield the values that a function and its callees refer to, and members of these lists, dicts and objects."""
    seen.add(id(step))
    values: list[Any] = []
    if isinstance(step, partial):
        values += [*step.args, *step.keywords.values()]
        step = step.func
    # Attributes are read of objects defined in the step's own module, and of plain namespaces.
    user_modules = getattr(step, "__module__", None), "types"
    if inspect.ismethod(step):
        values += [step.__self__, *vars(step.__self__).values()]
    try:
        scope = inspect.getclosurevars(step)
        values += [*scope.nonlocals.values(), *scope.globals.values()]
    except TypeError:  # a callable that is no Python function
        values += vars(step).values() if hasattr(step, "__dict__") else []
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        elif inspect.isroutine(value) and id(value) not in seen:
            if getattr(value, "__module__", None) in user_modules:
                yield from _values(value, seen)
        else:
            yield value
            if type(value).__module__ in user_modules and hasattr(value, "__dict__"):
                yield from vars(value).values()
