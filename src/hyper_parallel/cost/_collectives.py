"""Split of layers into pipeline stages, and the collectives of one optimizer step on a rank, in calls and bytes.

The slowest stage limits a pipeline, so the split minimizes the cost of the most expensive stage. The cost of a layer is
its training FLOPs per token: matmuls and causal attention. The last stage adds the output projection; the embedding has
no FLOPs.

A `shard.Boundary` is a collective with its elements, its group and its calls per forward, backward and recomputation.
`shard` lists the boundaries of every kind of layer, and this module adds them up over a step. The gradient norm, and
gradients of parameters that tensor parallelism replicates, are summed once per step. With pipeline stages, and with
ZeRO-0 and ZeRO-1, all gradients are reduced once per step, and parameters not freed after forward stay gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hyper_parallel.errors import NotDivisible
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
    half_batch_boundaries,
    head_boundaries,
    head_norm_boundaries,
    norm_boundaries,
    packed_boundaries,
    pipeline_boundaries,
    sharing_boundaries,
)
from hyper_parallel.units import DTYPE_BYTES


def partition(costs: Sequence[float], parts: int, *, last: float = 0.0) -> tuple[int, ...]:
    """Partition a sequence of costs into contiguous nonempty parts such that the greatest sum of a part is least.

    Args:
        costs: Cost of every element, in order.
        parts: Number of parts, at most the number of elements.
        last: Extra cost of the last part.

    Returns:
        Number of elements of every part. Among optimal partitions, later parts get as many elements as possible,
        because the first stages hold the most activations.

    Cost: O(n^2 log n), for a binary search over all sums of contiguous elements. The result is exact.
    """
    n = len(costs)
    prefix = np.array([0.0, *accumulate(costs)])
    sums = prefix[None, :] - prefix[:, None]
    upper = np.triu_indices(n + 1, 1)
    values = np.sort(np.concatenate([sums[upper], prefix[n] - prefix[:n] + last]))

    def cut(limit: float) -> list[int] | None:
        sizes, end = [], n
        for part in range(parts, 0, -1):
            room = limit - (last if part == parts else 0.0)
            start = end - 1
            while start > part - 1 and prefix[end] - prefix[start - 1] <= room * (1 + 1e-12):
                start -= 1
            if start < part - 1 or prefix[end] - prefix[start] > room * (1 + 1e-12):
                return None
            sizes.append(end - start)
            end = start
        return sizes[::-1] if end == 0 else None

    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if cut(float(values[middle])) is None:
            low = middle + 1
        else:
            high = middle
    best = cut(float(values[low]))
    assert best is not None, "the greatest candidate admits every partition"
    return tuple(best)


@lru_cache(maxsize=256)
def stage_layers(model: ModelSpec, strategy: Strategy, seq_len: int) -> tuple[int, ...]:
    """Return the number of decoder layers of each (virtual) stage: `strategy.stage_layers` if set, else by `partition`.

    The model must have at least as many layers as the strategy has stages. Errors are those of `check_stage_layers`.
    """
    if strategy.stage_layers:
        check_stage_layers(strategy, model.num_layers)
        return strategy.stage_layers
    blocks = [model.block_of(layer) for layer in range(model.num_layers)]
    outside = [b for b in model.blocks if not b.layers]
    head = sum(6 * b.num_matmul_params for b in outside if b.name == "head")
    return partition([_layer_flops(b, seq_len) for b in blocks], strategy.stages, last=head)


def check_stage_layers(strategy: Strategy, layers: int) -> None:
    """Raise an error if `strategy.stage_layers` is set and does not fit the stages and a model of `layers` layers.

    Raises:
        NotDivisible: HP203; the suggested change is a matching `pp`, else an even split unless a stage would be empty.
    """
    stages, explicit = strategy.stages, strategy.stage_layers
    if explicit and (len(explicit) != stages or sum(explicit) != layers or min(explicit) < 1):
        ends = [layers * stage // stages for stage in range(stages + 1)]
        near = [end - start for start, end in itertools.pairwise(ends)]
        changes: dict[str, Any] | None = {"parallel.stage_layers": near} if stages <= layers else None
        if stages == 1 and sum(explicit) == layers and min(explicit) > 0:
            changes = {"parallel.pp": len(explicit)}
        raise NotDivisible(
            "`stage_layers` must have one positive number per stage, and the numbers must add up to the layers",
            where="parallel.stage_layers",
            got=f"{list(explicit)}: {len(explicit)} stages, {sum(explicit)} layers",
            allowed=f"{stages} positive numbers that add up to {layers}"
            if stages <= layers
            else f"at most {layers} stages",
            changes=changes,
        )


def _layer_flops(block: Block, seq_len: int) -> int:
    attention = block.attention
    scores = attention.forward_flops_per_token(seq_len, causal=True) if attention else 0.0
    return 6 * block.num_matmul_params + round(3 * scores)


def rank_model(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> ModelSpec:
    """Return a model spec with only the blocks and layers on one pipeline rank; `num_layers` is unchanged.

    The embedding is on the first stage; all other blocks outside the layers, such as final norm and head, are on the
    last. On a rank without the embedding, a head that shares its weight owns a copy under the embedding's parameter
    name. Raises the errors of `stage_layers`.
    """
    if strategy.pp == 1:
        return model
    layers = {i for stage in _stages(model, strategy, seq_len, pp_rank) for i in stage}
    own = strategy.stages_of(pp_rank)
    first, last = 0 in own, strategy.stages - 1 in own
    blocks = []
    for block in model.blocks:
        if block.layers:
            plain_layers = tuple(i for i in block.layers if i in layers)
            blocks += [replace(block, layers=plain_layers)] if plain_layers else []
        elif block.name == "embedding":
            blocks += [block] if first else []
        elif last:
            blocks.append(block if first else _untied(block, model))
    tied = model.tied_embeddings and first and last
    return replace(model, blocks=tuple(blocks), tied_embeddings=tied)


def recomputed_layers(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> frozenset[int]:
    """Return the layers that a pipeline rank fully recomputes; arguments and errors as for `rank_model`."""
    if strategy.pp == 1:
        return strategy.recomputed([range(model.num_layers)])
    return strategy.recomputed(_stages(model, strategy, seq_len, pp_rank))


def split_recomputed(blocks: Iterable[Block], recomputed: frozenset[int]) -> Iterator[tuple[Block, bool]]:
    """Yield (block, whether backward recomputes its layers); a block with layers of both kinds is split in two."""
    for block in blocks:
        redone_layers = tuple(i for i in block.layers if i in recomputed)
        plain_layers = tuple(i for i in block.layers if i not in recomputed)
        if redone_layers:
            yield replace(block, layers=redone_layers), True
        if plain_layers or not block.layers:
            yield replace(block, layers=plain_layers), False


def _stages(model: ModelSpec, strategy: Strategy, seq_len: int, pp_rank: int) -> list[range]:
    per_stage = stage_layers(model, strategy, seq_len)
    ends = [sum(per_stage[:s]) for s in range(len(per_stage) + 1)]
    return [range(ends[s], ends[s + 1]) for s in strategy.stages_of(pp_rank)]


def _untied(block: Block, model: ModelSpec) -> Block:
    """Return a head whose tied weights are parameters of its own, with the names of the embedding's weights."""
    params = {p.name: p for b in model.blocks for p in b.params}
    return replace(
        block,
        params=tuple(replace(params[p.tied_to], dims=p.dims) if p.tied_to else p for p in block.params),
    )


