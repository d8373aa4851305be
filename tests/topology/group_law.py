"""Bandwidth and latency of any group of ranks, tier by tier: what `cost.Machine` must give for regular groups.

A group with g_local ranks inside one inner domain drives g_local outer links in parallel, so

    all-gather, reduce-scatter, all-reduce:   min over the tiers crossed of  g_local(tier) * bytes_s(tier)
    all-to-all:                               1 / max over sets of links of  sum of share(tier) / bytes_s(tier)

where g_local is 1 on the innermost tier, and share(tier) is the part of a rank's bytes whose receiver is first met on
that tier. Tiers that share links count as one set. See docs/explanation/topology.md for the derivation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.topology import Supernode, Tier

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True)
class Crossing:
    """A tier that a group uses."""

    tier: Tier
    link: int  # index of the set of links; tiers that share links have the same
    inner: int  # fewest ranks of the group in one domain below the set of links
    share: float  # largest part of a rank's peers that are met first on this tier
    domains: int  # most inner domains of the group joined in one domain of this tier


def domains_of(ranks: Sequence[int], size: int) -> Counter[int]:
    return Counter(rank // size if size else 0 for rank in ranks)


def crossings(supernode: Supernode, ranks: Sequence[int]) -> Iterator[Crossing]:
    supernode.tier_of(max(ranks) + 1)
    peers = len(ranks) - 1
    inner_size, below_links, link = 1, 1, -1
    for tier in supernode.tiers:
        if not tier.shares_links:
            link, below_links = link + 1, inner_size
        inner, outer = domains_of(ranks, inner_size), domains_of(ranks, tier.size)
        if len(outer) < len(inner):
            ratio = tier.size // inner_size if tier.size else 0
            joined = Counter(domain // ratio if ratio else 0 for domain in inner)
            met = max(outer[domain // ratio if ratio else 0] - count for domain, count in inner.items())
            local = min(domains_of(ranks, below_links).values())
            yield Crossing(tier, link, local, met / peers, max(joined.values()))
        if tier.size == 0:
            return
        inner_size = tier.size


def group_bandwidth(supernode: Supernode, ranks: Sequence[int], kind: CollectiveKind = "all_gather") -> float:
    """Bytes/s at which each rank sends in one collective of the flat algorithm; infinite for a group of one."""
    if len(ranks) < 2:
        return math.inf
    crossed = list(crossings(supernode, ranks))
    if kind != "all_to_all":
        return min(c.inner * c.tier.bytes_s.value for c in crossed)
    busy: dict[int, float] = {}
    for c in crossed:
        busy[c.link] = busy.get(c.link, 0.0) + c.share / c.tier.bytes_s.value
    return 1 / max(busy.values())


def group_latency(supernode: Supernode, ranks: Sequence[int], kind: CollectiveKind = "all_gather") -> float:
    """Seconds of one collective that are left when the message is tiny: steps of each tier times its latency."""
    if len(ranks) < 2:
        return 0.0
    total = sum(steps(c.tier.kind, c.domains) * c.tier.latency_s.value for c in crossings(supernode, ranks))
    return 2 * total if kind == "all_reduce" else total


def steps(kind: str, domains: int) -> int:
    match kind:
        case "full_mesh":
            return 1
        case "switch":
            return math.ceil(math.log2(domains))
        case "torus":
            return max(1, domains // 2)
        case _:
            return domains - 1
