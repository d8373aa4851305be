"""Number that begins a rank's random numbers, equal on tensor-parallel ranks that hold the same activations."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hyper_parallel.backends.torch.parallel_handle import handle


def mixed(*parts: int) -> int:
    """Return a 64-bit seed of several numbers; raw bits of PCG64 are fixed for ever."""
    return int(np.random.PCG64([4, *(part % 2**64 for part in parts)]).random_raw())


def rank_seed(model: nn.Module, seed: int) -> int:
    """Return the seed of a rank, by the seed of the run; each step mixes its number into it.

    Args:
        model: Passed through `parallelize`. If its ranks hold the stream whole, it takes this for their common seed.
        seed: Of the run; ranks that share nothing draw their own from the present random state.
    """
    own, attached = int(torch.randint(1 << 62, ())), handle(model)
    if attached.tp is None or not attached.tp.replicated_activations:
        return own
    attached.tp.same_random = True
    place = attached.plan.mesh.coordinate(attached.ranks.rank)
    return mixed(seed, *(place[axis] for axis in place if axis not in ("tp_x", "tp_y")))
