"""Stand-in of a tensor whose second half may still be computed; any use but by the next layer completes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hyper_parallel.backends.torch.stand_in import StandIn


class HalvedTensor(StandIn):
    """Output of two half-batches; shape and dtype are known before the second half is complete."""

    _first: Tensor
    _second: Callable[[], Tensor | None]
    _finish: Callable[[], None]
    _dim: int
    _whole: Tensor | None

    @staticmethod
    def stand_in(
        first: Tensor, second: Callable[[], Tensor], dim: int, finish: Callable[[], None]
    ) -> HalvedTensor:
        """Return a stand-in.

        Args:
            first: The first half.
            second: Returns the second half when it is complete.
            dim: Dim along which the halves are joined.
            finish: Completes the second half.
        """
        shape = list(first.shape)
        shape[dim] *= 2
        x = HalvedTensor.like(first, tuple(shape))
        x._first, x._second, x._dim, x._finish, x._whole = first, second, dim, finish, None
        return x

    def take_half(self, index: int) -> Tensor:
        """Return a half, which must be complete."""
        if self._whole is not None:
            return self._whole.chunk(2, self._dim)[index]
        return self._second() if index else self._first

    def whole(self) -> Tensor:
        """Complete both halves and return them joined; always the same tensor."""
        if self._whole is None:
            self._finish()
            if (second := self._second()) is None:
                raise RuntimeError("the pass of this tensor ended with an error")
            with torch.set_grad_enabled(self._first.requires_grad):
                self._whole = torch.cat((self._first, second), self._dim)
        return self._whole
