"""Messages between ranks: nested values with any number of tensors of any shape, keyed by edge and microbatch.

An edge is a pair of stages: sender and receiver.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[tuple[int, int], int, int]
"""Edge between two stages, and the microbatch: data-parallel rank of the language part, and index."""
_ALIGNMENT: Final = 16
"""Bytes of the largest element (complex128), so that each tensor of a message can be viewed in its dtype."""


def pack(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return a pickle of `value` with an index in place of each tensor, and the list of its distinct tensors."""
    tensors: list[Tensor] = []
    indices: dict[int, int] = {}  # id of a tensor -> its index
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)

    def index_of(item: Any) -> int | None:
        if not isinstance(item, Tensor):
            return None
        if id(item) not in indices:
            indices[id(item)] = len(tensors)
            tensors.append(item)
        return indices[id(item)]

    pickler.persistent_id = index_of  # type: ignore[method-assign]
    pickler.dump(value)
    return buffer.getvalue(), tensors


def _unpack(structure: bytes, tensors: Sequence[Tensor]) -> Any:
    # Unpickling is safe: the sender is a rank of this run and runs the same code.
    unpickler = pickle.Unpickler(io.BytesIO(structure))
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign,assignment]
    return unpickler.load()


class Channel:
    """Point-to-point messages with keys, in one direction; a receiver may ask for them in any order.

    Args:
        group: Process group of the ranks; no other traffic may use it.
        device: Device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._pending: list[tuple[Any, Tensor]] = []
        # Messages that have arrived but were not asked for yet, and messages of this rank to itself.
        self._arrived: dict[tuple[int, Key], tuple[bytes, list[tuple[Tensor, bool]]]] = {}

    def send(self, key: Key, structure: bytes, tensors: Sequence[Tensor], target: int) -> None:
        """Start sending the result of `pack` to the global rank `target`."""
        if target == dist.get_rank():
            self._arrived[target, key] = structure, [(t.detach(), t.requires_grad) for t in tensors]
            return
        described = [(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors]
        head = torch.frombuffer(bytearray(pickle.dumps((key, structure, described))), dtype=torch.uint8)
        data = [_bytes(t.detach()) for t in tensors]
        body = torch.cat(data) if data else torch.empty(0, dtype=torch.uint8)
        sizes = torch.tensor([head.numel(), body.numel()])
        self._pending = [(work, t) for work, t in self._pending if not work.is_completed()]
        for part in (sizes, head, body):
            if part.numel():
                self._pending.append((dist.isend(part, target, group=self._group), part))

    def receive(self, key: Key, source: int) -> Any:
        """Wait for the message `key` from the global rank `source` and return its value.

        Tensors of the value that require gradients are leaves.

        Raises:
            KeyError: `source` is this rank, and it has not sent the message.
        """
        while (source, key) not in self._arrived and source != dist.get_rank():
            self._read(source)
        structure, tensors = self._arrived.pop((source, key))
        return _unpack(structure, [_leaf(tensor, grad) for tensor, grad in tensors])

    def _read(self, source: int) -> None:
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, source, group=self._group)
        head = torch.empty(int(sizes[0]), dtype=torch.uint8)
        dist.recv(head, source, group=self._group)
        key, structure, described = pickle.loads(head.numpy().tobytes())
        body = torch.empty(int(sizes[1]), dtype=torch.uint8, device=self._device)
        if body.numel():
            dist.recv(body, source, group=self._group)
        tensors, start = [], 0
        for dtype, shape, requires_grad in described:
            size = dtype.itemsize * torch.Size(shape).numel()
            tensors.append((body[start : start + size].view(dtype).view(shape), requires_grad))
            start += size + -size % _ALIGNMENT
        self._arrived[source, key] = structure, tensors

    def flush(self) -> None:
        """Wait until every message is sent."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.requires_grad_(requires_grad and torch.is_grad_enabled())


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT))
