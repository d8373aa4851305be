"""Blocks of a decoder under tensor parallelism, and the forwards of the linear modules in them.

    1d                   [T, D] @ [F/P, D] -> [T, F/P] @ [D, F/P] -> scatter tokens over all P ranks
    2d, attention        gather tokens over x -> [T, D/y] @ [q/x, D/y] -> scatter heads over y -> attention on q/P heads
                         -> gather heads over y -> [T, D/x] @ [D/y, D/x] -> scatter tokens over x
    2d, MLP              gather tokens over x -> [T, D/y] @ [F/x, D/y] -> scatter tokens over y -> activation on
                         [T/y, F/x] -> gather tokens over y -> [T, F/x] @ [D/y, F/x] -> scatter tokens over x
    weight               the 1d block of the x ranks on T/y tokens; each weight is gathered over y where it is used

Which of these a block runs, and over which ranks, is what the boundary table says (`shard.block_program`); here is how.
Backward mirrors every collective. Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import sum_both, sum_forward
from hyper_parallel.backends.torch.regather import RegatherScope
from hyper_parallel.backends.torch.tensor._span_attention import SpanAttention
from hyper_parallel.backends.torch.tensor.collectives import gather, padded, reshard, scatter
from hyper_parallel.backends.torch.tensor.state import TpState, Y
from hyper_parallel.backends.torch.weights.initialization import LORA_A
from hyper_parallel.backends.torch.weights.lora import delta
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose
from hyper_parallel.shard import Boundary

Program = Mapping[Purpose, Boundary]


@dataclass(slots=True)
class Region:
    """One attention or MLP module: tokens are gathered where it begins, scattered where it ends.

    Attributes:
        name: Of the module.
        program: What its forward sends; empty where activations between modules are whole on every rank.
        key_program: The same for key and value projections.
        kv_heads: Key and value heads of the model; 0 for a module that takes tokens in any order.
        spans: Attention on one span of every sequence, or None.
        scope: What backward gathers again, while the module's forward runs.
        tokens: Gathered input that the projections read in place of what they are given, while forward runs.
        source: Where activations are whole: the tensor that the projections into the block read.
        shared: That tensor, with the ranks' gradients summed.
        listed: Rows of the gathered list of tokens, padding included.
    """

    state: TpState
    name: str = ""
    program: Program = field(default_factory=dict)
    key_program: Program = field(default_factory=dict)
    kv_heads: int = 0
    spans: SpanAttention | None = None
    scope: RegatherScope | None = None
    tokens: Tensor | None = None
    source: Tensor | None = None
    shared: Tensor | None = None
    listed: int = 0

    def group(self, purpose: Purpose) -> ProcessGroup:
        """The ranks of a collective of the program."""
        return self.state.groups[self.program[purpose].axes]

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's forward on gathered tokens."""
        named, state = "hidden_states" in kwargs, self.state
        if not named and not (args and isinstance(args[0], Tensor)):
            raise UnsupportedSharding(
                "the module takes its activations neither first nor as `hidden_states`",
                where=self.name,
                got=f"arguments {', '.join(kwargs) or 'none'}",
            )

        def run(tokens: Tensor) -> Any:
            more, shown = kwargs, self._shown(tokens)
            if self.spans is not None:
                more = self.spans.cut(kwargs, tokens.device)
            if named:
                return inner(*args, **{**more, "hidden_states": shown})
            return inner(shown, *args[1:], **more)

        part = kwargs["hidden_states"] if named else args[0]
        flat = part.dim() == 2  # tokens in any order, as shared experts are given them
        part = part.unsqueeze(0) if flat else part
        if (
            Purpose.RELAYOUT in self.program
        ):  # a rank's tokens with all features, to all tokens with its own
            (part,) = reshard((part,), 2, 1, self.group(Purpose.RELAYOUT), Purpose.RELAYOUT)
        moves = Purpose.WEIGHT_GATHER in self.program and not state.recomputed
        self.scope = RegatherScope() if state.regathers or moves else None
        with nullcontext() if self.scope is None else self.scope.open():
            out = state.gathered(self._gather, part, run, self.input_scope)
        self.tokens = self.scope = None
        return out.squeeze(0) if flat else out

    @property
    def input_scope(self) -> RegatherScope | None:
        """The scope of gathered inputs; None: they are kept."""
        return self.scope if self.state.regathers else None

    def _gather(self, part: Tensor) -> Tensor:
        """[B, S, .]: whole sequences, or spans; on two axes for attention only, else all tokens in any order."""
        tokens = gather(part, 1, self.group(Purpose.SEQUENCE_GATHER), Purpose.SEQUENCE_GATHER)
        self.listed = tokens.shape[1]
        if not self.kv_heads and Y in self.state.groups:
            return tokens
        grid = self.state.grid
        length = grid.span if grid.by_sequence else grid.batch[1]
        return grid.listed(tokens, (grid.batch[0], length))

    def _shown(self, tokens: Tensor) -> Tensor:
        """What the module is given. With spans on y it gets the shape of its span only, filled with NaN.

        The projections of 2d attention read all tokens and return one span; the module must see the span's shape.
        """
        if self.spans is None or Purpose.HEAD_SCATTER not in self.program:
            return tokens
        self.tokens = tokens
        empty = tokens.new_full((1, 1, 1), float("nan"))
        return empty.expand(tokens.shape[0], self.state.grid.span, tokens.shape[2])

    def scatter(self, out: Tensor) -> Tensor:
        """This rank's part of the sum of every rank's output."""
        tokens = padded(out.reshape(1, -1, out.shape[-1]), self.listed)
        return scatter(tokens, 1, self.group(Purpose.SEQUENCE_SCATTER), Purpose.SEQUENCE_SCATTER)

    def with_weight(self, module: nn.Module, use: Callable[[Tensor], Tensor]) -> Tensor:
        """`use` of a weight, gathered where weights move; a gathered one is not kept for backward."""
        weight = self.state.local(module.weight)
        if Purpose.WEIGHT_GATHER not in self.program:
            return use(weight)
        y = self.group(Purpose.WEIGHT_GATHER)
        return self.state.gathered(
            lambda part: gather(part, 0, y, Purpose.WEIGHT_GATHER), weight, use, self.scope
        )

    def adapter(
        self, module: nn.Module, x: Tensor, rows: slice | None = None, *, is_part: bool = False
    ) -> Tensor:
        """Return this rank's part of an adapter's product, or rows of it; `is_part`: `x` is a part of the width."""
        state, b = self.state, self.state.local(module.lora_B, rows)
        part = (state.rank, state.degree) if is_part and state.same_random else (0, 1)
        return delta(module, x, state.local(module.lora_A), b, part)

    def inner(self, x: Tensor) -> Tensor:
        """What a 2d block left on the y ranks, heads, spans or tokens, together again."""
        purpose = Purpose.HEAD_GATHER if self.kv_heads else Purpose.WIDTH_GATHER
        y = self.group(purpose)
        if self.kv_heads and self.spans is None:
            return gather(x, -1, y, purpose)
        tokens = gather(x.reshape(1, -1, x.shape[-1]), 1, y, purpose)
        return tokens if self.spans is None else self.state.grid.from_spans(tokens)

    def sum_heads(
        self, out: Tensor, bias: Tensor | None, rows: slice | None, boundary: Boundary
    ) -> tuple[Tensor, Tensor | None]:
        """A projection of 2d attention summed over y to whole heads, or to a span of the sequences; and its bias."""
        y = self.state.groups[boundary.axes]
        if self.spans is not None:
            grid = self.state.grid
            out = scatter(grid.spans(out), 1, y, Purpose.HEAD_SCATTER)
            return out.view(grid.batch[0], grid.span, -1), bias
        if boundary.kind == "reduce_scatter":
            out = scatter(out, -1, y, Purpose.HEAD_SCATTER)
            return out, None if bias is None else bias.chunk(y.size())[y.rank()]
        # Fewer heads than y ranks: every y rank gets the sum and takes the head its queries use.
        heads = 1 if rows else self.kv_heads // self.state.grid.x
        head = y.rank() // (y.size() // heads)
        out = sum_both(out, y, Purpose.HEAD_SCATTER).chunk(heads, -1)[head]
        return out, None if bias is None else bias.chunk(heads)[head]


