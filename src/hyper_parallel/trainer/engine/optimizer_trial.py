"""One step of a user's optimizer on a small layer, before any rank starts."""

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
"""Seconds of a trial, which takes milliseconds; code of any optimizer may hang."""


def check_trial_step(
    build: Callable[[nn.Module], torch.optim.Optimizer],
    name: str,
    where: str,
    *,
    sharded: bool,
    replicated: bool,
) -> None:
    """Refuse an optimizer whose step fails on parameters as a layout leaves them.

    An optimizer whose step fails on a plain layer too may need the accelerator of this machine, and passes.

    Args:
        build: Makes the optimizer of a module.
        name: Its name in the recipe.
        where: Origin of the name.
        sharded: The layout shards parameters.
        replicated: The layout replicates parameters.

    Raises:
        Contradiction: HP104 with the first line of the error.
        RankFailed: HP601 when the trial ended its process or hung.
    """
    degrees = (_RANKS,) if not replicated else (_RANKS, _RANKS if sharded else 1)

    def trial(_: int) -> tuple[str | None, str | None]:
        """Return the failures on a plain layer and on one that is laid out."""
        plain = _failure(build, nn.Linear(_SIZE, _SIZE))
        if plain is not None or not (sharded or replicated):
            return plain, None
        with World.fake(0, math.prod(degrees)):
            return None, _failure(build, _laid_out(degrees))

    plain, failure = _in_own_process(trial)
    if plain is not None:
        if local_capacity().is_cpu:
            raise _refusal(name, where, "a dense layer on a CPU", plain)
        return
    if failure is not None:
        what = "sharded parameters" if sharded else "replicated parameters"
        raise _refusal(name, where, what, failure)


def resumed_failure(
    before: Callable[[nn.Module], torch.optim.Optimizer],
    now: Callable[[nn.Module], torch.optim.Optimizer],
) -> str | None:
    """Return why an optimizer cannot continue from the state of another one; None: it can.

    Args:
        before: Makes the optimizer whose state was saved.
        now: Makes the optimizer that continues.
    """

    def trial(_: int) -> str | None:
        layer = nn.Linear(_SIZE, _SIZE)
        saved = before(layer)
        if _step_failure(saved, layer) is not None:
            return None  # it needs the accelerator of this machine
        continued = now(layer)
        continued.state.update(saved.state)
        return _step_failure(continued, layer)

    return _in_own_process(trial)


def _in_own_process(trial: Callable[[int], _Result]) -> _Result:
    """Run a trial in a child: optimizers of torch start the driver of an accelerator, which no fork survives."""
    try:
        return launch(trial, 1, timeout_s=_TIMEOUT_S)[0]
    except ForkUnsafe:  # a rank that has joined a process group: nothing is forked afterwards
        return trial(0)


def _failure(build: Callable[[nn.Module], torch.optim.Optimizer], layer: nn.Module) -> str | None:
    """Return the first line of the error of a step on the layer; None: it works."""
    return _step_failure(build(layer), layer)


def _step_failure(optimizer: torch.optim.Optimizer, layer: nn.Module) -> str | None:
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # code of any optimizer may raise anything
        text = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return f"no state {text}" if isinstance(error, KeyError) else text
    return None


def _laid_out(degrees: tuple[int, ...]) -> nn.Module:
    """Return a layer on a mesh of data-parallel ranks: sharded by the last axis, replicated by the one before it."""
    layer = nn.Linear(_SIZE, _SIZE)
    mesh = DeviceMesh("cpu", torch.arange(math.prod(degrees)).view(degrees))
    placements = [*[Replicate()] * (len(degrees) - 1), Shard(0)]
    for name, parameter in list(layer.named_parameters()):
        tensor = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
        setattr(layer, name, nn.Parameter(tensor))
    return layer


def _refusal(name: str, where: str, what: str, error: str) -> Contradiction:
    return Contradiction(
        f"a step of {name} fails on {what}: {error}",
        where=where,
        got=f"optimizer={name}",
        allowed="an optimizer that works element by element: adamw, adam, sgd",
        hint="set `training.optimizer=adamw`",
    )
