"""What a collective is for, said where it begins and read by whoever records it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hyper_parallel.ir import Purpose

_current: ContextVar[Purpose | None] = ContextVar("purpose", default=None)


def current_purpose() -> Purpose | None:
    """Purpose of the collectives that begin now; None outside of our own wrappers, as in FSDP."""
    return _current.get()


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
