"""Attention and MLP blocks of a decoder under tensor parallelism, and the forwards of their linear modules.

A region is one attention or MLP module: it gathers its input tokens, and scatters its output tokens. T tokens have D
features; q and F are the widths of attention and MLP. P = x y ranks lie on the axes tp_x and tp_y. Weights are
[out, in], as in `nn.Linear`.

    1d                   [T, D] @ [F/P, D] -> [T, F/P] @ [D, F/P] -> scatter tokens over all P ranks
    2d, attention        gather tokens over x -> [T, D/y] @ [q/x, D/y] -> scatter heads over y -> attention on width q/P
                         -> gather heads over y -> [T, q/x] @ [D/y, q/x] -> scatter tokens over x
    2d, MLP              gather tokens over x -> [T, D/y] @ [F/x, D/y] -> scatter tokens over y -> activation on
                         [T/y, F/x] -> gather tokens over y -> [T, F/x] @ [D/y, F/x] -> scatter tokens over x
    weight               the 1d block of the x ranks on T/y tokens; each weight is gathered over y where it is used

2d attention can also shard tokens instead of heads over y, see `_span_attention`.

The program of a block, from `shard.block_program`, lists its collectives and their mesh axes; this module runs them.
A packed projection (q, k and v, or gate and up, in one weight) whose parts are sharded separately needs no further
communication. Otherwise its rows are sharded into equal slices, and one all-to-all exchanges the output columns.
Backward runs the transpose of every collective.

Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import all_to_all, paired
from hyper_parallel.backends.torch.in_flight import half_index, offer_turn, sum_both, sum_forward
from hyper_parallel.backends.torch.pass_context import PassShape
from hyper_parallel.backends.torch.tensor._span_attention import SpanAttention
from hyper_parallel.backends.torch.tensor.collectives import gather, padded, reshard, scatter
from hyper_parallel.backends.torch.tensor.overlapped_tokens import (
    OverlappedTokens,
    TokenExecutor,
)
from hyper_parallel.backends.torch.tensor.state import RegatherScope, TpState, Y
from hyper_parallel.backends.torch.weights.initialization import LORA_A
from hyper_parallel.backends.torch.weights.lora import delta
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Part, Purpose, exchanged, exchanged_rows, gate_up_parts, qkv_parts
from hyper_parallel.shard import Boundary

Program = Mapping[Purpose, Boundary]


@dataclass(slots=True)
class RegionPass:
    """Values of a region during one forward of its module, separate for each half-batch.

    Attributes:
        scope: Scope in which gathered tensors are gathered again in backward; None: they are saved.
        gathered: Gathered tokens that column-parallel projections use in place of their input; None: use the input.
        block_input: Input of the column-parallel projections; set only with replicated activations.
        block_input_summed_grad: Tensor equal to `block_input` whose gradient is summed over the ranks.
        padded_rows: Number of gathered tokens, padding included.
        executor: Executor that overlaps collectives and products of this forward; None: they run serially.
        column_products: Products of column-parallel projections prepared for the executor, before this forward.
        row_products: Products of row-parallel projections prepared for the executor.
    """

    scope: RegatherScope | None = None
    gathered: Tensor | None = None
    block_input: Tensor | None = None
    block_input_summed_grad: Tensor | None = None
    padded_rows: int = 0
    executor: TokenExecutor | None = None
    column_products: PreparedProducts | None = None
    row_products: PreparedProducts | None = None


@dataclass(slots=True)
class PreparedProducts:
    """Results of `TokenExecutor.product`, created while a collective is in flight; see `chunk_product` for the reason.

    Attributes:
        shape: Shape of the forward pass in which the products were created.
        with_grad: Whether autograd was enabled.
        products: Product of each projection.
    """

    shape: PassShape
    with_grad: bool
    products: dict[nn.Module, Any]


@dataclass(slots=True)
class Region:
    """Attention or MLP module whose input tokens are gathered and whose output tokens are scattered.

    Attributes:
        state: State of tensor parallelism.
        name: Path of the module.
        program: Collectives of the module's forward; empty if activations are replicated.
        key_program: Collectives of the key and value projections.
        kv_heads: Number of key heads of the model; 0 for an MLP, which accepts tokens in any order.
        spans: Attention with queries from one span of every sequence; None for other modules.
        last_column: Last column-parallel projection. After it, the other half-batch may run (`in_flight.offer_turn`).
        column_products: Function by column-parallel projection. It reads the weight and returns its
            `TokenExecutor.product` for one pass.
        row_products: Function by row-parallel projection, as in `column_products`.
        following: Next region in the same layer, whose weights are read while this region's scatter is in flight. In
            backward, their gradients are then computed while the gradient of this region's output is gathered.
        passes: Values of the running forward, for each half-batch; without half-batches, only the first is used.
    """

    state: TpState
    name: str = ""
    program: Program = field(default_factory=dict)
    key_program: Program = field(default_factory=dict)
    kv_heads: int = 0
    spans: SpanAttention | None = None
    last_column: nn.Module | None = None
    column_products: dict[nn.Module, Callable[[], Any]] = field(default_factory=dict)
    row_products: dict[nn.Module, Callable[[], Any]] = field(default_factory=dict)
    following: Region | None = None
    passes: tuple[RegionPass, RegionPass] = field(default_factory=lambda: (RegionPass(), RegionPass()))

    @property
    def current(self) -> RegionPass:
        """Values of the running forward; with half-batches, those of the running half-batch."""
        return self.passes[half_index()]

    def group(self, purpose: Purpose) -> ProcessGroup:
        """Return the process group of the collective in `program` that has this purpose."""
        return self.state.groups[self.program[purpose].axes]

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward `inner` on gathered tokens; a row-parallel projection scatters its output."""
        by_keyword, state = "hidden_states" in kwargs, self.state
        if not by_keyword and not (args and isinstance(args[0], Tensor)):
            raise UnsupportedSharding(
                "tensor parallelism needs modules that get activations as first argument or as `hidden_states`",
                where="parallel.tp_x",
                got=f"{self.name}: arguments {', '.join(kwargs) or 'none'}",
                changes={"parallel.tp_x": 1, "parallel.tp_y": 1},
            )

        def run(tokens: Tensor) -> Any:
            call_kwargs, module_input = kwargs, self._placeholder_input(tokens)
            if self.spans is not None:
                call_kwargs = self.spans.cut(kwargs, tokens.device)
            if by_keyword:
                return inner(*args, **{**call_kwargs, "hidden_states": module_input})
            return inner(module_input, *args[1:], **call_kwargs)

        part = kwargs["hidden_states"] if by_keyword else args[0]
        flat = part.dim() == 2  # shared experts get tokens in any order
        part = part.unsqueeze(0) if flat else part
        if Purpose.RELAYOUT in self.program:
            # Exchange all features of this rank's tokens for this rank's features of all tokens.
            (part,) = reshard((part,), 2, 1, self.group(Purpose.RELAYOUT), Purpose.RELAYOUT)
        gathers_weights = Purpose.WEIGHT_GATHER in self.program and not state.recomputed
        current = self.current
        current.executor = self._executor(part)
        if current.executor is not None:
            group = self.group(Purpose.SEQUENCE_GATHER)
            current.padded_rows = group.size() * part.shape[1]
            batch = state.batch[0], state.batch[1]
            tokens = current.executor.gather(part, group, batch)
            current.row_products = self._prepare(self.row_products)
            out = run(tokens)
            current.row_products = None
            return out.squeeze(0) if flat else out
        current.scope = RegatherScope() if state.regathers or gathers_weights else None
        with nullcontext() if current.scope is None else current.scope.open():
            out = state.with_gathered(self._gather, part, run, self.input_scope)
        current.gathered = current.scope = None
        return out.squeeze(0) if flat else out

    @property
    def input_scope(self) -> RegatherScope | None:
        """Scope in which gathered inputs are gathered again in backward; None: they are saved for backward."""
        return self.current.scope if self.state.regathers else None

    def _executor(self, part: Tensor) -> TokenExecutor | None:
        """Return the executor for this rank's tokens [1, n, D]; None if collectives and products run serially."""
        state = self.state
        if state.executor is None:
            return None
        fits = state.executor.fits(part.shape[1]) and not torch.compiler.is_compiling()
        state.chunked_blocks += fits
        state.whole_blocks += not fits
        return state.executor if fits else None

    def _prepare(self, products: dict[nn.Module, Callable[[], Any]]) -> PreparedProducts:
        functions = {module: make() for module, make in products.items()}
        return PreparedProducts(self.state.shape, torch.is_grad_enabled(), functions)

    def prepare_following(self) -> None:
        """Prepare the products of the column-parallel projections of `following`."""
        if self.following is not None and self.following.state.executor is not None:
            region = self.following
            region.current.column_products = region._prepare(region.column_products)

    def _pop_column_products(self) -> dict[nn.Module, Callable[[], Any]]:
        """Return a function per projection that returns its product: the one prepared for this pass, else a new one."""
        prepared, self.current.column_products = self.current.column_products, None
        is_current = (
            prepared is not None
            and prepared.shape is self.state.shape
            and prepared.with_grad == torch.is_grad_enabled()
        )
        if prepared is None or not is_current:
            return self.column_products
        return {m: partial(prepared.products.__getitem__, m) for m in self.column_products}

    def product_of(self, module: nn.Module, tokens: OverlappedTokens) -> Tensor:
        """Return the product of the tokens with the weight of a column-parallel projection.

        The call of the first projection also computes the products of the other projections, so that more computation
        hides the gather. Projections with another input width or with hooks are computed in their own call. If the
        model calls a projection with a different input, its product from the first call is not used.
        """
        if module not in tokens.products:
            width = tokens.shape[-1]
            products = {
                m: make()
                for m, make in self._pop_column_products().items()
                if m is module or not (tokens.is_multiplied or m.weight.shape[1] != width or _has_hooks(m))
            }
            tokens.multiply(products)
        return tokens.products.pop(module)

    def _gather(self, part: Tensor) -> Tensor:
        """Gather tokens [B, S, ...], or [B, span, ...] if y shards sequences; for an MLP on two axes, [1, T, ...]."""
        tokens = gather(part, 1, self.group(Purpose.SEQUENCE_GATHER), Purpose.SEQUENCE_GATHER)
        self.current.padded_rows = tokens.shape[1]
        if not self.kv_heads and Y in self.state.groups:
            return tokens
        grid = self.state.grid
        length = grid.span if grid.shard_sequences_over_y else grid.batch[1]
        return grid.without_padding(tokens, (grid.batch[0], length))

    def _placeholder_input(self, tokens: Tensor) -> Tensor:
        """Return the module's input: `tokens`, or for 2d attention on spans a placeholder [B, span, ...] of NaN.

        With spans, projections read all tokens from `RegionPass.gathered` but return tokens of one span. The module
        therefore needs an input with the shape of the span.
        """
        if self.spans is None or Purpose.HEAD_SCATTER not in self.program:
            return tokens
        self.current.gathered = tokens
        empty = tokens.new_full((1, 1, 1), float("nan"))
        return empty.expand(tokens.shape[0], self.state.grid.span, tokens.shape[2])

    def scatter(self, out: Tensor) -> Tensor:
        """Reduce-scatter the output over the ranks and return this rank's tokens."""
        tokens = padded(out.reshape(1, -1, out.shape[-1]), self.current.padded_rows)
        group = self.group(Purpose.SEQUENCE_SCATTER)
        # Only a norm is computed before the next region's gather starts.
        return scatter(tokens, 1, group, Purpose.SEQUENCE_SCATTER, leads_to_start=True)

    def with_weight(self, module: nn.Module, use: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `use(weight)` for the module's local weight; if the program gathers weights, gather it over y first.

        Backward gathers the weight again instead of saving it, except in a recomputed layer.
        """
        weight = self.state.local(module.weight)
        if Purpose.WEIGHT_GATHER not in self.program:
            return use(weight)
        y = self.group(Purpose.WEIGHT_GATHER)
        return self.state.with_gathered(
            lambda part: gather(part, 0, y, Purpose.WEIGHT_GATHER), weight, use, self.current.scope
        )

    def adapter(self, module: nn.Module, x: Tensor, rows: slice | None = None, *, is_part: bool = False) -> Tensor:
        """Return the output of a projection's LoRA adapter for this rank's output features.

        Args:
            module: Projection with the adapter.
            x: Input of the projection.
            rows: Rows of the adapter's local B matrix to use; None: all rows.
            is_part: Whether `x` has only this rank's slice of the input features.
        """
        state, b = self.state, self.state.local(module.lora_B, rows)
        part = (state.rank, state.degree) if is_part and state.same_random else (0, 1)
        return delta(module, x, state.local(module.lora_A), b, part)

    def gather_over_y(self, x: Tensor) -> Tensor:
        """Gather the input of a 2d block's row-parallel projection over y: heads, or tokens for an MLP or spans."""
        purpose = Purpose.HEAD_GATHER if self.kv_heads else Purpose.WIDTH_GATHER
        y = self.group(purpose)
        if self.kv_heads and self.spans is None:
            return gather(x, -1, y, purpose)
        tokens = gather(x.reshape(1, -1, x.shape[-1]), 1, y, purpose)
        return tokens if self.spans is None else self.state.grid.from_spans(tokens)

    def sum_heads(
        self, out: Tensor, bias: Tensor | None, rows: slice | None, boundary: Boundary
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the output of a 2d attention projection over y; return this rank's slice and the bias of its features.

        The slice has complete heads or, with span attention, all local heads for the tokens of a span. `rows` is that
        of `colwise`, and `boundary` is the collective with the purpose `HEAD_SCATTER`. The bias is not added.
        """
        y = self.state.groups[boundary.axes]
        if self.spans is not None:
            grid = self.state.grid
            out = scatter(grid.spans(out), 1, y, Purpose.HEAD_SCATTER)
            return out.view(grid.batch[0], grid.span, -1), bias
        if boundary.kind == "reduce_scatter":
            out = scatter(out, -1, y, Purpose.HEAD_SCATTER)
            return out, None if bias is None else bias.chunk(y.size())[y.rank()]
        # Fewer heads than y ranks: all-reduce, then select the head that this rank's queries use.
        heads = 1 if rows else self.kv_heads // self.state.grid.x
        head = y.rank() // (y.size() // heads)
        out = sum_both(out, y, Purpose.HEAD_SCATTER).chunk(heads, -1)[head]
        return out, None if bias is None else bias.chunk(heads)[head]


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return any(hooks) or any((module._backward_pre_hooks, module._backward_hooks))


def colwise(module: nn.Module, name: str, region: Region, rows: slice | None = None) -> None:
    """Replace the forward of a column-parallel projection: it computes this rank's output features.

    Args:
        module: The projection.
        name: Module path of the projection.
        region: Region of the attention or MLP module that contains the projection.
        rows: Rows of a replicated weight for the key or value head that this rank's queries use; None: all local rows.
    """
    state, keys = region.state, name.rpartition(".")[2] in ("k_proj", "v_proj")
    program = region.key_program if keys else region.program
    heads, width = (program.get(p) for p in (Purpose.HEAD_SCATTER, Purpose.WIDTH_SCATTER))
    is_adapted = LORA_A in module._parameters
    region.last_column = module

    def executor_product() -> Any:
        weight, bias = (state.local(p, rows) for p in (module.weight, module.bias))
        adapter = partial(region.adapter, module, rows=rows) if is_adapted else None
        return cast("TokenExecutor", state.executor).product(weight, bias, adapter)

    region.column_products[module] = executor_product

    def forward(x: Tensor) -> Tensor:
        if isinstance(x, OverlappedTokens):
            return region.product_of(module, x)
        gathered = None if region.spans is None else region.current.gathered
        x = x if gathered is None else gathered
        bias = state.local(module.bias, rows)

        def product(weight: Tensor) -> Tensor:
            used = weight if rows is None else weight[rows]
            out = F.linear(x, used, None if heads or width else bias)
            return out + region.adapter(module, x, rows) if is_adapted else out

        out = region.with_weight(module, product)
        if heads is not None:
            out, bias = region.sum_heads(out, bias, rows, heads)
        elif width is not None:  # every y rank keeps its tokens
            out = scatter(out, 1, state.groups[width.axes], Purpose.WIDTH_SCATTER)
        else:  # included in the product
            bias = None
        if region.last_column is module:
            offer_turn()
        return out if bias is None else out + bias

    module.forward = forward


def rowwise(module: nn.Module, region: Region) -> None:
    """Replace the forward of a row-parallel projection: it reduces its partial output over ranks and adds the bias.

    The output is reduce-scattered if the program of the region has a sequence scatter, else all-reduced.
    """
    state, program = region.state, region.program
    gathers_over_y = Purpose.HEAD_GATHER in program or Purpose.WIDTH_GATHER in program
    is_adapted = LORA_A in module._parameters

    def executor_product() -> Any:
        adapter = partial(region.adapter, module, is_part=True) if is_adapted else None
        weight = state.local(module.weight)
        return cast("TokenExecutor", state.executor).product(weight, None, adapter)

    region.row_products[module] = executor_product

    def overlapped(x: Tensor, executor: TokenExecutor) -> Tensor:
        current, group = region.current, region.group(Purpose.SEQUENCE_SCATTER)
        prepared = current.row_products
        product = executor_product() if prepared is None else prepared.products[module]
        rows, before_wait = current.padded_rows, region.prepare_following
        out = executor.scatter(x, product, group, rows, before_wait)
        return out if module.bias is None else out + state.local(module.bias)

    def forward(x: Tensor) -> Tensor:
        if not program:
            region.current.block_input = region.current.block_input_summed_grad = None
        if (executor := region.current.executor) is not None:
            return overlapped(x, executor)

        def product(weight: Tensor) -> Tensor:
            def linear(columns: Tensor) -> Tensor:
                out = F.linear(columns, weight)
                return out + region.adapter(module, columns, is_part=True) if is_adapted else out

            if not gathers_over_y:
                return linear(x)
            return state.with_gathered(region.gather_over_y, x, linear, region.input_scope)

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


class LocalHeads:
    """Proxy of a model config that returns the head counts of one rank, and all other attributes unchanged."""

    def __init__(self, config: Any, num_heads: int, num_kv_heads: int) -> None:
        self.__dict__.update(_config=config, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


def set_local_head_counts(attention: nn.Module, config: Any, degree: int) -> None:
    """Divide head counts and widths in the attributes and the config of an attention module by `degree` ranks.

    At least one key and value head remains. `config` is the text config of the model. If it has values per layer, the
    config of the module is used instead.
    """
    config = attention.config if getattr(config, "is_heterogeneous", False) else config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    local_heads, local_kv_heads = heads // degree, max(1, kv_heads // degree)
    if hasattr(attention, "config"):
        attention.config = LocalHeads(config, local_heads, local_kv_heads)
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if hasattr(attention, name):
            setattr(attention, name, local_heads)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if hasattr(attention, name):
            setattr(attention, name, local_kv_heads)
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = local_heads // local_kv_heads
    for name in ("all_head_size", "embed_dim"):  # width of the concatenated heads
        if hasattr(attention, name):
            setattr(attention, name, getattr(attention, name) // degree)


def exchange_packed(module: nn.Module, parent: nn.Module, style: str, config: Any, state: TpState) -> None:
    """Make a packed projection return the output columns that this rank uses, by an all-to-all if needed.

    Args:
        module: The packed projection, whose forward already uses local parameters.
        parent: Module that splits the projection's output; for qkv, its head counts become those of one rank.
        style: Kind of packing: qkv or gate_up.
        config: Text config of the model, used for qkv.
        state: State of tensor parallelism.
    """
    if style == "gate_up":
        parts = gate_up_parts(module.out_features)
    else:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        parts = qkv_parts(heads, kv_heads, module.out_features // (heads + 2 * kv_heads))
        # Models split the output by head counts, from module attributes or from the config.
        set_local_head_counts(parent, config, state.degree)
    if hasattr(module.weight.placements[0], "split_factor"):
        return
    wrap(module, lambda inner, x: exchange_columns(inner(x), parts, state.group))


def exchange_columns(out: Tensor, parts: tuple[Part, ...], group: dist.ProcessGroup) -> Tensor:
    """Return the columns of a packed projection's output that this rank uses; differentiable.

    Args:
        out: Slice of the output that this rank has computed, [..., columns / ranks].
        parts: Packed parts of the weight's rows, such as q, k and v.
        group: Tensor-parallel process group.
    """
    degree, rank, width = group.size(), group.rank(), out.shape[-1]
    send_sizes = [exchanged_rows(parts, degree, rank, t) for t in range(degree)]
    receive_sizes = [exchanged_rows(parts, degree, s, rank) for s in range(degree)]
    runs = [run for t in range(degree) for run in exchanged(parts, degree, rank, t)]
    index = torch.cat([torch.arange(a, b) - rank * width for a, b in runs]).to(out.device)

    def exchange(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), rows.shape[1])
        return all_to_all(out, rows, group, Purpose.PACKED_COLUMNS, receive, send)

    def forward(x: Tensor) -> Tensor:
        columns = x.reshape(-1, width).t()
        # Columns received in rank order are in the order of the weight's rows, hence in the order of the parts.
        received = exchange(columns.index_select(0, index), send_sizes, receive_sizes)
        return received.t().reshape(*x.shape[:-1], -1).contiguous()

    def backward(grad: Tensor) -> Tensor:
        columns = grad.reshape(-1, grad.shape[-1]).t().contiguous()
        received = exchange(columns, receive_sizes, send_sizes)
        # The gradient of a key head shared by several ranks is the sum of their gradients.
        total = grad.new_zeros(width, columns.shape[1]).index_add_(0, index, received)
        return total.t().reshape(*grad.shape[:-1], width).contiguous()

    return paired(forward, backward, out)
