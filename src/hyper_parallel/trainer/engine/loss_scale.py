"""Dynamic loss scaling for float16: gradients of a multiple of the loss do not underflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROWTH_STEPS: Final = 2000
"""Steps without overflow after which the scale doubles, as in torch.amp.GradScaler."""


@dataclass
class LossScale:
    """Scale that halves when gradients overflow, and doubles after many steps without overflow; always a power of two.

    Source: dynamic loss scaling, Micikevicius et al., arXiv:1710.03740; constants of torch.amp.GradScaler.

    Attributes:
        value: Scale of the next step.
        good_steps: Steps since the last change.
    """

    value: float = 65536.0
    good_steps: int = 0

    def after(self, finite: bool) -> None:
        """Update the scale after a step with finite or non-finite loss and gradients."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
