"""Activations that a model's own forward keeps, measured without values."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
)

from hyper_parallel.backends.torch import measure_kept

pytestmark = pytest.mark.unit

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}


def model_of(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_a_fused_decoder_keeps_the_published_number_of_elements():
    kept = measure_kept(model_of(LlamaConfig(**SIZES)))
    h, q, k, f = 32, 32, 16, 96
    # Inputs of two norms and two column matmuls, queries, keys, values, output and its copy, the gated part; an unfused
    # norm keeps 8 h bytes more than its input at two bytes, the gate f elements, attention 4 bytes a head.
    elements = 4 * h + 3 * q + 2 * k + 3 * f + f
    assert kept.layer[1] == pytest.approx(0.0, abs=0.2)
    assert kept.layer[0] == pytest.approx(2 * elements + 2 * 6 * h - 4 * h + 4 * 4, rel=0.15)


def test_capped_scores_grow_with_the_sequence_and_capped_logits_with_the_vocabulary():
    capped = model_of(Gemma2Config(**SIZES, sliding_window=1024, attn_implementation="eager"))
    plain = Gemma2Config(
        **SIZES,
        sliding_window=1024,
        attn_implementation="eager",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    found, other = measure_kept(capped), measure_kept(model_of(plain))
    # The result of tanh, at two bytes: of every score of four heads, and of every logit.
    assert found.layer[1] - other.layer[1] == pytest.approx(2 * 4, rel=0.02)
    assert found.outside - other.outside == pytest.approx(2 * 64, rel=0.02)


def test_the_measured_bytes_are_those_that_autograd_saves():
    config = LlamaConfig(**SIZES, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    alive, total = [], {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            alive.append(storage)
            total[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=torch.arange(256)[None] % 60, use_cache=False)
    kept = measure_kept(model)
    layers = 2 * (kept.layer[0] + 256 * kept.layer[1])
    assert 256 * (layers + kept.outside) == pytest.approx(sum(total.values()), rel=0.02)


def test_a_model_without_a_list_of_layers_is_not_measured():
    assert measure_kept(torch.nn.Linear(2, 2)) is None


def test_layers_of_two_kinds_are_measured_apart():
    config = Lfm2Config(**SIZES, layer_types=["full_attention", "conv"])
    kept, one = measure_kept(model_of(config)), []
    for kind in ("full_attention", "conv"):
        alone = {**SIZES, "num_hidden_layers": 1}
        one.append(measure_kept(model_of(Lfm2Config(**alone, layer_types=[kind]))).layer[0])
    assert kept.layer[0] == pytest.approx(sum(one) / 2, rel=0.01)
    assert (kept.fullest, kept.last) == (
        pytest.approx(max(one), rel=0.01),
        pytest.approx(one[1], rel=0.01),
    )
    names = {name for name, num_bytes in kept.modules if num_bytes}
    assert {"model.layers.*.self_attn", "model.layers.*.conv"} <= names


def test_a_layer_that_repeats_is_measured_once_and_counted_as_often():
    few, many = (measure_kept(model_of(LlamaConfig(**{**SIZES, "num_hidden_layers": n}))) for n in (1, 6))
    assert many.layer == pytest.approx(few.layer, rel=1e-6)
    assert many.outside == pytest.approx(few.outside, rel=1e-6)


def test_rows_of_experts_tell_whether_every_expert_sees_every_token():
    sizes = {**SIZES, "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 96}
    every = Llama4TextConfig(**sizes, interleave_moe_layer_step=1)
    assert measure_kept(model_of(every)).expert_rows == 4
    assert measure_kept(model_of(MixtralConfig(**SIZES, num_local_experts=4))).expert_rows == 1


@pytest.mark.parametrize("window", [512, 1024, 8192])
def test_a_window_between_the_measured_lengths_is_not_a_slope(window):
    """From the window on, attention takes a mask and saves repeated keys: one step, not growth with the length."""
    config = Gemma3TextConfig(
        **SIZES,
        sliding_window=window,
        layer_types=["sliding_attention"] * SIZES["num_hidden_layers"],
    )
    assert measure_kept(model_of(config)).layer[1] == 0.0
