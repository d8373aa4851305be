"""Trial step of a named or user-defined optimizer on a small layer, before any rank starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyper_parallel.errors import Contradiction, ForkUnsafe
from hyper_parallel.runtime import World, launch, local_capacity

_Result = TypeVar("_Result")

_SIZE: Final = 4
_RANKS: Final = 2
_TIMEOUT_S: Final = 60.0
"""Timeout of a trial, which takes milliseconds; a user optimizer may hang."""


def check_trial_step(
    build: Callable[[nn.Module], torch.optim.Optimizer],
    name: str,
    where: str,
    hint: str,
    *,
    sharded: bool,
    replicated: bool,
) -> None:
    """Check that an optimizer can update a small linear layer, first with ordinary tensors, then with DTensors.

    `build` returns the optimizer of a module. `hint` is the hint of the error. `sharded` and `replicated` tell how the
    run distributes parameters; if both are False, DTensors are not tried. The trial runs on a CPU. An optimizer that
    fails on ordinary tensors may need an accelerator, so it is accepted on machines that have an accelerator.

    Raises:
        Contradiction: HP104 with the first line of the optimizer's error.
        RankFailed: HP601 when the trial crashed its process or hung.
    """
    degrees = (_RANKS,) if not replicated else (_RANKS, _RANKS if sharded else 1)

    def trial(_: int) -> tuple[str | None, str | None]:
        layer = nn.Linear(_SIZE, _SIZE)
        plain = _step_failure(build(layer), layer)
        if plain is not None or not (sharded or replicated):
            return plain, None
        with World.fake(0, math.prod(degrees)):
            layer = _parallelized_layer(degrees)
            return None, _step_failure(build(layer), layer)

    plain, failure = _in_child_process(trial)
    if plain is not None:
        if local_capacity().is_cpu:
            raise _refusal(name, where, hint, "a dense layer on a CPU", plain)
        return
    if failure is not None:
        what = "sharded parameters" if sharded else "replicated parameters"
        raise _refusal(name, where, hint, what, failure)


def resumed_failure(
    build_saved: Callable[[nn.Module], torch.optim.Optimizer],
    build_resumed: Callable[[nn.Module], torch.optim.Optimizer],
) -> str | None:
    """Return the error of a step of the resumed optimizer from the state of the saved one; None if it succeeds.

    Both functions return the optimizer of a module. The result is also None if the saved optimizer fails on this CPU.
    """

    def trial(_: int) -> str | None:
        layer = nn.Linear(_SIZE, _SIZE)
        saved = build_saved(layer)
        if _step_failure(saved, layer) is not None:
            return None  # the saved optimizer may need an accelerator
        continued = build_resumed(layer)
        continued.state.update(saved.state)
        return _step_failure(continued, layer)

    return _in_child_process(trial)


def _in_child_process(trial: Callable[[int], _Result]) -> _Result:
    """Run a trial in a child process: if an optimizer initialised the accelerator here, later forks would fail."""
    try:
        return launch(trial, 1, timeout_s=_TIMEOUT_S)[0]
    except ForkUnsafe:  # a rank with a process group never forks later
        return trial(0)


def _step_failure(optimizer: torch.optim.Optimizer, layer: nn.Module) -> str | None:
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # a user optimizer may raise any exception
        text = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return f"no state {text}" if isinstance(error, KeyError) else text
    return None


def _parallelized_layer(degrees: tuple[int, ...]) -> nn.Module:
    """Return a linear layer sharded over the last mesh axis and replicated over the first of two axes."""
    layer = nn.Linear(_SIZE, _SIZE)
    mesh = DeviceMesh("cpu", torch.arange(math.prod(degrees)).view(degrees))
    placements = [*[Replicate()] * (len(degrees) - 1), Shard(0)]
    for name, parameter in list(layer.named_parameters()):
        tensor = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
        setattr(layer, name, nn.Parameter(tensor))
    return layer


def _refusal(name: str, where: str, hint: str, what: str, error: str) -> Contradiction:
    return Contradiction(
        f"a step of {name} fails on {what}: {error}",
        where=where,
        got=f"optimizer={name}",
        allowed="an optimizer that works element by element: adamw, adam, sgd",
        hint=hint,
    )
