"""Adafactor on parameters that every rank holds whole."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.backends.torch.weights.shard_ranges import local


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, on the local parts of parameters and states.

    DTensor has no rule for the norms of rows and columns that it takes in place. Where no axis shards a parameter, the
    local part of a replica is the whole matrix, and every rank computes the same update.
    """

    def _init_group(self, group: dict[str, Any], *tensors: Any) -> bool:
        """Collect the tensors of a group, as torch's method does, and replace them by their local parts."""
        has_complex: bool = super()._init_group(group, *tensors)  # type: ignore[misc]
        for collected in tensors:
            collected[:] = [None if tensor is None else local(tensor) for tensor in collected]
        return has_complex
