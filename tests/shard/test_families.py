"""The framework-free table agrees with the configuration classes of the installed transformers."""

import pytest

from hyper_parallel.ir import Rule, Strategy
from hyper_parallel.shard import (
    FAMILIES,
    completed_rules,
    family_rules,
    normalise_plan,
    plan_layouts,
)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_the_plan_of_the_configuration_class(transformers, family):
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    model_class = transformers.AutoModelForCausalLM._model_mapping[config_class]
    body = normalise_plan(config_class.base_model_tp_plan, prefix="model.")
    head = normalise_plan(model_class._tp_plan)
    theirs = {r.pattern: r.style for r in (*body, *head)}
    added = completed_rules(family)
    rules = family_rules(family)
    assert rules[: len(added)] == added
    ours = {r.pattern: r.style for r in rules[len(added) :]}
    assert ours == {**theirs, "model.embed_tokens": "vocab"}
    assert "unsupported" not in theirs.values()


TINY = {
    "vocab_size": 240,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
DENSE = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "glm",
    "glm4",
]


def parameters(transformers, family):
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(family, **TINY)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return [(n, tuple(p.shape), ()) for n, p in model.named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_matrix_of_a_dense_family_is_split(transformers, family, tp):
    params = parameters(transformers, family)
    plan = plan_layouts(
        params,
        family_rules(family),
        Strategy(tp_x=tp),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=240,
    )
    assert set(plan.layouts) == {name for name, _, _ in params}
    whole = {n for n, s, _ in params if len(s) == 2 and not plan.layouts[n].sharding_axes}
    kv = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "kv"}
    assert whole == (kv & set(plan.layouts) if tp == 4 else set())


def test_rules_of_the_built_model_give_the_same_layouts(transformers):
    """The rules that `parallelize` reads from the class and those of the planner's table give one plan."""
    params = parameters(transformers, "qwen3")
    plan = transformers.models.qwen3.Qwen3Config.base_model_tp_plan
    rules = (*normalise_plan(plan, "model."), Rule("model.embed_tokens", "vocab"))
    rules += normalise_plan(transformers.Qwen3ForCausalLM._tp_plan)
    numbers = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 240}
    strategy = Strategy(tp_x=2, dp_shard=2)
    assert plan_layouts(params, rules, strategy, **numbers) == plan_layouts(
        params, family_rules("qwen3"), strategy, **numbers
    )
