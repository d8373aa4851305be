"""Noise on the embeddings of tokens while a model trains: NEFTune, Jain et al. 2023, arXiv:2310.05914.

As transformers adds it: uniform in +-alpha / sqrt(S D) for rows of S tokens and D features. Which number a feature gets
is a function of a key that the caller gives (of seed and step), of the tokens of the row, of the position in it and of
the feature. Nothing is drawn, so the noise of a sequence is the same whoever holds it, whole or a part of it.
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
_SPREAD: Final = (
    0x9E3779B1  # odd, 2^32 over the golden ratio: steps of it visit every number of 32 bits
)
_BLOCK_ELEMENTS: Final = 1 << 22
"""Numbers made at a time, which bounds the temporaries."""


def mixed(x: Tensor) -> Tensor:
    """A hash of every number of 32 bits: lowbias32, C. Wellons, Prospecting for Hash Functions, 2018."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & _LOW
    return x ^ (x >> 16)


@dataclass
class EmbeddingNoise:
    """The noise of one model.

    Attributes:
        alpha: `neftune_noise_alpha` of transformers.
        key: Begins the noise of a step.
    """

    alpha: float
    key: int = 0
    _ids: Tensor | None = None

    @classmethod
    def attach(cls, model: nn.Module, alpha: float) -> EmbeddingNoise:
        """Add noise to what a model that passed through `parallelize` embeds, in training mode alone.

        Raises:
            UnsupportedSharding: HP205, in a forward pass, when an embedding does not see the row's tokens in order.
        """
        noise, attached = cls(alpha), handle(model)

        def begins(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            noise._ids = kwargs.get("input_ids", args[0] if args else None)

        def embedded(_: nn.Module, __: Any, out: Tensor) -> Tensor | None:
            ids, tp = noise._ids, attached.tp
            summand = tp is not None and tp.partial_embedding and tp.rank > 0  # rank 0 adds it
            if ids is None or not model.training or not out.is_floating_point() or summand:
                return None
            places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            if attached.context is not None:
                places = attached.context.local_tokens(places, 0)
            if out.shape[:-1] != places.shape:
                raise UnsupportedSharding(
                    "noise is added where the tokens of a row are embedded in their order",
                    where=type(model).__name__,
                    got=f"an embedding {tuple(out.shape)} of tokens {tuple(places.shape)}",
                    hint="training.neftune_noise_alpha=null",
                )
            return out + noise.of(ids, places, out)

        # Before the row is cut over ranks.
        model.register_forward_pre_hook(begins, with_kwargs=True, prepend=True)
        model.get_input_embeddings().register_forward_hook(embedded)  # type: ignore[operator]
        return noise

    @torch.no_grad()
    def of(self, ids: Tensor, places: Tensor, out: Tensor) -> Tensor:
        """[..., D] noise like `out` of tokens at `places` [...] of [B, S] ids laid end to end."""
        length, width = ids.shape[1], out.shape[-1]
        at = mixed(torch.arange(1, length + 1, device=ids.device))
        rows = mixed((mixed((ids + at) & _LOW).sum(1) & _LOW) ^ self.key & _LOW)
        flat = places.reshape(-1)
        keys = mixed(rows[flat // length] ^ at[flat % length])
        features = torch.arange(width, device=ids.device) * _SPREAD & _LOW
        found = torch.empty(len(flat), width, dtype=out.dtype, device=out.device)
        size, bound = max(1, _BLOCK_ELEMENTS // width), self.alpha / math.sqrt(length * width)
        wide = torch.promote_types(out.dtype, torch.float32)
        for i in range(0, len(flat), size):
            numbers = mixed((keys[i : i + size, None] + features) & _LOW)
            found[i : i + size] = (numbers.to(wide) * 2.0**-31 - 1) * bound
        return found.view(out.shape)
