import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import NotDivisible, RuleError, UnsupportedSharding
from hyper_parallel.ir import Layout, Rule, Strategy
from hyper_parallel.shard import family_rules, legal_tp, normalise_plan, plan_layouts
from tests.shard._models import AT, EMBED, HEAD_DIM, LLAMA, decoder, plan, refused, sizes

pytestmark = pytest.mark.unit

FSDP = Strategy(tp_x=2, dp_shard=2)


def ruled(**rules):
    """A strategy with tp 2 and rules for modules of the layers, `mlp__up_proj` standing for `mlp.up_proj`."""
    return Strategy(
        tp_x=2,
        rules=tuple(Rule(f"{AT}.{k.replace('__', '.')}", v) for k, v in rules.items()),
    )


def test_fsdp_cuts_what_tensor_parallelism_left():
    layouts = plan(Strategy(dp_shard=2, tp_x=2), bias=True).layouts
    assert layouts[f"{AT}.mlp.up_proj.weight"].axes == (("tp_x", "dp_shard"), ())
    assert layouts[f"{AT}.mlp.up_proj.bias"].axes == (("tp_x", "dp_shard"),)
    assert layouts[f"{AT}.mlp.down_proj.weight"].axes == (("dp_shard",), ("tp_x",))
    assert layouts[f"{AT}.mlp.down_proj.bias"].axes == (("dp_shard",),)
    assert layouts["model.embed_tokens.weight"].axes == (("tp_x", "dp_shard"), ())
    assert layouts["lm_head.weight"].axes == (("tp_x", "dp_shard"), ())
    assert layouts["model.norm.weight"].axes == (("dp_shard",),)


def test_a_rowwise_bias_is_whole_whatever_its_size():
    made = plan(Strategy(tp_x=3), num_heads=6, num_kv_heads=3, bias=True)
    assert EMBED % 3
    assert made.layouts[f"{AT}.mlp.down_proj.bias"].sharding_axes == ()


def test_axes_of_degree_one_are_left_out():
    assert not any(x.sharding_axes for x in plan(Strategy(dp_replicate=4)).layouts.values())
    only_tp = plan(Strategy(tp_x=2)).layouts.values()
    assert {a for x in only_tp for a in x.sharding_axes} == {"tp_x"}
    only_fsdp = plan(Strategy(dp_shard=2)).layouts.values()
    assert all(x.axes[0] == ("dp_shard",) and not any(x.axes[1:]) for x in only_fsdp)


def test_logical_dims_are_kept():
    params = [("a.weight", (4, 4), ("mlp", "embed"))]
    assert plan(Strategy(dp_shard=2), (), params).layouts["a.weight"] == Layout(
        (("dp_shard",), ()), dims=("mlp", "embed")
    )


def test_without_tensor_parallelism_any_model_is_planned():
    params = [("experts.w", (4, 8, 8), ()), ("scale", (), ()), ("conv.weight", (8, 1, 4), ())]
    made = plan(Strategy(dp_shard=2), (Rule("experts", "experts"),), params)
    assert made.layouts["experts.w"].axes == (("dp_shard",), (), ())
    assert made.layouts["scale"].axes == ()
    assert made.styles == {"experts": "experts", "scale": "replicate", "conv": "replicate"}


def test_styles_by_module():
    made = plan(Strategy(tp_x=2), qk_norm=True, rules=family_rules("qwen3"))
    assert made.styles[f"{AT}.self_attn.q_proj"] == "colwise"
    assert made.styles[f"{AT}.self_attn.o_proj"] == "rowwise"
    assert made.styles[f"{AT}.self_attn.q_norm"] == "replicate"
    assert made.styles[f"{AT}.input_layernorm"] == "replicate"
    assert made.styles["model.embed_tokens"] == "vocab"
    assert made.styles["lm_head"] == "head"
    assert made.notes == ()


def test_concrete_layer_names_give_the_layouts_of_the_pattern():
    by_pattern = plan(Strategy(dp_shard=2, tp_x=2)).layouts
    concrete = plan(Strategy(dp_shard=2, tp_x=2), layer="7").layouts
    assert concrete == {k.replace("*", "7"): v for k, v in by_pattern.items()}


