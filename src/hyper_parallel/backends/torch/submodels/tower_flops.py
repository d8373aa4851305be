"""Operations of the forward of a tower, counted on meta tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel.backends.torch.submodels.parts import TowerModel, divide


def tower_flops(
    model: nn.Module, batches: Sequence[Mapping[str, NDArray[Any]]]
) -> list[float] | None:
    """Return the FLOPs of the tower's forward on each batch; None if the tower does not run on meta tensors.

    Args:
        model: Model of `parallelize_submodels`, on the meta device; not changed.
        batches: Arguments of its forward as arrays.
    """
    tower = TowerModel(copy.deepcopy(model), divide(model))
    dtype = next(tower.parameters()).dtype
    counts = []
    for batch in batches:
        inputs = {name: _meta(array, dtype) for name, array in batch.items()}
        if not any(t.is_floating_point() for t in inputs.values()):
            counts.append(0.0)
            continue
        has_features = False
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            # Models read values after the tower, for example to compare numbers of tokens: meta tensors have none. An
            # error inside of the tower leaves no features.
            with suppress(Exception):
                has_features = bool(tower(**inputs)[1])
            if not (tower.has_features or has_features):
                return None
        counts.append(float(counter.get_total_flops()))
    return counts


def _meta(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor of an array; small integers, such as grids of patches, keep their values."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tensor if tensor.dim() == 2 and tensor.shape[1] == 3 else tensor.to("meta")
