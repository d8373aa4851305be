"""Communication of one optimizer step by formula: every collective of `parallelize`, per rank, to the byte.

Notation: T tokens of one microbatch on one data- and context-parallel rank, D hidden size, V vocabulary, t = tp,
s = dp_shard * cp, c / r / p bytes of the compute, reduce and parameter formats, w = max(c, 4). Per microbatch,
whole tensors:

    sequence gather, scatter     t * ceil(T / t) * D * c    each region: two forward, two backward
    FSDP parameters              sum of s * ceil(rows / s) * row size * c, over the parameters of a group
    FSDP gradients               the same elements * r
    loss statistics              t * 2 * T * w

The norm, and the gradients of parameters that tensor parallelism keeps whole, are summed once per step. With pipeline
stages, and where only optimizer states are sharded (ZeRO-1), FSDP also reduces gradients once per step, and keeps what
it does not free after forward gathered for all of it.
Sources: Korthikanti et al. 2022 (sequence parallelism: all-reduce as reduce-scatter + all-gather, 8 T D (t-1)/t per
layer when gathered inputs are kept); Rajbhandari et al. 2020 (ZeRO); ring volumes as in `ring_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hyper_parallel.cost._context_bytes import context_bytes
from hyper_parallel.cost._expert_bytes import Rows, expert_collectives, on_expert_mesh
from hyper_parallel.cost._pipeline_bytes import (
    PP,
    in_halves,
    pipeline_sends,
    rank_model,
    recomputed_layers,
)
from hyper_parallel.cost._projections import projection_collectives
from hyper_parallel.cost._ring import ring_bytes
from hyper_parallel.cost._tensor2d_bytes import grid_collectives
from hyper_parallel.ir import Collective, Layout, SequenceCut, Strategy, Workload
from hyper_parallel.model import Block, ModelSpec, ParamSpec
from hyper_parallel.units import DTYPE_BYTES

TP = "tp_x"

LINEAR_ENTRY = (
    "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "llama", "mistral", "mixtral", "olmo2",
    "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Families whose model code only scales the embedding before the first layer, so that its sum can wait until there."""


