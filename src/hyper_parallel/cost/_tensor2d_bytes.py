"""Collectives of tensor parallelism on two axes, by formula, to the byte: what `backends.torch` really sends.

Notation: T = B S tokens of a microbatch, P = x y ranks, n tokens of a padded piece, D hidden, q / k rows of the query /
key projections, F width, c bytes of the compute format. Whole tensors of one block, forward; backward mirrors each
(gather and scatter change places), and gathers inputs once more when they are not kept:

    1d        gather and scatter over (x, y)        P n D each
    2d        gather over x                         P n D / y
              attention: scatter q, k, v over y     T (q + 2 k) / x; doubled for k, v when heads are fewer than ranks
                         gather over y              T D / x
              MLP: scatter each input over y        P n F / x
                   gather over y                    P n F / x
              scatter over x                        P n D / y
    weight    gather and scatter over x             x n D each
              each weight gathered over y           out in / x; always gathered again for backward
              attention: gather k, v over y         T 2 k / x

A 2d block in a residual stream of whole hidden adds an all-to-all over y of n D on each side. Norms of a stream that is
cut over y sum one statistic of w = max(c, 4) bytes for each of its y n tokens.
Sources: Xu et al. 2021 (GSPMD), section 3.2; Pope et al. 2022, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.cost._pipeline_bytes import in_halves
from hyper_parallel.ir import Layout, Strategy, Workload
from hyper_parallel.model import Block, ModelSpec, ParamSpec
from hyper_parallel.units import DTYPE_BYTES

X, Y = ("tp_x",), ("tp_y",)
BOTH = ("tp_x", "tp_y")
_MIRROR = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
_KEYS = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Equal collectives of one step.

    Attributes:
        kind: As in `ring_bytes`.
        axes: Mesh axes of the group.
        purpose: What for.
        count: How many in a step.
        whole_bytes: Size of the whole tensor of one.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    count: int
    whole_bytes: int


@dataclass(frozen=True, slots=True)
class _Op:
    """One collective of a block's forward.

    Attributes:
        elements: Of the whole tensor.
        again: Backward gathers it once more, unless it is made again anyway: "input" when inputs are not kept,
            "weight" always.
        tail: Nothing after it is kept for backward when the block ends its layer.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    elements: int
    again: str = ""
    tail: bool = False


def grid_collectives(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    seq_len: int,
    linear_entry: bool,
    last_norms: tuple[str, ...],
    recomputed: frozenset[int],
) -> Iterator[Exchange]:
    """All collectives of tensor parallelism in one optimizer step, tp_y above one.

    Args:
        model: The model.
        layouts: Layout of every parameter.
        strategy: Degrees and shapes.
        workload: Batch numbers resolved, and number formats.
        seq_len: Tokens of a sequence on this rank.
        linear_entry: The embedding's sum waits until the first layer.
        last_norms: Parts of the names of norms that end a layer.
        recomputed: Layers that backward makes again.
    """
    grid = _Grid(model, layouts, strategy, workload, seq_len, last_norms)
    times = workload.accumulation_steps or 1
    yield from grid.ends(linear_entry, times)
    for block, again in in_halves(model.blocks, recomputed):
        if block.layers:
            yield from grid.layer(block, block.count * times, again)
    yield from grid.gradients()