def colwise(module: nn.Module, name: str, region: Region, rows: slice | None = None) -> None:
    """A projection into a split width.

    `rows` of a weight that is whole over x are for the heads that this rank's queries use; None: all it holds.
    """
    state, keys = region.state, name.rpartition(".")[2] in ("k_proj", "v_proj")
    program = region.key_program if keys else region.program
    heads, width = (program.get(p) for p in (Purpose.HEAD_SCATTER, Purpose.WIDTH_SCATTER))
    is_adapted = LORA_A in module._parameters

    def forward(x: Tensor) -> Tensor:
        x = x if region.tokens is None else region.tokens
        bias = state.local(module.bias, rows)

        def product(weight: Tensor) -> Tensor:
            mine = weight if rows is None else weight[rows]
            out = F.linear(x, mine, None if heads or width else bias)
            return out + region.adapter(module, x, rows) if is_adapted else out

        out = region.with_weight(module, product)
        if heads is not None:
            out, bias = region.sum_heads(out, bias, rows, heads)
        elif width is not None:  # every y rank keeps its part of the tokens
            out = scatter(out, 1, state.groups[width.axes], Purpose.WIDTH_SCATTER)
        else:
            return out
        return out if bias is None else out + bias

    module.forward = forward


def rowwise(module: nn.Module, name: str, region: Region) -> None:
    """The projection back: sum, each rank keeps its part of the tokens or all of them; then add the bias once."""
    state, program = region.state, region.program
    inner = Purpose.HEAD_GATHER in program or Purpose.WIDTH_GATHER in program
    is_adapted = LORA_A in module._parameters

    def forward(x: Tensor) -> Tensor:
        region.source = region.shared = None

        def product(weight: Tensor) -> Tensor:
            def of(whole: Tensor) -> Tensor:
                out = F.linear(whole, weight)
                return out + region.adapter(module, whole, is_part=True) if is_adapted else out

            return state.gathered(region.inner, x, of, region.input_scope) if inner else of(x)

        out = region.with_weight(module, product)
        if Purpose.SEQUENCE_SCATTER in program:
            out = region.scatter(out)
        else:
            out = sum_forward(out, state.group, Purpose.ACTIVATIONS)
        out = out if module.bias is None else out + state.local(module.bias)
        if Purpose.RELAYOUT in program:
            (out,) = reshard((out,), 1, 2, region.group(Purpose.RELAYOUT), Purpose.RELAYOUT)
        return out

    module.forward = forward
