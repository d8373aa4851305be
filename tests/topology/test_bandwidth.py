"""The bandwidth law of groups that span tiers, on cases that can be checked by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import TopologyTooSmall
from hyper_parallel.topology import load_topology
from tests.topology.group_law import group_bandwidth, group_latency

pytestmark = pytest.mark.unit

H100 = load_topology("dgx-h100")
CM384 = load_topology("cloudmatrix384")
MACHINES = [load_topology(n) for n in ("dgx-h100", "cloudmatrix384", "gb200-nvl72", "local-cpu")]


@pytest.mark.parametrize(
    ("ranks", "gb_s"),
    [
        (range(8), 450),  # inside NVLink
        ([0, 8], 50),  # one rank per node: one network card
        ([0, 8, 16, 24], 50),
        ([0, 1, 8, 9], 100),  # two ranks per node drive two cards
        (range(16), 400),  # eight cards are slower than NVLink
        (range(1024), 400),
        ([*range(8), 8], 50),  # the domain with the fewest ranks decides
    ],
)
def test_h100_gather(ranks, gb_s):
    assert group_bandwidth(H100, ranks) == gb_s * 1e9
    assert group_bandwidth(H100, ranks, "reduce_scatter") == gb_s * 1e9


@pytest.mark.parametrize(
    ("ranks", "gb_s"),
    [
        (range(16), 196),  # one node
        ([0, 16], 190),  # two nodes of one fabric
        (range(32), 190),  # one fabric: more ranks per node add no links
        (range(768), 190),
        ([0, 768], 25),  # RDMA between supernodes
        ([0, 1, 768, 769], 50),
        (range(1536), 190),  # 768 RDMA cards outrun the fabric
    ],
)
def test_cloudmatrix_gather(ranks, gb_s):
    assert group_bandwidth(CM384, ranks) == gb_s * 1e9


def test_all_to_all_is_bound_by_the_injection_of_each_rank():
    # 16 ranks on two nodes: 8 of 15 peers lie behind the own 50 GB/s card.
    assert group_bandwidth(H100, range(16), "all_to_all") == pytest.approx(50e9 * 15 / 8)
    assert group_bandwidth(H100, range(8), "all_to_all") == pytest.approx(450e9)
    assert group_bandwidth(H100, [0, 8], "all_to_all") == pytest.approx(50e9)
    # One fabric: the traffic of both tiers adds up on the same links.
    both = (15 / 31) / 196e9 + (16 / 31) / 190e9
    assert group_bandwidth(CM384, range(32), "all_to_all") == pytest.approx(1 / both)


def test_latency_counts_steps_per_tier():
    assert group_latency(H100, range(8)) == pytest.approx(3 * 5e-6)
    assert group_latency(H100, range(32)) == pytest.approx(3 * 5e-6 + 2 * 10e-6)
    assert group_latency(H100, range(8), "all_reduce") == pytest.approx(2 * 3 * 5e-6)
    assert group_latency(CM384, range(16)) == pytest.approx(10e-6)
    assert group_latency(load_topology("local-cpu"), range(4)) == pytest.approx(1.2e-3)


def test_a_single_rank_sends_nothing():
    assert group_bandwidth(H100, [3]) == math.inf
    assert group_latency(H100, [3]) == 0


def test_ranks_beyond_the_outermost_tier_are_refused():
    with pytest.raises(TopologyTooSmall):
        group_bandwidth(load_topology("atlas-950"), [0, 8192])


@settings(deadline=None)
@given(
    st.sampled_from(MACHINES),
    st.sets(st.integers(0, 4000), min_size=2, max_size=24),
    st.sampled_from(["all_gather", "all_to_all"]),
)
def test_law_holds_for_any_group(machine, ranks, kind):
    bandwidth = group_bandwidth(machine, sorted(ranks), kind)
    rates = [tier.bytes_s.value for tier in machine.tiers]
    assert bandwidth >= min(rates)
    assert bandwidth == group_bandwidth(machine, sorted(ranks, reverse=True), kind)
    if kind == "all_gather":
        # never above the innermost link that the group uses
        assert bandwidth <= max(rates) * len(ranks)
        apart = [machine.tiers[0].size * r if machine.tiers[0].size else r for r in sorted(ranks)]
        assert group_bandwidth(machine, apart) <= bandwidth


@settings(deadline=None)
@given(st.sampled_from(MACHINES), st.integers(0, 40), st.integers(2, 64))
def test_moving_a_group_by_whole_domains_changes_nothing(machine, domain, size):
    outer = next((t.size for t in reversed(machine.tiers) if t.size), 1)
    moved = [domain * outer + r for r in range(size)]
    assert group_bandwidth(machine, moved) == group_bandwidth(machine, range(size))
    assert group_latency(machine, moved) == group_latency(machine, range(size))
