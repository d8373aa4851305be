import pytest

from hyper_parallel.ir import Rule
from hyper_parallel.shard import FAMILIES, REFUSED, STYLES, family_rules, match, normalise_plan

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("model.layers.*.mlp", "model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp"),
        ("model.layers.*.mlp", "model.layers.*.mlp", "model.layers.*.mlp"),
        ("model.layers.0.mlp", "model.layers.1.mlp", None),
        ("*", "lm_head.weight", "lm_head"),
        ("model.*", "lm_head.weight", None),
        ("*.*.*", "lm_head.weight", None),
        ("model.layers.*.mlp.*_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_a_star_matches_one_part(pattern, name, found):
    assert match(pattern, name) == found


def test_hugging_face_styles_become_ours():
    rules = normalise_plan(
        {
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
            "layers.*.self_attn.qkv_proj": "colwise_gather_output",
            "layers.*.mlp.down_proj": "rowwise_split_input",
            "embed_tokens": "embedding_rowwise",
        },
        prefix="model.",
    )
    assert {r.pattern: r.style for r in rules} == {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.q_norm": "replicate",
        "model.layers.*.self_attn.qkv_proj": "gather_output",
        "model.layers.*.mlp.down_proj": "split_input",
        "model.embed_tokens": "vocab",
    }


@pytest.mark.parametrize("style", ["colwise_gather_output", "colwise_rep"])
def test_a_gathered_projection_outside_the_layers_is_the_head(style):
    assert normalise_plan({"lm_head": style}) == (Rule("lm_head", "head"),)


def test_everything_inside_an_expert_module_is_experts():
    rules = normalise_plan(
        {
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.experts.down_proj": "rowwise",
            "layers.*.mlp.down_proj": "rowwise",
        }
    )
    assert rules == (
        Rule("layers.*.mlp.experts.gate_up_proj", "experts"),
        Rule("layers.*.mlp.experts.down_proj", "experts"),
        Rule("layers.*.mlp.experts", "experts"),
        Rule("layers.*.mlp.down_proj", "rowwise"),
    )


def test_an_unknown_style_is_refused_later():
    rules = normalise_plan({"layers.*.attn.kv_a": "mla_kv_a_proj"}, prefix="model.")
    assert rules == (Rule("model.layers.*.attn.kv_a", "unsupported"),)


def test_no_plan_gives_no_rules():
    assert normalise_plan(None) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_names_known_styles(family):
    assert {rule.style for rule in family_rules(family)} <= {*STYLES, *REFUSED}


def test_an_unknown_family_gets_the_common_names():
    assert family_rules("brand_new") == family_rules("llama")


def test_embedding_and_head_come_with_every_family():
    for family in FAMILIES:
        assert family_rules(family)[-2:] == (
            Rule("model.embed_tokens", "vocab"),
            Rule("lm_head", "head"),
        )
