"""What rehearsing a step needs: what the runs of one step are compared by, and what a captured step may not do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hyper_parallel.backends.torch.memory import Captured
from hyper_parallel.errors import CaptureUnsupported

_SAMPLED: Final = 4096
ULPS: Final = 4
"""Units in the last place by which an update on a CPU may be away from the same one on an accelerator."""
_SPREADS: Final = 10
"""Run-to-run differences of plain steps by which a planned step may differ where kernels are not deterministic."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one run of a step gave, to be compared with another run of the same step.

    Attributes:
        outputs: Loss, gradient norm and routing.
        digests: A checksum of every tensor of the state.
        samples: Elements of every tensor of the state, and its type.
    """

    outputs: dict[str, Tensor]
    digests: dict[str, int]
    samples: dict[str, tuple[Tensor, torch.dtype]]

    @classmethod
    def of(cls, outputs: Any, state: Mapping[str, Tensor], *, sampled: bool) -> StepOutcome:
        """Copy what is compared.

        Args:
            outputs: Loss, gradient norm, and the routing or None.
            state: The state after the step.
            sampled: An update elsewhere may have rounded differently, so the elements matter, not the bytes.
        """
        loss, grad_norm, routing = outputs
        values = {"loss": loss.clone(), "grad_norm": grad_norm.clone()}
        if routing is not None:
            values["routing"] = routing[0].clone()
        samples = {name: (sample(t), t.dtype) for name, t in state.items()} if sampled else {}
        return cls(values, {name: _digest(t) for name, t in state.items()}, samples)

    def spread(self, again: StepOutcome) -> dict[str, float]:
        """How far loss and norm of two plain runs are apart; empty when the runs are the same bit for bit."""
        if self.difference(again) is None:
            return {}
        pairs = ((name, self.outputs[name], again.outputs[name]) for name in ("loss", "grad_norm"))
        return {name: float((a - b).abs()) for name, a, b in pairs}

    def difference(
        self,
        other: StepOutcome,
        spread: Mapping[str, float] | None = None,
        *,
        rounded: bool = False,
    ) -> str | None:
        """Name of the first value that is another one; None: the runs agree.

        Args:
            other: The other run.
            spread: Where it is not empty only these values are compared, up to ten times these distances.
            rounded: The state may differ by rounding, where both runs have samples.
        """
        mine, others = self.outputs, other.outputs
        if spread:
            equal = {n: (mine[n] - others[n]).abs() <= _SPREADS * far for n, far in spread.items()}
        else:
            equal = {n: torch.equal(value, others[n]) for n, value in mine.items()}
            equal |= {n: digest == other.digests[n] for n, digest in self.digests.items()}
        if rounded and not spread:
            equal |= {n: near(other.samples[n][0], *mine) for n, mine in self.samples.items()}
        return next((name for name, same in equal.items() if not same), None)


def refuse_hidden_state(captured: Captured, named: set[str]) -> None:
    """State that nobody named would not be undone after the rehearsal, nor saved in a checkpoint."""
    storages = captured.program.storages
    for call in captured.program.operators:
        for s in call.writes:
            if storages[s].at_start and storages[s].name not in named:
                raise CaptureUnsupported(
                    f"`{call.name}` changes a tensor that is no parameter, buffer or optimizer state",
                    hint="train this model with `offload.budget=null offload.max_slowdown=null`",
                )


def _digest(tensor: Tensor) -> int:
    # A copy: what NumPy has looked at can no longer be resized.
    flat = tensor.detach().reshape(-1).to("cpu", copy=True).view(torch.uint8)
    return zlib.crc32(memoryview(flat.numpy()))


def sample(tensor: Tensor) -> Tensor:
    """Up to so many elements of a tensor, evenly spread, in float64 on the host."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].to("cpu", torch.float64, copy=True)


def near(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Two samples of a tensor of this type that differ by rounding: a few units in the last place of the largest."""
    unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return bool(((a - b).abs() <= ULPS * unit * b.abs().max()).all())
