"""AdamW over the parameters of a parallelized model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.config import Training


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups by number of dims: matrices are decayed; vectors (norm weights, biases) are not.

    The number of dims is the logical one, so the groups are the same on every layout.
    """
    matrices, vectors = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW with decoupled decay (Loshchilov and Hutter, arXiv:1711.05101)."""
    return torch.optim.AdamW(
        parameter_groups(model, training.weight_decay),
        lr=training.lr,
        betas=training.betas,
        eps=training.eps,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float | torch.Tensor) -> None:
    """Give every group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
