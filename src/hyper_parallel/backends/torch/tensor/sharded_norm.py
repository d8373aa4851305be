"""Norms over features or heads that are sharded over ranks: an unmodified module with global statistics.

During the norm's forward, a mean over the last dim is averaged over the ranks by one all-reduce of one number per
row, in float32 or wider. The fused norms of torch are computed from these means. Other common reductions, matrix
products, and norms without a mean are refused: they would cover one rank's slice only. Ranks may share key heads: the
average stays exact, because every head is on the same number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hyper_parallel.backends.torch.in_flight import blocking_sum
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose

_MEANS = (Tensor.mean, torch.mean)
_RMS = (F.rms_norm, torch.rms_norm)
_LAYER = (F.layer_norm, torch.layer_norm)
_OTHERS = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("sum", "var", "std", "var_mean", "std_mean", "norm", "amax", "amin", "softmax", "cumsum", "matmul")
    if hasattr(owner, name)
) | {torch.linalg.vector_norm, F.normalize, F.linear, F.softmax}  # fmt: skip


class ShardedNorm(TorchFunctionMode):
    """Context for the forward of one norm; its features are sharded over the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, name: str, purpose: Purpose = Purpose.NORM_STATISTICS) -> None:
        super().__init__()
        self.group, self.name, self.purpose = group, name, purpose
        self.seen = False
        """True after a mean has been computed over all ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _OTHERS:
            raise self._refusal(getattr(func, "__name__", str(func)))
        if func in _MEANS:
            func = self._mean_of
        elif func in _RMS:
            func = self._rms_norm
        elif func in _LAYER:
            func = self._layer_norm
        return func(*args, **(kwargs or {}))

    def _mean_of(self, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
        if len(dims) != 1 or dims[0] not in (-1, x.dim() - 1) or kwargs.get("dtype") is not None:
            raise self._refusal(f"mean(dim={dim}, dtype={kwargs.get('dtype')})")
        return self._mean(x) if keepdim else self._mean(x).squeeze(-1)

    def _mean(self, x: Tensor) -> Tensor:
        self.seen = True
        wide = torch.promote_types(x.dtype, torch.float32)
        local = x.to(wide).mean(-1, keepdim=True)
        return (blocking_sum(local, self.group, self.purpose) / self.group.size()).to(x.dtype)

    def _rms_norm(self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        wide = self._wide(x, shape)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        out = (wide * torch.rsqrt(self._mean(wide.square()) + eps)).to(x.dtype)
        return out if weight is None else out * weight

    def _layer_norm(
        self,
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Tensor:
        wide = self._wide(x, shape)
        out = self._rms_norm(wide - self._mean(wide), shape, None, eps).to(x.dtype)
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def _wide(self, x: Tensor, shape: Any) -> Tensor:
        if not isinstance(shape, int) and len(tuple(shape)) != 1:
            raise self._refusal(f"a norm over {tuple(shape)}")
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and not self.seen:
            raise self._refusal("a custom kernel")

    def _refusal(self, operation: str) -> UnsupportedSharding:
        on_stream = self.purpose == Purpose.NORM_STATISTICS
        return UnsupportedSharding(
            f"the norm `{self.name}` computes its statistics with {operation}, not as a mean over the features",
            got=operation,
            allowed="x.mean(-1), rms_norm, layer_norm",
            changes={"parallel.mlp_shape": "1d"} if on_stream else {"parallel.tp_x": 1, "parallel.tp_y": 1},
        )
