"""Packed documents for models that would let them see each other.

Models of transformers tell documents by `position_ids` that begin again, and mask them where they build their masks.
GPT-OSS builds its masks without positions, so documents leak into the ones that follow. It takes masks that were built
before, though, and this builds them with the same public functions, positions included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FORGETFUL = ("gpt_oss",)
"""Families whose masks ignore `position_ids`."""


def mask_documents(base: nn.Module, dtype: torch.dtype) -> None:
    """Let a decoder of such a family mask packed documents; masks that are added to scores have `dtype`."""
    if base.config.model_type not in FORGETFUL:
        return
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positions = kwargs.get("position_ids")
        given = any(kwargs.get(n) is not None for n in ("attention_mask", "past_key_values"))
        if positions is None or given:
            return None
        ids = kwargs.get("input_ids")
        tokens = ids if ids is not None else kwargs["inputs_embeds"]
        # Only its shape, format and device are read.
        like = torch.empty(*tokens.shape[:2], 0, dtype=dtype, device=tokens.device)
        about = {
            "config": module.config,
            "inputs_embeds": like,
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": positions,
        }
        masks = {
            "full_attention": create_causal_mask(**about),
            "sliding_attention": create_sliding_window_causal_mask(**about),
        }
        return args, {**kwargs, "attention_mask": masks}

    base.register_forward_pre_hook(before, with_kwargs=True)
