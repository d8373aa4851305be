"""Inputs of the cost formulas: model, machine, number formats and candidate strategies, and simple derived values.

`Machine` has the achieved rates of a device and its links, and times collectives over groups of ranks. `Places` has the
position of every process group on the machine, as degree and stride of each mesh axis. `PricingCase` joins both with
the model; its properties are columns (arrays over the candidates) or single numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._cards import (
    DeviceCard,
    StackCard,
    cards_for_ranks,
    own_cards_by_ranks,
    shipped_cards,
)
from hyper_parallel.cost._numbers import ModelNumbers, Uncut
from hyper_parallel.cost.candidates import ORDERS, Array, Axis, Candidates, Speed
from hyper_parallel.ir import AXES, Workload
from hyper_parallel.shard import TokenCut
from hyper_parallel.topology import Supernode, Tier
from hyper_parallel.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring of ranks for all-gather and reduce-scatter, as arrays over candidates."""

    size: Array  # number of ranks of the group
    rate: Array  # bytes/s that a rank sends
    delay: Array  # seconds of a collective with a tiny message

    def seconds(self, gathered_bytes: Array) -> Array:
        """Return the seconds of one all-gather or reduce-scatter; `gathered_bytes` is the size of the full tensor.

        Each of g ranks sends (g-1)/g of the full tensor at the rate of the slowest links, after the latency of the
        tiers.

        Source: ring collectives, Patarasuk and Yuan 2009.
        """
        if self.rate.size == 1 and np.isinf(self.rate[0]):  # a group of one rank sends nothing
            return np.zeros(np.broadcast_shapes(self.size.shape, np.shape(gathered_bytes)))
        sent = gathered_bytes * (self.size - 1.0) / self.size
        seconds: Array = sent / self.rate + self.delay
        return seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak rates of one device and its links, and cards with the fractions of these rates that are achieved."""

    peak_flops: float  # dense peak FLOP/s in the compute dtype
    matmul_peak: float  # dense peak FLOP/s in the format of matmul inputs
    # format of matmul inputs; differs from the compute dtype in 8 and 4 bit training
    matmul_dtype: str
    compute_dtype: str  # format of activations
    memory_bytes: int  # capacity of the device's own memory
    memory_bytes_s: float  # peak bytes/s of the device's own memory
    # bytes/s per device and direction to host memory; 0 if unknown
    host_bytes_s: float
    tiers: tuple[Tier, ...]  # interconnect levels, inner to outer
    card: DeviceCard  # efficiency of the device's kernels and links
    stack: StackCard  # behavior of the training framework
    ranks_per_core: float = 1.0  # ranks that share one CPU core in turn
    host_bytes: float = np.inf  # host memory of one device; infinity if unknown
    may_recompute: bool = True  # whether offload may also drop and recompute activations
    # whether exposed communication includes waits for ranks that have not reached a collective
    counts_late: bool = True

    @classmethod
    def of(
        cls,
        supernode: Supernode,
        compute_dtype: str,
        *,
        matmul_dtype: str | None = None,
        card: DeviceCard | None = None,
        stack: StackCard | None = None,
    ) -> Machine:
        """Return the machine of a topology.

        If `card` and `stack` are None, the topology `local` has the cards that `calibrate` wrote for this device, if
        any. Raises the errors of `Supernode.peak_flops` and `own_cards_by_ranks`.

        Args:
            supernode: The machine.
            compute_dtype: Format of activations.
            matmul_dtype: Format of matmul inputs; None: the compute dtype.
            card: Device card; None: the shipped one for the device.
            stack: Stack card; None: the shipped one of HyperParallel's own runtime.
        """
        device = supernode.device
        matmul_dtype = matmul_dtype or compute_dtype
        if card is None or stack is None:
            use_own = supernode.name == "local" and card is None and stack is None
            own = own_cards_by_ranks(device.name) if use_own else {}
            default = cards_for_ranks(own, supernode.num_devices) if own else shipped_cards(device)
            card, stack = card or default[0], stack or default[1]
        return cls(
            _peak_flops(supernode, compute_dtype),
            _peak_flops(supernode, matmul_dtype),
            matmul_dtype,
            compute_dtype,
            int(device.memory_bytes.value),
            device.memory_bytes_s.value,
            supernode.host_bytes_s,
            supernode.tiers,
            card,
            stack,
            device.ranks_per_core,
            np.inf if supernode.host_bytes is None else supernode.host_bytes,
        )

    @property
    def pace(self) -> Speed | None:
        """Function from the fraction of ranks that run to the speed of one rank, relative to its speed while all run.

        The function interpolates measurements if the card has any; otherwise ranks contend for cores only. None if the
        card has none and every rank has its own cores.
        """
        if own := self.card.pace:
            shares = sorted((float(share), speed) for share, speed in own.items())
            x, y = (np.log([*values, 1.0]) for values in zip(*shares, strict=True))
            return lambda share: np.exp(np.interp(np.log(share), x, y))
        if self.ranks_per_core <= 1.0:
            return None
        return lambda share: np.minimum(self.ranks_per_core, 1.0 / share)

    def paces(self, ranks: int) -> tuple[float, ...]:
        """Return the speed of one rank while 1, 2, ... `ranks` ranks run, as in `pace`; () if `pace` is None."""
        if self.pace is None:
            return ()
        return tuple(self.pace(np.arange(1.0, ranks + 1.0) / ranks).tolist())

    @property
    def width(self) -> float:
        """Bytes of one activation element."""
        return float(DTYPE_BYTES[self.compute_dtype])

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of a large matmul."""
        return self.matmul_peak * self.card.share("matmul", self.matmul_dtype) / self.stack.compute

    @property
    def saturation(self) -> float:
        """Size of one matmul dimension, with the other two large, at which a matmul reaches half of `matmul_flops`."""
        return self.card.saturation * self.peak_flops * self.width / 2.0 / self.memory_bytes_s

    @property
    def attention_flops(self) -> float:
        """FLOP/s of the attention matmuls on long sequences and wide heads."""
        share = self.card.share("attention", self.compute_dtype)
        share = share * (self.card.portable if self.stack.portable else 1.0)
        return self.peak_flops * share / self.stack.compute

    @property
    def passing_bytes_s(self) -> float:
        """Memory bytes/s that element-wise kernels achieve."""
        return self.memory_bytes_s * self.card.elementwise / self.stack.compute

    @property
    def stream_bytes_s(self) -> float:
        """Memory bytes/s that one long sequential pass achieves, such as the optimizer."""
        return self.memory_bytes_s * self.card.stream

    def link_share(self, tier: Tier) -> float:
        """Return the fraction of a tier's bandwidth that collectives achieve."""
        if self._is_innermost(tier):
            return self.card.link
        return self.card.network * self.stack.network

    def _is_innermost(self, tier: Tier) -> bool:
        return tier is self.tiers[0] or tier.shares_links

    def ring(self, *axes: Axis) -> Ring:
        """Return the ring over the ranks of a process group.

        A rank sends at the minimum, over the tiers that the group crosses, of g_local * bandwidth * link efficiency.
        Here g_local is the number of ranks of the group in one inner domain: they use the links of the tier in
        parallel. If the group does not divide evenly, the domain with the fewest ranks is the bottleneck.
        `axes` are the mesh axes of the group.

        Source: hierarchical collectives, docs/explanation/topology.md.
        """
        size = _product(axes)
        if (size == 1).all():
            return Ring(size, np.full(1, np.inf), np.zeros(1))
        hops = list(self._hops(axes))
        rate = np.full(np.shape(size), np.inf)
        for hop in hops:
            rest = np.mod(size, hop.below)
            local = np.where(rest > 0, rest, hop.below)
            bandwidth = local * hop.tier.bytes_s.value * self.link_share(hop.tier)
            rate = np.where(hop.reached > hop.inside, np.minimum(rate, bandwidth), rate)
        return Ring(size, rate, self._delay(hops))

    def all_to_all_seconds(
        self, local_bytes: Array, *axes: Axis, copies: float = 1.0, message: float = np.inf
    ) -> Array:
        """Return the seconds of one all-to-all.

        Bytes between two ranks cross the links of the innermost tier that connects them. Tiers with their own links
        transfer at the same time, tiers that share links one after the other.

        Args:
            local_bytes: Bytes that one rank sends in total, including the part for itself.
            axes: Degree and stride of every mesh axis of the group.
            copies: Number of receivers of one token. Above 1, a token is sent to a domain only once for all receivers
                there; the bytes follow from the expected number of distinct domains.
            message: Bytes per message; a network card has a limited rate of messages.
        """
        size = _product(axes)
        slowest = busy = np.zeros(np.shape(size))  # seconds per byte
        for hop in self._hops(axes):
            share = (hop.reached - hop.inside) / size
            if copies > 1.0:
                domains = np.maximum(size / hop.inside, 1.0)
                distinct = domains * (1.0 - (1.0 - 1.0 / domains) ** copies)
                share = share * np.minimum(1.0, distinct / copies)
            reach = self.link_share(hop.tier)
            if not self._is_innermost(hop.tier):
                reach *= self.card.exchange / (1.0 + self.card.message_bytes / message)
            seconds = share / (hop.tier.bytes_s.value * reach)
            busy = busy + seconds if hop.tier.shares_links else seconds
            slowest = np.maximum(slowest, busy)
        return local_bytes * slowest + self.latency(*axes)

    def latency(self, *axes: Axis) -> Array:
        """Return the seconds of a collective with a tiny message: the sum over tiers of steps times latency per step.

        The number of steps between n domains is 1 on a full mesh, log2 n over a switch (a tree), n / 2 on a torus, and
        n - 1 otherwise.
        """
        return self._delay(list(self._hops(axes)))

    def _delay(self, hops: Sequence[_Hop]) -> Array:
        total: Array = np.zeros(np.shape(hops[-1].reached))
        for hop in hops:
            num_domains = np.ceil(hop.reached / hop.inside)
            if hop.tier.kind == "full_mesh":
                steps = np.ones_like(total)
            elif hop.tier.kind == "switch":
                steps = np.ceil(np.log2(np.maximum(num_domains, 2.0)))
            elif hop.tier.kind == "torus":
                steps = np.maximum(1.0, num_domains // 2)
            else:
                steps = num_domains - 1
            crossed = hop.reached > hop.inside
            delay = hop.tier.latency_s.value * self.card.latency
            total = total + np.where(crossed, steps * delay, 0.0)
        return total

    def _hops(self, axes: tuple[Axis, ...]) -> Iterator[_Hop]:
        """Yield a `_Hop` for every tier, inner to outer."""
        size = _product(axes)
        inside = below = np.ones(np.shape(size))
        for index, tier in enumerate(self.tiers):
            if tier.size == 0 or index == len(self.tiers) - 1:
                reached = size
            else:
                # The number of the group's ranks in one domain is a product over its axes.
                reached = _product(
                    [
                        (np.minimum(degree, np.maximum(1.0, np.floor(tier.size / stride))), stride)
                        for degree, stride in axes
                    ]
                )
            if not tier.shares_links:
                below = inside
            reached = np.maximum(reached, inside)
            yield _Hop(tier, inside, below, reached)
            inside = reached


def _product(axes: tuple[Axis, ...] | list[Axis]) -> Array:
    size: Array = np.ones(1)
    for degree, stride in axes:
        if degree.shape != stride.shape and stride.size > 1:
            degree = np.broadcast_to(degree, np.broadcast(degree, stride).shape)
        size = size * degree
    return size


@dataclass(frozen=True, slots=True)
class _Hop:
    """Tier of links, and numbers of ranks of a process group per domain; a domain is a set of connected devices."""

    tier: Tier
    inside: Array  # ranks of the group in one domain of the next inner tier
    below: Array  # ranks of the group in one domain below the links that this tier uses
    reached: Array  # ranks of the group in one domain of this tier


def _peak_flops(supernode: Supernode, dtype: str) -> float:
    """Return the peak FLOP/s of a format; float16 without an own entry has the rate of bfloat16."""
    only_bfloat16 = dtype == "float16" and dtype not in supernode.device.peak_flops
    return supernode.peak_flops("bfloat16" if only_bfloat16 else dtype)


_LOSS_BLOCK: Final = float(1 << 24)
"""Logits per block that our loss converts to float32; `logsumexp` needs a second buffer of that size."""
_FOLDED = ("dp_shard", "cp", "tp_x", "tp_y")
_IS_INSIDE: Final = {
    (a, b): np.array([order.index(a) > order.index(b) for order in ORDERS]) for a in AXES for b in AXES
}
"""Per pair of axes (a, b), a mask over `ORDERS`: whether axis a is inside axis b."""


class Places:
    """Degree and stride of every mesh axis and of the expert groups, for all candidates.

    The stride of an axis is the distance between the ranks of two neighbours on the axis.
    """

    def __init__(self, c: Candidates) -> None:
        order = np.asarray(c.order, dtype=np.intp)
        same = order.size and (order == order.flat[0]).all()
        self._order, self._c = order.flat[:1] if same else order, c
        self._axes: dict[str, Axis] = {}

    def axis(self, name: str) -> Axis:
        """Return degree and stride of a mesh axis."""
        if name not in self._axes:
            self._axes[name] = getattr(self._c, name), self._inside(name, AXES)
        return self._axes[name]

    def group(self, axes: Sequence[str]) -> tuple[Axis, ...]:
        """Return the (degree, stride) of every axis of a process group, given by axis names.

        ("cp",) is a key-value ring, which has one rank of each Ulysses group. ("pp",) is a pair of adjacent stages.
        """
        if axes == ("pp",):
            return ((np.minimum(self._c.pp, 2.0), self.axis("pp")[1]),)
        if axes == ("cp",):
            (degree, stride), inner = self.axis("cp"), self._c.cp_ulysses
            return ((degree / inner, stride * inner),)
        if axes[0] in ("etp", "edp"):
            return self.experts[axes[0]]
        return tuple(self.axis(name) for name in axes)

    @cached_property
    def experts(self) -> dict[str, tuple[Axis, ...]]:
        """Dict from expert group to the degrees and strides of its factors of dp_shard, cp, tp_x and tp_y.

        Ranks of `etp` shard one expert, ranks of `ep` hold different experts, ranks of `edp` replicate experts.
        """
        c, parts = self._c, []
        for name in _FOLDED:
            degree, stride = self.axis(name)
            # Experts fold over the inner ranks first; this axis provides the remaining factor.
            inner = self._inside(name, _FOLDED)
            etp = np.clip(c.etp / inner, 1.0, degree)
            etp_ep = np.clip(c.etp * c.ep / inner, 1.0, degree)
            parts.append(((etp, stride), (etp_ep / etp, stride * etp), (degree / etp_ep, stride * etp_ep)))
        return dict(zip(("etp", "ep", "edp"), zip(*parts, strict=True), strict=True))

    def _inside(self, name: str, axes: Sequence[str]) -> Array:
        """Return the product of the degrees of those `axes` that are inside the axis `name`."""
        product: Array = np.ones(1)
        for axis in axes:
            is_inside = _IS_INSIDE[axis, name][self._order]
            if is_inside.any():
                product = product * np.where(is_inside, getattr(self._c, axis), 1.0)
        return product


@dataclass(frozen=True)
class PricingCase:
    """Candidate strategies for a model on a machine; properties are columns over the candidates."""

    n: ModelNumbers  # sizes of the model
    machine: Machine
    workload: Workload  # sequence length and number formats; the candidates have the batch numbers
    c: Candidates  # candidate strategies
    _rings: dict[tuple[str, ...], Ring] = field(default_factory=dict, init=False, repr=False)
    # (kind, axes, width, id of the elements) of a collective to (these elements, seconds of one call)
    priced_calls: dict[tuple[str, tuple[str, ...], float, int], tuple[Array, Array]] = field(
        default_factory=dict, init=False, repr=False
    )

    def with_columns(self, **columns: Array) -> PricingCase:
        """Return the case with some columns of the candidates replaced."""
        return replace(self, c=replace(self.c, **columns))

    @cached_property
    def places(self) -> Places:
        """Degree and stride of the mesh axes."""
        return Places(self.c)

    @cached_property
    def tokens(self) -> Array:
        """T: tokens of one microbatch that one tensor-parallel group processes."""
        return self.c.microbatch * positions(self.c.cp, self.c.cp_ulysses, self.workload.seq_len)

    @cached_property
    def layers(self) -> Array:
        """Number of layers of the fullest pipeline rank if layers are split evenly."""
        return np.ceil(self.n.layers / self.c.pp)

    @cached_property
    def shards(self) -> Array:
        """d: number of FSDP ranks, over which parameters are sharded."""
        return self.c.dp_shard * self.c.cp

    @cached_property
    def cut(self) -> TokenCut:
        """Sharding of the tokens of a microbatch over the ranks, without the padding for tensor parallelism."""
        c, tokens = self.c, self.tokens
        ring = c.cp / c.cp_ulysses
        return TokenCut(c.tp_x, c.tp_y, tokens, tokens / c.tp, tokens, ring, c.cp_ulysses)

    @cached_property
    def full(self) -> Array | float:
        """1 for candidates with full recomputation, else 0; a scalar if all candidates are equal."""
        return collapse(np.where(self.c.recompute > 1, 1.0, 0.0))

    def dense(self, layers: Array | float = 1.0) -> Array:
        """Return the parameters of `layers` average layers on one tensor-parallel rank before FSDP, without experts."""
        n, whole = self.n, self.uncut.weights
        cut = (n.attention_weights + n.mlp_weights - whole) / self.c.tp
        return layers * (cut + whole * self.over_tp(1.0) + n.vector_weights)

    @property
    def uncut(self) -> Uncut:
        """Parts that tensor parallelism replicates; none for other frameworks, which are assumed to shard all parts."""
        return self.n.uncut if self.machine.stack.is_own_runtime else Uncut()

    def over_tp(self, uncut: float) -> Array:
        """Return the fraction of some work on one tensor-parallel rank, if a fraction `uncut` of it is replicated."""
        whole_share = uncut * self.keeps_whole
        return (1.0 - whole_share) / self.c.tp + whole_share

    @cached_property
    def keeps_whole(self) -> Array:
        """1 for candidates that replicate the parts in `uncut`, 0 for candidates that cannot run.

        A replicated residual stream requires tp_y = 1, pp = 1 and ep = 1. Other candidates are priced as if tensor
        parallelism sharded all parts.
        """
        c = self.c
        if not self.uncut.stream:
            return np.ones(1)
        return np.where((c.tp_y <= 1) & (c.pp <= 1) & (c.ep <= 1), 1.0, 0.0)

    @cached_property
    def etp(self) -> Array:
        """Number of ranks that shard one expert; 1 where `whole_experts`."""
        return np.where(self.whole_experts, 1.0, self.c.etp)

    @cached_property
    def whole_experts(self) -> NDArray[np.bool_]:
        """True if every tensor-parallel rank has all experts: in HyperParallel's own runtime if ep = 1."""
        return np.asarray((self.c.ep <= 1) & self.machine.stack.is_own_runtime)

    def experts(self, layers: Array | float = 1.0) -> Array:
        """Return the matrix elements of routed experts on a rank before FSDP, over ep and etp, in `layers` layers."""
        return layers * self.n.expert_weights / (self.c.ep * self.etp)

    @cached_property
    def last_layer(self) -> tuple[Array, Array]:
        """Parameters of the larger of the last two layers on a rank, before FSDP, as (without experts, experts).

        At the memory peak these layers are gathered and their gradients are reduced. A mean over all layers would be
        too small if the first layers have no experts.
        """
        ranks = self.c.ep * self.etp
        dense, experts = self.dense(), self.experts()
        for index, layer in enumerate(self.n.last_layers):
            whole = layer.whole * self.over_tp(float(self.uncut.weights > 0.0))
            own = layer.dense / self.c.tp + whole + layer.vectors, layer.experts / ranks
            larger = sum(own) > dense + experts if index else np.full(1, True)
            dense, experts = np.where(larger, own[0], dense), np.where(larger, own[1], experts)
        return dense, experts

    @cached_property
    def expert_shards(self) -> Array:
        """Number of ranks with the same experts, over which FSDP shards the experts' parameters."""
        return np.maximum(1.0, self.shards * self.c.tp / (self.c.ep * self.c.etp))

    @cached_property
    def outside(self) -> Array:
        """Number of parameters of embedding and head before sharding; in a pipeline, of the larger of the two."""
        n = self.n
        largest = max(n.embedding_weights, n.head_weights)
        return np.where(self.c.pp > 1, largest, n.embedding_weights + n.head_params) * 1.0

    @cached_property
    def vocabulary_ranks(self) -> Array:
        """Number of ranks that shard the rows of embedding and head: 1 if tensor parallelism cannot shard them.

        Frameworks other than HyperParallel pad the vocabulary, so that tensor parallelism can always shard it.
        """
        c, n = self.c, self.n
        if not self.machine.stack.is_own_runtime:
            return c.tp
        is_replicated = self.keeps_whole * self.uncut.vocabulary > 0.0
        return np.where((n.vocab % c.tp == 0) & ~is_replicated, c.tp, 1.0)

    @cached_property
    def logit_ranks(self) -> Array:
        """Number of ranks over which the logits of a tensor-parallel group are sharded.

        If every rank has the whole head, it computes the logits of its own tokens only, or of all tokens if the
        residual stream is replicated.
        """
        return np.where(self.uncut.stream * self.keeps_whole, self.vocabulary_ranks, self.c.tp)

    def ends(self, elements: Array | float) -> Array:
        """Return the number of parameters on a rank, before FSDP, of `elements` parameters outside the layers."""
        whole = min(self.uncut.outside, float(np.min(elements)))
        cut = (elements - whole) / self.vocabulary_ranks
        return np.asarray(cut + whole * self.over_tp(1.0))

    @property
    def scores(self) -> float:
        """Bytes per token of probabilities that unfused attention saves in an average layer; 0 without sinks."""
        n, stack = self.n, self.machine.stack
        return stack.eager * n.sinks * self.machine.width * n.num_heads * self.workload.seq_len

    @cached_property
    def logits(self) -> Array:
        """Bytes of logits and their float32 copies on a rank at the peak of the loss computation."""
        stack = self.machine.stack
        ranks = self.logit_ranks
        elements = self.tokens * self.n.vocab / ranks
        width = stack.logit_bytes * max(self.machine.width, 2.0) / 2.0
        converted = 8.0 * stack.eager * np.minimum(elements, _LOSS_BLOCK)
        unpredicted = stack.eager * self.tokens * self.n.unpredicted_logit_bytes / ranks
        return elements * width + converted + unpredicted

    @cached_property
    def sharded(self) -> NDArray[np.bool_]:
        """True if FSDP shards gradients, and parameters while not in use."""
        return (self.shards > 1) & (self.c.zero > 1)

    @cached_property
    def copies(self) -> NDArray[np.bool_]:
        """True if matmuls read a copy of the ZeRO-2 or ZeRO-3 parameters: a gathered one, or one in another format.

        With data-parallel replicas, FSDP copies parameters even if it shards them over one rank.
        """
        another = self.machine.width != self.param_width
        return (self.c.zero > 1) & (self.sharded | another | (self.c.dp_replicate > 1))

    def ring(self, axes: tuple[str, ...]) -> Ring:
        """Return the ring over the ranks of a process group, given by axis names."""
        if axes not in self._rings:
            self._rings[axes] = self.machine.ring(*self.places.group(axes))
        return self._rings[axes]

    @property
    def param_width(self) -> float:
        """Bytes of one element of a stored parameter."""
        return float(DTYPE_BYTES[self.workload.param_dtype])

    @property
    def reduce_width(self) -> float:
        """Bytes of one gradient element during reduction."""
        return float(DTYPE_BYTES[self.workload.reduce_dtype])


def positions(cp: Array, cp_ulysses: Array | float, seq_len: int) -> Array:
    """Return the number of tokens of a sequence on one context-parallel rank, padding included (`SequenceCut`)."""
    chunks = np.where((cp > cp_ulysses) & (cp_ulysses % 2 > 0), 2.0, 1.0)
    return chunks * np.ceil(seq_len / (cp * chunks))


def collapse(column: Array) -> Array | float:
    """Return a column, or its value as a scalar if all entries are equal; scalars are much faster to compute with."""
    same = column.size > 0 and bool((column == column.flat[0]).all())
    return float(column.flat[0]) if same else column
