"""What a collective is for, said where it begins and read by whoever records it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from hyper_parallel.ir import Purpose

_current: ContextVar[Purpose | None] = ContextVar("purpose", default=None)
_together: ContextVar[bool] = ContextVar("together", default=False)


def current_purpose() -> Purpose | None:
    """Purpose of the collectives that begin now; None outside of our own wrappers, as in FSDP."""
    return _current.get()


def issued_together() -> bool:
    """The messages that begin now are one exchange: all are sent before one is waited for."""
    return _together.get()


@contextmanager
def purpose(name: Purpose) -> Iterator[None]:
    """Collectives that begin inside are for this; the innermost context counts."""
    if torch.compiler.is_compiling():  # recorders see eager code only
        yield
        return
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def exchange(messages: list[dist.P2POp], name: Purpose) -> list[dist.Work]:
    """Begin messages to and from other ranks that belong together."""
    token = _together.set(True)
    try:
        with purpose(name):
            return dist.batch_isend_irecv(messages)
    finally:
        _together.reset(token)
