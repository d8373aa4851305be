"""Load pretrained weights into a sharded model; each rank reads only the bytes of its own part.

What transformers converts in a way that is more than stacking and joining is read whole by each rank that needs it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch._token_scores import SCORE, scores_tokens
from hyper_parallel.backends.torch.weights._huggingface import (
    Box,
    Conversion,
    boxes,
    may_be_unexpected,
    twin,
)
from hyper_parallel.backends.torch.weights._initialise import (
    allocate_and_fill_buffers,
    canonical_name,
    is_adapter,
    named_tensors,
)
from hyper_parallel.backends.torch.weights._ranges import Run, copy_full, local, local_ranges
from hyper_parallel.backends.torch.weights._tensor_files import Ranges, WeightFiles, copy_overlap
from hyper_parallel.errors import WeightsUnreadable

Assigned = list[Box] | tuple[Conversion, str, tuple[int, ...]]
"""Boxes of stored tensors, or a conversion with the name and shape of its result."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank did: tensors filled, bytes read from the files, seconds, and stored names not used."""

    tensors: int
    bytes_read: int
    seconds: float
    ignored: tuple[str, ...]


def load_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> LoadReport:
    """Fill a model from a Hugging Face directory of safetensors files, or of PyTorch's where there are none.

    Names, shapes and file sizes are checked from the headers before the first value is copied. Values are cast to the
    dtype of each parameter. No communication; every rank reads the directory on its own.

    Args:
        model: Module of plain tensors or DTensors, on any device including meta; changed in place.
        directory: Holds `model.safetensors` or `pytorch_model.bin`, or shards with their index.
        device: Where plain tensors on the meta device go; None: the CPU.
        seed: Of the first values of a head of scores, where no file holds it; another head is left out then.

    Raises:
        WeightsUnreadable: HP703 naming the file and the parameter: missing, truncated, unexpected, or of another
            shape.
    """
    begin = time.perf_counter()
    source = WeightFiles(directory)
    reference = twin(model)
    targets = _targets(model)
    shapes = {name: entry.shape for name, entry in source.tensors.items()}
    # A pipeline rank holds a part of the model; the files hold all of it.
    wanted = set(targets) | (set(reference.state_dict()) if reference is not None else set())
    boxed, conversions, unknown = boxes(reference, wanted, shapes)
    fresh = {f"{SCORE}.weight"} - boxed.keys() if scores_tokens(model) else set()
    inside = f"{model.base_model_prefix}." if fresh else ""
    _check_unknown([key for key in unknown if key.startswith(inside)], reference, source)
    assigned: dict[str, Assigned] = {**boxed}
    for conversion in conversions:
        made = conversion.run(lambda key: torch.empty(shapes[key], device="meta"))
        assigned |= {name: (conversion, name, tuple(value.shape)) for name, value in made.items()}
    given = {name: target for name, target in targets.items() if name not in fresh}
    chosen = _choose(given, assigned, reference, source)
    for name, parts in chosen.items():
        _check_shape(name, tuple(targets[name].shape), parts, source)
    ranges = {name: local_ranges(targets[name], name) for name in chosen}
    allocate_and_fill_buffers(model, device=device, fresh=fresh, seed=seed)
    targets = _targets(model)
    with torch.no_grad():
        for name, parts in chosen.items():
            for box in parts if isinstance(parts, list) else ():
                _read_box(source, box, local(targets[name]).detach(), ranges[name])
        for conversion in conversions:
            into = {n: p[1] for n, p in chosen.items() if p[0] is conversion}
            values = conversion.run(source.read) if into else {}
            for name, stored in into.items():
                copy_full(targets[name], values[stored], name)
    return LoadReport(
        len(chosen), source.bytes_read, time.perf_counter() - begin, tuple(sorted(unknown))
    )


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """What a file can hold: parameters and persistent buffers, by the name in the unwrapped model; no adapters."""
    skip = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }
    return {
        canonical_name(n): t
        for n, t in named_tensors(model).items()
        if not (n in skip or is_adapter(n))
    }


def _check_unknown(unknown: list[str], reference: nn.Module | None, source: WeightFiles) -> None:
    for key in unknown:
        if not may_be_unexpected(reference, key):
            raise WeightsUnreadable(
                f"the model has no parameter for `{key}`",
                where=str(source.tensors[key].file),
                hint="check that config.json belongs to these weights",
            )


def _choose(
    targets: dict[str, Tensor],
    assigned: dict[str, Assigned],
    reference: nn.Module | None,
    source: WeightFiles,
) -> dict[str, Assigned]:
    """What fills each tensor; of a tied one any of its names may be in the files, also one of another stage."""
    names: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names.setdefault(id(tensor), []).append(name)
    tied: dict[int, list[str]] = {}
    whole = {} if reference is None else named_tensors(reference)
    for name, tensor in whole.items():
        tied.setdefault(id(tensor), []).append(name)
    chosen = {}
    for group in names.values():
        others = [n for name in group if name in whole for n in tied[id(whole[name])]]
        present = [name for name in (*group, *others) if name in assigned]
        if not present:
            raise WeightsUnreadable(
                f"no file holds the parameter `{group[0]}`",
                where=str(source.directory),
                got=f"{len(source.tensors)} tensors in the files",
            )
        chosen[group[0]] = assigned[present[0]]
    return chosen


def _check_shape(name: str, shape: tuple[int, ...], parts: Assigned, source: WeightFiles) -> None:
    """Refuse boxes that reach outside the parameter or do not fill it."""
    if not isinstance(parts, list):
        if parts[2] != shape:
            raise WeightsUnreadable(
                f"what the files are converted to does not fit the parameter `{name}`",
                where=str(source.directory),
                got=f"shape {parts[2]}",
                allowed=f"shape {shape}",
            )
        return
    filled = 0
    for box in parts:
        entry = source.tensors[box.key]
        size = ((1,) if box.stacked else ()) + entry.shape
        inside = len(size) == len(shape) and all(
            o + s <= n for o, s, n in zip(box.offset, size, shape, strict=True)
        )
        if not inside or (len(parts) == 1 and size != shape):
            raise WeightsUnreadable(
                f"`{box.key}` does not fit the parameter `{name}`",
                where=str(entry.file),
                got=f"shape {entry.shape}",
                allowed=f"{'' if len(parts) == 1 else f'one of {len(parts)} parts of '}shape {shape}",
            )
        filled += math.prod(size)
    if filled != math.prod(shape):
        raise WeightsUnreadable(
            f"the files hold {filled} of the {math.prod(shape)} elements of `{name}`",
            where=str(source.tensors[parts[0].key].file),
            got=[box.key for box in parts],
        )


def _read_box(
    source: WeightFiles, box: Box, target: Tensor, ranges: tuple[tuple[Run, ...], ...]
) -> None:
    """Copy the intersection of a stored tensor with this rank's part of the parameter."""

    def read(part: Ranges) -> Tensor:
        stored = source.read(box.key, part[1:] if box.stacked else part)
        return stored.unsqueeze(0) if box.stacked else stored

    size = ((1,) if box.stacked else ()) + source.tensors[box.key].shape
    copy_overlap(read, box.offset, size, target, ranges)
