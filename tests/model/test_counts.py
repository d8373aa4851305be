"""Counts and FLOPs against published numbers and closed forms."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.model import ModelSpec, load_model, preset_names, spec_from_config
from hyper_parallel.serde import decode, encode

pytestmark = pytest.mark.unit

# Totals are those of the published weights; the GPT shapes follow 12 L h^2 (1 + 13/12h) + (V + s) h + 2h.
PARAMS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
    "gpt3-175b": 174_615_846_912,
    "megatron-310b": 310_130_540_544,
}


def test_every_preset_has_an_expected_count():
    assert set(PARAMS) == set(preset_names())


@pytest.mark.parametrize("preset", PARAMS)
def test_parameter_count(preset):
    assert load_model(preset).num_params == PARAMS[preset]


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.2),
        ("deepseek-v3", 37.6),
        ("qwen3-30b-a3b", 3.4),
        ("qwen3-235b-a22b", 22.2),
        ("gpt-oss-120b", 5.7),
        ("llama-3-70b", 70.6),
    ],
)
def test_active_parameters(preset, billions):
    assert round(load_model(preset).num_active_params / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("preset", "seq_len", "giga"),
    [("llama-3-70b", 8192, 481.4), ("llama-3-405b", 8192, 2625.4)],
)
def test_flops_per_token(preset, seq_len, giga):
    assert round(load_model(preset).flops_per_token(seq_len) / 1e9, 1) == giga


def test_flops_of_a_3_57b_llama():
    values = {
        "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 32,
        "intermediate_size": 8192, "vocab_size": 131072,
    }  # fmt: skip
    spec = spec_from_config(values, name="llama-3.57b")
    assert round(spec.flops_per_token(4096) / 1e9, 2) == 25.67


def test_causal_attention_is_half_and_windows_bound_it():
    spec = load_model("llama-3-8b")
    scores = spec.flops_per_token(4096) - 6 * spec.num_matmul_params
    causal = spec.flops_per_token(4096, causal=True) - 6 * spec.num_matmul_params
    assert causal == scores / 2
    oss = load_model("gpt-oss-120b")
    short, long = (oss.flops_per_token(s) - 6 * oss.num_matmul_params for s in (128, 8192))
    assert short == 12 * 36 * 64 * 64 * 128
    assert long == 12 * 18 * 64 * 64 * (128 + 8192)


def test_causal_window_is_the_mean_over_positions():
    seq_len, window = 4096, 128
    values = {
        "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 64, "sliding_window": window,
    }  # fmt: skip
    attention = spec_from_config(values, name="m").decoder_blocks[0].attention
    exact = sum(min(i + 1, window) for i in range(seq_len)) / seq_len * 4 * 4 * 16
    assert attention.forward_flops_per_token(seq_len, causal=True) == pytest.approx(exact, rel=0.005)


def test_kv_cache_width():
    assert load_model("llama-3-8b").decoder_blocks[0].attention.kv_cache_width == 2 * 8 * 128
    assert load_model("deepseek-v3").decoder_blocks[0].attention.kv_cache_width == 512 + 64


@pytest.mark.parametrize("preset", PARAMS)
def test_reading_takes_milliseconds_and_nothing_is_expanded(preset):
    best = min(_seconds(preset) for _ in range(3))
    assert best < 0.020
    assert sum(len(b.params) for b in load_model(preset).blocks) < 60


def _seconds(preset):
    """Processor seconds, so that a busy machine does not decide."""
    start = time.process_time()
    load_model(preset)
    return time.process_time() - start


@pytest.mark.parametrize("preset", PARAMS)
def test_layers_are_covered_once_and_dims_match_sizes(preset):
    spec = load_model(preset)
    layers = [i for b in spec.blocks for i in b.layers]
    assert sorted(layers) == list(range(spec.num_layers))
    for block in spec.blocks:
        for param in block.params:
            sizes = dict(zip(param.dims, param.shape, strict=True))
            assert sizes.get("vocab", spec.vocab_size) == spec.vocab_size
            assert sizes.get("embed", spec.hidden_size) == spec.hidden_size
            assert sizes.get("expert", spec.num_experts) == spec.num_experts
            assert sizes.get("heads", 0) % spec.num_heads == 0
            assert sizes.get("kv_heads", 0) % spec.num_kv_heads == 0


def test_fingerprint_names_the_shapes_not_the_label():
    spec = load_model("llama-3-8b")
    assert decode(ModelSpec, json.loads(json.dumps(encode(spec)))) == spec
    assert len({load_model(p).fingerprint for p in preset_names()}) == len(PARAMS)
    values = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 64,
    }  # fmt: skip
    one = spec_from_config(values, name="a")
    assert one.fingerprint == spec_from_config({**values, "dtype": "bfloat16"}, name="b").fingerprint
    assert one.fingerprint != spec_from_config({**values, "num_hidden_layers": 3}, name="a").fingerprint
    assert one.fingerprint != spec_from_config({**values, "tie_word_embeddings": True}, name="a").fingerprint


@st.composite
def dense_configs(draw):
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4))
    return {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3", "something_new"])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.integers(1, 64)),
        "hidden_size": draw(st.integers(1, 256)),
        "num_hidden_layers": draw(st.integers(1, 20)),
        "intermediate_size": draw(st.integers(1, 512)),
        "vocab_size": draw(st.integers(1, 1000)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@given(dense_configs())
def test_dense_count_is_the_closed_form(c):
    d, width = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    matmul = 2 * d * q + 2 * d * kv + 3 * d * c["intermediate_size"]
    small = 2 * d
    small += (q + 2 * kv) * (c["model_type"] == "qwen2")
    small += 2 * width * (c["model_type"] == "qwen3")
    table = c["vocab_size"] * d
    layers = c["num_hidden_layers"]
    spec = spec_from_config(c, name="random")
    assert spec.num_params == layers * (matmul + small) + d + table * (2 - c["tie_word_embeddings"])
    assert spec.num_active_params == spec.num_params
    assert spec.num_matmul_params == layers * matmul + table
    assert spec.flops_per_token(100) == 6 * (layers * matmul + table) + 12 * layers * q * 100


@given(st.integers(1, 16), st.data())
def test_active_experts_scale_between_one_and_all(num_experts, data):
    per_token = data.draw(st.integers(1, num_experts))
    values = {
        "model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 50,
        "num_local_experts": num_experts, "num_experts_per_tok": per_token,
    }  # fmt: skip
    spec = spec_from_config(values, name="random")
    idle = 2 * (num_experts - per_token) * 3 * 16 * 24
    assert spec.num_params - spec.num_active_params == idle
