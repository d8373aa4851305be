"""Models that no reader knows train through the command, and a layout gives the losses of one rank."""

import json

import pytest

from tests.e2e.runs import assert_same_curve, curve, train, write_functions

pytestmark = pytest.mark.e2e

SIZES = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
STRANGERS = {
    "gpt_neox": {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64},
    "mamba": {**SIZES, "state_size": 4, "pad_token_id": 0},
    "granitemoe": {**SIZES, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
                   "num_key_value_heads": 2, "pad_token_id": 0},
}  # fmt: skip


@pytest.fixture
def place(request, tmp_path):
    (tmp_path / "model.json").write_text(
        json.dumps({"model_type": request.param, **STRANGERS[request.param]})
    )
    write_functions(tmp_path / "text.txt", 60)
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {tmp_path / 'model.json'}}}\n"
        f"data: {{source: {tmp_path / 'text.txt'}, seq_len: 24, vocab_size: 300}}\n"
        "training: {steps: 2, dtype: float64, tokens_per_step: 96}\n"
        "checkpoint: {export: false}\n"
    )
    return tmp_path


@pytest.mark.parametrize("place", STRANGERS, indirect=True)
def test_a_stranger_trains_sharded_as_on_one_rank(place):
    train(place, place / "one", "parallel.dp_shard=1")
    train(place, place / "two", "parallel.dp_shard=2", "training.recompute=full")
    assert_same_curve(curve(place / "two"), curve(place / "one"))
