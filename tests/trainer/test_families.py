"""Which models a recipe may name: everything else is refused by name before any rank starts."""

import json

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import ModelUnreadable
from hyper_parallel.planner import plan_recipe
from hyper_parallel.trainer import prepare_job
from hyper_parallel.trainer.engine.recipe_model import build_model, check_parameters

pytestmark = pytest.mark.torch

LIKE_LLAMA = {
    "vocab_size": 311, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 3,
}  # fmt: skip
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 311}


@pytest.fixture
def recipe_of(tmp_path):
    def load(family, values, **model):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"model_type": family, **values}))
        text = tmp_path / "text"
        text.mkdir(exist_ok=True)
        (text / "a.txt").write_text("a line of text\n" * 400)
        path = tmp_path / "recipe.json"
        path.write_text(
            json.dumps(
                {
                    "model": {"path": str(config), **model},
                    "data": {
                        "source": str(text),
                        "vocab_size": 300,
                        "cache_dir": str(tmp_path / "cache"),
                    },
                    "parallel": {"dp_shard": 2},
                    "output_dir": str(tmp_path / "out"),
                }
            )
        )
        return load_recipe(path)

    return load


@pytest.mark.parametrize(
    ("family", "values", "layer"),
    [
        ("stablelm", LIKE_LLAMA, "model.layers.*.input_layernorm.bias"),
        ("cohere", LIKE_LLAMA, "model.layers.*.self_attn.q_proj.weight"),
        ("gpt_neox", LIKE_LLAMA, "gpt_neox.layers.*.attention.query_key_value.weight"),
        ("falcon", LIKE_LLAMA, "transformer.h.*.self_attention.query_key_value.weight"),
        ("gpt_bigcode", GPT2, "transformer.h.*.attn.c_attn.weight"),
        ("mamba", {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 311}, "backbone.layers.*.mixer.A_log"),
    ],
)  # fmt: skip
def test_a_family_without_a_reader_is_planned_as_its_module_is(recipe_of, family, values, layer):
    loaded = recipe_of(family, values)
    job = prepare_job(loaded)
    model = build_model(loaded.recipe)
    assert job.plan.model.num_params == sum(p.numel() for p in model.parameters())
    assert job.plan.layouts[layer].axes[0] == ("dp_shard",)
    check_parameters(model, job.plan, "here")
    assert any("read from the module" in note for note in job.plan.notes)
    assert any("2 layers have no known attention" in n for n in job.plan.notes) == (family == "mamba")


def test_a_type_that_transformers_does_not_know_is_refused_by_name(recipe_of, tmp_path):
    with pytest.raises(ModelUnreadable, match=r"(?s)no model of this type.*no_such_family"):
        prepare_job(recipe_of("no_such_family", LIKE_LLAMA))
    assert not (tmp_path / "out").exists()


def test_attention_that_a_model_does_not_have_is_refused_with_one_that_it_has(recipe_of):
    with pytest.raises(ModelUnreadable, match="gemma2") as caught:
        build_model(recipe_of("gemma2", LIKE_LLAMA, attn_implementation="sdpa").recipe)
    key, _, value = caught.value.hint.split("`")[1].partition("=")
    assert key == "model.attn_implementation"
    build_model(recipe_of("gemma2", LIKE_LLAMA, attn_implementation=value).recipe)
    build_model(recipe_of("gemma2", LIKE_LLAMA).recipe)  # the choice of transformers


@pytest.mark.parametrize("tied", [{}, {"tie_word_embeddings": False}])
def test_the_head_of_gpt2_is_its_embedding_unless_the_config_says_otherwise(recipe_of, tied):
    loaded = recipe_of("gpt2", GPT2 | tied)
    model = build_model(loaded.recipe)
    assert ("lm_head.weight" in dict(model.named_parameters())) == bool(tied)
    check_parameters(model, plan_recipe(loaded.recipe, None, loaded.where), "here")