def test_few_kv_heads_are_kept_whole():
    made = plan(Strategy(tp_x=8, dp_shard=2), num_kv_heads=2, bias=True)
    for name in ("k_proj", "v_proj"):
        assert made.styles[f"{AT}.self_attn.{name}"] == "kv_replicate"
        assert made.layouts[f"{AT}.self_attn.{name}.weight"].axes == (("dp_shard",), ())
        assert made.layouts[f"{AT}.self_attn.{name}.bias"].axes == (("dp_shard",),)
    assert made.notes[0] == (
        f"`{AT}.self_attn.k_proj` keeps its weight whole: 2 key and value heads on tp=8 ranks; "
        "each head is computed on 4 ranks"
    )


def test_notes_name_the_pattern_once():
    params = [p for layer in "012" for p in decoder(num_kv_heads=2, layer=layer)]
    made = plan(Strategy(tp_x=4), params=params, num_kv_heads=2)
    assert len(made.notes) == 2


@given(st.integers(1, 32), st.integers(1, 32), st.integers(1, 32))
def test_legal_degrees_keep_heads_where_their_queries_are(num_heads, num_kv_heads, tp):
    if num_heads % num_kv_heads:
        return
    per_query = num_heads // num_kv_heads
    if tp in legal_tp(num_heads, num_kv_heads):
        mine = num_heads // tp
        for rank in range(tp):
            used = {q // per_query for q in range(rank * mine, (rank + 1) * mine)}
            if num_kv_heads % tp == 0:
                own = num_kv_heads // tp
                assert used == set(range(rank * own, (rank + 1) * own))
            else:
                assert len(used) == 1
    else:
        assert num_heads % tp or (num_kv_heads % tp and tp % num_kv_heads)


@settings(deadline=None)
@given(
    st.sampled_from([(8, 4), (8, 1), (12, 6), (6, 2), (28, 4)]),
    st.sampled_from([96, 100, 90]),
    st.integers(2, 16),
)
def test_a_degree_is_planned_or_refused_as_legal_tp_says(heads, mlp, tp):
    num_heads, num_kv_heads = heads
    allowed = legal_tp(num_heads, num_kv_heads, mlp)
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "mlp": mlp}
    if tp in allowed:
        plan(Strategy(tp_x=tp), **numbers)
    else:
        error = refused(NotDivisible, Strategy(tp_x=tp), **numbers)
        assert error.allowed == f"tp {', '.join(map(str, allowed))}"
        assert error.hint == f"parallel.tp={max(t for t in allowed if t <= tp)}"


def test_heads_that_do_not_divide():
    error = refused(NotDivisible, Strategy(tp_x=16), num_heads=28)
    assert str(error) == (
        "error[HP203]: tp=16 does not divide heads=28 in `model.layers.*.self_attn.q_proj`\n"
        "  --> r.yaml: parallel.tp_x\n"
        "  got: heads=28, tp=16      allowed: tp 1, 2, 4\n\n"
        "hint: parallel.tp=4"
    )


def test_kv_heads_that_do_not_divide():
    error = refused(NotDivisible, Strategy(tp_x=4), num_heads=12, num_kv_heads=6)
    assert "kv_heads=6" in str(error)
    assert error.hint == "parallel.tp=3"


def test_a_width_that_does_not_divide():
    error = refused(NotDivisible, Strategy(tp_x=4), mlp=90)
    assert error.what == f"tp=4 does not divide width=90 in `{AT}.mlp.gate_proj`"
    assert error.hint == "parallel.tp=2"


def test_kv_projections_are_known_by_size_or_dims_where_names_do_not_tell():
    def params(dims):
        return [
            ("h.attn.query.weight", (64, EMBED), ()),
            ("h.attn.key.weight", (16, EMBED), dims),
            ("h.attn.out.weight", (EMBED, 64), ()),
        ]

    rules = [Rule("h.attn.query", "colwise"), Rule("h.attn.key", "colwise")]
    rules.append(Rule("h.attn.out", "rowwise"))
    for dims in ((), ("kv_heads", "embed")):
        made = plan(Strategy(tp_x=4), rules, params(dims), num_kv_heads=2)
        assert made.styles["h.attn.key"] == "kv_replicate"


