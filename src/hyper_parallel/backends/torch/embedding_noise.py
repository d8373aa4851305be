"""Noise on token embeddings in training: NEFTune, Jain et al. 2023, arXiv:2310.05914.

The noise is uniform in +-alpha / sqrt(S D) for sequences of S tokens and D features, as in transformers. It is a hash
of a key of the step, the token ids of the sequence, the position and the feature. The noise of a token is therefore
equal on every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.parallel_handle import handle
from hyper_parallel.errors import UnsupportedSharding

_LOW: Final = 0xFFFFFFFF
_SPREAD: Final = 0x9E3779B1
"""2^32 over the golden ratio, odd: its multiples visit every 32-bit number."""
_BLOCK_ELEMENTS: Final = 1 << 22
"""Number of elements computed at a time, to bound temporary memory."""


def hash32(x: Tensor) -> Tensor:
    """Return the lowbias32 hash of 32-bit numbers. Source: C. Wellons, Prospecting for Hash Functions, 2018."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


@dataclass
class EmbeddingNoise:
    """Embedding noise of one model.

    Attributes:
        alpha: Magnitude of the noise, `neftune_noise_alpha` of transformers.
        key: Hash key of the step, which the caller sets before each step.
    """

    alpha: float
    key: int = 0
    _ids: Tensor | None = None

    @classmethod
    def attach(cls, model: nn.Module, alpha: float) -> EmbeddingNoise:
        """Add noise to the token embeddings of a parallelized model, in training mode only; return an `EmbeddingNoise`.

        A forward pass raises HP205 if the output of the embedding does not have one row for each of this rank's tokens.
        A pass without `input_ids` gets no noise.
        """
        noise, attached = cls(alpha), handle(model)

        def store_ids(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            noise._ids = kwargs.get("input_ids", args[0] if args else None)

        def add_noise(_: nn.Module, __: Any, out: Tensor) -> Tensor | None:
            ids, tp = noise._ids, attached.tp
            # Partial embeddings are summed over tensor-parallel ranks later: only rank 0 adds the noise.
            skips = tp is not None and tp.running.context.partial_embedding and tp.rank > 0
            if ids is None or not model.training or not out.is_floating_point() or skips:
                return None
            flat_index = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            if attached.context is not None:
                flat_index = attached.context.local_tokens(flat_index, 0)
            if out.shape[:-1] != flat_index.shape:
                raise UnsupportedSharding(
                    "embedding noise (NEFTune) needs one embedding per token, in token order",
                    where="training.neftune_noise_alpha",
                    got=f"{type(model).__name__}: embeddings {tuple(out.shape)} for tokens {tuple(flat_index.shape)}",
                    hint="training.neftune_noise_alpha=null",
                )
            return out + noise.compute(ids, flat_index, out)

        # The hook reads the ids before they are sharded over ranks.
        model.register_forward_pre_hook(store_ids, with_kwargs=True, prepend=True)
        model.get_input_embeddings().register_forward_hook(add_noise)  # type: ignore[operator]
        return noise

    @torch.no_grad()
    def compute(self, ids: Tensor, flat_index: Tensor, out: Tensor) -> Tensor:
        """Return noise for the embeddings `out` [..., D] of tokens `flat_index` [...] in the flattened ids [B, S]."""
        length, width = ids.shape[1], out.shape[-1]
        positions = hash32(torch.arange(1, length + 1, device=ids.device))
        rows = hash32((hash32((ids + positions) & _LOW).sum(1) & _LOW) ^ self.key & _LOW)
        flat = flat_index.reshape(-1)
        keys = hash32(rows[flat // length] ^ positions[flat % length])
        features = torch.arange(width, device=ids.device) * _SPREAD & _LOW
        noise = torch.empty(len(flat), width, dtype=out.dtype, device=out.device)
        size, bound = max(1, _BLOCK_ELEMENTS // width), self.alpha / math.sqrt(length * width)
        wide = torch.promote_types(out.dtype, torch.float32)
        for i in range(0, len(flat), size):
            numbers = hash32((keys[i : i + size, None] + features) & _LOW)
            noise[i : i + size] = (numbers.to(wide) * 2.0**-31 - 1) * bound
        return noise.view(out.shape)
