"""Adafactor for parameters that are replicated on every rank."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.backends.torch.weights.shard_ranges import local


class Adafactor(torch.optim.Adafactor):
    """Adafactor of torch, applied to the local shards of parameters and states.

    DTensor has no sharding rule for the in-place row and column norms. If no axis shards a parameter, the local tensor
    of a replica is the full matrix, and every rank computes the same update.
    """

    def _init_group(self, group: dict[str, Any], *tensors: Any) -> bool:
        """Collect the tensors of a group with torch's method, and replace them by their local shards."""
        has_complex: bool = super()._init_group(group, *tensors)  # type: ignore[misc]
        for collected in tensors:
            collected[:] = [None if tensor is None else local(tensor) for tensor in collected]
        return has_complex