def test_an_uneven_vocabulary_keeps_embedding_and_head_whole():
    made = plan(Strategy(tp_x=2, dp_shard=2), vocab=241)
    for module in ("model.embed_tokens", "lm_head"):
        assert made.styles[module] == "replicate"
        assert made.layouts[f"{module}.weight"].axes == (("dp_shard",), ())
    assert made.styles[f"{AT}.mlp.up_proj"] == "colwise"
    assert made.notes == (
        "embedding and head are kept whole: the vocabulary of 241 is not divisible by tp=2; "
        "the head works on the sequence shard of each rank",
    )


TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("vocab", [240, 241])
def test_tied_embeddings_have_one_layout(vocab):
    made = plan_layouts(decoder(vocab=vocab), LLAMA, Strategy(tp_x=2), tied=TIED, **sizes(vocab=vocab))
    assert made.layouts["lm_head.weight"] == made.layouts["model.embed_tokens.weight"]


def test_a_rule_that_splits_tied_embeddings_apart_is_refused():
    strategy = Strategy(tp_x=2, rules=(Rule("lm_head", "replicate"),))
    with pytest.raises(RuleError, match="two layouts") as error:
        plan_layouts(decoder(), LLAMA, strategy, tied=TIED, **sizes())
    assert error.value.code == "HP204"
    assert error.value.hint == ("'parallel.rules={lm_head: replicate, model.embed_tokens: replicate}'")


def test_the_first_rule_of_the_strategy_wins():
    rules = (Rule("lm_head", "replicate"), Rule("*", "head"))
    assert plan(Strategy(tp_x=2, rules=rules), params=[("lm_head.weight", (8, 8), ())]).styles == {
        "lm_head": "replicate"
    }


def test_replicate_holds_for_everything_inside_a_module():
    made = plan(ruled(mlp="replicate"))
    assert {made.styles[f"{AT}.mlp.{n}_proj"] for n in ("gate", "up", "down")} == {"replicate"}
    assert made.layouts[f"{AT}.mlp.down_proj.weight"].sharding_axes == ()


def test_a_rule_can_keep_experts_whole():
    params = [*decoder(), (f"{AT}.mlp.experts.gate_up_proj", (4, 16, EMBED), ())]
    made = plan(ruled(mlp__experts="replicate"), family_rules("qwen3_moe"), params)
    assert made.layouts[f"{AT}.mlp.experts.gate_up_proj"].sharding_axes == ()


def test_a_rule_that_matches_nothing():
    error = refused(RuleError, ruled(mlp__upproj="colwise"))
    assert error.code == "HP204"
    assert error.hint == f"'parallel.rules={{{AT}.mlp.up_proj: colwise}}'"


def test_a_splitting_style_names_the_module_itself():
    assert "matches no module" in refused(RuleError, ruled(mlp="colwise")).what


def test_a_style_that_does_not_exist():
    error = refused(RuleError, ruled(mlp__up_proj="colwize"))
    assert error.got == "colwize"
    assert error.hint == f"'parallel.rules={{{AT}.mlp.up_proj: colwise}}'"


def test_rules_are_checked_without_tensor_parallelism_too():
    refused(RuleError, Strategy(rules=(Rule("nothing", "replicate"),)))


def test_kv_replicate_elsewhere_is_refused():
    error = refused(RuleError, ruled(mlp__up_proj="kv_replicate"))
    assert error.hint == f"'parallel.rules={{{AT}.mlp.up_proj: colwise}}'"


