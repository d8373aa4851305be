"""Layouts of experts: what ep cuts, what FSDP cuts after it, and what is refused."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Layout, Overlap, Rule, Strategy
from hyper_parallel.shard import ShardPlan, family_rules, plan_layouts
from tests.shard._models import EMBED, decoder, sizes

pytestmark = pytest.mark.unit

BLOCK = "model.layers.*.mlp"
GATE_UP, DOWN = f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"


def routed(strategy: Strategy, experts: int = 8, width: int = 16, rules=None) -> ShardPlan:
    attention = [p for p in decoder() if ".mlp." not in p[0]]
    params = [
        *attention,
        (f"{BLOCK}.gate.weight", (experts, EMBED), ()),
        (GATE_UP, (experts, 2 * width, EMBED), ()),
        (DOWN, (experts, EMBED, width), ()),
    ]
    rules = family_rules("mixtral") if rules is None else rules
    return plan_layouts(params, rules, strategy, **sizes(), where="parallel.ep")


def axes(plan: ShardPlan, name: str) -> tuple[tuple[str, ...], ...]:
    return plan.layouts[name].axes


def test_ep_cuts_experts_and_fsdp_cuts_what_it_left() -> None:
    plan = routed(Strategy(dp_shard=4, ep=2))
    assert axes(plan, GATE_UP) == (("ep", "edp"), (), ())
    assert axes(plan, f"{BLOCK}.gate.weight") == (("dp_shard",), ())
    assert plan.styles[f"{BLOCK}.experts"] == "experts"


def test_fsdp_takes_another_dim_when_there_are_too_few_experts() -> None:
    assert axes(routed(Strategy(dp_shard=8, ep=4), experts=4), GATE_UP) == (("ep",), ("edp",), ())
    assert axes(routed(Strategy(dp_shard=8, ep=4), experts=4), DOWN) == (("ep",), ("edp",), ())
    odd = routed(Strategy(dp_shard=12, ep=4), experts=4, width=9)
    assert axes(odd, GATE_UP) == (("ep",), ("edp",), ())
    assert axes(odd, DOWN) == (("ep",), (), ("edp",))


def test_axes_of_degree_one_are_left_out() -> None:
    assert axes(routed(Strategy(dp_shard=2, ep=2)), GATE_UP) == (("ep",), (), ())
    assert axes(routed(Strategy(dp_shard=2)), GATE_UP) == (("dp_shard",), (), ())


def test_tensor_parallelism_leaves_experts_and_router_whole() -> None:
    plan = routed(Strategy(tp_x=2, dp_shard=2))
    assert axes(plan, GATE_UP) == (("dp_shard",), (), ())
    assert axes(plan, f"{BLOCK}.gate.weight") == (("dp_shard",), ())
    assert plan.styles[f"{BLOCK}.gate"] == "replicate"
    both = routed(Strategy(tp_x=2, dp_shard=2, ep=4))
    assert axes(both, GATE_UP) == (("ep",), (), ())


@pytest.mark.parametrize(
    ("experts", "ranks", "wanted"),
    [
        (8, 4, (("dp_shard",), (), ())),
        (3, 2, ((), ("dp_shard",), ())),
        (4, 8, ((), ("dp_shard",), ())),
    ],
)
def test_fsdp_cuts_experts_into_equal_shards(experts: int, ranks: int, wanted: object) -> None:
    plan = routed(Strategy(dp_shard=ranks), experts)
    assert axes(plan, GATE_UP) == wanted


def test_experts_are_known_by_name_where_no_rule_covers_them() -> None:
    plan = routed(Strategy(dp_shard=2, ep=2), rules=())
    assert axes(plan, GATE_UP) == (("ep",), (), ())


def test_a_rule_names_experts_of_any_module() -> None:
    params = [("moe.w", (4, 8, 8), ())]
    plan = plan_layouts(params, (Rule("moe", "experts"),), Strategy(dp_shard=2, ep=2), **sizes())
    assert plan.layouts["moe.w"].axes == (("ep",), (), ())
    assert plan.styles == {"moe": "experts"}


@pytest.mark.parametrize(
    ("strategy", "experts", "got", "hint"),
    [
        (Strategy(dp_shard=4, ep=4), 6, "experts=6, ep=4", "parallel.ep=2"),
        (Strategy(dp_shard=6, ep=6), 9, "experts=9, ep=6", "parallel.ep=3"),
        (Strategy(dp_shard=4, ep=8), 8, "dp_shard=4, cp=1, tp=1, ep=8", "parallel.ep=4"),
        (Strategy(dp_replicate=4, ep=2), 8, "dp_shard=1, cp=1, tp=1, ep=2", "parallel.ep=1"),
        (Strategy(dp_shard=4, ep=6), 9, "dp_shard=4, cp=1, tp=1, ep=6", "parallel.ep=1"),
        (Strategy(dp_shard=4, ep=6), 6, "dp_shard=4, cp=1, tp=1, ep=6", "parallel.ep=2"),
        (
            Strategy(dp_shard=4, ep=6, overlap=Overlap(ep_chunks=2)),
            9,
            "dp_shard=4, cp=1, tp=1, ep=6",
            "parallel.ep=1 overlap=none",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_refused(strategy: Strategy, experts: int, got: str, hint: str) -> None:
    with pytest.raises(NotDivisible) as caught:
        routed(strategy, experts)
    assert (caught.value.code, caught.value.got, caught.value.hint) == ("HP203", got, hint)
    assert caught.value.where == "parallel.ep"


def test_a_dense_model_has_nothing_for_ep() -> None:
    with pytest.raises(UnsupportedSharding, match="needs routed experts"):
        plan_layouts(decoder(), family_rules("llama"), Strategy(dp_shard=2, ep=2), **sizes())


def test_experts_in_a_list_are_dealt_out() -> None:
    rules = (*family_rules("mixtral"), *family_rules("llama"))

    def first(strategy: Strategy, *indices: object) -> str:
        listed = [(f"{BLOCK}.experts.{i}.w1.weight", (15, EMBED), ()) for i in indices]
        found = plan_layouts([*decoder(), *listed], rules, strategy, **sizes())
        return str(found.layouts[listed[0][0]])

    assert first(Strategy(dp_shard=2, tp_x=2), *range(4)) == "[d0:dp_shard, d1] @ hbm"
    assert first(Strategy(dp_shard=2, ep=2), *range(4)) == "[d0, d1] @ hbm, one of ep"
    assert first(Strategy(dp_shard=4, ep=2), "*") == "[d0, d1:edp] @ hbm, one of ep"
    with pytest.raises(NotDivisible, match="ep=2 does not divide the 3 experts of a layer"):
        first(Strategy(dp_shard=2, ep=2), *range(3))
    with pytest.raises(UnsupportedSharding, match="in a form that ep cannot shard"):
        first(Strategy(dp_shard=2, ep=2), "left", "right")


def test_ranks_of_the_expert_mesh() -> None:
    mesh = Strategy(dp_replicate=2, dp_shard=2, tp_x=2, ep=2).expert_mesh()
    assert mesh.group(0, "ep") == (0, 1)
    assert mesh.group(0, "edp") == (0, 2)
    assert mesh.group(5, "ep") == (4, 5)


@pytest.mark.parametrize(
    ("strategy", "ep", "edp"),
    [
        (Strategy(dp_shard=2, ep=2), ("dp_shard",), ("edp",)),
        (Strategy(dp_shard=4, ep=2), ("ep",), ("edp",)),
        (Strategy(dp_shard=2, tp_x=2, ep=2), ("tp_x",), ("dp_shard",)),
        (Strategy(dp_shard=2, tp_x=2, ep=4), ("dp_shard", "tp_x"), ("edp",)),
    ],
)
def test_a_group_of_ranks_has_one_name(strategy: Strategy, ep: tuple[str, ...], edp: tuple[str, ...]) -> None:
    assert strategy.spanning_axes(("ep",)) == ep
    assert strategy.spanning_axes(("edp",)) == edp


def test_the_mesh_of_a_layout() -> None:
    strategy = Strategy(dp_shard=4, ep=2)
    assert strategy.mesh_of(Layout((("ep", "edp"),))).degree("edp") == 2
    assert strategy.mesh_of(Layout((("dp_shard",),))) == strategy.mesh()