_LAST_NORMS = ("post_feedforward", "post_mlp")
"""Parts of the names of norms that end a layer."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What the formulas are evaluated on; `model` is what the pipeline rank holds, `recomputed` are layers of it."""

    model: ModelSpec
    layouts: Mapping[str, Layout]
    strategy: Strategy
    workload: Workload
    recomputed: frozenset[int]

    @property
    def microbatches(self) -> int:
        return self.workload.accumulation_steps or 1

    def gathers(self, freed: bool) -> int:
        """All-gathers of an FSDP group in a step, whose parameters are `freed` after forward or not."""
        return 2 * self.microbatches if freed else self.reductions

    @property
    def reductions(self) -> int:
        """Reduce-scatters of an FSDP group in a step."""
        return 1 if self.strategy.reduces_once else self.microbatches

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank, padding included."""
        return (self.workload.microbatch or 1) * self.cut.local

    @property
    def cut(self) -> SequenceCut:
        """How context parallelism cuts the sequences."""
        s = self.strategy
        return SequenceCut.of(self.workload.seq_len, s.cp, s.cp_kind, s.cp_ulysses)

    @property
    def shards(self) -> int:
        """Ranks that FSDP cuts parameters over."""
        return self.strategy.dp_shard * self.strategy.cp

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.workload.compute_dtype]

    @property
    def stat_bytes(self) -> int:
        """Bytes of a loss statistic: float32 at least."""
        return max(4, self.compute_bytes)

    @property
    def sequence_bytes(self) -> int:
        """Activations of all tokens, the last pieces padded."""
        tp = self.strategy.tp
        return tp * -(-self.tokens // tp) * self.model.hidden_size * self.compute_bytes

    def params(self, block: Block) -> Iterator[ParamSpec]:
        return (p for p in block.params if p.tied_to is None)

    def tp_cuts(self, param: ParamSpec, dim: int) -> bool:
        axes = self.layouts[param.name].axes
        return -len(axes) <= dim < len(axes) and TP in axes[dim]

    def tp_shape(self, param: ParamSpec) -> tuple[int, ...]:
        """Shape after tensor parallelism, before FSDP."""
        mesh = self.strategy.mesh()
        return tuple(
            -(-size // mesh.degree(a for a in axes if a in (TP, "tp_y")))
            for size, axes in zip(param.shape, self.layouts[param.name].axes, strict=True)
        )

    def group_elements(self, params: Iterator[ParamSpec]) -> int:
        """Elements of one FSDP group, dim 0 of every parameter padded to a multiple of the shards.

        Where FSDP cuts columns they divide.
        """
        total = 0
        for param in params:
            if on_expert_mesh(self.layouts[param.name]):
                continue
            rows, *rest = self.tp_shape(param)
            if not set(self.strategy.fsdp_axes) & set(self.layouts[param.name].axes[0]):
                total += rows * math.prod(rest)
                continue
            total += -(-rows // self.shards) * self.shards * math.prod(rest)
        return total

    def collective(
        self, kind: str, axes: tuple[str, ...], purpose: str, count: int, whole_bytes: int
    ) -> Collective:
        degree = self.strategy.mesh().degree(axes)
        return Collective(kind, axes, purpose, count, count * ring_bytes(kind, whole_bytes, degree))


def step_collectives(
    model: ModelSpec,
    layouts: Mapping[str, Layout],
    strategy: Strategy,
    workload: Workload,
    rows: Mapping[int, Rows] | None = None,
    pp_rank: int = 0,
) -> tuple[Collective, ...]:
    """All collectives of one optimizer step on a pipeline rank, at coordinate 0 of every other axis, the fullest.

    One step is `accumulation_steps` microbatches (forward and backward), gradient clipping and the update. What a
    trainer sends besides (token counts, losses to print) is not in it.

    Args:
        model: The model; its parameter names hold `*` for the layer index.
        layouts: Layout of every parameter, as `shard.plan_layouts` gives them.
        strategy: Degrees of the axes.
        workload: Batch numbers resolved, and number formats.
        rows: What experts of each layer were sent, for the bytes that really occurred; None: routing is even.
        pp_rank: Coordinate on the axis `pp`, whose ranks hold different parts of the model.
    """
    held = rank_model(model, strategy, workload.seq_len, pp_rank)
    again = recomputed_layers(model, strategy, workload.seq_len, pp_rank)
    step = _Step(held, layouts, strategy, workload, again)
    sends = (
        step.collective("send_recv", (PP,), *message)
        for message in pipeline_sends(model, layouts, strategy, workload, pp_rank)
    )
    found = [
        *_data_parallel(step),
        *_tensor_parallel(step),
        *projection_collectives(held, layouts, strategy, workload, again),
        *_context_parallel(step),
        *expert_collectives(held, layouts, strategy, workload, rows, again),
        *sends,
        *_gradient_norm(step),
    ]
    merged: dict[tuple[str, tuple[str, ...], str], Collective] = {}
    for item in found:
        key = (item.kind, item.axes, item.purpose)
        seen = merged.get(key)
        if seen is not None:
            item = replace(
                item, count=seen.count + item.count, sent_bytes=seen.sent_bytes + item.sent_bytes
            )
        # A rank without tokens sends nothing to experts, but calls.
        if item.count and (item.sent_bytes or item.kind == "all_to_all"):
            merged[key] = item
    return tuple(merged.values())


def _groups(step: _Step) -> Iterator[tuple[int, int, int]]:
    """FSDP groups as (how many, elements, gathers per step): one per decoder layer, one for the rest."""
    rest: list[ParamSpec] = []
    for block in step.model.blocks:
        if block.layers:
            gathers = step.gathers(step.strategy.frees_gathered)
            yield block.count, step.group_elements(step.params(block)), gathers
        else:
            rest.extend(step.params(block))
    if rest:  # a rank of middle stages has none
        yield 1, step.group_elements(iter(rest)), step.gathers(False)


def _data_parallel(step: _Step) -> Iterator[Collective]:
    """FSDP: parameters gathered, gradients reduce-scattered; replicas summed once per step."""
    reduce_bytes = DTYPE_BYTES[step.workload.reduce_dtype]
    replicas, times, axes = step.strategy.dp_replicate, step.reductions, step.strategy.fsdp_axes
    for count, elements, gathers in _groups(step):
        if axes:
            yield step.collective(
                "all_gather", axes, "fsdp parameters", count * gathers,
                elements * step.compute_bytes,
            )  # fmt: skip
            yield step.collective(
                "reduce_scatter", axes, "fsdp gradients", count * times, elements * reduce_bytes
            )
        if replicas > 1:
            yield step.collective(
                "all_reduce", ("dp_replicate",), "replica gradients", count,
                elements // step.shards * reduce_bytes,
            )  # fmt: skip


def _tensor_parallel(step: _Step) -> Iterator[Collective]:
    if step.strategy.tp == 1:
        return
    if step.strategy.tp_y > 1:
        for e in grid_collectives(
            step.model, step.layouts, step.strategy, step.workload, step.cut.local,
            gathers_entry(step.model.family), _LAST_NORMS, step.recomputed,
        ):  # fmt: skip
            yield step.collective(e.kind, e.axes, e.purpose, e.count, e.whole_bytes)
        return
    times, whole = step.microbatches, step.sequence_bytes
    gathers, scatters = _entry(step)
    regions = _regions(step)
    gathers, scatters = gathers + regions[0], scatters + regions[1]
    # The final norm's output is gathered; its gradient is scattered.
    end = int(any(b.name == "final_norm" for b in step.model.blocks))
    yield step.collective("all_gather", (TP,), "sequence gather", (gathers + end) * times, whole)
    yield step.collective(
        "reduce_scatter", (TP,), "sequence scatter", (scatters + end) * times, whole
    )
    if not gathers_entry(step.model.family) and _cuts_vocabulary(step, "embedding"):
        bytes_ = step.tokens * step.model.hidden_size * step.compute_bytes
        yield step.collective("all_reduce", (TP,), "embedding", 2 * times, bytes_)
    if not end:
        pass  # the loss is on another pipeline rank
    elif _cuts_vocabulary(step, "head") or (
        step.model.tied_embeddings and _cuts_vocabulary(step, "embedding")
    ):
        stats = step.strategy.tp * 2 * step.tokens * step.stat_bytes
        yield step.collective("all_gather", (TP,), "loss statistics", times, stats)
    else:
        yield step.collective("all_reduce", (TP,), "loss", times, step.stat_bytes)
    yield step.collective(
        "all_reduce", (TP,), "gradients of whole parameters", 1,
        _whole_elements(step) * DTYPE_BYTES[step.workload.param_dtype],
    )  # fmt: skip


def _context_parallel(step: _Step) -> Iterator[Collective]:
    """Exchanges of attention; forward runs again where activations are made again."""
    s = step.strategy
    if s.cp == 1:
        return
    for block, again in in_halves(step.model.blocks, step.recomputed):
        if block.attention is None:
            continue
        runs = 2 if again else 1
        for item in context_bytes(
            block.attention, step.cut, s.cp_kind, microbatch=step.workload.microbatch or 1, tp=s.tp,
            compute_bytes=step.compute_bytes,
        ):  # fmt: skip
            count = block.count * step.microbatches * (runs * item.forward + item.backward)
            yield Collective(
                item.kind, ("cp",), f"attention: {item.purpose}", count, count * item.sent_bytes
            )


def gathers_entry(family: str) -> bool:
    """Whether the embedding's sum waits until the first layer, where it is a reduce-scatter."""
    return family in LINEAR_ENTRY


