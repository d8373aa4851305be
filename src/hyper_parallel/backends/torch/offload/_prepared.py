"""Calls made ready to run many times: where the views lie among the arguments is found once, not in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.backends.torch.offload._calls import Call, View, finished, is_message
from hyper_parallel.ir import Operator

Held = Mapping[int, torch.UntypedStorage]
"""Bytes of every storage that is on the device."""
_Make = Callable[[Held], Any]


class Prepared:
    """One operator of a program, ready to run.

    Args:
        call: What was recorded.
        operator: Its entry in the program.

    Attributes:
        func: The operator overload.
        touched: Storages that must be there before it runs.
        talks: It sends to or receives from other ranks.
        message: It is a message to or from one rank, under way until its storage is needed.
        made: (flat output index, storage, size) of every output with a fresh storage.
        guards: (flat output index, value) of outputs that were seen as plain numbers.
    """

    __slots__ = (
        "_args", "_holes", "_kwargs", "_kwholes", "func", "guards", "made", "message", "talks", "touched",
    )  # fmt: skip

    def __init__(self, call: Call, operator: Operator) -> None:
        fresh = set(operator.allocs)
        self.func = call.func
        self.talks = call.talks
        self.message = is_message(call.func)
        self.touched = tuple(s for s in operator.touched if s not in fresh)
        self.made = tuple(
            (at, s, size) for (at, s), size in zip(call.made, call.sizes, strict=True)
        )
        self.guards = call.guards
        self._args = list(call.args)
        self._kwargs = dict(call.kwargs)
        self._holes = [(i, m) for i, v in enumerate(call.args) if (m := _maker(v)) is not None]
        self._kwholes = [(k, m) for k, v in call.kwargs.items() if (m := _maker(v)) is not None]

    def run(self, held: Held) -> list[Any] | tuple[Any, ...]:
        """Run on the bytes that are on the device; the outputs, flat. Communication has ended, except of a message."""
        args = self._args.copy()
        for i, make in self._holes:
            args[i] = make(held)
        kwargs = self._kwargs
        if self._kwholes:
            kwargs = {**kwargs, **{name: make(held) for name, make in self._kwholes}}
        out = self.func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return (out,)
        if self.talks:
            return tree_flatten(out)[0] if self.message else finished(out)
        return tree_flatten(out)[0]


def _maker(value: Any) -> _Make | None:
    """What makes an argument from the bytes on the device; None: it has no view in it."""
    if isinstance(value, View):
        return _view(value)
    if isinstance(value, dict):
        parts = {k: _maker(v) for k, v in value.items()}
        if not any(parts.values()):
            return None
        return lambda held: {k: value[k] if m is None else m(held) for k, m in parts.items()}
    if not isinstance(value, (list, tuple)):
        return None
    makers = [_maker(v) for v in value]
    if not any(makers):
        return None
    both = list(zip(value, makers, strict=True))
    kind = list if isinstance(value, list) else tuple
    return lambda held: kind(v if m is None else m(held) for v, m in both)


def _view(view: View) -> _Make:
    storage, dtype, offset, size, stride = (
        view.storage,
        view.dtype,
        view.offset,
        view.size,
        view.stride,
    )
    empty = torch.empty

    def make(held: Held) -> torch.Tensor:
        base = held[storage]
        return empty(0, dtype=dtype, device=base.device).set_(base, offset, size, stride)  # type: ignore[call-overload, no-any-return]

    return make
