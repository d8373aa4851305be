"""Communication of one optimizer step by formula: every collective of `parallelize`, per rank, to the byte.

Notation: T tokens of one microbatch on one data-parallel rank, D hidden size, V vocabulary, t = tp, s = dp_shard,
c / r / p bytes of the compute, reduce and parameter formats, w = max(c, 4). Per microbatch, whole tensors:

    sequence gather, scatter     t * ceil(T / t) * D * c    each region: two forward, two backward
    FSDP parameters              sum of s * ceil(rows / s) * row size * c, over the parameters of a group
    FSDP gradients               the same elements * r
    loss statistics              t * 2 * T * w

The norm, and the gradients of parameters that tensor parallelism keeps whole, are summed once per step.
Sources: Korthikanti et al. 2022 (sequence parallelism: all-reduce as reduce-scatter + all-gather, 8 T D (t-1)/t per
layer when gathered inputs are kept); Rajbhandari et al. 2020 (ZeRO); ring volumes as in `ring_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hyper_parallel.ir import Collective, Layout, Strategy, Workload
from hyper_parallel.model import Block, ModelSpec, ParamSpec
from hyper_parallel.units import DTYPE_BYTES

TP = "tp_x"
FSDP = "dp_shard"

LINEAR_ENTRY = (
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3",
)  # fmt: skip
"""Families whose model code only scales the embedding before the first layer, so that its sum can wait until there."""


def ring_bytes(kind: str, whole_bytes: int, degree: int) -> int:
    """Bytes one rank sends in a ring algorithm.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        whole_bytes: Size of the whole tensor: gathered, before scattering, or the one that is reduced.
        degree: Ranks of the group.

    Cost: (g-1)/g of the whole for all-gather, reduce-scatter and all-to-all, twice that for all-reduce, the whole for
    broadcast; fractions are rounded down per call.
    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 3.
    """
    if degree <= 1:
        return 0
    if kind == "broadcast":
        return whole_bytes
    passes = 2 if kind == "all_reduce" else 1
    return passes * whole_bytes * (degree - 1) // degree


@dataclass(frozen=True, slots=True)
class _Step:
    """What the formulas are evaluated on."""

    model: ModelSpec
    layouts: Mapping[str, Layout]
    strategy: Strategy
    workload: Workload

    @property
    def microbatches(self) -> int:
        return self.workload.accumulation_steps or 1

    @property
    def tokens(self) -> int:
        return (self.workload.microbatch or 1) * self.workload.seq_len

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

    @property
    def recompute(self) -> bool:
        return self.strategy.recompute == "full"

    def params(self, block: Block) -> Iterator[ParamSpec]:
        return (p for p in block.params if p.tied_to is None)

    def tp_cuts(self, param: ParamSpec, dim: int) -> bool:
        axes = self.layouts[param.name].axes
        return -len(axes) <= dim < len(axes) and TP in axes[dim]

    def tp_shape(self, param: ParamSpec) -> tuple[int, ...]:
        """Shape after tensor parallelism, before FSDP."""
        return tuple(
            -(-size // self.strategy.tp) if TP in axes else size
            for size, axes in zip(param.shape, self.layouts[param.name].axes, strict=True)
        )

    def group_elements(self, params: Iterator[ParamSpec]) -> int:
        """Elements of one FSDP group, dim 0 of every parameter padded to a multiple of the shards."""
        shards = self.strategy.dp_shard
        total = 0
        for param in params:
            rows, *rest = self.tp_shape(param)
            total += -(-rows // shards) * shards * math.prod(rest)
        return total

    def collective(
        self, kind: str, axes: tuple[str, ...], purpose: str, count: int, whole_bytes: int
    ) -> Collective:
        degree = self.strategy.mesh().degree(axes)
        return Collective(kind, axes, purpose, count, count * ring_bytes(kind, whole_bytes, degree))


def step_collectives(
    model: ModelSpec, layouts: Mapping[str, Layout], strategy: Strategy, workload: Workload
) -> tuple[Collective, ...]:
    """All collectives of one optimizer step on the fullest rank, the one at coordinate 0 of every axis.

    One step is `accumulation_steps` microbatches (forward and backward), gradient clipping and the update. What a
    trainer sends besides (token counts, losses to print) is not in it.

    Args:
        model: The model; its parameter names hold `*` for the layer index.
        layouts: Layout of every parameter, as `shard.plan_layouts` gives them.
        strategy: Degrees of the axes.
        workload: Batch numbers resolved, and number formats.
    """
    step = _Step(model, layouts, strategy, workload)
    found = [*_data_parallel(step), *_tensor_parallel(step), *_gradient_norm(step)]
    merged: dict[tuple[str, tuple[str, ...], str], Collective] = {}
    for item in found:
        key = (item.kind, item.axes, item.purpose)
        seen = merged.get(key)
        if seen is not None:
            item = replace(
                item, count=seen.count + item.count, sent_bytes=seen.sent_bytes + item.sent_bytes
            )
        if item.count and item.sent_bytes:
            merged[key] = item
    return tuple(merged.values())


def _groups(step: _Step) -> Iterator[tuple[int, int, int]]:
    """FSDP groups as (how many, elements, gathers per microbatch): one per decoder layer, one for the rest."""
    rest: list[ParamSpec] = []
    for block in step.model.blocks:
        if block.layers:
            gathers = 2 if step.strategy.reshard_after_forward else 1
            yield block.count, step.group_elements(step.params(block)), gathers
        else:
            rest.extend(step.params(block))
    yield 1, step.group_elements(iter(rest)), 1


def _data_parallel(step: _Step) -> Iterator[Collective]:
    """FSDP: parameters gathered, gradients reduce-scattered per microbatch; replicas summed once per step."""
    reduce_bytes = DTYPE_BYTES[step.workload.reduce_dtype]
    shards, replicas, times = step.strategy.dp_shard, step.strategy.dp_replicate, step.microbatches
    for count, elements, gathers in _groups(step):
        if shards > 1:
            yield step.collective(
                "all_gather", (FSDP,), "fsdp parameters", count * gathers * times,
                elements * step.compute_bytes,
            )  # fmt: skip
            yield step.collective(
                "reduce_scatter", (FSDP,), "fsdp gradients", count * times, elements * reduce_bytes
            )
        if replicas > 1:
            yield step.collective(
                "all_reduce", ("dp_replicate",), "replica gradients", count,
                elements // shards * reduce_bytes,
            )  # fmt: skip


def _tensor_parallel(step: _Step) -> Iterator[Collective]:
    if step.strategy.tp == 1:
        return
    times, whole = step.microbatches, step.sequence_bytes
    gathers, scatters = _entry(step)
    regions = _regions(step)
    gathers, scatters = gathers + regions[0], scatters + regions[1]
    # The final norm's output is gathered; its gradient is scattered.
    yield step.collective("all_gather", (TP,), "sequence gather", (gathers + 1) * times, whole)
    yield step.collective(
        "reduce_scatter", (TP,), "sequence scatter", (scatters + 1) * times, whole
    )
    if not gathers_entry(step.model.family) and _cuts_vocabulary(step, "embedding"):
        bytes_ = step.tokens * step.model.hidden_size * step.compute_bytes
        yield step.collective("all_reduce", (TP,), "embedding", 2 * times, bytes_)
    if _cuts_vocabulary(step, "head") or (
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
    for block in step.model.blocks:
        if not block.layers:
            continue
        matrices = [p for p in step.params(block) if len(p.shape) == 2]
        regions = {_parent(p.name) for p in matrices if step.tp_cuts(p, 0)}
        out = sum(step.tp_cuts(p, 1) for p in matrices)
        # A gather's backward is a scatter and the other way round.
        layer_gathers = layer_scatters = len(regions) + out
        if step.recompute:
            # Nothing after the last scatter of a layer is kept for backward unless a norm follows it, so that the
            # layer is made again only up to its last product.
            ends_with_norm = any("post_feedforward" in p.name for p in block.params)
            layer_gathers += len(regions)
            layer_scatters += out if ends_with_norm else max(0, out - 1)
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
        if TP not in step.layouts[p.name].sharding_axes
    )


def _gradient_norm(step: _Step) -> Iterator[Collective]:
    axes = tuple(name for name, degree in step.strategy.mesh().axes if degree > 1)
    bytes_ = max(4, DTYPE_BYTES[step.workload.param_dtype])
    if axes:
        yield step.collective("all_reduce", axes, "gradient norm", 1, bytes_)
