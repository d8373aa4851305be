"""Activation recomputation that offloads outputs of matrix products and attention to host memory.

Backward recomputes a layer, but reloads these expensive outputs instead of recomputing them. Unlike a memory plan, this
method does not need fixed shapes.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
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
_SAVED_OPS: Final = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
HOST_SAVED: Final = "_swap"
"""Attribute of recomputed layers that offload activations: True if they offload their inputs too."""


def host_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of forward and of recomputation, for `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    saved: deque[tuple[Any, Any]] = deque()
    return _SavedOutputs(saved, reloads=False), _SavedOutputs(saved, reloads=True)


def inputs_on_host(enabled: bool) -> AbstractContextManager[Any]:
    """Return a context that offloads the inputs of a checkpointed call, or, if not `enabled`, one without effect."""
    return saved_tensors_hooks(_to_host, _to_device) if enabled else nullcontext()


def save_activations_on_host(layers: list[nn.Module], inputs: bool = True) -> None:
    """Make recomputed layers offload outputs of matmuls and attention to the host; with `inputs`, also their inputs."""
    for layer in layers:
        setattr(layer, HOST_SAVED, inputs)


@dataclass(frozen=True)
class _HostCopy:
    tensor: Tensor
    device: torch.device


def _to_host(tensor: Tensor) -> _HostCopy:
    pinned = tensor.device.type != "cpu"
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return _HostCopy(host.copy_(tensor, non_blocking=pinned), tensor.device)


def _to_device(copy: _HostCopy) -> Tensor:
    return copy.tensor.to(copy.device, non_blocking=True)


class _SavedOutputs(TorchDispatchMode):
    """Mode that offloads outputs of `_SAVED_OPS` in call order; with `reloads`, it reloads them in the same order.

    Attention with dropout is recomputed instead: recomputation restores the random state and draws the same masks.
    """

    def __init__(self, saved: deque[tuple[Any, Any]], *, reloads: bool) -> None:
        super().__init__()
        self._saved, self._reloads = saved, reloads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SAVED_OPS or _named(func, args, kwargs).get("dropout_p"):
            return func(*args, **kwargs)
        if not self._reloads:
            out = func(*args, **kwargs)
            self._saved.append((func, tree_map_only(Tensor, _to_host, out)))
            return out
        if not self._saved or self._saved[0][0] is not func:
            raise RuntimeError(f"recomputation of a layer reached {func}, which forward did not run at this position")
        return tree_map_only(_HostCopy, _to_device, self._saved.popleft()[1])


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
