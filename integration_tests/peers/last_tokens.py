"""Leaves the last token of every sequence out of the forward pass of TRL's trainers.

It predicts nothing, and our side does not read it. In a mixture of experts it is routed, though, and counts in the
router's loss. Rows with `without_last_tokens` compare all the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def leave_out_last_tokens(model: Any) -> None:
    """Wrap the forward method of a model in a trainer of TRL."""
    original = model.forward

    def forward(input_ids: Tensor, *, labels: Tensor | None = None, **inputs: Any) -> Any:
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if mask is not None:
            inputs["attention_mask"] = mask[:, :-1] & mask[:, 1:]
        if labels is None:  # a trainer that takes all logits, and uses none of the last ones
            outputs = original(input_ids=input_ids[:, :-1], **inputs)
            outputs.logits = functional.pad(outputs.logits, (0, 0, 0, 1))
            return outputs
        input_ids, targets = input_ids[:, :-1], labels[:, 1:]
        if mask is None:  # one row of packed sequences; their lengths are for other kernels
            kept = torch.nonzero(positions[0, 1:] != 0)[:, 0]
            input_ids, targets = input_ids[:, kept], targets[:, kept]
            inputs = {"position_ids": positions[:, kept], "fused_lm_head": True}
        return original(input_ids=input_ids, shift_labels=targets, **inputs)

    model.forward = forward
