"""Checks that saved and exported weights and optimizer states are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hyper_parallel.errors import LossNotFinite
from hyper_parallel.trainer.checkpoints.pieces import dtype_name


def is_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite, as a scalar bool tensor on the device of `tensor`."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype.itemsize == 1:  # float8 dtypes have no norm
        tensor = tensor.float()
    # Unlike `isfinite().all()`, the norm needs no temporary of the tensor's size.
    return torch.isfinite(torch.linalg.vector_norm(tensor.detach(), torch.inf))


def first_not_finite(parts: Iterable[tuple[str, Callable[[], Tensor]]]) -> str | None:
    """Return the name of the first tensor in `parts` with NaN or infinity; None if all are finite.

    `parts` are pairs of a name and a function that returns a local tensor.
    """
    names, flags = list[str](), dict[torch.device, list[tuple[int, Tensor]]]()
    for number, (name, read) in enumerate(parts):
        names.append(name)
        flag = is_finite(read())
        flags.setdefault(flag.device, []).append((number, flag))
    bad = [
        number
        for group in flags.values()
        for (number, _), finite in zip(group, torch.stack([f for _, f in group]).tolist(), strict=True)
        if not finite
    ]
    return names[min(bad)] if bad else None


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Raise LossNotFinite (HP604) if a parameter to export has NaN or infinity; `where` is the export directory."""
    if not bool(is_finite(tensor)):
        raise LossNotFinite(
            f"parameter `{name}` is not finite in {dtype_name(tensor.dtype)}, so nothing is exported",
            where=where,
            hint="export an older step: `hyper-parallel checkpoint export RUN_DIR --step STEP`; if values overflow in "
            "this dtype, add `--dtype float32`",
        )
