"""What rehearsing a step needs: phases for the recorder, and what two steps are compared by."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch import local
from hyper_parallel.backends.torch.memory import Captured, StepCapture
from hyper_parallel.errors import CaptureUnsupported

_ACTION = re.compile(r"\d+([FBIW])\d+")
"""Name of a pipeline action: stage, what, microbatch."""


_SAMPLED = 4096
ULPS = 4
"""Units in the last place by which an update on a CPU may be away from the same one on an accelerator."""


class Phases:
    """Spans of the loop, told to the recorder as phases of the program."""

    def __init__(self, recorder: StepCapture, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model

    @contextmanager
    def span(self, name: str, category: str, lane: str = "compute") -> Iterator[None]:
        action = _ACTION.fullmatch(name)
        if action is not None:
            self._recorder.part = "forward" if action[1] == "F" else "backward"
        elif name in ("forward", "backward"):
            self._recorder.part = name
        elif name in ("gradient norm", "optimizer", "routing"):
            self._recorder.part = "optimizer"
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    self._recorder.mark(local(parameter.grad), "gradient")
        yield


def refuse_hidden_state(captured: Captured, named: set[str]) -> None:
    """State that nobody named would not be undone after the rehearsal, nor saved in a checkpoint."""
    storages = captured.program.storages
    for call in captured.program.operators:
        for s in call.writes:
            if storages[s].at_start and storages[s].name not in named:
                raise CaptureUnsupported(
                    f"`{call.name}` changes a tensor that is no parameter, buffer or optimizer state",
                    hint="train this model with `offload.budget=null offload.max_slowdown=null`",
                )


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def digests(state: dict[str, Tensor]) -> dict[str, int]:
    """What a whole state is compared by, bit for bit."""
    return {name: _digest(tensor) for name, tensor in state.items()}


def _digest(tensor: Tensor) -> int:
    # A copy: what NumPy has looked at can no longer be resized.
    flat = tensor.detach().reshape(-1).to("cpu", copy=True).view(torch.uint8)
    return zlib.crc32(memoryview(flat.numpy()))


def sample(tensor: Tensor) -> Tensor:
    """Up to so many elements of a tensor, evenly spread, in float64 on the host."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].to("cpu", torch.float64, copy=True)


def near(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Two samples of a tensor of this type that differ by rounding: a few units in the last place of the largest."""
    unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return bool(((a - b).abs() <= ULPS * unit * b.abs().max()).all())
