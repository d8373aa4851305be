"""Inputs of every formula: a model, a machine, number formats and candidates, and values derived from them alone.

`Machine` holds the rates of a device and its links after efficiency, and times of collectives over groups of ranks.
`Places` are degree and stride of every mesh axis of the candidates, also of the groups of experts. `PricingCase` joins
both with the model: its properties are columns over the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._cards import DeviceCard, StackCard, device_card, own_cards, stack_card
from hyper_parallel.cost._numbers import ModelNumbers, Uncut
from hyper_parallel.cost.candidates import ORDERS, Array, Axis, Candidates, Speed
from hyper_parallel.ir import AXES, Workload
from hyper_parallel.shard import TokenCut
from hyper_parallel.topology import Supernode, Tier
from hyper_parallel.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Ring:
    """Groups of ranks that send in a ring."""

    size: Array  # ranks of a group
    rate: Array  # bytes/s of a rank
    delay: Array  # seconds of a collective with a tiny message
    domain: float = np.inf  # ranks of a domain
    outside_bytes_s: float = np.inf  # total bytes/s of a domain to other domains

    def seconds(self, gathered_bytes: Array) -> Array:
        """Return seconds of one all-gather or reduce-scatter of `gathered_bytes` of the whole tensor.

        A ring sends (g-1)/g of the gathered tensor at the rate of its slowest links, after the latency of the tiers.

        Source: ring collectives, Patarasuk and Yuan 2009.
        """
        if self.rate.size == 1 and np.isinf(self.rate[0]):  # groups of one send nothing
            return np.zeros(np.broadcast_shapes(self.size.shape, np.shape(gathered_bytes)))
        sent = gathered_bytes * (self.size - 1.0) / self.size
        seconds = sent / self.rate + self.delay
        if not np.isfinite(self.outside_bytes_s):
            return seconds
        # A group larger than a domain is limited by the total bandwidth out of the domain.
        outside = np.maximum(seconds, sent / (self.domain * self.outside_bytes_s))
        return np.where(self.size > self.domain, outside, seconds)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and of its links, and the cards with their efficiency."""

    peak_flops: float  # dense peak FLOP/s in the compute dtype
    matmul_peak: float  # dense peak FLOP/s in the format of matmul inputs
    # format of matmul inputs; differs from the compute dtype in 8 and 4 bit training
    matmul_dtype: str
    compute_dtype: str  # format of activations
    memory_bytes: int  # capacity of the device's own memory
    memory_bytes_s: float  # peak bytes/s of the device's own memory
    # bytes/s per device and direction to host memory; 0 when the topology names none
    host_bytes_s: float
    tiers: tuple[Tier, ...]  # interconnect levels, inner to outer
    card: DeviceCard  # efficiency of the device's kernels
    stack: StackCard  # how the training framework uses it
    ranks_per_core: float = 1.0  # ranks that time-share a core: one runs while another waits
    host_bytes: float = np.inf  # host memory of one device
    may_recompute: bool = True  # whether a memory plan may drop and recompute results

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
        """Read the numbers of a topology.

        Args:
            supernode: The machine.
            compute_dtype: Format of activations.
            matmul_dtype: Format of matmul inputs; None: the compute dtype.
            card: Device card; None: the shipped one for the device. Without either card, and on the topology `local`,
                the cards that `calibrate` wrote for this device.
            stack: Stack card; None: the one of our own runtime.
        """
        device = supernode.device
        matmul_dtype = matmul_dtype or compute_dtype
        use_own = supernode.name == "local" and card is None and stack is None
        if use_own and (own := own_cards(device.name, supernode.num_devices)):
            card, stack = own
        return cls(
            _peak_flops(supernode, compute_dtype),
            _peak_flops(supernode, matmul_dtype),
            matmul_dtype,
            compute_dtype,
            int(device.memory_bytes.value),
            device.memory_bytes_s.value,
            supernode.host_bytes_s,
            supernode.tiers,
            card or device_card(device.name, device.kind),
            stack or stack_card("cpu" if device.kind == "cpu" else "hyper-parallel"),
            device.ranks_per_core,
            np.inf if supernode.host_bytes is None else supernode.host_bytes,
        )

    @property
    def pace(self) -> Speed | None:
        """Speed of a rank by the share of running ranks, relative to all ranks running.

        It is measured if the card has it. Otherwise ranks that share cores are assumed to contend for cores only. None
        if every rank has its own cores.
        """
        if own := self.card.pace:
            shares = sorted((float(share), speed) for share, speed in own.items())
            x, y = (np.log([*values, 1.0]) for values in zip(*shares, strict=True))
            return lambda share: np.exp(np.interp(np.log(share), x, y))
        if self.ranks_per_core <= 1.0:
            return None
        return lambda share: np.minimum(self.ranks_per_core, 1.0 / share)

    def paces(self, ranks: int) -> tuple[float, ...]:
        """Return the `pace` of a rank with 1, 2, ... ranks running; empty if every rank has its own cores."""
        if self.pace is None:
            return ()
        return tuple(self.pace(np.arange(1.0, ranks + 1.0) / ranks).tolist())

    @property
    def width(self) -> float:
        """Bytes of an activation element."""
        return float(DTYPE_BYTES[self.compute_dtype])

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of a large matmul."""
        return self.matmul_peak * self.card.share("matmul", self.matmul_dtype) / self.stack.compute

    @property
    def saturation(self) -> float:
        """Rows, columns or depth at which a matmul reaches half of its FLOP/s: memory time equals compute time."""
        return self.card.saturation * self.peak_flops * self.width / 2.0 / self.memory_bytes_s

    @property
    def attention_flops(self) -> float:
        """FLOP/s of the attention products on long sequences and wide heads."""
        share = self.card.share("attention", self.compute_dtype)
        share = share * (self.card.portable if self.stack.portable else 1.0)
        return self.peak_flops * share / self.stack.compute

    @property
    def passing_bytes_s(self) -> float:
        """Bytes/s of element-wise kernels."""
        return self.memory_bytes_s * self.card.elementwise / self.stack.compute

    @property
    def stream_bytes_s(self) -> float:
        """Bytes/s of one long pass."""
        return self.memory_bytes_s * self.card.stream

    def link_share(self, tier: Tier) -> float:
        """Return the share of a tier's bandwidth that collectives reach, of innermost or network links."""
        return (
            self.card.link if self._is_innermost(tier) else self.card.network * self.stack.network
        )

    def _is_innermost(self, tier: Tier) -> bool:
        """Return whether a tier uses the innermost links."""
        return tier is self.tiers[0] or tier.shares_links

    def ring(self, *axes: Axis) -> Ring:
        """Return the groups that some axes span, each as a ring.

        A rank sends at the least of g_local * bandwidth over the tiers, times the link efficiency. The g_local ranks of
        the group in one domain below the links of a tier drive these links in parallel. If the group does not divide
        over the domains, the domain with the fewest ranks is the bottleneck. Source: hierarchical collectives,
        docs/explanation/topology.md.
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
        """Return seconds of one all-to-all in which every rank has `local_bytes` for the whole group, itself included.

        Bytes for peers whose closest common tier is t cross tier t. Tiers with their own links run concurrently, tiers
        that share links sequentially.

        Args:
            local_bytes: Bytes of one rank.
            axes: Degree and stride of every axis of the group.
            copies: Copies of one token that are sent once to each rank or domain with several of its receivers: the
                expected
                number of distinct ones over the copies; 1 sends every copy.
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
        """Return seconds of a collective with a tiny message: steps on every tier times its latency.

        One step on a full mesh, a tree over a switch, a ring in both directions on a torus, a ring on one host.
        """
        return self._delay(list(self._hops(axes)))

    def _delay(self, hops: Sequence[_Hop]) -> Array:
        """Return the latency over some hops."""
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
        """Yield every tier with the ranks of a group inside it."""
        size = _product(axes)
        inside = below = np.ones(np.shape(size))
        for index, tier in enumerate(self.tiers):
            if tier.size == 0 or index == len(self.tiers) - 1:
                reached = size
            else:
                # Members of the group in one domain multiply over its axes.
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
    """Return the product of degrees."""
    size: Array = np.ones(1)
    for degree, stride in axes:
        if degree.shape != stride.shape and stride.size > 1:
            degree = np.broadcast_to(degree, np.broadcast(degree, stride).shape)
        size = size * degree
    return size


