"""Run code of a model without starting the driver of an accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable with which `torch.cuda.is_available` does not start the driver. Source: torch, notes/cuda."""


def capturing_nothing() -> bool:
    """Return what `is_current_stream_capturing` says in a process that has not started the device."""
    return False


@contextmanager
def driver_untouched() -> Iterator[None]:
    """Answer what a model's code asks of an accelerator that this process has not started.

    A process cannot use a CUDA device whose driver was started in the process that forked it. transformers asks
    whether a stream is captured whenever it makes a mask, and torch starts the driver to answer.
    """
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    modules: list[Any] = [getattr(torch, kind, None) for kind in ("cuda", "xpu", "npu")]
    asked = [
        m for m in modules if hasattr(m, "is_current_stream_capturing") and not m.is_initialized()
    ]
    answers = [m.is_current_stream_capturing for m in asked]
    try:
        for module in asked:
            module.is_current_stream_capturing = capturing_nothing
        yield
    finally:
        for module, answer in zip(asked, answers, strict=True):
            module.is_current_stream_capturing = answer
        del os.environ[NVML_CHECK]
        if before is not None:
            os.environ[NVML_CHECK] = before
