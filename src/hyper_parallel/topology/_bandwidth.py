"""Bandwidth and latency of a group of ranks that may span several tiers.

A group with g_local ranks inside one inner domain drives g_local outer links in parallel, so

    all-gather, reduce-scatter, all-reduce:   min over the tiers crossed of  g_local(tier) * bytes_s(tier)
    all-to-all:                               1 / max over sets of links of  sum of share(tier) / bytes_s(tier)

where g_local is 1 on the innermost tier, and share(tier) is the part of a rank's bytes whose receiver is first met on
that tier. On two tiers the first line is min(scale_up, g_local * NIC). Both are bounds of hierarchical algorithms with
all phases pipelined; measured efficiency belongs to calibration, not here. Tiers that share links (one fabric, only
latency differs) count as one set: nothing is gained from a second rank, and all-to-all traffic of both adds up.

Domains are runs of consecutive device ids, so the result depends on which ranks form the group, not only on how many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.topology._supernode import Supernode, Tier

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A tier that a group uses.

    Attributes:
        tier: The tier.
        link: Index of the set of links the tier uses; tiers that share links have the same.
        inner: Fewest ranks of the group in one domain below the set of links.
        share: Largest part of a rank's peers that are met first on this tier.
        domains: Most inner domains of the group joined in one domain of this tier.
    """

    tier: Tier
    link: int
    inner: int
    share: float
    domains: int


def _domains(ranks: Sequence[int], size: int) -> Counter[int]:
    return Counter(rank // size if size else 0 for rank in ranks)


def _crossings(supernode: Supernode, ranks: Sequence[int]) -> Iterator[_Crossing]:
    supernode.tier_of(max(ranks) + 1)
    peers = len(ranks) - 1
    inner_size, below_links, link = 1, 1, -1
    for tier in supernode.tiers:
        if not tier.shares_links:
            link, below_links = link + 1, inner_size
        inner, outer = _domains(ranks, inner_size), _domains(ranks, tier.size)
        if len(outer) < len(inner):
            ratio = tier.size // inner_size if tier.size else 0
            joined = Counter(domain // ratio if ratio else 0 for domain in inner)
            met = max(
                outer[domain // ratio if ratio else 0] - count for domain, count in inner.items()
            )
            local = min(_domains(ranks, below_links).values())
            yield _Crossing(tier, link, local, met / peers, max(joined.values()))
        if tier.size == 0:
            return
        inner_size = tier.size


def group_bandwidth(
    supernode: Supernode, ranks: Sequence[int], kind: CollectiveKind = "all_gather"
) -> float:
    """Bytes/s at which each rank of a group sends in one collective.

    Seconds of the transfer are the bytes one rank sends in the flat algorithm, (g-1)/g of the gathered tensor for an
    all-gather over g ranks, divided by this.

    Args:
        supernode: The machine.
        ranks: Device ids of the group, in any order.
        kind: The collective; all but all_to_all follow the same law.

    Returns:
        Bytes/s per rank and direction; infinite for a group of one.

    Raises:
        TopologyTooSmall: HP311 when a rank lies outside the outermost tier.

    Source: hierarchical collectives; see docs/topology.md for the derivation.
    """
    if len(ranks) < 2:
        return math.inf
    crossings = list(_crossings(supernode, ranks))
    if kind != "all_to_all":
        return min(c.inner * c.tier.bytes_s.value for c in crossings)
    busy: dict[int, float] = {}
    for c in crossings:
        busy[c.link] = busy.get(c.link, 0.0) + c.share / c.tier.bytes_s.value
    return 1 / max(busy.values())


def group_latency(
    supernode: Supernode, ranks: Sequence[int], kind: CollectiveKind = "all_gather"
) -> float:
    """Seconds of one collective over a group that are left when the message is tiny.

    Steps on each tier crossed, times its latency: 1 on a full mesh, ceil(log2 n) over a switch (tree), n // 2 on a
    torus (ring in both directions), n - 1 on the ranks of one CPU machine (ring), for n domains joined; an all-reduce
    is two phases.

    Raises:
        TopologyTooSmall: HP311 when a rank lies outside the outermost tier.
    """
    if len(ranks) < 2:
        return 0.0
    total = sum(
        _steps(c.tier.kind, c.domains) * c.tier.latency_s.value
        for c in _crossings(supernode, ranks)
    )
    return 2 * total if kind == "all_reduce" else total


def _steps(kind: str, domains: int) -> int:
    match kind:
        case "full_mesh":
            return 1
        case "switch":
            return math.ceil(math.log2(domains))
        case "torus":
            return max(1, domains // 2)
        case _:
            return domains - 1
