"""Random seed of a rank, equal on tensor-parallel ranks with the same activations."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hyper_parallel.backends.torch.parallel_handle import handle


def derive_seed(*parts: int) -> int:
    """Return a 64-bit seed derived from `parts`, the same for all versions of numpy."""
    return int(np.random.PCG64([4, *(part % 2**64 for part in parts)]).random_raw())


def rank_seed(model: nn.Module, seed: int) -> int:
    """Return the seed of this rank; callers derive the seed of each step from it with `derive_seed`.

    Tensor-parallel ranks with replicated activations must draw equal random numbers. They get equal seeds, derived from
    `seed`, and `TpState.same_random` is set, so that forward passes do not synchronize random states again. For other
    ranks, the seed is drawn from torch's random state.
    """
    own, attached = int(torch.randint(1 << 62, ())), handle(model)
    if attached.tp is None or not attached.tp.replicated_activations:
        return own
    attached.tp.same_random = True
    coordinate = attached.plan.mesh.coordinate(attached.ranks.rank)
    return derive_seed(seed, *(index for axis, index in coordinate.items() if axis not in ("tp_x", "tp_y")))