@pytest.mark.parametrize(
    ("rules", "odd"),
    [
        ({"mlp__down_proj": "replicate"}, "mlp.gate_proj` is colwise"),
        ({"mlp__up_proj": "replicate"}, "mlp.up_proj` is replicate"),
        ({"mlp__up_proj": "replicate", "mlp__gate_proj": "replicate"}, "mlp.down_proj` is rowwise"),
        ({"self_attn__k_proj": "replicate"}, "self_attn.k_proj` is replicate"),
        ({"self_attn": "replicate"}, "self_attn.q_proj` is replicate"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(rules, odd):
    error = refused(UnsupportedSharding, ruled(**rules))
    assert error.code == "HP205"
    assert odd in error.what
    attention = "self_attn" in odd
    expected = "parallel.tp=1 parallel.dp_shard=2" if attention else f"'parallel.rules={{{AT}.mlp: replicate"
    assert error.hint.startswith(expected)


def test_a_norm_over_all_heads_is_refused():
    params = [*decoder(), (f"{AT}.self_attn.q_norm.weight", (8 * HEAD_DIM,), ())]
    error = refused(UnsupportedSharding, Strategy(tp_x=2), family_rules("qwen3"), params)
    assert "self_attn.q_norm" in error.what


@pytest.mark.parametrize(("name", "shape"), [("mixer.in_proj.weight", (8, 8)), ("mixer.conv.weight", (8, 1, 4))])
def test_what_no_rule_covers_stays_whole_and_so_does_the_stream(name, shape):
    params = [*decoder(), (f"model.layers.0.{name}", shape, ())]
    made = plan(Strategy(tp_x=2), params=params)
    module = name.rpartition(".")[0]
    assert made.whole_stream
    assert made.styles[f"model.layers.0.{module}"] == "whole"
    assert str(made.layouts[f"model.layers.0.{name}"]).count("tp_x") == 0
    assert any(f"replicated: `{AT}.{module}`" in note for note in made.notes)
    assert not plan(Strategy(tp_x=2)).whole_stream
    assert made.layouts[f"{AT}.mlp.up_proj.weight"].axes == (("tp_x",), ())


def test_a_parameter_between_split_projections_needs_a_rule():
    params = [*decoder(), ("model.layers.0.self_attn.sinks", (8,), ())]
    error = refused(UnsupportedSharding, Strategy(tp_x=2), params=params)
    assert error.what.startswith(f"no rule covers `{AT}.self_attn.sinks`")
    assert error.hint.startswith("parallel.tp=1 parallel.dp_shard=2")


def test_a_splitting_style_needs_a_matrix():
    rules = (Rule("conv", "colwise"),)
    error = refused(UnsupportedSharding, Strategy(tp_x=2), rules, [("conv.weight", (8, 1, 4), ())])
    assert error.what == "style `colwise` needs a matrix or a vector, but `conv.weight` is neither"


def test_context_ranks_cut_parameters_as_fsdp_ranks_do():
    layouts = plan(Strategy(dp_shard=2, cp=2, tp_x=2)).layouts
    assert layouts[f"{AT}.mlp.up_proj.weight"].axes == (("tp_x", "dp_shard", "cp"), ())
    assert plan(Strategy(cp=2)).layouts["model.norm.weight"].axes == (("cp",),)


@pytest.mark.parametrize(
    ("choices", "allowed", "hint"),
    [
        ({"cp": 8, "cp_kind": "ulysses"}, [1, 2, 4], "cp_kind=hybrid parallel.cp_ulysses=4"),
        ({"cp": 3, "cp_kind": "ulysses"}, [1], "cp_kind=ring parallel.cp_ulysses=1"),
        ({"cp": 4, "tp_x": 2, "cp_kind": "ulysses"}, [1, 2], "cp_kind=hybrid parallel.cp_ulysses=2"),
        ({"cp": 4, "cp_kind": "hybrid", "cp_ulysses": 3}, [1, 2, 4], "cp_ulysses=2"),
        ({"cp": 4, "cp_ulysses": 2}, None, "cp_kind=hybrid parallel.cp_ulysses=2"),
        ({"cp": 4, "cp_ulysses": 3}, None, "cp_kind=hybrid parallel.cp_ulysses=2"),
    ],
)  # fmt: skip
def test_ulysses_ranks_divide_cp_and_heads(choices, allowed, hint):
    error = refused(NotDivisible, Strategy(**choices), num_heads=4, num_kv_heads=2)
    assert error.allowed == allowed
    assert hint in error.hint
    plan(Strategy(cp=4, cp_kind="ulysses"), num_heads=4, num_kv_heads=1)  # key heads are repeated


def test_a_model_of_which_nothing_is_split_is_refused():
    rules = normalise_plan({"layers.*.mlp.in_proj": "colwise_gather_output"}, "model.")
    params = [(f"{AT}.mlp.in_proj.weight", (96, EMBED), ())]
    error = refused(UnsupportedSharding, Strategy(tp_x=2, dp_shard=2), rules, params)
    assert error.code == "HP205"
    assert error.got == f"tp=2; replicated: `{AT}.mlp.in_proj`"
    assert error.hint == "parallel.tp=1 parallel.dp_shard=4"


def test_a_hint_for_stacked_rows_names_a_degree_that_divides_them():
    params = [(f"{AT}.self_attn.qkv_proj.weight", (18, EMBED), ()), (f"{AT}.self_attn.o_proj.weight", (EMBED, 12), ())]
    rules = [Rule(f"{AT}.self_attn.qkv_proj", "qkv"), Rule(f"{AT}.self_attn.o_proj", "rowwise")]
    heads = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 3, "vocab_size": 10}
    with pytest.raises(NotDivisible) as caught:
        plan_layouts(params, rules, Strategy(tp_x=4), **heads)
    assert (caught.value.allowed, caught.value.hint) == ("tp 1, 2", "parallel.tp=2")
    plan_layouts(params, rules, Strategy(tp_x=2), **heads)


def test_a_norm_over_all_heads_is_split_with_them():
    params = [*decoder(), (f"{AT}.self_attn.q_norm.weight", (8 * HEAD_DIM,), ())]
    params += [(f"{AT}.self_attn.k_norm.weight", (4 * HEAD_DIM,), ())]
    made = plan(FSDP, family_rules("olmo2"), params)
    assert made.layouts[f"{AT}.self_attn.q_norm.weight"].axes == (("tp_x", "dp_shard"),)
    few = plan(Strategy(tp_x=8), family_rules("olmo2"), params)
    assert few.styles[f"{AT}.self_attn.q_norm"] == "norm_heads"
    assert few.styles[f"{AT}.self_attn.k_norm"] == "kv_replicate"
    assert few.layouts[f"{AT}.self_attn.k_norm.weight"].axes == ((),)


def test_latent_projections_stay_whole_between_split_ones():
    sizes = {"q_a_proj": (24, EMBED), "q_a_layernorm": (24,), "q_b_proj": (64, 24),
             "kv_b_proj": (128, 16), "o_proj": (EMBED, 64)}  # fmt: skip
    params = [(f"{AT}.self_attn.{n}.weight", shape, ()) for n, shape in sizes.items()]
    made = plan(FSDP, family_rules("deepseek_v3"), params, num_kv_heads=8)
    cut = {n: made.layouts[f"{AT}.self_attn.{n}.weight"].axes for n in sizes}
    assert cut["q_a_proj"] == (("dp_shard",), ())
    assert cut["q_a_layernorm"] == (("dp_shard",),)
    assert cut["q_b_proj"] == cut["kv_b_proj"] == (("tp_x", "dp_shard"), ())


def test_a_rule_may_name_a_parameter_of_attention_itself():
    params = [(f"{AT}.self_attn.sinks", (8,), ()), *decoder()]
    made = plan(FSDP, family_rules("gpt_oss"), [p for p in params if ".mlp." not in p[0]])
    assert made.layouts[f"{AT}.self_attn.sinks"].axes == (("tp_x", "dp_shard"),)
    assert made.styles[f"{AT}.self_attn.sinks"] == "colwise"
    params = [p for p in params if ".mlp." not in p[0]]
    error = refused(NotDivisible, Strategy(tp_x=16), family_rules("gpt_oss"), params)
    assert "heads=8" in error.what
