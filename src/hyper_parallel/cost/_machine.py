"""Machine numbers for the cost formulas: rates after efficiency, and the bandwidth of rank groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.cost._candidates import Array, Axis
from hyper_parallel.cost._cards import DeviceCard, StackCard, device_card, stack_card
from hyper_parallel.cost._own_cards import own_cards
from hyper_parallel.cost.pipeline import Speed
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
