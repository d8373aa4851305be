"""Layouts on two tensor-parallel axes, and which sizes they need."""

import pytest

from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from hyper_parallel.ir import BLOCK_SHAPES, Rule, Strategy
from hyper_parallel.shard import family_rules, plan_layouts
from tests.shard._models import decoder, sizes

pytestmark = pytest.mark.unit

AT = "model.layers.*"
BOTH = ("tp_x", "tp_y")


def plan(strategy, family="llama", **numbers):
    wanted = {k: v for k, v in numbers.items() if k in ("num_heads", "num_kv_heads", "vocab")}
    return plan_layouts(decoder(**numbers), family_rules(family), strategy, **sizes(**wanted))


def refused(error, strategy, **numbers):
    with pytest.raises(error) as caught:
        plan(strategy, **numbers)
    return caught.value


def two(x, y, attention="2d", mlp="2d", **more):
    return Strategy(tp_x=x, tp_y=y, attention_shape=attention, mlp_shape=mlp, **more)


@pytest.mark.parametrize(
    ("shape", "into", "out", "bias_in", "bias_out"),
    [
        ("1d", (BOTH, ()), ((), BOTH), (BOTH,), ((),)),
        ("2d", (("tp_x",), ("tp_y",)), (("tp_y",), ("tp_x",)), (("tp_x",),), (("tp_y",),)),
        ("weight", (BOTH, ()), (("tp_y",), ("tp_x",)), (("tp_x",),), ((),)),
    ],
)
def test_weights_of_a_shape(shape, into, out, bias_in, bias_out):
    layouts = plan(two(2, 2, shape, shape), bias=True).layouts
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"):
        assert layouts[f"{AT}.{name}.weight"].axes == into
        assert layouts[f"{AT}.{name}.bias"].axes == bias_in
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert layouts[f"{AT}.{name}.weight"].axes == out
        assert layouts[f"{AT}.{name}.bias"].axes == bias_out
    assert layouts["model.embed_tokens.weight"].axes == (BOTH, ())


def test_fsdp_cuts_what_both_axes_left():
    layouts = plan(two(2, 2, dp_shard=2)).layouts
    assert layouts[f"{AT}.mlp.up_proj.weight"].axes == (("tp_x", "dp_shard"), ("tp_y",))
    assert layouts["lm_head.weight"].axes == ((*BOTH, "dp_shard"), ())
    assert layouts["model.norm.weight"].axes == (("tp_y", "dp_shard"),)


@pytest.mark.parametrize("attention", BLOCK_SHAPES)
@pytest.mark.parametrize("mlp", BLOCK_SHAPES)
def test_norms_say_whether_the_stream_is_cut(attention, mlp):
    layouts = plan(two(2, 2, attention, mlp), qk_norm=True, family="qwen3").layouts
    cut = ("tp_y",) if (attention, mlp) == ("2d", "2d") else ()
    assert layouts[f"{AT}.input_layernorm.weight"].axes == (cut,)
    assert layouts["model.norm.weight"].axes == (cut,)
    assert layouts[f"{AT}.self_attn.q_norm.weight"].axes == ((),)  # inside attention: over one head


def test_a_block_that_stays_whole_keeps_the_stream_whole():
    rules = tuple(Rule(f"{AT}.mlp.{name}_proj", "replicate") for name in ("gate", "up", "down"))
    layouts = plan(two(2, 2, rules=rules)).layouts
    assert layouts["model.norm.weight"].axes == ((),)
    assert layouts[f"{AT}.self_attn.q_proj.weight"].axes == (("tp_x",), ("tp_y",))


@pytest.mark.parametrize(
    ("strategy", "kv_heads", "axes"),
    [
        (
            two(2, 4),
            4,
            (("tp_x",), ("tp_y",)),
        ),  # two heads on x, one on a rank: summed over y, not scattered
        (two(4, 2), 2, ((), ("tp_y",))),  # fewer heads than x ranks
        (two(4, 2, "weight"), 2, (("tp_y",), ())),
        (two(4, 2, "1d"), 4, ((), ())),
    ],
)
def test_fewer_key_and_value_heads_than_ranks(strategy, kv_heads, axes):
    made = plan(strategy, num_kv_heads=kv_heads)
    assert made.layouts[f"{AT}.self_attn.k_proj.weight"].axes == axes
    style = made.styles[f"{AT}.self_attn.k_proj"]
    assert style == ("colwise" if "tp_x" in axes[0] else "kv_replicate")
    assert bool(made.notes) == (style == "kv_replicate")


