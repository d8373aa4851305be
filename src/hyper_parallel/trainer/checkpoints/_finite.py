"""Weights and optimizer states that are NaN or infinite are neither saved nor exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hyper_parallel.errors import LossNotFinite


def is_finite(tensor: Tensor) -> Tensor:
    """Return, as a scalar on the device, whether all elements are finite; one pass without a temporary."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype.itemsize == 1:  # formats without a norm
        tensor = tensor.float()
    return torch.isfinite(torch.linalg.vector_norm(tensor.detach(), torch.inf))


def first_not_finite(parts: Iterable[tuple[str, Callable[[], Tensor]]]) -> str | None:
    """Return the name of the first tensor with NaN or infinity; a device is waited for once.

    Args:
        parts: Names, and functions that give the local tensors.
    """
    names, flags = list[str](), dict[torch.device, list[tuple[int, Tensor]]]()
    for number, (name, read) in enumerate(parts):
        names.append(name)
        flag = is_finite(read())
        flags.setdefault(flag.device, []).append((number, flag))
    bad = [
        number
        for group in flags.values()
        for (number, _), finite in zip(
            group, torch.stack([f for _, f in group]).tolist(), strict=True
        )
        if not finite
    ]
    return names[min(bad)] if bad else None


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Raise LossNotFinite (HP604) when a whole parameter that is exported has NaN or infinity.

    Args:
        name: Its name.
        tensor: In the dtype in which it is stored.
        where: What is written.
    """
    if not bool(is_finite(tensor)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise LossNotFinite(
            f"parameter `{name}` is not finite in {dtype}, so nothing is exported",
            where=where,
            hint="export an older checkpoint (--step), or in a dtype of a larger range (--dtype float32)",
        )
