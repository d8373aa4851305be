"""Checkpoint entries for tensors of which a rank holds several ranges of rows.

torch.distributed.checkpoint writes the local part of a DTensor as one box of the whole tensor. Where stacked
projections are cut apart, a rank holds one box per part. A tensor may list its boxes itself; here it does.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hyper_parallel.backends.torch.weights._ranges import local_ranges


def boxed(state: dict[str, Any]) -> dict[str, Any]:
    """The same state, sharing its storage, whose tensors of several boxes list them.

    Args:
        state: Tensors by name, in nested dicts.
    """
    return {key: _boxed(value, key) for key, value in state.items()}


def _boxed(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return boxed(value)
    # Only a split of a split has several ranges; the others are left to the library.
    if not isinstance(value, DTensor) or not any(
        hasattr(p, "split_factor") for p in value.placements
    ):
        return value
    ranges = local_ranges(value, name)
    if all(len(runs) == 1 for runs in ranges):
        return value
    return _with_boxes(value, list(itertools.product(*ranges)))


def _with_boxes(tensor: DTensor, boxes: list[tuple[Any, ...]]) -> DTensor:
    found = tensor.detach()
    local = found._local_tensor
    chunks, parts = [], {}
    for box in boxes:
        offsets = torch.Size([run.start for run in box])
        sizes = torch.Size([run.stop - run.start for run in box])
        part = local
        for dim, run in enumerate(box):
            part = part.narrow(dim, run.at, run.stop - run.start)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        parts[offsets] = part

    def write_items(name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(local), found.size()
                ),
            )
            for chunk in chunks
        ]

    def shard(index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return parts[torch.Size(index.offset)]

    # The protocol is looked up on the object, so that one tensor may differ from its class.
    found.__create_write_items__ = write_items  # type: ignore[method-assign]
    found.__create_chunk_list__ = lambda: chunks  # type: ignore[method-assign]
    found.__get_tensor_shard__ = shard  # type: ignore[method-assign]
    return found
