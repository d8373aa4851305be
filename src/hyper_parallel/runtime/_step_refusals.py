"""Search for the models and optimizers to which a user's training step refers, and checks of a step for `offload`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hyper_parallel.backends.torch.memory import Captured
from hyper_parallel.errors import CaptureUnsupported


def models_of(step: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules to which a step function refers, except submodules of other returned modules."""
    modules = referenced_objects(step, torch.nn.Module)
    inside = {id(part) for value in modules for part in [*value.modules()][1:]}
    return [value for value in modules if id(value) not in inside]


def referenced_objects(step: Callable[..., Any], kind: type) -> list[Any]:
    """Return the objects of a class to which a step function refers, each once."""
    return list({id(v): v for v in _values(step, set()) if isinstance(v, kind)}.values())


def _values(step: Callable[..., Any], seen: set[int]) -> Iterator[Any]:
    """Yield the objects to which a function refers: closure variables, globals, arguments of `partial`, `self`.

    Elements of lists, tuples and dicts are included, attributes of objects whose class is in the step's module, and
    objects to which other functions of that module refer.
    """
    seen.add(id(step))
    values: list[Any] = []
    if isinstance(step, partial):
        values += [*step.args, *step.keywords.values()]
        step = step.func
    # Attributes are searched only in objects from the step's module and in `types.SimpleNamespace`.
    user_modules = getattr(step, "__module__", None), "types"
    if inspect.ismethod(step):
        values += [step.__self__, *vars(step.__self__).values()]
    try:
        scope = inspect.getclosurevars(step)
        values += [*scope.nonlocals.values(), *scope.globals.values()]
    except TypeError:  # not a Python function
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


def refuse_compiled(step: Callable[..., Any], model: torch.nn.Module) -> None:
    """Raise HP511 for a compiled step or model: torch would record its eager form, which rounds differently."""
    if hasattr(step, "_torchdynamo_orig_callable") or any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()
    ):
        raise CaptureUnsupported(
            "the step or its model is compiled by torch.compile, but a memory plan runs single operators",
            hint="pass the step and the model before compilation, for example `model._orig_mod`",
        )


def refuse_odd_arguments(leaves: list[Any]) -> None:
    """Raise HP511 for arguments that are neither tensors nor plain values, because their changes are undetectable."""
    kinds = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
    if odd := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, kinds)]:
        raise CaptureUnsupported(
            "an argument of the step is neither a tensor nor a plain value",
            got=odd[0],
            allowed="tensors, numbers and strings, also nested in lists, tuples and dicts",
            hint="pass its tensors instead, or refer to the object inside the step",
        )


def refuse_reads(captured: Captured, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise HP511 if the step's Python code reads a float that changes between steps, or any optimizer state.

    A planned step compares every number that Python reads with its recorded value. A difference ends the step halfway,
    when the state cannot be restored. Integers and booleans that are no optimizer state are accepted: they may repeat.
    """
    program = captured.program
    varies = {*captured.input_storages, *captured.written_state}
    for call, operator in zip(captured.calls, program.operators, strict=True):
        read = [s for s in operator.reads if s in varies]
        varies.update((*operator.allocs, *operator.writes) if read or operator.ordered else ())
        if not (read and call.guards):
            continue
        name = program.storages[read[0]].name
        if any(program.storages[s].kind == "optimizer" for s in read):
            kinds = [type(optimizer).__name__ for optimizer in optimizers]
            fused = any("fused" in optimizer.defaults for optimizer in optimizers)
            raise CaptureUnsupported(
                "the optimizer counts its steps in Python, so every planned step would repeat one count",
                where=f"`{call.func}` reads `{name}`",
                got=kinds,
                hint="create the optimizer with `fused=True`, which keeps the count in a tensor"
                if fused
                else (
                    "with `capturable=True` an accelerator keeps the count in a tensor; or use "
                    "`torch.optim.AdamW(..., fused=True)`"
                ),
            )
        if any(isinstance(value, float) for _, value in call.guards):
            raise CaptureUnsupported(
                "the step reads a number that changes between steps",
                where=f"`{call.func}` on the result of `{name}`",
                got=call.guards[0][1],
                hint="return `loss.detach()` instead of `loss.item()`, and read the loss outside of the step",
            )


def refuse_schedule(step: Callable[..., Any], captured: Captured, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise HP511 if the step calls a learning-rate scheduler, because planned steps would repeat the recorded rate."""
    rates = {
        group["lr"].untyped_storage()._cdata
        for optimizer in optimizers
        for group in optimizer.param_groups
        if isinstance(group["lr"], torch.Tensor)
    }
    changed = {captured.state[s].untyped_storage()._cdata for s in captured.written_state}
    schedulers = referenced_objects(step, torch.optim.lr_scheduler.LRScheduler)
    if schedulers and not rates.isdisjoint(changed):
        raise CaptureUnsupported(
            "a scheduler changes the learning rate inside of the step",
            hint="call `scheduler.step()` outside of the step, after it",
        )