def test_what_does_not_divide_names_the_legal_pairs():
    error = refused(NotDivisible, two(4, 2), num_heads=4)
    assert error.what == "tp_x * tp_y = 8 does not divide heads=4 with attention shape 2d, MLP shape 2d"
    assert error.hint == "parallel.attention_shape=weight parallel.mlp_shape=2d"
    plan(two(4, 2, "weight"), num_heads=4)
    error = refused(NotDivisible, two(2, 4, "weight"), num_heads=6, num_kv_heads=3)
    assert error.what == "tp_x = 2 does not divide kv_heads=3 with attention shape weight, MLP shape 2d"
    error = refused(NotDivisible, two(2, 3, mlp="1d"), num_heads=6, num_kv_heads=6, mlp=64)
    assert error.what == "tp_x * tp_y = 6 does not divide width=64 with attention shape 2d, MLP shape 1d"
    error = refused(NotDivisible, two(2, 3), num_heads=6, num_kv_heads=6)
    assert error.what == "tp_y = 3 does not divide hidden=64 with attention shape 2d, MLP shape 2d"
    assert error.hint == "parallel.tp_x=3 parallel.tp_y=2"
    plan(two(3, 2), num_heads=6, num_kv_heads=6)


def test_when_nothing_on_two_axes_divides_one_axis_is_named():
    error = refused(NotDivisible, two(2, 3), num_heads=5, num_kv_heads=5)
    assert error.hint == "parallel.tp_x=2 parallel.tp_y=1 parallel.dp_shard=3"


def test_token_scatter_needs_heads_on_x_only():
    refused(NotDivisible, two(2, 4), num_heads=4)
    plan(two(2, 4, attention_scatter="token"), num_heads=4)


def test_combinations_without_meaning():
    error = refused(UnsupportedSharding, two(1, 4))
    assert error.hint == "parallel.tp_x=4 parallel.tp_y=1"
    for strategy in (two(2, 2, "weight", cp=2), two(2, 2, cp=2, attention_scatter="token")):
        error = refused(UnsupportedSharding, strategy)
        assert "context parallelism" in error.what
        assert error.hint == "parallel.attention_shape=2d parallel.attention_scatter=head"
    plan(two(2, 2, cp=2))


AT_MLP = f"{AT}.mlp"


def packed(strategy, family="glm4"):
    params = [p for p in decoder() if not p[0].endswith(("gate_proj.weight", "up_proj.weight"))]
    params.append((f"{AT_MLP}.gate_up_proj.weight", (192, 64), ()))
    return plan_layouts(params, family_rules(family), strategy, **sizes())


def test_gate_and_up_in_one_weight_are_cut_apart_or_change_columns():
    name = f"{AT_MLP}.gate_up_proj.weight"
    layout = packed(two(2, 2)).layouts[name]
    assert (layout.axes, layout.parts_of(0)) == ((("tp_x",), ("tp_y",)), 2)
    layout = packed(two(2, 2, mlp="1d", dp_shard=2)).layouts[name]
    assert (layout.axes, layout.parts_of(0)) == (((*BOTH, "dp_shard"), ()), 1)
    for strategy in (two(2, 2, mlp="weight"), two(2, 2, dp_shard=2)):
        with pytest.raises(UnsupportedSharding) as caught:
            packed(strategy)
        assert caught.value.hint == "parallel.mlp_shape=1d"


def test_a_vocabulary_that_does_not_divide_stays_whole():
    made = plan(two(2, 2), vocab=42)
    assert made.layouts["lm_head.weight"].axes == ((), ())
    assert "tp=4" in made.notes[0]
