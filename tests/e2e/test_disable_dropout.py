"""Dropout in the stages that compare answers: off unless the recipe asks for it, in every form that models have."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch import materialize
from hyper_parallel.backends.torch.dropout import disable_dropout, original_config
from hyper_parallel.config import Recipe
from hyper_parallel.trainer.engine.recipe_model import build_model
from tests.e2e.runs import PAIRS, make_stage_place, rows, train

SMALL = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {
    **{"model_type": "gpt2", "vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4},
    **{"n_positions": 128, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5},
}
OPT = {
    **{"model_type": "opt", **SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    **{"max_position_embeddings": 128, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
}
MIXTRAL = {
    **{"model_type": "mixtral", **SMALL, "intermediate_size": 48, "num_key_value_heads": 2},
    **{"num_local_experts": 4, "attention_dropout": 0.5, "router_jitter_noise": 0.3},
}
PHIMOE = {
    **{"model_type": "phimoe", **SMALL, "intermediate_size": 48, "num_key_value_heads": 2},
    **{"num_local_experts": 4, "router_jitter_noise": 0.4, "input_jitter_noise": 0.3},
}


def logits(model, seed):
    torch.manual_seed(seed)
    ids = torch.arange(3, 67).view(2, 32)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("config", [GPT2, OPT, MIXTRAL, PHIMOE], ids=lambda c: c["model_type"])
def test_training_computes_what_evaluation_computes(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).train()
    saved = model.config.to_dict()
    assert not torch.equal(logits(model, 1), logits(model, 2)), "the config asks for dropout"
    evaluated = logits(model.eval(), 1)
    disable_dropout(model)
    for seed in (1, 2):
        torch.testing.assert_close(logits(model.train(), seed), evaluated)
    assert original_config(model).to_dict() == saved, "an export keeps the published rates"


@pytest.mark.parametrize("stage", ["pt", "sft", "dpo", "orpo", "kto", "rm", "grpo"])
def test_every_stage_but_the_first_two_trains_without_dropout(stage, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    for choice in (None, True, False):
        recipe = Recipe(
            model={"path": str(tmp_path)},
            stage=stage,
            training={"dtype": "float32", "disable_dropout": choice},
        )
        model = build_model(recipe)
        materialize(model, seed=0, device="cpu")
        if stage == "rm":
            model.config.pad_token_id = 0
        expected = stage not in ("pt", "sft") if choice is None else choice
        assert torch.equal(logits(model, 1), logits(model, 2)) == expected
        assert original_config(model).attn_pdrop == 0.5


def test_the_first_loss_of_pairs_is_log_2_with_dropout_in_model_and_adapter(tmp_path):
    place = make_stage_place(tmp_path, "dpo", PAIRS, lora={"lora_dropout": 0.5})
    (place / "model.json").write_text(json.dumps(OPT | {"layerdrop": 0.0}))
    losses = {}
    for name, override in (("off", "training.seed=0"), ("on", "training.disable_dropout=false")):
        train(place, place / name, "training.steps=1", override)
        losses[name] = rows(place / name / "metrics.jsonl")[0]["loss"]
    assert losses["off"] == pytest.approx(math.log(2), rel=1e-12)
    assert losses["on"] != pytest.approx(math.log(2), rel=1e-6)
