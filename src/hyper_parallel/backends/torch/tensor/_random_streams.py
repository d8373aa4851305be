"""Random streams of tensor-parallel ranks with replicated activations.

    replicated activations               one common stream on all ranks, hence equal dropout masks
    between column- and row-parallel     one stream per rank: every slice of heads or of a width has its own mask

After a column-parallel projection, the rank switches to its own stream, seeded from the common stream. After the
row-parallel projection, it resumes the common stream behind that seed. Both streams are functions of the common one, so
a layer recomputed under the random state of its forward draws the same masks.

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
"""Unit of CUDA generator offsets."""


@dataclass
class RandomStreams:
    """Switch between the common random stream and the rank's own one.

    Attributes:
        rank: Position of this rank in the tensor-parallel group.
    """

    rank: int
    _generator: torch.Generator | None = None
    _common: Tensor | None = None

    def run_column_projection(self, module: nn.Module, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a column-parallel projection; draw from the rank's own stream afterwards."""
        self.join()
        out = inner(x)
        if module.training:
            self.split(out)
        return out

    def run_row_projection(self, inner: Callable[..., Any], x: Tensor) -> Any:
        """Run a row-parallel projection; draw from the common stream afterwards."""
        out = inner(x)
        self.join()
        return out

    def split(self, like: Tensor) -> None:
        """Switch to this rank's own stream, on the device of a tensor."""
        if isinstance(like, FakeTensor):
            return
        self._generator = generator = _generator_of(like.device)
        seed = _advance(generator)
        self._common = generator.get_state()
        generator.manual_seed(_hash64(seed + self.rank))

    def join(self) -> None:
        """Switch back to the common stream."""
        if self._common is not None and self._generator is not None:
            self._generator.set_state(self._common)
        self.forget()

    def forget(self) -> None:
        """Make the current stream the common one, after a pass that ended with an error."""
        self._generator = self._common = None


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _advance(generator: torch.Generator) -> int:
    """Return a number derived from the generator's state and advance the state, without a device synchronization."""
    if generator.device.type == "cpu":
        return int(torch.randint(1 << 62, (), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + _CUDA_STEP)
    return _hash64(generator.initial_seed()) ^ offset


def _hash64(x: int) -> int:
    """Return the SplitMix64 hash (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x + 1) * 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return (x ^ (x >> 31)) >> 1
