"""Communication of one optimizer step in bytes: the boundary table of `shard`, counted over the layers of one rank.

Parity and dry-run tests compare this list with the collectives of real and traced ranks, to the byte. The gradient
norm, and gradients of parameters that tensor parallelism replicates, are summed once per step. With pipeline stages,
and with ZeRO-1, FSDP also reduces gradients once per step, and parameters not freed after forward stay gathered for the
step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Final

from hyper_parallel.cost._stages import rank_model, recomputed_layers, split_recomputed
from hyper_parallel.ir import (
    Collective,
    Layout,
    Part,
    Purpose,
    Strategy,
    Workload,
    gate_up_parts,
    qkv_parts,
)
from hyper_parallel.model import Block, ModelSpec, ParamSpec
from hyper_parallel.shard import (
    BlockWidths,
    Boundary,
    Format,
    Projection,
    TokenCut,
    block_boundaries,
    context_boundaries,
    embedding_boundaries,
    expert_boundaries,
    head_boundaries,
    head_norm_boundaries,
    norm_boundaries,
    packed_boundaries,
    pipeline_boundaries,
    sharing_boundaries,
)
from hyper_parallel.units import DTYPE_BYTES

LINEAR_ENTRY = (
    "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "llama", "mistral", "mixtral", "olmo2",
    "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Families whose model code only scales the embedding before the first layer, so its sum can be deferred until then."""

_LAST_NORMS = ("post_feedforward", "post_mlp")
"""Substrings in the names of norms that end a layer."""
_TP = ("tp_x", "tp_y")
_KEYS = ("k_proj", "v_proj")

Entries = tuple[int, bool, Iterable[Boundary]]
"""Number of layers with some collectives, whether backward recomputes these layers, and the collectives."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that one rank exchanged with other ranks in one layer and step, over all microbatches, forward only."""

    sent: int  # rows to experts on other ranks
    received: int  # rows for experts of this rank


