"""Rules by structure: what is recognised is split, and what is not understood stays whole."""

import pytest

from hyper_parallel.ir import Rule, Strategy
from hyper_parallel.shard import derived_rules, plan_layouts

D, F, HEADS, KV, HEAD = 32, 48, 4, 2, 8
L = "model.layers.{}."
ATTENTION = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}


def attention(layer: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    at = L.format(layer) + "self_attn."
    projections = {**ATTENTION, "o_proj": (D, HEADS * HEAD)}
    return {f"{at}{name}.weight": shape for name, shape in (projections | more).items()}


def pair(layer: int, module: str = "", into: str = "fc1", out: str = "fc2") -> dict[str, tuple[int, ...]]:
    at = L.format(layer) + module
    return {f"{at}{into}.weight": (F, D), f"{at}{into}.bias": (F,), f"{at}{out}.weight": (D, F)}


def styles(params: dict[str, tuple[int, ...]]) -> dict[str, str]:
    linear = {n.rpartition(".")[0] for n, shape in params.items() if len(shape) == 2}
    *rules, last = derived_rules(params, frozenset(linear), HEADS, KV)
    assert last == Rule("*", "whole")
    return {rule.pattern.removeprefix("model.layers.*."): rule.style for rule in rules}


def test_projections_of_a_layer_without_a_module_of_their_own():
    norms = {L.format(0) + "final_layer_norm.weight": (D,)}
    assert styles({**pair(0), **pair(1), **norms}) == {"fc1": "colwise", "fc2": "rowwise"}


@pytest.mark.parametrize(
    "odd",
    [
        {L.format(1) + "mlp.norm.weight": (F,)},  # a norm of the inner width
        {L.format(1) + "mlp.act.alpha": (1,)},
        {L.format(1) + "mlp.fc1.weight": (F + 2, D)},  # another width than its partner has
    ],
)
def test_one_layer_that_is_not_understood_keeps_all_whole(odd):
    assert styles({**pair(0, "mlp."), **pair(1, "mlp."), **odd}) == {}
    assert set(styles(pair(0, "mlp."))) == {"mlp.fc1", "mlp.fc2"}


def test_norms_of_one_head_stand_between_split_projections():
    found = styles(attention(0, q_norm=(HEAD,), k_norm=(HEAD,), gate_proj=(HEADS * HEAD, D)))
    assert found["self_attn.q_norm"] == found["self_attn.k_norm"] == "inner"
    assert found["self_attn.gate_proj"] == found["self_attn.k_proj"] == "colwise"
    assert found["self_attn.o_proj"] == "rowwise"


@pytest.mark.parametrize(
    "more",
    [
        {"q_norm": (HEADS * HEAD,)},  # over all heads
        {"indexer": (D, D)},
        {"q_proj": (2 * HEADS * HEAD, D)},  # twice the rows that the output reads
        {"k_proj": (HEADS * HEAD, D)},  # other heads than the config has
    ],
)
def test_attention_that_is_not_understood_stays_whole(more):
    assert styles(attention(0, **more)) == {}


def test_gate_and_up_in_one_weight():
    at = L.format(0) + "mlp."
    params = {f"{at}gate_up_proj.weight": (2 * F, D), f"{at}down_proj.weight": (D, F)}
    assert styles(params) == {"mlp.gate_up_proj": "gate_up", "mlp.down_proj": "rowwise"}


def test_rules_of_a_user_go_before_what_the_structure_says():
    params = {**pair(0, "mlp."), **pair(0, "mixer.", "into", "out")}
    linear = frozenset(n.rpartition(".")[0] for n, s in params.items() if len(s) == 2)
    own = {"mlp": "replicate", "mixer.into": "colwise", "mixer.out": "rowwise"}
    rules = tuple(Rule(f"model.layers.*.{name}", style) for name, style in own.items())
    made = plan_layouts(
        [(name, shape, ()) for name, shape in params.items()],
        derived_rules(params, linear, HEADS, KV), Strategy(tp_x=2, rules=rules),
        num_heads=HEADS, num_kv_heads=KV, head_dim=HEAD, vocab_size=2,
    )  # fmt: skip
    split = {name for name, layout in made.layouts.items() if "tp_x" in str(layout)}
    assert split == {f"model.layers.0.mixer.{p}" for p in ("into.weight", "into.bias", "out.weight")}
