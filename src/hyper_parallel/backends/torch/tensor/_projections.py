"""Forwards of linear modules under tensor parallelism, by their style and the shape of the block around them.

    1d                   [T, D] @ [F/P, D] -> [T, F/P] @ [D, F/P] -> scatter tokens over all P ranks
    2d, attention        gather tokens over x -> [T, D/y] @ [q/x, D/y] -> scatter heads over y -> attention on q/P heads
                         -> gather heads over y -> [T, D/x] @ [D/y, D/x] -> scatter tokens over x
    2d, MLP              gather tokens over x -> [T, D/y] @ [F/x, D/y] -> scatter tokens over y -> activation on
                         [T/y, F/x] -> gather tokens over y -> [T, F/x] @ [D/y, F/x] -> scatter tokens over x
    weight               the 1d block of the x ranks on T/y tokens; each weight is gathered over y where it is used

Backward mirrors every collective. Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch._collectives import sum_both, sum_forward
from hyper_parallel.backends.torch._regather import RegatherScope, instead_of
from hyper_parallel.backends.torch.tensor._collectives import (
    gather_features,
    gather_tokens,
    scatter_features,
    scatter_tokens,
)
from hyper_parallel.backends.torch.tensor._gradients import to_local
from hyper_parallel.backends.torch.tensor._span_attention import SpanAttention
from hyper_parallel.backends.torch.tensor._state import TpState
from hyper_parallel.backends.torch.tensor._stream import TokenGrid, TokenList
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose


@dataclass(slots=True)
class Region:
    """One attention or MLP module: tokens are gathered where it begins, scattered where it ends.

    Attributes:
        shape: 1d, 2d or weight.
        attention: Whether it mixes positions.
        spans: Attention on one span of every sequence, or None.
        scope: What backward gathers again, while the module's forward runs.
        tokens: Gathered input that the projections read in place of what they are given, while forward runs.
    """

    shape: str = "1d"
    attention: bool = False
    spans: SpanAttention | None = None
    scope: RegatherScope | None = None
    tokens: Tensor | None = None

    def watch(self, state: TpState) -> AbstractContextManager[Any]:
        """Watch what the module saves, when anything in it may be gathered again."""
        wanted = state.regathers or (self.shape == "weight" and not state.recomputed)
        self.scope = RegatherScope() if wanted else None
        return nullcontext() if self.scope is None else self.scope.open()

    def shown(self, tokens: Tensor, stream: TokenList | TokenGrid) -> Tensor:
        """What the module is given. With spans on y it gets the shape of its span only, filled with NaN.

        The projections of 2d attention read all tokens and return one span; the module must see the span's shape.
        """
        if self.shape != "2d" or self.spans is None:
            return tokens
        assert isinstance(stream, TokenGrid)
        self.tokens = tokens
        empty = tokens.new_full((1, 1, 1), float("nan"))
        return empty.expand(tokens.shape[0], stream.span, tokens.shape[2])


class Projections:
    """Gives the linear modules of one model their forwards; one of no region, by name, is in shape 1d."""

    def __init__(
        self,
        state: TpState,
        stream: TokenList | TokenGrid,
        regions: dict[str, Region],
        config: Any,
    ) -> None:
        self.state, self.stream, self.regions, self.config = state, stream, regions, config

    @property
    def _grid(self) -> TokenGrid:
        assert isinstance(self.stream, TokenGrid), "a block of two axes on one"
        return self.stream

    def _region(self, name: str) -> Region:
        return self.regions.get(name.rpartition(".")[0], Region())

    def _local(self, param: Any, rows: slice | None = None) -> Any:
        if param is None:
            return None
        part = to_local(param, self.state.gradients)
        return part if rows is None else part[rows]

    def key_value_rows(self, module: nn.Module) -> slice:
        """Rows of the key and value head that this rank's queries use, of several ranks' common one."""
        heads = self.config.num_key_value_heads
        width = module.weight.shape[0] // heads
        row = self.state.rank // (self.state.degree // heads) * width
        return slice(row, row + width)

    def colwise(self, module: nn.Module, name: str, rows: slice | None = None) -> None:
        """A projection into a split width.

        `rows` of a weight that is whole over x are for the heads that this rank's queries use; None: all it holds.
        """
        require_linear(module, name)
        region = self._region(name)

        def plain(x: Tensor) -> Tensor:
            return F.linear(x, self._local(module.weight, rows), self._local(module.bias, rows))

        def weight(x: Tensor) -> Tensor:
            bias = self._local(module.bias, rows)
            return self._with_weight(
                region, module, lambda w: F.linear(x, w if rows is None else w[rows], bias)
            )

        def width(x: Tensor) -> Tensor:
            """Sum over y, each y rank keeps its part of the tokens."""
            out = F.linear(x, self._local(module.weight))
            out = scatter_tokens(out, self._grid.y, Purpose.WIDTH_SCATTER)
            return out if module.bias is None else out + self._local(module.bias)

        if region.shape == "2d" and region.attention:
            self._heads(module, name, region, rows)
        else:
            module.forward = {"1d": plain, "weight": weight, "2d": width}[region.shape]

    def _heads(self, module: nn.Module, name: str, region: Region, rows: slice | None) -> None:
        """A projection of 2d attention: sum over y, each y rank keeps whole heads, or its span of the sequences."""
        grid = self._grid
        y, kv_heads = grid.y, self.config.num_key_value_heads
        # Fewer heads than y ranks: every y rank gets the sum and takes the head its queries use.
        doubled = (
            region.spans is None
            and name.rpartition(".")[2] in ("k_proj", "v_proj")
            and kv_heads % self.state.degree
        )
        local_heads = 1 if rows else kv_heads // grid.x.size()

        def head(x: Tensor) -> Tensor:
            width = x.shape[-1] // local_heads
            first = y.rank() // (y.size() // local_heads) * width
            return x[..., first : first + width]

        def forward(x: Tensor) -> Tensor:
            x = x if region.tokens is None else region.tokens
            out = F.linear(x, self._local(module.weight, rows))
            bias = self._local(module.bias, rows)
            if region.spans is not None:
                out = scatter_tokens(grid.spans(out), y, Purpose.HEAD_SCATTER)
                out = out.view(x.shape[0], grid.span, -1)
            elif doubled:
                out = head(sum_both(out, y, Purpose.HEAD_SCATTER))
                bias = None if bias is None else head(bias)
            else:
                out = scatter_features(out, y, Purpose.HEAD_SCATTER)
                bias = None if bias is None else bias.chunk(y.size())[y.rank()]
            return out if bias is None else out + bias

        module.forward = forward

    def rowwise(self, module: nn.Module, name: str, tokens: bool = True) -> None:
        """The projection back: sum, each rank keeps its part of the tokens or all of them; then add the bias once."""
        require_linear(module, name)
        region, state, stream = self._region(name), self.state, self.stream

        def forward(x: Tensor) -> Tensor:
            if region.shape == "weight":
                out = self._with_weight(region, module, lambda w: F.linear(x, w))
            elif region.shape == "2d":
                out = self._joined(x, region, self._local(module.weight))
            else:
                out = F.linear(x, self._local(module.weight))
            if tokens:
                out = stream.scatter(out, region.shape, region.attention)
            else:
                out = sum_forward(out, state.group, Purpose.ACTIVATIONS)
            out = out if module.bias is None else out + self._local(module.bias)
            return stream.back(out, region.shape)

        module.forward = forward

    def _with_weight(
        self, region: Region, module: nn.Module, use: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Call `use` with a weight gathered over y, which is not kept for backward; its gradient is scattered."""
        y, part = self._grid.y, self._local(module.weight)
        whole = (1, y.size() * part.shape[0])

        def gather(part: Tensor) -> Tensor:
            return gather_tokens(part, whole, y, Purpose.WEIGHT_GATHER)

        weight, kept = gather(part)[0], part.detach()
        with instead_of(region.scope, weight, lambda: gather(kept)):
            return use(weight)

    def _joined(self, x: Tensor, region: Region, weight: Tensor) -> Tensor:
        """The product with what a 2d block's inner part leaves on the y ranks: heads, spans, or tokens."""
        grid, kept = self._grid, x.detach()
        name = Purpose.HEAD_GATHER if region.attention else Purpose.WIDTH_GATHER

        def gather(x: Tensor) -> Tensor:
            if region.attention and region.spans is None:
                return gather_features(x, grid.y, name)
            rows = x.shape[0] * x.shape[1]
            whole = (1, grid.y.size() * rows)
            out = gather_tokens(x.reshape(1, rows, -1), whole, grid.y, name)
            return grid.from_spans(out) if region.attention else out

        whole = gather(x)
        scope = region.scope if self.state.regathers else None
        with instead_of(scope, whole, self.state.later(lambda: gather(kept))):
            return F.linear(whole, weight)


def require_linear(module: nn.Module, name: str) -> None:
    """Refuse a module that computes something else than `nn.Linear`."""
    if type(module).forward is not nn.Linear.forward:
        raise UnsupportedSharding(
            "only nn.Linear can be split over ranks",
            where=name,
            got=type(module).__name__,
            hint=f"'parallel.rules={{{name}: replicate}}'",
        )
