"""Projections that hold several matrices: where they can be cut apart, and where columns are exchanged."""

import pytest

from hyper_parallel.errors import NotDivisible, RuleError
from hyper_parallel.ir import Strategy
from hyper_parallel.shard import family_rules
from tests.shard._models import AT, EMBED, HEAD_DIM, plan, refused

pytestmark = pytest.mark.unit


def phi3(num_kv_heads=8, embed=EMBED, bias=False, gate_up=192):
    rows = (8 + 2 * num_kv_heads) * HEAD_DIM
    made = [
        (f"{AT}.self_attn.qkv_proj.weight", (rows, embed), ()),
        (f"{AT}.self_attn.o_proj.weight", (embed, 64), ()),
        (f"{AT}.mlp.gate_up_proj.weight", (gate_up, embed), ()),
        (f"{AT}.mlp.down_proj.weight", (embed, gate_up // 2), ()),
    ]
    return [*made, (f"{AT}.mlp.gate_up_proj.bias", (gate_up,), ())] if bias else made


PHI3 = family_rules("phi3")
FSDP = Strategy(tp_x=2, dp_shard=2)


def test_parts_of_one_size_are_cut_apart_and_fsdp_takes_the_columns():
    made = plan(FSDP, PHI3, phi3(), num_kv_heads=8)
    qkv = made.layouts[f"{AT}.self_attn.qkv_proj.weight"]
    gate_up = made.layouts[f"{AT}.mlp.gate_up_proj.weight"]
    assert (qkv.axes, qkv.parts) == ((("tp_x",), ("dp_shard",)), (3, 1))
    assert (gate_up.axes, gate_up.parts) == ((("tp_x",), ("dp_shard",)), (2, 1))
    assert made.layouts[f"{AT}.mlp.down_proj.weight"].axes == (("dp_shard",), ("tp_x",))
    assert made.notes == ()


@pytest.mark.parametrize(
    ("params", "kv_heads", "exchanged", "reason"),
    [
        (phi3(4), 4, "self_attn.qkv_proj", "its parts have different sizes"),
        (phi3(embed=65), 8, "mlp.gate_up_proj", "its 65 columns are not divisible by the 2 ranks"),
        (phi3(bias=True), 8, "mlp.gate_up_proj", "it has a bias"),
    ],
)
def test_other_packed_projections_exchange_columns(params, kv_heads, exchanged, reason):
    made = plan(FSDP, PHI3, params, num_kv_heads=kv_heads)
    layout = made.layouts[f"{AT}.{exchanged}.weight"]
    assert (layout.axes, layout.parts) == ((("tp_x", "dp_shard"), ()), ())
    assert any(f"{AT}.{exchanged}` is sharded into equal row slices" in n and reason in n for n in made.notes)


def test_packed_projections_need_heads_and_widths_that_divide():
    error = refused(NotDivisible, Strategy(tp_x=4), PHI3, phi3(6), num_kv_heads=6)
    assert "kv_heads=6" in error.what
    error = refused(NotDivisible, Strategy(tp_x=4), PHI3, phi3(gate_up=180), num_kv_heads=8)
    assert error.what == f"tp=4 does not divide width=90 in `{AT}.mlp.down_proj`"
    only = [p for p in phi3(gate_up=180) if "down" not in p[0]]
    error = refused(NotDivisible, Strategy(tp_x=4), PHI3, only, num_kv_heads=8)
    assert error.what == f"tp=4 does not divide width=90 in `{AT}.mlp.gate_up_proj`"
    assert error.hint == "parallel.tp=2"


def test_a_weight_that_does_not_stack_what_its_style_says():
    error = refused(RuleError, Strategy(tp_x=2), PHI3, phi3(4), num_kv_heads=2)
    assert error.what == f"the rows of `{AT}.self_attn.qkv_proj` do not match style `qkv`"
    assert (error.got, error.allowed) == ("128 rows", "64 + 16 + 16 rows")