def piece_tokens(strategy: Strategy, batch: int, seq_len: int) -> int:
    """Tokens of the padded piece that a tensor-parallel rank holds between blocks, n."""
    if strategy.tp_y > 1 and strategy.attention_shape == "weight":  # sequences are cut over y first
        return -(-batch * -(-seq_len // strategy.tp_y) // strategy.tp_x)
    return -(-batch * seq_len // strategy.tp)


@dataclass(frozen=True, slots=True)
class _Grid:
    model: ModelSpec
    layouts: Mapping[str, Layout]
    strategy: Strategy
    workload: Workload
    seq_len: int
    last_norms: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        return self.workload.microbatch or 1

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def spans(self) -> int:
        """Tokens of all spans of all sequences, padded."""
        y = self.strategy.tp_y
        return y * self.batch * -(-self.seq_len // y)

    @property
    def piece(self) -> int:
        return piece_tokens(self.strategy, self.batch, self.seq_len)

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.workload.compute_dtype]

    @property
    def stat_bytes(self) -> int:
        return max(4, self.compute_bytes)

    def params(self, block: Block) -> list[ParamSpec]:
        return [p for p in block.params if p.tied_to is None]

    def cuts(self, param: ParamSpec) -> set[str]:
        return {*self.layouts[param.name].sharding_axes}

    def norms(self, block: Block) -> int:
        """Statistics that the norms of a block sum over y: one for each norm, two when it has a bias."""
        found = [
            p
            for p in self.params(block)
            if len(p.shape) == 1 and "tp_y" in self.cuts(p) and "tp_x" not in self.cuts(p)
        ]
        inside = {_parent(p.name) for p in self.params(block) if len(p.shape) == 2}
        return sum(1 for p in found if _parent(p.name) not in inside)

    @property
    def hidden_cut(self) -> bool:
        return any(self.norms(block) for block in self.model.blocks)

    def ends(self, linear_entry: bool, times: int) -> Iterator[Exchange]:
        """Embedding, final norm, head and loss."""
        hidden, c = self.model.hidden_size, self.compute_bytes
        stream = self.strategy.tp * self.piece * hidden * c
        cut = {b.name: self._cuts_rows(b) for b in self.model.blocks if not b.layers}
        embedding = cut.get("embedding", False)
        head = cut.get("head", False) or (self.model.tied_embeddings and embedding)
        end = "final_norm" in cut  # else on another pipeline rank
        gathers = int(end) + int(embedding and linear_entry)
        yield Exchange("all_gather", BOTH, "sequence gather", gathers * times, stream)
        yield Exchange("reduce_scatter", BOTH, "sequence scatter", gathers * times, stream)
        if embedding and not linear_entry:
            whole = self.tokens * hidden * c
            yield Exchange("all_reduce", BOTH, "embedding", 2 * times, whole)
        if not end:
            pass
        elif head:
            stats = self.strategy.tp * 2 * self.tokens * self.stat_bytes
            yield Exchange("all_gather", BOTH, "loss statistics", times, stats)
        else:
            yield Exchange("all_reduce", BOTH, "loss", times, self.stat_bytes)
        for block in self.model.blocks:
            if not block.layers:
                yield self.statistics(2 * self.norms(block) * times)

    def _cuts_rows(self, block: Block) -> bool:
        return any("tp_x" in self.cuts(p) for p in self.params(block) if len(p.shape) == 2)

    def statistics(self, count: int) -> Exchange:
        rows = self.strategy.tp_y * self.piece
        return Exchange("all_reduce", Y, "norm statistics", count, rows * self.stat_bytes)

    def layer(self, block: Block, times: int, made_again: bool) -> Iterator[Exchange]:
        """One layer's blocks, forward, backward, and what is made or gathered again."""
        regather = self.strategy.gathered_inputs == "re-gather"
        yield self.statistics((3 if made_again else 2) * self.norms(block) * times)
        regions: dict[str, list[ParamSpec]] = {}
        for param in self.params(block):
            if len(param.shape) == 2 and self.cuts(param) & {*BOTH}:
                regions.setdefault(_parent(param.name), []).append(param)
        last = next(reversed(regions), None)
        followed = any(n in p.name for p in block.params for n in self.last_norms)
        for name, members in regions.items():
            attention = _is_attention(name)
            ends_layer = name == last and not attention and not followed
            for op in self.operators(block, members, attention):
                whole = op.elements * self.compute_bytes
                backward = _MIRROR.get(op.kind, op.kind)
                yield Exchange(op.kind, op.axes, op.purpose, times, whole)
                yield Exchange(backward, op.axes, op.purpose, times, whole)
                once_more = op.again == "weight" or (op.again == "input" and regather)
                if (made_again and not (op.tail and ends_layer)) or (once_more and not made_again):
                    yield Exchange(op.kind, op.axes, op.purpose, times, whole)

    def operators(self, block: Block, members: list[ParamSpec], attention: bool) -> Iterator[_Op]:
        """Collectives of a block's forward, in order."""
        s, hidden = self.strategy, self.model.hidden_size
        shape = s.attention_shape if attention else s.mlp_shape
        into = [p for p in members if "tp_x" not in self.layouts[p.name].axes[1]]
        out = [p for p in members if p not in into]
        stream = self.piece * hidden * s.tp
        if shape == "1d":
            yield _Op("all_gather", BOTH, "sequence gather", stream, "input")
            for _ in out:
                yield _Op("reduce_scatter", BOTH, "sequence scatter", stream, tail=True)
            return
        relayout = shape == "2d" and not self.hidden_cut
        along_x = stream // s.tp_y
        if relayout:
            yield _Op("all_to_all", Y, "relayout", self.piece * hidden)
        yield _Op("all_gather", X, "sequence gather", along_x, "input")
        if shape == "weight":
            yield from self._moved(block, into, out, attention)
        elif attention:
            yield from self._heads(block, into, out)
        else:
            rows = s.tp * self.piece
            for param in into:
                yield _Op("reduce_scatter", Y, "width scatter", rows * self._rows(block, param))
            for param in out:
                yield _Op("all_gather", Y, "width gather", rows * param.shape[1] // s.tp_x, "input")
        for _ in out:
            yield _Op("reduce_scatter", X, "sequence scatter", along_x, tail=True)
            if relayout:
                yield _Op("all_to_all", Y, "relayout", self.piece * hidden, tail=True)

    def _moved(
        self, block: Block, into: list[ParamSpec], out: list[ParamSpec], attention: bool
    ) -> Iterator[_Op]:
        x = self.strategy.tp_x
        for param in into:
            whole = param.size // (x if "tp_x" in self.cuts(param) else 1)
            yield _Op("all_gather", Y, "weight gather", whole, "weight")
        if attention:
            yield self._keys(block, into)
        for param in out:
            yield _Op("all_gather", Y, "weight gather", param.size // x, "weight")

    def _heads(self, block: Block, into: list[ParamSpec], out: list[ParamSpec]) -> Iterator[_Op]:
        s = self.strategy
        token = s.attention_scatter == "token"
        tokens = self.spans if token else self.tokens
        assert block.attention is not None
        fewer = not token and block.attention.num_kv_heads % s.tp > 0
        for param in into:
            doubled = fewer and _leaf(param.name) in _KEYS
            kind = "all_reduce" if doubled else "reduce_scatter"
            yield _Op(kind, Y, "head scatter", tokens * self._rows(block, param))
        if token:
            yield self._keys(block, into)
        for param in out:
            yield _Op("all_gather", Y, "head gather", tokens * param.shape[1] // s.tp_x, "input")

    def _keys(self, block: Block, into: list[ParamSpec]) -> _Op:
        rows = sum(self._rows(block, p) for p in into if _leaf(p.name) in _KEYS)
        return _Op("all_gather", Y, "key and value gather", self.spans * rows)

    def _rows(self, block: Block, param: ParamSpec) -> int:
        """Rows of a projection's output on one x rank; one head of those that are whole over x."""
        if "tp_x" in self.cuts(param):
            return param.shape[0] // self.strategy.tp_x
        assert block.attention is not None
        return param.shape[0] // block.attention.num_kv_heads

    def gradients(self) -> Iterator[Exchange]:
        """Sums over the axes that do not cut a parameter, once a step."""
        mesh = self.strategy.mesh()
        elements: dict[tuple[str, ...], int] = {}
        for block in self.model.blocks:
            for param in self.params(block):
                missing = tuple(a for a in BOTH if a not in self.cuts(param))
                if missing and "ep" not in self.cuts(param):
                    part = self.layouts[param.name].max_local_shape(param.shape, mesh)
                    size = block.count * math.prod(part)
                    elements[missing] = elements.get(missing, 0) + size
        width = DTYPE_BYTES[self.workload.param_dtype]
        for axes, size in elements.items():
            yield Exchange("all_reduce", axes, "gradients of whole parameters", 1, size * width)


def _parent(name: str) -> str:
    """Module that contains the module of a parameter."""
    return name.rsplit(".", 2)[0]


def _leaf(name: str) -> str:
    """Last part of the name of a parameter's module."""
    return name.rsplit(".", 2)[-2]


def _is_attention(module: str) -> bool:
    last = module.rpartition(".")[2]
    return "attn" in last or "attention" in last
