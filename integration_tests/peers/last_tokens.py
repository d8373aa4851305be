"""Leaves the last token of every sequence out of the forward pass of TRL's trainers.

It predicts nothing, and our side does not read it. In a mixture of experts it is routed, though, and counts in the
router's loss. Rows with `without_last_tokens` compare all the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def leave_out_last_tokens(model: Any) -> None:
    """Wrap the forward method of a model whose head TRL has fused."""
    fused = model.forward

    def forward(
        *,
        input_ids: Tensor,
        labels: Tensor | None = None,
        fused_lm_head: bool = False,
        **inputs: Any,
    ) -> Any:
        if not fused_lm_head or labels is None:
            return fused(input_ids=input_ids, labels=labels, fused_lm_head=fused_lm_head, **inputs)
        targets = labels[:, 1:]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if mask is not None:
            inputs["attention_mask"] = mask[:, :-1] & mask[:, 1:]
            input_ids = input_ids[:, :-1]
        else:  # one row of packed sequences
            kept = torch.nonzero(positions[0, 1:] != 0)[:, 0]
            input_ids, targets = input_ids[:, kept], targets[:, kept]
            inputs = {
                "position_ids": positions[:, kept]
            }  # lengths of sequences are for other kernels
        return fused(input_ids=input_ids, shift_labels=targets, fused_lm_head=True, **inputs)

    model.forward = forward
