"""Calls made ready to run many times: where the views lie among the arguments is found once, not in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.backends.torch.offload._calls import Call, View, finished, is_message
from hyper_parallel.backends.torch.offload._captured import as_view
from hyper_parallel.ir import Operator

Held = dict[int, torch.UntypedStorage]
"""Bytes of every storage that is on the device."""


class Resident:
    """What is on the device: bytes by storage, and the tensors on them that were made so far.

    Making a tensor on given bytes costs more than a small operator; most views are used several times, and most are
    the very result of an operator. A tensor is kept as long as its storage stays.

    Attributes:
        bytes: By storage.
    """

    def __init__(self) -> None:
        self.bytes: Held = {}
        self._numbers: dict[View, int] = {}
        self._of: dict[int, list[int]] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def number(self, view: View) -> int:
        """The number under which `tensors` may have a view."""
        if view not in self._numbers:
            self._numbers[view] = len(self._numbers)
            self._of.setdefault(view.storage, []).append(self._numbers[view])
        return self._numbers[view]

    def known(self, view: View) -> int | None:
        """The number of a view that some operator takes."""
        return self._numbers.get(view)

    def drop(self, storage: int) -> None:
        """Let go of the bytes of a storage."""
        del self.bytes[storage]
        for number in self._of.get(storage, ()):
            self.tensors.pop(number, None)

    def clear(self) -> None:
        """Let go of everything."""
        self.bytes.clear()
        self.tensors.clear()


_Make = Callable[[], Any]


class Prepared:
    """One operator of a program, ready to run.

    Args:
        call: What was recorded.
        operator: Its entry in the program.
        resident: Where its arguments are found.

    Attributes:
        func: The operator overload.
        touched: Storages that must be there before it runs.
        talks: It sends to or receives from other ranks.
        message: It is a message to or from one rank, under way until its storage is needed.
        made: (flat output index, storage, size) of every output with a fresh storage.
        guards: (flat output index, value) of outputs that were seen as plain numbers.
    """

    __slots__ = (
        "_args", "_holes", "_known", "_kwargs", "_kwholes", "_op", "_resident", "func", "guards", "made", "message",
        "talks", "touched",
    )  # fmt: skip

    def __init__(self, call: Call, operator: Operator, resident: Resident) -> None:
        fresh = set(operator.allocs)
        self.func = call.func
        self._op = getattr(call.func, "_op", call.func)  # without the overload's Python
        self.talks = call.talks
        self.message = is_message(call.func)
        self.touched = tuple(s for s in operator.touched if s not in fresh)
        self.made = tuple(
            (at, s, size) for (at, s), size in zip(call.made, call.sizes, strict=True)
        )
        self.guards = call.guards
        self._resident = resident
        self._known: list[int | None] | None = None
        # Who communicates counts the owners of the bytes, so its arguments are not kept.
        kept = not self.talks
        self._args = list(call.args)
        self._kwargs = dict(call.kwargs)
        made = [(i, _maker(value, resident, kept)) for i, value in enumerate(call.args)]
        self._holes = [(i, make) for i, make in made if make is not None]
        named = [(name, _maker(value, resident, kept)) for name, value in call.kwargs.items()]
        self._kwholes = [(name, make) for name, make in named if make is not None]

    def run(self) -> list[Any] | tuple[Any, ...]:
        """Run on the bytes that are on the device; the outputs, flat. Communication has ended, except of a message."""
        args = self._args.copy()
        for i, make in self._holes:
            args[i] = make()
        kwargs = self._kwargs
        if self._kwholes:
            kwargs = {**kwargs, **{name: make() for name, make in self._kwholes}}
        out = self._op(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return (out,)
        if self.talks:
            return tree_flatten(out)[0] if self.message else finished(out)
        return tree_flatten(out)[0]

    def keep(self, out: list[Any] | tuple[Any, ...]) -> None:
        """Put the results on the device: their bytes, and the very tensors where a later operator takes them so."""
        resident = self._resident
        if self._known is None:
            self._known = [resident.known(as_view(out[at], s)) for at, s, _ in self.made]
        for (at, s, _), number in zip(self.made, self._known, strict=True):
            resident.bytes[s] = out[at].untyped_storage()
            if number is not None:
                resident.tensors[number] = out[at]


def _maker(value: Any, resident: Resident, kept: bool) -> _Make | None:
    """What makes an argument from the bytes on the device; None: it has no view in it."""
    if isinstance(value, View):
        return _view(value, resident) if kept else _fresh(value, resident.bytes)
    if isinstance(value, dict):
        parts = {k: _maker(v, resident, kept) for k, v in value.items()}
        if not any(parts.values()):
            return None
        return lambda: {k: value[k] if m is None else m() for k, m in parts.items()}
    if not isinstance(value, (list, tuple)):
        return None
    makers = [_maker(v, resident, kept) for v in value]
    if not any(makers):
        return None
    both = list(zip(value, makers, strict=True))
    kind = list if isinstance(value, list) else tuple
    return lambda: kind([v if m is None else m() for v, m in both])


def _view(view: View, resident: Resident) -> _Make:
    number, tensors, held, storage = (
        resident.number(view),
        resident.tensors,
        resident.bytes,
        view.storage,
    )

    def make() -> torch.Tensor:
        found = tensors.get(number)
        if found is None:
            found = tensors[number] = view.on(held[storage])
        return found

    return make


def _fresh(view: View, held: Held) -> _Make:
    return lambda: view.on(held[view.storage])
