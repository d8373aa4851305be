"""Random numbers of tensor-parallel ranks that hold the residual stream whole.

    everything whole on each rank     one stream of random numbers, the same on all ranks: one mask of dropout
    between split projections         a stream per rank: every group of heads, and slice of a width, has its own mask

A rank's own stream begins, whenever a projection into a split width has run, with a seed from the common stream, which
goes on behind that seed when the projection back has run. Both streams are functions of the common one, so a layer that
is recomputed under the random state of its forward pass draws the same masks again.

Source: Shoeybi et al. 2019 (Megatron-LM), appendix B.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

_WORD: Final = (1 << 64) - 1
_CUDA_STEP: Final = 4
"""Offsets of CUDA generators are multiples of it."""


@dataclass
class RandomStreams:
    """Which stream a rank draws from.

    Attributes:
        rank: Of the tensor-parallel group.
    """

    rank: int
    _generator: torch.Generator | None = None
    _common: Tensor | None = None

    def run_into(self, module: nn.Module, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a projection into a split width on whole inputs; draw from the rank's own stream afterwards."""
        self.join()
        out = inner(x)
        if module.training:
            self.split(out)
        return out

    def run_back(self, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a projection back on split inputs; draw from the common stream afterwards."""
        out = inner(x)
        self.join()
        return out

    def split(self, like: Tensor) -> None:
        """Draw from this rank's own stream, on the device of a tensor."""
        if isinstance(like, FakeTensor):
            return
        self._generator = generator = _generator_of(like.device)
        seed = _advance(generator)
        self._common = generator.get_state()
        generator.manual_seed(_mixed(seed + self.rank))

    def join(self) -> None:
        """Draw from the common stream."""
        if self._common is not None and self._generator is not None:
            self._generator.set_state(self._common)
        self.forget()

    def forget(self) -> None:
        """Take the present stream as the common one: a pass has ended with an error."""
        self._generator = self._common = None


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _advance(generator: torch.Generator) -> int:
    """Return a number of the generator's state, and move the state on, without waiting for a device."""
    if generator.device.type == "cpu":
        return int(torch.randint(1 << 62, (), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + _CUDA_STEP)
    return _mixed(generator.initial_seed()) ^ offset


def _mixed(x: int) -> int:
    """SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014."""
    x = (x + 1) * 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return (x ^ (x >> 31)) >> 1
