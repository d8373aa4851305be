"""The loss scale of float16: small gradients survive the format because they are those of a multiple of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROWTH_STEPS: Final = 2000
"""Steps without overflow after which the scale doubles, as in torch.amp.GradScaler."""


@dataclass
class LossScale:
    """A scale that halves when gradients overflow, and doubles after many steps without; always a power of two.

    Source: dynamic loss scaling, Micikevicius et al., arXiv:1710.03740; constants of torch.amp.GradScaler.

    Attributes:
        value: The scale of the next step.
        good_steps: Steps since it changed.
    """

    value: float = 65536.0
    good_steps: int = 0

    def after(self, finite: bool) -> None:
        """Take note of a step: whether its loss and its gradients were finite."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