def _cuts_vocabulary(step: _Step, block: str) -> bool:
    params = [p for b in step.model.blocks if b.name == block for p in step.params(b)]
    return any(step.tp_cuts(p, 0) for p in params)


def _entry(step: _Step) -> tuple[int, int]:
    """All-gathers and reduce-scatters of the embedding, forward and backward."""
    cut = gathers_entry(step.model.family) and _cuts_vocabulary(step, "embedding")
    return int(cut), int(cut)


def _regions(step: _Step) -> tuple[int, int]:
    """All-gathers and reduce-scatters of all regions of all layers, forward, backward and recompute."""
    gathers = scatters = 0
    for block, again in in_halves(step.model.blocks, step.recomputed):
        if not block.layers:
            continue
        matrices = [p for p in step.params(block) if len(p.shape) == 2]
        regions = {_parent(p.name) for p in matrices if step.tp_cuts(p, 0)}
        out = sum(step.tp_cuts(p, 1) for p in matrices)
        # A gather's backward is a scatter and the other way round.
        layer_gathers = layer_scatters = len(regions) + out
        if again:
            # Nothing after the last scatter of a layer is kept for backward unless a norm follows it, so that the
            # layer is made again only up to its last product. That of attention is followed by the MLP.
            ends_with_norm = any(part in p.name for p in block.params for part in _LAST_NORMS)
            ends_with_product = any(step.tp_cuts(p, 1) and "attn" not in p.name for p in matrices)
            layer_gathers += len(regions)
            layer_scatters += out - int(ends_with_product and not ends_with_norm)
        elif step.strategy.gathered_inputs == "re-gather":
            layer_gathers += len(regions)
        gathers += block.count * layer_gathers
        scatters += block.count * layer_scatters
    return gathers, scatters


def _parent(name: str) -> str:
    """Module that contains the module of a parameter."""
    return name.rsplit(".", 2)[0]


def _whole_elements(step: _Step) -> int:
    """Local elements of the parameters that tensor parallelism does not cut."""
    mesh = step.strategy.mesh()
    return sum(
        block.count * math.prod(step.layouts[p.name].max_local_shape(p.shape, mesh))
        for block in step.model.blocks
        for p in step.params(block)
        if not {TP, "ep"} & {*step.layouts[p.name].sharding_axes}
    )


def _gradient_norm(step: _Step) -> Iterator[Collective]:
    axes = tuple(name for name, degree in step.strategy.mesh().axes if degree > 1)
    bytes_ = max(4, DTYPE_BYTES[step.workload.param_dtype])
    if axes:
        yield step.collective("all_reduce", axes, "gradient norm", 1, bytes_)
