"""Steps that `offload` refuses: before they run, and right after they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.backends.torch.memory import Captured
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.runtime._step_parts import schedulers_of


def refuse_compiled(step: Callable[..., Any], model: torch.nn.Module) -> None:
    """Refuse compiled code, which has no operator stream: under the recorder, torch runs it eagerly with other bits."""
    if hasattr(step, "_torchdynamo_orig_callable") or any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    ):
        raise CaptureUnsupported(
            "the step or its model is compiled; a memory plan runs operators one by one",
            hint="pass the module before compilation: `model._orig_mod` of `torch.compile(model)`",
        )


def refuse_odd_arguments(leaves: list[Any]) -> None:
    """Refuse arguments that are neither tensors nor plain values, because a change in them cannot be detected."""
    kinds = (
        torch.Tensor,
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
    )
    if odd := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, kinds)]:
        raise CaptureUnsupported(
            "the step was given something that is neither a tensor nor a plain value",
            got=odd[0],
            allowed="nests of tensors, numbers and texts",
            hint="pass its tensors, or let the step refer to it",
        )


def refuse_reads(captured: Captured, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a step whose Python code reads a number that differs in every step, such as the loss or a step counter.

    The guard on such a value would stop the next step in its middle, where the state is lost. Integers and booleans
    that depend on the batch are accepted, because they may repeat.
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
                "the optimizer counts its steps in Python",
                where=f"`{call.func}` reads `{name}`",
                got=kinds,
                hint="make it with `fused=True`, which keeps the count in a tensor"
                if fused
                else "with `capturable=True` an accelerator keeps the count in a tensor; or take "
                "`torch.optim.AdamW(..., fused=True)`",
            )
        if any(isinstance(value, float) for _, value in call.guards):
            raise CaptureUnsupported(
                "the step reads a number that differs from step to step",
                where=f"`{call.func}` on what `{name}` made",
                got=call.guards[0][1],
                hint="return `loss.detach()` instead of `loss.item()`, and read it outside of the step",
            )


def refuse_schedule(
    step: Callable[..., Any], captured: Captured, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Refuse a scheduler inside the step: its Python number would be constant in every planned step."""
    rates = {
        group["lr"].untyped_storage()._cdata
        for optimizer in optimizers
        for group in optimizer.param_groups
        if isinstance(group["lr"], torch.Tensor)
    }
    changed = {captured.state[s].untyped_storage()._cdata for s in captured.written_state}
    if schedulers_of(step) and not rates.isdisjoint(changed):
        raise CaptureUnsupported(
            "a scheduler changes the learning rate inside of the step",
            hint="call `scheduler.step()` after the step, outside of it",
        )
