"""Tensor parallelism on two axes: blocks of shape 1d, 2d or weight around unmodified modules.

    2d, attention   gather tokens over x -> [T, D/y] @ [q/x, D/y] -> scatter heads over y -> attention on q/P heads
                    -> gather heads over y -> [T, D/x] @ [D/y, D/x] -> scatter tokens over x
    2d, MLP         gather tokens over x -> [T, D/y] @ [F/x, D/y] -> scatter tokens over y -> activation on [T/y, F/x]
                    -> gather tokens over y -> [T, F/x] @ [D/y, F/x] -> scatter tokens over x
    weight          the 1-D block of the x ranks on T/y tokens; each weight is gathered over y where it is used

Embedding, head and loss work on all P ranks as in one dimension. Backward mirrors every collective.
Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch import _collectives
from hyper_parallel.backends.torch._handle import TpState
from hyper_parallel.backends.torch._regather import RegatherScope, instead_of
from hyper_parallel.backends.torch.data._gradients import TpGradients, to_local
from hyper_parallel.backends.torch.experts._apply import local_parameters
from hyper_parallel.backends.torch.tensor._apply import (
    Forward,
    TensorParallel,
    _require_linear,
    _wrap,
)
from hyper_parallel.backends.torch.tensor._collectives import gather_features, scatter_features
from hyper_parallel.backends.torch.tensor._span_attention import SpanAttention
from hyper_parallel.backends.torch.tensor._spread_norm import SpreadNorm
from hyper_parallel.backends.torch.tensor._token_grid import TokenGrid
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose, Strategy


@dataclass(slots=True)
class _Block:
    """One attention or MLP module.

    Attributes:
        shape: 1d, 2d or weight.
        attention: Whether it mixes positions.
        spans: Attention on one span of every sequence, or None.
        scope: What backward gathers again, while the block's forward runs.
        tokens: Gathered input that the projections read in place of what they are given, while forward runs.
    """

    shape: str
    attention: bool
    spans: SpanAttention | None = None
    scope: RegatherScope | None = None
    tokens: Tensor | None = None


class TensorParallel2d(TensorParallel):
    """Puts two-dimensional tensor parallelism around the modules of one model.

    Args:
        model: The model, its parameters already DTensors on the mesh of both axes.
        styles: Module name to style, as `shard.plan_layouts` gives them.
        state: State shared by the modules; its group is all ranks of both axes.
        gradients: Sums the gradients of parameters that some of the axes do not cut.
        grid: The axes, and how the residual stream lies on them.
        strategy: Shapes of the blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: dict[str, str],
        state: TpState,
        gradients: TpGradients,
        grid: TokenGrid,
        strategy: Strategy,
    ) -> None:
        super().__init__(model, styles, state, gradients)
        self.grid = grid
        self.strategy = strategy
        self.config = model.config.get_text_config()
        self.blocks = {name: self._block(name) for name in self._regions()}

    def apply_to_modules(self) -> None:
        """Refuse any model that is no decoder: activations between its modules have no tokens to cut."""
        raise UnsupportedSharding(
            "two-dimensional tensor parallelism needs a Hugging Face model with a list of decoder layers",
            where=type(self.model).__name__,
            hint=f"parallel.tp_x={self.strategy.tp} parallel.tp_y=1",
        )

    def _block(self, name: str) -> _Block:
        last = name.rpartition(".")[2]
        attention = "attn" in last or "attention" in last
        s = self.strategy
        if not attention:
            return _Block(s.mlp_shape, False)
        block = _Block(s.attention_shape, True)
        module = self.modules[name]
        if s.attention_shape == "weight" or (
            s.attention_shape == "2d" and s.attention_scatter == "token"
        ):
            block.spans = SpanAttention.attach(module, self.grid, name)
        config = self.config
        kv_heads, heads = config.num_key_value_heads, config.num_attention_heads
        ranks = s.tp_x if block.spans is not None else s.tp
        if kv_heads % ranks and hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads // ranks
        return block

    def _of(self, name: str) -> _Block:
        return self.blocks[name.rpartition(".")[0]]

    def _linear(self, module: nn.Module, name: str) -> None:
        block = self.blocks.get(name.rpartition(".")[0])
        if block is None or block.shape == "1d":
            super()._linear(module, name)
        elif block.shape == "weight":
            self._moved_weight(module, name, block)
        elif block.attention:
            self._heads(module, name, block)
        else:
            self._width(module, name)

    def _key_value(self, module: nn.Module, name: str) -> None:
        """A key or value projection that is whole over x: compute the rows of the heads this rank's queries use."""
        block = self._of(name)
        if block.shape == "1d":
            super()._key_value(module, name)
        elif block.shape == "weight":
            self._moved_weight(module, name, block, self._rows_on_x(module))
        else:
            self._heads(module, name, block, self._rows_on_x(module))

    def _rows_on_x(self, module: nn.Module) -> slice:
        heads, x = self.config.num_key_value_heads, self.grid.x
        width = module.out_features // heads
        row = x.rank() // (x.size() // heads) * width
        return slice(row, row + width)

    def _moved_weight(
        self, module: nn.Module, name: str, block: _Block, rows: slice | None = None
    ) -> None:
        """The weight is gathered over y where it is used; its gradient is scattered."""
        _require_linear(module, name)
        cut = slice(None) if rows is None else rows
        owner = self.gradients

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else to_local(module.bias, owner)[cut]
            return self._with_weight(
                block, to_local(module.weight, owner), lambda w: F.linear(x, w[cut], bias)
            )

        module.forward = forward

    def _with_weight(self, block: _Block, part: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
        """Call `use` with the weight gathered over y; not kept for backward."""
        y = self.grid.y
        whole = (1, y.size() * part.shape[0])
        weight = _collectives.gather_tokens(part, whole, y, Purpose.WEIGHT_GATHER)[0]
        kept = part.detach()
        with instead_of(
            block.scope,
            weight,
            lambda: _collectives.gather_tokens(kept, whole, y, Purpose.WEIGHT_GATHER),
        ):
            return use(weight)

    def _width(self, module: nn.Module, name: str) -> None:
        """A projection into the width of a 2d MLP: sum over y, each y rank keeps its part of the tokens."""
        _require_linear(module, name)
        y, owner = self.grid.y, self.gradients

        def forward(x: Tensor) -> Tensor:
            out = F.linear(x, to_local(module.weight, None))
            out = _collectives.scatter_tokens(out, y, Purpose.WIDTH_SCATTER)
            return out if module.bias is None else out + to_local(module.bias, owner)

        module.forward = forward

    def _heads(
        self, module: nn.Module, name: str, block: _Block, rows: slice | None = None
    ) -> None:
        """A projection of 2d attention: sum over y, each y rank keeps whole heads, or its span of the sequences."""
        _require_linear(module, name)
        grid, owner = self.grid, self.gradients
        y, cut = grid.y, slice(None) if rows is None else rows
        config = self.config
        doubled = (
            block.spans is None
            and name.rpartition(".")[2] in ("k_proj", "v_proj")
            and config.num_key_value_heads % self.state.degree
        )
        local_heads = 1 if rows else config.num_key_value_heads // grid.x.size()

        def forward(x: Tensor) -> Tensor:
            x = x if block.tokens is None else block.tokens
            out = F.linear(x, to_local(module.weight, owner)[cut])
            bias = None if module.bias is None else to_local(module.bias, owner)[cut]
            if block.spans is not None:
                out = _collectives.scatter_tokens(grid.spans(out), y, Purpose.HEAD_SCATTER)
                out = out.view(x.shape[0], grid.span, -1)
            elif doubled:
                # Fewer heads than y ranks: every y rank gets the sum and takes the head its queries use.
                out = _head(
                    _collectives.sum_both(out, y, Purpose.HEAD_SCATTER),
                    y.rank(),
                    y.size(),
                    local_heads,
                )
                bias = None if bias is None else _head(bias, y.rank(), y.size(), local_heads)
            else:
                out = scatter_features(out, y, Purpose.HEAD_SCATTER)
                bias = None if bias is None else bias.chunk(y.size())[y.rank()]
            return out if bias is None else out + bias

        module.forward = forward

    def _rowwise(self, module: nn.Module, name: str, tokens: bool = True) -> None:
        """Sum over x, each x rank keeps its part of the tokens; then add the bias once."""
        block = self._of(name)
        if block.shape == "1d":
            super()._rowwise(module, name, tokens)
            return
        _require_linear(module, name)
        grid, owner = self.grid, self.gradients

        def forward(x: Tensor) -> Tensor:
            weight = to_local(module.weight, None)
            if block.shape == "weight":
                out = self._with_weight(block, weight, lambda w: F.linear(x, w))
            else:
                gathered = self._gather_y(x, block)
                kept = x.detach()
                again = block.scope if self.state.regathers else None
                make = grid.later(lambda: self._gather_y(kept, block))
                with instead_of(again, gathered, make):
                    out = F.linear(gathered, weight)
            scatter = grid.scatter_sequences if block.attention else grid.scatter_list
            out = scatter(out, block.shape)
            out = out if module.bias is None else out + to_local(module.bias, owner)
            return grid.back(out, block.shape)

        module.forward = forward

    def _gather_y(self, x: Tensor, block: _Block) -> Tensor:
        """What a 2d block's inner part leaves on the y ranks, joined: heads, spans, or tokens."""
        y = self.grid.y
        if block.attention and block.spans is None:
            return gather_features(x, y, Purpose.HEAD_GATHER)
        rows = x.shape[0] * x.shape[1]
        name = Purpose.HEAD_GATHER if block.attention else Purpose.WIDTH_GATHER
        whole = _collectives.gather_tokens(x.reshape(1, rows, -1), (1, y.size() * rows), y, name)
        return self.grid.from_spans(whole) if block.attention else whole

    def _scope(self, block: _Block) -> AbstractContextManager[Any]:
        """Watch what a block saves, when anything in it may be gathered again."""
        weight = block.shape == "weight" and not self.state.recomputed
        wanted = weight or self.state.regathers
        block.scope = RegatherScope() if wanted else None
        return nullcontext() if block.scope is None else block.scope.open()

    def _region(self, module: nn.Module, name: str) -> None:
        """Gather what a block reads where it begins; its rowwise module scatters it again."""
        block, grid = self.blocks[name], self.grid
        gather = grid.gather_sequences if block.attention else grid.gather_list

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            named = "hidden_states" in kwargs
            if not named and not (args and isinstance(args[0], Tensor)):
                raise UnsupportedSharding(
                    "the module takes its activations neither first nor as `hidden_states`",
                    where=name,
                    got=f"arguments {', '.join(kwargs) or 'none'}",
                )
            part = grid.align(kwargs.pop("hidden_states") if named else args[0], block.shape)
            tokens = gather(part, block.shape)
            kept = part.detach()
            shown = self._shown(tokens, block)
            if block.spans is not None:
                kwargs = block.spans.cut(kwargs, tokens.device)
            with self._scope(block):
                again = block.scope if self.state.regathers else None
                make = grid.later(lambda: gather(kept, block.shape))
                with instead_of(again, tokens, make):
                    args = args if named else (shown, *args[1:])
                    out = inner(*args, **({"hidden_states": shown} if named else {}), **kwargs)
            block.tokens = block.scope = None
            return out

        _wrap(module, forward)

    def _shown(self, tokens: Tensor, block: _Block) -> Tensor:
        """What the attention module is given. With spans on y it gets the shape of its span only, filled with NaN.

        The projections of 2d attention read all tokens and return one span; the module must see the span's shape.
        """
        if block.shape != "2d" or block.spans is None:
            return tokens
        block.tokens = tokens
        empty = tokens.new_full((1, 1, 1), float("nan"))
        return empty.expand(tokens.shape[0], self.grid.span, tokens.shape[2])

    def _whole(self, module: nn.Module, summed: bool = True) -> None:
        """A module with whole parameters, or a norm on a stream that is cut over y."""
        name = self._name(module)
        weights = list(module.parameters(recurse=False))
        if not any(self._cut_over_y(p) for p in weights):
            super()._whole(module, summed)
            return
        y, owner = self.grid.y, self.gradients

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            with local_parameters(module, owner), SpreadNorm(y, name):
                return inner(*args, **kwargs)

        _wrap(module, forward)

    def _cut_over_y(self, param: nn.Parameter) -> bool:
        return any(p.is_shard() for p in param.placements)

    def _enter(self, layer: nn.Module) -> None:
        """Cut tokens and features where the first layer begins."""
        state, grid = self.state, self.grid

        def forward(inner: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            state.batch = tuple(hidden_states.shape[:-1])
            part = grid.enter(hidden_states, state.partial_embedding)
            state.partial_embedding = False
            return inner(part, *args, **kwargs)

        _wrap(layer, forward)

    def _leave(self, norm: nn.Module) -> None:
        _wrap(norm, lambda inner, *a, **k: self.grid.leave(inner(*a, **k)))


def _head(x: Tensor, rank: int, ranks: int, heads: int) -> Tensor:
    """The part of the last dim that is one rank's head, of `heads` heads spread over more ranks."""
    width = x.shape[-1] // heads
    first = rank // (ranks // heads) * width
    return x[..., first : first + width]