@dataclass(frozen=True, slots=True)
class _Hop:
    """Tier with the number of ranks of a group inside it."""

    tier: Tier
    inside: Array  # ranks of the group in one domain of the next inner tier
    below: Array  # ranks of the group in one domain below the links that this tier uses
    reached: Array  # ranks of the group in one domain of this tier


def _peak_flops(supernode: Supernode, dtype: str) -> float:
    """Return the peak rate of a format; float16 defaults to bfloat16, which has the same rate in matrix units."""
    only_bfloat16 = dtype == "float16" and dtype not in supernode.device.peak_flops
    return supernode.peak_flops("bfloat16" if only_bfloat16 else dtype)


_LOSS_BLOCK: Final = float(1 << 24)
"""Logits that our runtime's loss converts to float32 per block; `logsumexp` needs a second buffer of that size."""
_FOLDED = ("dp_shard", "cp", "tp_x", "tp_y")
_IS_INSIDE: Final = {
    (a, b): np.array([order.index(a) > order.index(b) for order in ORDERS])
    for a in AXES
    for b in AXES
}
"""Whether axis a is inside axis b, for every order."""


class Places:
    """Placement of the axes of every candidate, and of the groups of experts that fold over several axes."""

    def __init__(self, c: Candidates) -> None:
        order = np.asarray(c.order, dtype=np.intp)
        same = order.size and (order == order.flat[0]).all()
        self._order, self._c = order.flat[:1] if same else order, c
        self._axes: dict[str, Axis] = {}

    def axis(self, name: str) -> Axis:
        """Return an axis of the mesh."""
        if name not in self._axes:
            self._axes[name] = getattr(self._c, name), self._inside(name, AXES)
        return self._axes[name]

    def group(self, axes: Sequence[str]) -> tuple[Axis, ...]:
        """Return a group of the boundary table by the names of its axes.

        The group ("cp",) contains the ranks of a key-value ring, outside the ranks that exchange heads. The group
        ("pp",) contains two adjacent stages.
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
        """Factors of dp_shard, cp, tp_x and tp_y: ranks that shard one expert (etp), hold all (ep), replicate (edp)."""
        c, parts = self._c, []
        for name in _FOLDED:
            degree, stride = self.axis(name)
            # Experts fold over the inner ranks first; this axis provides the remaining factor.
            inner = self._inside(name, _FOLDED)
            etp = np.clip(c.etp / inner, 1.0, degree)
            etp_ep = np.clip(c.etp * c.ep / inner, 1.0, degree)
            parts.append(
                ((etp, stride), (etp_ep / etp, stride * etp), (degree / etp_ep, stride * etp_ep))
            )
        return dict(zip(("etp", "ep", "edp"), zip(*parts, strict=True), strict=True))

    def _inside(self, name: str, axes: Sequence[str]) -> Array:
        """Return the product of the degrees of the axes inside an axis."""
        product: Array = np.ones(1)
        for axis in axes:
            is_inside = _IS_INSIDE[axis, name][self._order]
            if is_inside.any():
                product = product * np.where(is_inside, getattr(self._c, axis), 1.0)
        return product


_ALL_CUT: Final = Uncut()


@dataclass(frozen=True)
class PricingCase:
    """Candidates for a model on a machine; properties are columns over the candidates."""

    n: ModelNumbers
    machine: Machine
    workload: Workload  # sequence length and number formats; the candidates have the batch numbers
    c: Candidates
    _rings: dict[tuple[str, ...], Ring] = field(default_factory=dict, init=False, repr=False)
    # kind, axes, width and identity of the elements of a collective -> these elements and its seconds
    priced_calls: dict[tuple[str, tuple[str, ...], float, int], tuple[Array, Array]] = field(
        default_factory=dict, init=False, repr=False
    )

    def with_columns(self, **columns: Array) -> PricingCase:
        """Return the case with some columns of the candidates replaced."""
        return replace(self, c=replace(self.c, **columns))

    @cached_property
    def places(self) -> Places:
        """Placement of the axes."""
        return Places(self.c)

    @cached_property
    def tokens(self) -> Array:
        """T: tokens of one microbatch on the ranks of one tensor-parallel group."""
        return self.c.microbatch * positions(self.c.cp, self.c.cp_ulysses, self.workload.seq_len)

    @cached_property
    def layers(self) -> Array:
        """Layers of the fullest stage with equal stages."""
        return np.ceil(self.n.layers / self.c.pp)

    @cached_property
    def shards(self) -> Array:
        """d: ranks that share parameters."""
        return self.c.dp_shard * self.c.cp

    @cached_property
    def cut(self) -> TokenCut:
        """Sharding of the tokens of a microbatch; without padding of the pieces between blocks."""
        c, tokens = self.c, self.tokens
        ring = c.cp / c.cp_ulysses
        return TokenCut(c.tp_x, c.tp_y, tokens, tokens / c.tp, tokens, ring, c.cp_ulysses)

    @cached_property
    def full(self) -> Array | float:
        """1 for candidates with full recomputation, else 0; a scalar if all candidates agree."""
        return collapse(np.where(self.c.recompute > 1, 1.0, 0.0))

    def dense(self, layers: Array | float = 1.0) -> Array:
        """Return parameters of mean layers on a tensor-parallel rank, without experts."""
        n, whole = self.n, self.uncut.weights
        cut = (n.attention_weights + n.mlp_weights - whole) / self.c.tp
        return layers * (cut + whole * self.over_tp(1.0) + n.vector_weights)

    @property
    def uncut(self) -> Uncut:
        """Parts that tensor parallelism replicates in our own stack; other stacks are assumed to shard them."""
        return self.n.uncut if self.machine.stack.phased else _ALL_CUT

    def over_tp(self, uncut: float) -> Array:
        """Return the share of a layer's work on one tensor-parallel rank, if the share `uncut` of it stays whole."""
        whole_share = uncut * self.keeps_whole
        return (1.0 - whole_share) / self.c.tp + whole_share

    @cached_property
    def keeps_whole(self) -> Array:
        """1 for candidates whose uncut parts stay whole; 0 if layouts refuse that, priced as if all were sharded.

        A whole residual stream requires one axis of tensor parallelism, without ep and pp (`keep_whole`).
        """
        c = self.c
        if not self.uncut.stream:
            return np.ones(1)
        return np.where((c.tp_y <= 1) & (c.pp <= 1) & (c.ep <= 1), 1.0, 0.0)

    @cached_property
    def etp(self) -> Array:
        """Ranks that shard one expert; in our own stack tensor parallelism keeps experts whole."""
        return np.where(self.whole_experts, 1.0, self.c.etp)

    @cached_property
    def whole_experts(self) -> NDArray[np.bool_]:
        """True if every tensor-parallel rank has all experts: in our own stack, without expert parallelism."""
        return np.asarray((self.c.ep <= 1) & bool(self.machine.stack.phased))

    def experts(self, layers: Array | float = 1.0) -> Array:
        """Return parameters of the experts of mean layers on an expert-parallel rank."""
        return layers * self.n.expert_weights / (self.c.ep * self.etp)

    @cached_property
    def last_layer(self) -> tuple[Array, Array]:
        """Parameters of the larger of the last two layers on a rank before data sharding: without experts, and experts.

        At the peak these layers are gathered and their gradients reduced. A mean over all layers would be too small if
        the first layers have no experts.
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
        """Ranks that share the states of the same experts, after ep and etp."""
        return np.maximum(1.0, self.shards * self.c.tp / (self.c.ep * self.c.etp))

    @cached_property
    def outside(self) -> Array:
        """Parameters of embedding and head in the stage with more of them, before any sharding."""
        n = self.n
        largest = max(n.embedding_weights, n.head_weights)
        return np.where(self.c.pp > 1, largest, n.embedding_weights + n.head_params) * 1.0

    @property
    def largest_end(self) -> float:
        """Elements of the larger of embedding and head."""
        return float(max(self.n.embedding_weights, self.n.head_params))

    @cached_property
    def vocabulary_ranks(self) -> Array:
        """Ranks that share the rows of embedding and head: 1 if tensor parallelism cannot shard them.

        Stacks other than our own pad the vocabulary, so all ranks of tensor parallelism share it.
        """
        c, n = self.c, self.n
        if not self.machine.stack.phased:
            return c.tp
        return np.where(
            (n.vocab % c.tp == 0) & ~(self.keeps_whole * self.uncut.vocabulary > 0.0), c.tp, 1.0
        )

    @cached_property
    def logit_ranks(self) -> Array:
        """Ranks that share the logits of a tensor-parallel group.

        Without the stream of all tokens, a whole head processes the tokens of its rank.
        """
        return np.where(self.uncut.stream * self.keeps_whole, self.vocabulary_ranks, self.c.tp)

    def ends(self, elements: Array | float) -> Array:
        """Return elements on a rank of embedding, head and other parameters outside layers, before data sharding."""
        whole = min(self.uncut.outside, float(np.min(elements)))
        cut = (elements - whole) / self.vocabulary_ranks
        return np.asarray(cut + whole * self.over_tp(1.0))

    @property
    def scores(self) -> float:
        """Bytes of attention probabilities per token of a mean layer in unfused attention: of layers with sinks."""
        n, stack = self.n, self.machine.stack
        return stack.eager * n.sinks * self.machine.width * n.num_heads * self.workload.seq_len

    @cached_property
    def logits(self) -> Array:
        """Bytes at the peak of the loss."""
        stack = self.machine.stack
        ranks = self.logit_ranks
        elements = self.tokens * self.n.vocab / ranks
        converted = 8.0 * stack.eager * np.minimum(elements, _LOSS_BLOCK)
        unknown = stack.eager * self.tokens * self.n.unknown_logit_bytes / ranks
        return (
            elements * stack.logit_bytes * max(self.machine.width, 2.0) / 2.0 + converted + unknown
        )

    @cached_property
    def sharded(self) -> NDArray[np.bool_]:
        """True if gradients, and parameters between uses, are shards."""
        return (self.shards > 1) & (self.c.zero > 1)

    @cached_property
    def copies(self) -> NDArray[np.bool_]:
        """True if matmuls read copies of parameters: gathered, in another format, or of replicas.

        FSDP, which sums the gradients of replicas, copies its parameters even in a group of one rank.
        """
        another = self.machine.width != self.param_width
        return (self.c.zero > 1) & (self.sharded | another | (self.c.dp_replicate > 1))

    def ring(self, axes: tuple[str, ...]) -> Ring:
        """Return the ring over a group, by the axis names of the boundary table."""
        if axes not in self._rings:
            self._rings[axes] = self.machine.ring(*self.places.group(axes))
        return self._rings[axes]

    @property
    def param_width(self) -> float:
        """Bytes of a stored parameter."""
        return float(DTYPE_BYTES[self.workload.param_dtype])

    @property
    def reduce_width(self) -> float:
        """Bytes of an element of a gradient in reduction."""
        return float(DTYPE_BYTES[self.workload.reduce_dtype])


def positions(cp: Array, cp_ulysses: Array | float, seq_len: int) -> Array:
    """Return positions of a sequence on one context-parallel rank, with the padding of `SequenceCut`."""
    chunks = np.where((cp > cp_ulysses) & (cp_ulysses % 2 > 0), 2.0, 1.0)
    return chunks * np.ceil(seq_len / (cp * chunks))


def collapse(column: Array) -> Array | float:
    """Return a column, or its value if it is constant: scalar arithmetic is much faster than that of short arrays."""
    same = column.size > 0 and bool((column == column.flat[0]).all())
    return float(column.flat[0]) if same else column
