"""Rows to an index and back, each at most once, so that backward places gradients instead of adding them.

With `spare` there is one more place behind the last, which any number of rows may name: they are dropped on the way
there and zero on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def take(rows: Tensor, index: Tensor, spare: bool = False) -> Tensor:
    """[N, D] the rows at `index` [N], each at most once; with `spare`, zero for index len(rows)."""
    return _Take.apply(rows, index, spare)


def place(rows: Tensor, index: Tensor, size: int, spare: bool = False) -> Tensor:
    """[size, D] with `rows` at the places `index`, each at most once, and zero elsewhere.

    With `spare`, rows of index `size` are left out.
    """
    return _Place.apply(rows, index, size, spare)


def _taken(rows: Tensor, index: Tensor, spare: bool) -> Tensor:
    if spare:
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    return rows[index]


def _placed(rows: Tensor, index: Tensor, size: int, spare: bool) -> Tensor:
    if spare:
        return rows.new_zeros(size + 1, *rows.shape[1:]).index_copy_(0, index, rows)[:size]
    make = rows.new_empty if len(index) == size else rows.new_zeros
    return make(size, *rows.shape[1:]).index_copy_(0, index, rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, spare: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size, ctx.spare = rows.shape[0], spare
        return _taken(rows, index, spare)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _placed(grad, index, ctx.size, ctx.spare), None, None


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, size: int, spare: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.spare = spare
        return _placed(rows, index, size, spare)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return _taken(grad, index, ctx.spare), None, None, None
