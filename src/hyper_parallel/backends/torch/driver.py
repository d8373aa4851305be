"""Context for model code that must not initialize the driver of an accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable that makes `torch.cuda.is_available` skip driver initialization. Source: torch, notes/cuda."""


@contextmanager
def driver_untouched() -> Iterator[None]:
    """Prevent model code in this context from initializing the driver of an accelerator.

    A process cannot use a CUDA device whose driver was initialized in its parent before a fork. transformers checks for
    stream capture whenever it creates a mask, and torch initializes the driver for this check.
    """
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    modules: list[Any] = [getattr(torch, kind, None) for kind in ("cuda", "xpu", "npu")]
    uninitialized = [m for m in modules if hasattr(m, "is_current_stream_capturing") and not m.is_initialized()]
    originals = [m.is_current_stream_capturing for m in uninitialized]
    try:
        for module in uninitialized:
            module.is_current_stream_capturing = lambda: False
        yield
    finally:
        for module, original in zip(uninitialized, originals, strict=True):
            module.is_current_stream_capturing = original
        del os.environ[NVML_CHECK]
        if before is not None:
            os.environ[NVML_CHECK] = before
