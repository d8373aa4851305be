"""Recomputed layers whose matrix products wait for backward in host memory.

Backward runs such a layer again, but takes the outputs of matrix products and attention, which cost most of its time,
from the host instead of computing them. Unlike a memory plan this needs no fixed shapes.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_NAMES: Final = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"),
    *(
        f"_scaled_dot_product_{kind}"
        for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    ),
)  # fmt: skip
_KEPT: Final = frozenset(
    getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)
)
SWAP: Final = "_swap"
"""Attribute of a recomputed layer that holds its `Swap`."""


class Swap:
    """What a layer keeps on the host between forward and backward.

    Attributes:
        inputs: The layer's inputs too.
    """

    def __init__(self, inputs: bool) -> None:
        self.inputs = inputs

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of one forward pass and of running it again, as `torch.utils.checkpoint` takes them."""
        kept: deque[tuple[Any, Any]] = deque()
        return _SwapOut(kept), _SwapIn(kept)

    def around(self) -> AbstractContextManager[Any]:
        """Context of the checkpointed call: what that saves are the inputs."""
        return saved_tensors_hooks(_to_host, _back)


def swap_layers(layers: list[nn.Module], inputs: bool = True) -> None:
    """Let layers that are recomputed keep matrix products, and with `inputs` what they are called with, on the host."""
    for layer in layers:
        setattr(layer, SWAP, Swap(inputs))


@dataclass(frozen=True)
class _HostCopy:
    tensor: Tensor
    device: torch.device


def _to_host(tensor: Tensor) -> _HostCopy:
    """A copy, pinned where that lets it go on beside the work; later work of the stream waits for it."""
    pinned = tensor.device.type != "cpu"
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return _HostCopy(host.copy_(tensor, non_blocking=pinned), tensor.device)


def _back(kept: _HostCopy) -> Tensor:
    return kept.tensor.to(kept.device, non_blocking=True)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation drops values: it has to run again, so that later ones draw the numbers that they drew."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "dropout_p":
            return bool(value)
    return bool(kwargs.get("dropout_p"))


class _SwapOut(TorchDispatchMode):
    """Keep outputs of a forward pass, in their order."""

    def __init__(self, kept: deque[tuple[Any, Any]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _KEPT and not _draws(func, args, kwargs or {}):
            self._kept.append((func, tree_map_only(Tensor, _to_host, out)))
        return out


class _SwapIn(TorchDispatchMode):
    """Give the outputs of a forward pass back instead of computing them again."""

    def __init__(self, kept: deque[tuple[Any, Any]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _KEPT or _draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if not self._kept or self._kept[0][0] is not func:
            raise RuntimeError(
                f"running a layer again came to {func}, which its forward pass did not do there"
            )
        return tree_map_only(_HostCopy, _back, self._kept.popleft()[1])
