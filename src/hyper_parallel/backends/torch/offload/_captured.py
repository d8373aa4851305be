"""A recorded step, and tensors as addresses in its storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.backends.torch.offload._calls import Call, View
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import MemoryProgram


@dataclass
class Captured:
    """A recorded step.

    Attributes:
        program: What planning needs; no tensor in it.
        calls: The torch operator behind each of the program's operators.
        state: Tensor that owns each storage which exists from the start, by storage index.
        inputs: Views of the named inputs.
        outputs: What the step returned, tensors replaced by views.
        eager_peak_bytes: Device peak of the recorded run itself, with the lifetimes that Python gave the storages.
    """

    program: MemoryProgram
    calls: tuple[Call, ...]
    state: dict[int, torch.Tensor]
    inputs: dict[str, View]
    outputs: Any
    eager_peak_bytes: int = 0


def as_view(tensor: torch.Tensor, storage: int) -> View:
    return View(
        storage,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )


def views_in(tree: Any) -> list[View]:
    return [v for v in tree_flatten(tree)[0] if isinstance(v, View)]


def storages_in(tree: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(v.storage for v in views_in(tree)))


def refuse_layouts(tensor: torch.Tensor) -> None:
    if (
        tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
    ):
        raise CaptureUnsupported(
            "only plain strided tensors have an address in a storage",
            got=f"layout {tensor.layout}, conjugate {tensor.is_conj()}, negative {tensor.is_neg()}",
            hint="materialise the tensor with `.contiguous()`, `.resolve_conj()` or `.resolve_neg()`",
        )
