"""The gradient of an embedding, made beside its address a few columns at a time.

No kernel writes it at a given address, and it is as large as the table. A column of it depends on the same column of
the incoming gradient only and is added up in an order that the rows give, so columns made apart have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from hyper_parallel.backends.torch.offload._calls import Call, View
from hyper_parallel.ir import GRADIENT_PIECES
from hyper_parallel.units import KiB

Beside = Callable[[torch.Tensor], None]
"""Told of every tensor that is made beside the arena."""
_LEAST: Final = 64 * KiB  # a smaller piece is not worth its launches


def columns(call: Call) -> tuple[range, ...]:
    """Columns of the pieces in which a call can make its result; fewer than two: it makes it as a whole."""
    if call.func is not torch.ops.aten.embedding_dense_backward.default or len(call.made) != 1:
        return ()
    scaled = call.args[
        4
    ]  # by how often a row occurs: a kernel's last columns may be rounded differently
    if scaled:
        return ()
    table = call.made[0][1]
    # Every piece sorts the rows again.
    count = min(GRADIENT_PIECES, table.num_bytes // _LEAST, table.size[1])
    if count < 2:
        return ()
    width = -(-table.size[1] // count)
    return tuple(range(at, min(at + width, table.size[1])) for at in range(0, table.size[1], width))


def piece_bytes(call: Call, pieces: tuple[range, ...]) -> tuple[int, ...]:
    """Bytes beside the arena at the same time: columns of the result and of the incoming gradient."""
    width = max(map(len, pieces))
    table, grad = call.made[0][1], call.args[0]
    assert isinstance(grad, View)
    rows = 1
    for size in grad.size[:-1]:
        rows *= size
    return width * table.size[0] * table.dtype.itemsize, width * rows * grad.dtype.itemsize


def widest(pieces: tuple[range, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the operator for a piece that no other is larger than."""
    return args[0][..., pieces[0].start : pieces[0].stop].contiguous(), *args[1:]


def in_pieces(
    pieces: tuple[range, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: torch.Tensor,
    beside: Beside,
) -> Callable[[], None]:
    """What runs the operator piece by piece into `out` [rows, columns]."""
    op = torch.ops.aten.embedding_dense_backward.default
    grad, rest = args[0], args[1:]
    parts = [(grad[..., p.start : p.stop], out[:, p.start : p.stop]) for p in pieces]

    def run() -> None:
        for given, target in parts:
            mine = given.clone(memory_format=torch.contiguous_format)
            beside(mine)
            made = op(mine, *rest, **kwargs)
            beside(made)
            target.copy_(made)
            del mine, made  # before the next piece is made

    return run