def step_collectives(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    rows: Mapping[int, Rows] | None = None,
    pp_rank: int = 0,
) -> tuple[Collective, ...]:
    """Return all collectives of one optimizer step on a pipeline rank, at coordinate 0 of every other axis.

    These ranks are the fullest. A step is `accumulation_steps` microbatches (forward and backward), gradient clipping
    and the update. Other messages of a trainer (token counts, losses to print) are not included.

    Args:
        model: The model; its parameter names hold `*` for the layer index.
        layouts: Layout of every parameter, as returned by `shard.plan_layouts`.
        strategy: Degrees of the axes.
        workload: Batch numbers resolved, and number formats.
        rows: Rows exchanged by the experts of each layer, for measured bytes; None: uniform routing.
        pp_rank: Coordinate on the axis `pp`, whose ranks hold different parts of the model.
    """
    rank_part = rank_model(model, strategy, workload.seq_len, pp_rank)
    recomputed = recomputed_layers(model, strategy, workload.seq_len, pp_rank)
    step = _Step(
        rank_part,
        layouts,
        strategy,
        workload,
        tuple(split_recomputed(rank_part.blocks, recomputed)),
    )
    return step.collectives(
        step.sharing(), step.tensor(), step.projections(), step.context(), step.experts(rows),
        step.pipeline(model, pp_rank), step.gradient_norm(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """Step of one rank: the model part of its pipeline rank, and its blocks with their recomputation."""

    model: ModelSpec
    layouts: Mapping[str, Layout]
    strategy: Strategy
    workload: Workload
    blocks: tuple[tuple[Block, bool], ...]

    def collectives(self, *parts: Iterable[Entries]) -> tuple[Collective, ...]:
        """Return calls and bytes of entries, summed by kind, axes and purpose."""
        w = self.workload
        compute, param = DTYPE_BYTES[w.compute_dtype], DTYPE_BYTES[w.param_dtype]
        widths = {
            "compute": compute, "reduce": DTYPE_BYTES[w.reduce_dtype], "parameter": param,
            "statistic": max(4, compute), "norm": max(4, param), "count": 8,
        }  # fmt: skip
        regathers = self.strategy.gathered_inputs == "re-gather"
        total: dict[tuple[str, tuple[str, ...], Purpose], list[int]] = {}
        entries = itertools.chain.from_iterable(parts)
        for layers, recomputed, b in (
            (n, is_recomputed, b) for n, is_recomputed, rows in entries for b in rows
        ):
            extra = b.recomputed if recomputed else b.regathered if regathers else 0
            count = layers * (self.microbatches * (b.forward + b.backward + extra) + b.once)
            sent = int(count * b.sent_bytes(widths[b.format]))
            # A rank without tokens for other ranks still calls the collective.
            if b.ranks > 1 and count and (sent or b.kind == "all_to_all"):
                sums = total.setdefault((b.kind, self.axes(b.axes), b.purpose), [0, 0])
                sums[0] += count
                sums[1] += sent
        return tuple(Collective(*key, count, sent) for key, (count, sent) in total.items())

    def axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of a group as the mesh names them, without those of one rank."""
        if {"ep", "edp"} & {*names}:
            return self.strategy.spanning_axes(names)
        return tuple(a for a in names if getattr(self.strategy, a) > 1)

    @cached_property
    def cut(self) -> TokenCut:
        """Sharding of the tokens of a microbatch."""
        return TokenCut.of(self.strategy, self.workload)

    @cached_property
    def parts(self) -> int:
        """Number of parts of a microbatch, which layers run one after the other."""
        w = self.workload
        return self.strategy.overlap.parts(w.microbatch or 1, w.seq_len)

    @cached_property
    def part_cut(self) -> TokenCut:
        """Sharding of the tokens of a part of a microbatch."""
        sequences = (self.workload.microbatch or 1) // self.parts
        return TokenCut.of(self.strategy, replace(self.workload, microbatch=sequences))

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return self.workload.accumulation_steps or 1

    def params(self, block: Block) -> list[ParamSpec]:
        """Return the parameters of a block that are not tied to another."""
        return [p for p in block.params if p.tied_to is None]

    def sharding_axes(self, param: ParamSpec) -> set[str]:
        """Return the axes that shard a parameter."""
        return {*self.layouts[param.name].sharding_axes}

    def sharing(self) -> Iterator[Entries]:
        """Yield FSDP collectives: one group per decoder layer, and one for the rest."""
        s = self.strategy
        rest: list[ParamSpec] = []
        for block in self.model.blocks:
            if not block.layers:
                rest += self.params(block)
                continue
            yield block.count, False, self.fsdp_group(self.params(block), s.frees_gathered)
        yield 1, False, self.fsdp_group(rest, False)  # empty on middle stages

    def fsdp_group(self, params: Iterable[ParamSpec], freed: bool) -> Iterator[Boundary]:
        """Return collectives of one FSDP group; dim 0 of a parameter is padded to a multiple of the shards."""
        s, total = self.strategy, 0
        shards = s.dp_shard * s.cp
        for param in params:
            if "ep" in self.sharding_axes(param) or not param.shape:  # FSDP has no scalars
                continue
            axes = self.layouts[param.name].axes
            rows, *columns = (
                -(-size // s.mesh().degree(a for a in cut if a in _TP))
                for size, cut in zip(param.shape, axes, strict=True)
            )
            if {*s.fsdp_axes} & {*axes[0]}:
                rows = -(-rows // shards) * shards
            total += rows * math.prod(columns)
        return sharing_boundaries(
            total, s.fsdp_axes, shards, s.dp_replicate, s.zero_stage, self.reduces_once, freed
        )

    @property
    def reduces_once(self) -> bool:
        """True if gradients are reduced once per step."""
        return self.strategy.reduces_once or self.strategy.zero_stage == 0

    def tensor(self) -> Iterator[Entries]:
        """Yield tensor-parallel collectives: embedding, head and loss; blocks of layers; gradients of replicas."""
        if self.strategy.tp == 1:
            return
        hidden = self.model.hidden_size
        outside = {b.name: b for b in self.model.blocks if not b.layers}
        vocabulary = {
            name: any(self.sharding_axes(p) & {*_TP} for p in self.params(b) if len(p.shape) == 2)
            for name, b in outside.items()
        }
        embedding = vocabulary.get("embedding", False)
        head = vocabulary.get("head", False) or (self.model.tied_embeddings and embedding)
        sum_waits = self.model.family in LINEAR_ENTRY
        if embedding:
            parts, cut = (self.parts, self.part_cut) if sum_waits else (1, self.cut)
            yield parts, False, embedding_boundaries(cut, hidden, sum_waits)
        if "final_norm" in outside:  # else on another pipeline rank
            stream, loss = (head_boundaries(c, hidden, head) for c in (self.part_cut, self.cut))
            once = (Purpose.LOSS, Purpose.LOSS_STATISTICS)
            yield self.parts, False, (b for b in stream if b.purpose not in once)
            yield 1, False, (b for b in loss if b.purpose in once)
        for block, recomputed in self.blocks:
            layers = block.count * self.parts
            yield layers, recomputed, norm_boundaries(self.part_cut, self.norms(block))
            # Recomputation ends with the last tensor that backward needs, which is one of the last part.
            for times, may_end in ((layers - block.count, False), (block.count, True)):
                table = self.layer(block, may_end)
                yield times, recomputed, _in_chunks(table, self.token_chunks, *_TOKENS_MOVED)
        elements: dict[tuple[str, ...], int] = {}
        for block in self.model.blocks:
            for p in self.params(block):
                whole = tuple(a for a in self.axes(_TP) if a not in self.sharding_axes(p))
                if whole and "ep" not in self.sharding_axes(p):
                    part = self.layouts[p.name].max_local_shape(p.shape, self.strategy.mesh())
                    size = block.count * math.prod(part)
                    elements[whole] = elements.get(whole, 0) + size
        for axes, size in elements.items():
            ranks = self.strategy.mesh().degree(axes)
            yield _once_per_step("all_reduce", axes, ranks, size, Purpose.WHOLE_PARAMETERS)

    def norms(self, block: Block) -> int:
        """Return the number of statistics that the norms of a block sum over y: one per norm, two if it has a bias."""
        inside = {_parent(p.name) for p in self.params(block) if len(p.shape) == 2}
        return sum(
            self.sharding_axes(p) & {*_TP} == {"tp_y"} and _parent(p.name) not in inside
            for p in self.params(block)
            if len(p.shape) == 1
        )

    @cached_property
    def hidden_cut(self) -> bool:
        """True if the residual stream is sharded over y, according to the layouts of its norms."""
        return any(self.norms(block) for block in self.model.blocks)

    def layer(self, block: Block, may_end: bool = True) -> Iterator[Boundary]:
        """Yield collectives of the blocks of a layer: modules with matrices that tensor parallelism shards."""
        if not block.layers:
            return
        s = self.strategy
        modules: dict[str, list[ParamSpec]] = {}
        for p in self.params(block):
            if len(p.shape) == 2 and self.sharding_axes(p) & {*_TP}:
                modules.setdefault(_parent(p.name), []).append(p)
        last = next(reversed(modules), None)
        followed = any(norm in p.name for p in block.params for norm in _LAST_NORMS)
        for name, matrices in modules.items():
            module = name.rpartition(".")[2]
            attention = block.attention if "attn" in module or "attention" in module else None
            shape = s.attention_shape if attention else s.mlp_shape
            out = [p for p in matrices if "tp_x" in self.layouts[p.name].axes[1]]
            inputs = (p for p in matrices if p not in out)
            widths = BlockWidths(
                self.model.hidden_size,
                tuple(Projection(p.shape[0], p.size, _leaf(p.name) in _KEYS) for p in inputs),
                tuple(Projection(p.shape[1], p.size) for p in out),
                attention.num_kv_heads if attention else 0,
            )
            yield from block_boundaries(
                widths, shape if s.tp_y > 1 else "1d", self.part_cut, token_scatter=s.attention_scatter == "token",
                hidden_cut=self.hidden_cut, ends_layer=may_end and name == last and not attention and not followed,
            )  # fmt: skip

    @property
    def token_chunks(self) -> int:
        """Number of chunks in which blocks gather and scatter their tokens."""
        chunks = self.strategy.overlap.tp_chunks
        return 1 if self.part_cut.piece % chunks else chunks

    def projections(self) -> Iterator[Entries]:
        """Yield exchanges of packed projections, and norms over all heads."""
        s, ranks = self.strategy, self.strategy.tp
        if ranks == 1:
            return
        for block, recomputed in self.blocks:
            for p in block.params if block.layers else ():
                layout, parts = self.layouts[p.name], _stacked(p, block)
                layers, cut = block.count * self.parts, self.part_cut
                if parts and "tp_x" in layout.axes[0] and layout.parts_of(0) == 1:
                    # Between blocks of two axes tokens are a padded list, which an MLP of all ranks processes.
                    listed = s.tp_y > 1 and p.dims[0] == "gate_up"
                    tokens = ranks * cut.piece if listed else cut.tokens
                    yield layers, recomputed, packed_boundaries(parts, ranks, tokens)
                elif p.name.endswith("_norm.weight") and p.dims[0] in ("heads", "kv_heads"):
                    yield layers, recomputed, head_norm_boundaries(cut)

    def context(self) -> Iterator[Entries]:
        """Yield exchanges of attention over context-parallel ranks."""
        for block, recomputed in self.blocks:
            if self.strategy.cp > 1 and block.attention is not None:
                gather = self.strategy.cp_kind == "all_gather"
                layers = block.count * self.parts
                yield layers, recomputed, context_boundaries(block.attention, self.part_cut, gather)

    def experts(self, rows: Mapping[int, Rows] | None) -> Iterator[Entries]:
        """Yield FSDP collectives of expert parameters over `edp`, and exchanges of routed tokens."""
        s, mesh = self.strategy, self.strategy.expert_mesh()
        if s.ep == 1:
            return
        edp = mesh.degree("edp")
        for block in self.model.blocks:
            params = [
                p for p in block.params if p.name in self.layouts and "ep" in self.sharding_axes(p)
            ]
            shapes = (self.layouts[p.name].max_local_shape(p.shape, mesh) for p in params)
            elements = edp * sum(math.prod(shape) for shape in shapes)
            yield block.count, False, sharing_boundaries(
                elements, ("edp",), edp, s.dp_replicate, s.zero_stage, self.reduces_once, s.frees_gathered, experts=True
            )  # fmt: skip
        chunks, parts = s.overlap.ep_chunks, self.parts
        sequences = (self.workload.microbatch or 1) // parts
        tokens = -(-sequences * self.workload.seq_len // (s.cp * s.tp))
        for block, recomputed in self.blocks:
            if block.mlp is None or not block.mlp.num_experts:
                continue
            routed_rows = tokens * block.mlp.experts_per_token
            if rows is None:  # rounded down over the layers
                even = block.count * routed_rows * (s.ep - 1) // s.ep
                moved = (Fraction(even, block.count),) * 2
            else:
                calls = block.count * self.microbatches * parts
                own = [rows[layer] for layer in block.layers]
                sent, received = sum(r.sent for r in own), sum(r.received for r in own)
                moved = Fraction(sent, calls), Fraction(received, calls)
            hidden, experts = self.model.hidden_size, block.mlp.num_experts
            table = expert_boundaries(hidden, experts * chunks, s.ep, routed_rows, *moved)
            yield block.count * parts, recomputed, _in_chunks(table, chunks, Purpose.EXPERT_ROWS)

    def pipeline(self, whole: ModelSpec, pp_rank: int) -> Iterator[Entries]:
        """Yield messages to other stages, and the gradient of a weight shared by the first and the last stage."""
        s = self.strategy
        if s.pp == 1:
            return
        rank_of = {stage: r for r in range(s.pp) for stage in s.stages_of(r)}
        own = s.stages_of(pp_rank)
        onward, back = (
            sum(rank_of.get(stage + step, pp_rank) != pp_rank for stage in own) for step in (1, -1)
        )
        yield 1, False, pipeline_boundaries(self.cut, self.model.hidden_size, onward, back)
        ends = {rank_of[0], rank_of[s.stages - 1]}
        if len(ends) == 2 and pp_rank in ends:
            fsdp_group = sum(
                math.prod(self.layouts[p.tied_to].max_local_shape(p.shape, s.mesh()))
                for block in whole.blocks
                for p in block.params
                if p.tied_to and not block.layers
            )
            yield _once_per_step("send_recv", ("pp",), 2, fsdp_group, Purpose.SHARED_WEIGHT)

    def gradient_norm(self) -> Iterator[Entries]:
        """Yield the sum of one number over all ranks."""
        axes = tuple(name for name, degree in self.strategy.mesh().axes if degree > 1)
        ranks = self.strategy.mesh().degree(axes)
        yield _once_per_step("all_reduce", axes, ranks, 1, Purpose.GRADIENT_NORM, "norm")


_TOKENS_MOVED: Final = (Purpose.SEQUENCE_GATHER, Purpose.SEQUENCE_SCATTER)
"""Purposes of the collectives that chunks of tokens divide."""


def _in_chunks(table: Iterable[Boundary], chunks: int, *purposes: Purpose) -> Iterator[Boundary]:
    """Yield boundaries with every exchange for one of the purposes in equal chunks."""
    for b in table:
        if b.purpose not in purposes or chunks == 1:
            yield b
            continue
        calls = {n: getattr(b, n) * chunks for n in ("forward", "backward", "recomputed")}
        if b.forward and b.purpose is Purpose.SEQUENCE_SCATTER and not b.recomputed:
            # Recomputation stops in the product of the last chunk, behind the scatters of the others.
            calls["recomputed"] = chunks - 1
        sent = None if b.sent is None else Fraction(b.sent) / chunks
        yield replace(b, elements=b.elements / chunks, sent=sent, **calls)


def _once_per_step(
    kind: str, axes: tuple[str, ...], ranks: int, elements: int, purpose: Purpose, width: Format = "parameter"
) -> Entries:  # fmt: skip
    """Return an entry with one call per step."""
    return 1, False, [Boundary(kind, axes, ranks, elements, purpose, width, once=1)]


def _parent(name: str) -> str:
    """Return the module that contains the module of a parameter."""
    return name.rsplit(".", 2)[0]


def _leaf(name: str) -> str:
    """Return the last part of the name of a parameter's module."""
    return name.rsplit(".", 2)[-2]


def _stacked(param: ParamSpec, block: Block) -> tuple[Part, ...]:
    """Return the projections stacked in a matrix; () for one projection, and for experts."""
    if len(param.shape) != 2:
        return ()
    if param.dims[0] == "gate_up":
        return gate_up_parts(param.shape[0])
    if param.dims[0] == "qkv" and block.attention is not None:
        attention = block.attention
        return qkv_parts(attention.num_heads, attention.num_kv_heads, attention.qk_head_dim)
    return ()