LINEAR_ENTRY = (
    "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "llama", "mistral", "mixtral", "olmo2",
    "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Families whose code only scales embeddings before the first layer.

The reduce-scatter before this layer can therefore also sum the partial embeddings of a sharded vocabulary.
"""

_LAST_NORMS = ("post_feedforward", "post_mlp")
"""Substrings in the names of norms that end a layer."""
_TP = ("tp_x", "tp_y")
_KEYS = ("k_proj", "v_proj")

Entries = tuple[int, bool, Iterable[Boundary]]
"""(number of layers * parts of a microbatch, whether backward recomputes them, collectives of one layer and part)."""


def step_collectives(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    rows: Mapping[int, tuple[int, int]] | None = None,
    pp_rank: int = 0,
) -> tuple[Collective, ...]:
    """Return the collectives of one optimizer step on one rank, with calls and bytes.

    The rank has coordinate 0 on every axis but `pp`; there, shards are largest. A step is `accumulation_steps`
    microbatches (forward and backward), gradient clipping and the update. Other messages of a trainer (token counts,
    losses to print) are not included. Raises the errors of `stage_layers`.

    Args:
        model: The model; its parameter names hold `*` for the layer index.
        layouts: Layout of every parameter, as returned by `shard.plan_layouts`.
        strategy: Degrees and choices.
        workload: Resolved batch numbers, and number formats.
        rows: Dict from expert layer to the measured numbers of rows (sent to experts on other ranks, received from
            other ranks) in all forwards of a step; a token has one row per chosen expert. None: uniform routing.
        pp_rank: Coordinate of the rank on the axis `pp`.
    """
    rank_part = rank_model(model, strategy, workload.seq_len, pp_rank)
    recomputed = recomputed_layers(model, strategy, workload.seq_len, pp_rank)
    blocks = tuple(split_recomputed(rank_part.blocks, recomputed))
    step = _Step(rank_part, layouts, strategy, workload, blocks)
    return step.collectives(
        step.sharing(), step.tensor(), step.projections(), step.context(), step.experts(rows),
        step.pipeline(model, pp_rank), step.gradient_norm(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """Builder of the collectives of a step on one rank, from the blocks on its pipeline stages."""

    model: ModelSpec
    layouts: Mapping[str, Layout]
    strategy: Strategy
    workload: Workload
    blocks: tuple[tuple[Block, bool], ...]

    def collectives(self, *parts: Iterable[Entries]) -> tuple[Collective, ...]:
        """Return the collectives of all entries, with calls and bytes added up by kind, axes and purpose."""
        w = self.workload
        compute, param = DTYPE_BYTES[w.compute_dtype], DTYPE_BYTES[w.param_dtype]
        widths = {
            "compute": compute, "reduce": DTYPE_BYTES[w.reduce_dtype], "parameter": param,
            "statistic": max(4, compute), "norm": max(4, param), "count": 8,
        }  # fmt: skip
        regathers = self.strategy.gathered_inputs == "re-gather"
        total: dict[tuple[str, tuple[str, ...], Purpose], list[int]] = {}
        entries = itertools.chain.from_iterable(parts)
        for layers, recomputed, b in ((n, is_recomputed, b) for n, is_recomputed, rows in entries for b in rows):
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
        """Return the axes of the main mesh, with degrees above 1, that span the ranks of `names`.

        Expert axes are returned unchanged if no axes of the main mesh span the same ranks.
        """
        if {"ep", "edp"} & {*names}:
            return self.strategy.spanning_axes(names)
        return tuple(a for a in names if getattr(self.strategy, a) > 1)

    @cached_property
    def cut(self) -> TokenCut:
        return TokenCut.of(self.strategy, self.workload)

    @cached_property
    def parts(self) -> int:
        """Number of parts that each microbatch is split into, for overlap: 2 with half-batches, else 1."""
        w = self.workload
        return self.strategy.overlap.parts(w.microbatch or 1, w.seq_len)

    @cached_property
    def part_cut(self) -> TokenCut:
        sequences = (self.workload.microbatch or 1) // self.parts
        return TokenCut.of(self.strategy, replace(self.workload, microbatch=sequences))

    @property
    def microbatches(self) -> int:
        return self.workload.accumulation_steps or 1

    def params(self, block: Block) -> list[ParamSpec]:
        return [p for p in block.params if p.tied_to is None]

    def sharding_axes(self, param: ParamSpec) -> set[str]:
        return {*self.layouts[param.name].sharding_axes}

    def sharing(self) -> Iterator[Entries]:
        """Yield FSDP collectives: one parameter group per decoder layer, and one group of all other parameters."""
        s = self.strategy
        rest: list[ParamSpec] = []
        for block in self.model.blocks:
            if not block.layers:
                rest += self.params(block)
                continue
            yield block.count, False, self.fsdp_group(self.params(block), s.frees_gathered)
        yield 1, False, self.fsdp_group(rest, False)  # empty on middle stages

    def fsdp_group(self, params: Iterable[ParamSpec], freed: bool) -> Iterator[Boundary]:
        """Return the collectives of an FSDP group of `params`, without those sharded over `ep`.

        `freed` states whether forward frees the gathered parameters.
        """
        s, total = self.strategy, 0
        shards = s.dp_shard * s.cp
        for param in params:
            if "ep" in self.sharding_axes(param) or not param.shape:  # FSDP does not shard scalars
                continue
            axes = self.layouts[param.name].axes
            rows, *columns = (
                -(-size // s.mesh().degree(a for a in cut if a in _TP))
                for size, cut in zip(param.shape, axes, strict=True)
            )
            if {*s.fsdp_axes} & {*axes[0]}:
                rows = -(-rows // shards) * shards
            total += rows * math.prod(columns)
        return sharing_boundaries(total, s.fsdp_axes, shards, s.dp_replicate, s.zero_stage, self.reduces_once, freed)

    @property
    def reduces_once(self) -> bool:
        return self.strategy.reduces_once or self.strategy.zero_stage == 0

    def tensor(self) -> Iterator[Entries]:
        """Yield tensor-parallel collectives: of embedding, head and loss, of layers, and of replicated parameters."""
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
            # Recomputation stops once all tensors that backward needs are saved. An operator that fuses a matmul with
            # the scatter saves its tensors after the scatter, so recomputation repeats the scatter.
            table = self.layer(block, may_end=not self.strategy.overlap.tp_symmetric)
            yield layers, recomputed, _in_chunks(table, self.token_chunks, *_TOKENS_MOVED)
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
        """Return the number of all-reduces over tp_y for norm statistics: one per norm, two for a norm with a bias."""
        inside = {_parent(p.name) for p in self.params(block) if len(p.shape) == 2}
        return sum(
            self.sharding_axes(p) & {*_TP} == {"tp_y"} and _parent(p.name) not in inside
            for p in self.params(block)
            if len(p.shape) == 1
        )

    @cached_property
    def hidden_cut(self) -> bool:
        """True if the hidden dim of the residual stream is sharded over tp_y, as the layouts of the norms show."""
        return any(self.norms(block) for block in self.model.blocks)

    def layer(self, block: Block, may_end: bool = True) -> Iterator[Boundary]:
        """Yield tensor-parallel collectives of the attention and MLP modules of a block.

        With `may_end`, recomputation omits the last scatter of a layer if the layer ends with an MLP.
        """
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
        """Chunks in which blocks gather and scatter tokens; 1 if `tp_chunks` does not divide the tokens of a rank."""
        chunks = self.strategy.overlap.tp_chunks
        return 1 if self.part_cut.piece % chunks else chunks

    def projections(self) -> Iterator[Entries]:
        """Yield tensor-parallel collectives of packed projections (qkv, gate and up), and of norms over all heads."""
        s, ranks = self.strategy, self.strategy.tp
        if ranks == 1:
            return
        for block, recomputed in self.blocks:
            for p in block.params if block.layers else ():
                layout, parts = self.layouts[p.name], _stacked(p, block)
                layers, cut = block.count * self.parts, self.part_cut
                if parts and "tp_x" in layout.axes[0] and layout.parts_of(0) == 1:
                    # With two axes, tokens between blocks have padding, which MLPs process too.
                    listed = s.tp_y > 1 and p.dims[0] == "gate_up"
                    tokens = ranks * cut.piece if listed else cut.tokens
                    yield layers, recomputed, packed_boundaries(parts, ranks, tokens)
                elif p.name.endswith("_norm.weight") and p.dims[0] in ("heads", "kv_heads"):
                    yield layers, recomputed, head_norm_boundaries(cut)

    def context(self) -> Iterator[Entries]:
        for block, recomputed in self.blocks:
            if self.strategy.cp > 1 and block.attention is not None:
                gather = self.strategy.cp_kind == "all_gather"
                layers = block.count * self.parts
                yield layers, recomputed, context_boundaries(block.attention, self.part_cut, gather)

    def experts(self, rows: Mapping[int, tuple[int, int]] | None) -> Iterator[Entries]:
        """Yield FSDP collectives of expert parameters, all-to-alls of rows, and the agreement on half-batches."""
        s, mesh = self.strategy, self.strategy.expert_mesh()
        if s.ep == 1:
            return
        edp = mesh.degree("edp")
        for block in self.model.blocks:
            params = [p for p in block.params if p.name in self.layouts and "ep" in self.sharding_axes(p)]
            shapes = (self.layouts[p.name].max_local_shape(p.shape, mesh) for p in params)
            elements = edp * sum(math.prod(shape) for shape in shapes)
            yield block.count, False, sharing_boundaries(
                elements, ("edp",), edp, s.dp_replicate, s.zero_stage, self.reduces_once, s.frees_gathered, experts=True
            )  # fmt: skip
        chunks, parts = s.overlap.ep_chunks, self.parts
        if parts > 1:
            yield 1, False, half_batch_boundaries(s.ep)
        sequences = (self.workload.microbatch or 1) // parts
        tokens = -(-sequences * self.workload.seq_len // (s.cp * s.tp))
        for block, recomputed in self.blocks:
            if block.mlp is None or not block.mlp.num_experts:
                continue
            routed_rows = tokens * block.mlp.experts_per_token
            if rows is None:  # uniform routing; the sum over the layers is rounded down
                even = block.count * routed_rows * (s.ep - 1) // s.ep
                moved = (Fraction(even, block.count),) * 2
            else:
                calls = block.count * self.microbatches * parts
                sent, received = map(sum, zip(*(rows[i] for i in block.layers), strict=True))
                moved = Fraction(sent, calls), Fraction(received, calls)
            hidden, experts = self.model.hidden_size, block.mlp.num_experts
            table = expert_boundaries(hidden, experts * chunks, s.ep, routed_rows, *moved)
            yield block.count * parts, recomputed, _in_chunks(table, chunks, Purpose.EXPERT_ROWS)

    def pipeline(self, whole: ModelSpec, pp_rank: int) -> Iterator[Entries]:
        """Yield sends to other stages, and the gradient exchange of a weight that first and last stage share."""
        s = self.strategy
        if s.pp == 1:
            return
        rank_of = {stage: r for r in range(s.pp) for stage in s.stages_of(r)}
        own = s.stages_of(pp_rank)
        onward, back = (sum(rank_of.get(stage + step, pp_rank) != pp_rank for stage in own) for step in (1, -1))
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
        axes = tuple(name for name, degree in self.strategy.mesh().axes if degree > 1)
        ranks = self.strategy.mesh().degree(axes)
        yield _once_per_step("all_reduce", axes, ranks, 1, Purpose.GRADIENT_NORM, "norm")


_TOKENS_MOVED: Final = (Purpose.SEQUENCE_GATHER, Purpose.SEQUENCE_SCATTER)
"""Purposes of the collectives that are split if attention and MLP process their tokens in chunks."""


def _in_chunks(table: Iterable[Boundary], chunks: int, *purposes: Purpose) -> Iterator[Boundary]:
    """Yield the collectives in `table`, those for one of `purposes` split into `chunks` equal calls."""
    for b in table:
        if b.purpose not in purposes or chunks == 1:
            yield b
            continue
        calls = {n: getattr(b, n) * chunks for n in ("forward", "backward", "recomputed")}
        if b.forward and b.purpose is Purpose.SEQUENCE_SCATTER and not b.recomputed:
            # Recomputation stops in the matmul of the last chunk, after the scatters of the other chunks.
            calls["recomputed"] = chunks - 1
        sent = None if b.sent is None else Fraction(b.sent) / chunks
        yield replace(b, elements=b.elements / chunks, sent=sent, **calls)


def _once_per_step(
    kind: str, axes: tuple[str, ...], ranks: int, elements: int, purpose: Purpose, width: Format = "parameter"
) -> Entries:  # fmt: skip
    return 1, False, [Boundary(kind, axes, ranks, elements, purpose, width, once=1)]


def _parent(name: str) -> str:
    """Return the module path two levels above a parameter: `mlp` for `mlp.up_proj.weight`."""
    return name.rsplit(".", 2)[0]


def _leaf(name: str) -> str:
    """Return the name of the module that owns a parameter: `up_proj` for `mlp.up_proj.weight`."""
    return name.rsplit(".", 2)[-2]


def _stacked(param: ParamSpec, block: Block) -> tuple[Part, ...]:
    """Return the projections that are stacked in a packed matrix; () for a single projection and for experts."""
    if len(param.shape) != 2:
        return ()
    if param.dims[0] == "gate_up":
        return gate_up_parts(param.shape[0])
    if param.dims[0] == "qkv" and block.attention is not None:
        attention = block.attention
        return qkv_parts(attention.num_heads, attention.num_kv_heads, attention.qk_head_dim)
    return ()
