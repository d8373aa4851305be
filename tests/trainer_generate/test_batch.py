"""Many sequences in slots of one cache: each as if it were alone, in any order, cut off and continued."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.decode_slots import SlotPasses, passes_of, slot_cache_refusal
from hyper_parallel.backends.torch.forward_variants import keep_float64, loop_over_experts
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.decoding import Decoder, DecodingSequence, Sampling, numbers
from tests.slow import slow_cells

pytestmark = pytest.mark.torch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 8}
MIXED = WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": WINDOW,
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "gpt2": GPT2,
    "gpt_neox": {},
    "starcoder2": WINDOW,
    "stablelm": {},
    "granite": {},
    "cohere": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": ROUTED | {"head_dim": 8, "num_experts": 4},
    "gpt_oss": MIXED
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v3": ROUTED  # keys and values of different widths
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "bloom": {"n_head": 4, "n_layer": 2},  # positions from distances: no cache in slots
    "mamba": {"state_size": 4},  # a state, and no keys
}
UNCACHED = {"bloom", "mamba"}
PROMPTS = [
    torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 12, 1, 9, 20)
]


def model_of(family, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {} if FAMILIES[family] is GPT2 else SIZES
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if dtype == torch.float64:
        keep_float64(model)
    loop_over_experts(model, dtype)
    return model


def running(sampling, prompts=PROMPTS, first=0):
    limit = sampling.max_new_tokens
    return [
        DecodingSequence(i, [*ids], len(ids), limit, numbers(sampling.seed, i, length=limit))
        for i, ids in enumerate(prompts, first)
    ]


def decoded(model, sequences, sampling, slots=3, **more):
    passes = passes_of(model, slots, max(s.start + s.limit for s in sequences) - 1)
    if isinstance(passes, SlotPasses):
        passes.chunk = 7
    decoder = Decoder(passes, sampling, **more)
    decoder.add(sequences)
    for _ in decoder.run():
        pass
    return sequences


@slow_cells("bloom", "gemma2", "gpt_oss", "granite", "mistral", "mixtral", "qwen2", "starcoder2")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    """Five prompts of different lengths on three slots, in chunks; log-probabilities are those of one whole pass."""
    model = model_of(family)
    assert (slot_cache_refusal(model) is not None) == (family in UNCACHED)
    for sequence in decoded(model, running(sampling := Sampling(14, temperature=0)), sampling):
        prompt = torch.tensor([sequence.text[: sequence.start]])
        given = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        expected = model.generate(prompt, max_new_tokens=14, **given)
        assert sequence.text == expected[0].tolist()
        assert sequence.finish == "length"
        with torch.no_grad():
            logp = model(expected, use_cache=False).logits[0, sequence.start - 1 : -1].log_softmax(-1)
        chosen = logp.gather(1, expected[0, sequence.start :, None])[:, 0]
        assert sequence.logprobs == pytest.approx(chosen.tolist(), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sequence_does_not_depend_on_its_batch(dtype):
    """A matrix product of another height may round differently, which is all that logprobs show."""
    model, sampling = model_of("qwen3_moe", dtype), Sampling(8, top_k=50, seed=3)
    prompts = [[7 + i % 5] * (1 + i % 9) for i in range(32)]
    together = decoded(model, running(sampling, prompts), sampling, slots=32)
    few = decoded(model, running(sampling, prompts), sampling, slots=5)
    error = 1e-10 if dtype == torch.float64 else 1e-4
    assert [s.text for s in together] == [s.text for s in few]
    for i in (0, 13, 31):
        (alone,) = decoded(model, running(sampling, prompts[i : i + 1], i), sampling)
        assert alone.text == together[i].text
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=error)
    assert len({tuple(s.tokens) for s in together}) > 25


def test_a_stop_token_frees_a_slot_for_the_next_sequence():
    model, sampling = model_of("llama"), Sampling(14, temperature=0)
    free = decoded(model, running(sampling), sampling)
    stop = free[0].tokens[3]
    stopped = decoded(model, running(sampling), sampling, slots=2, stops={stop})
    for sequence, expected in zip(stopped, free, strict=True):
        tokens = expected.tokens
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert sequence.tokens == tokens[:end]
        assert sequence.finish == ("stop" if stop in tokens else "length")


def test_rotary_frequencies_that_follow_the_longest_text_are_refused_beyond_their_length():
    model = model_of("phi3")
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model.config.rope_parameters = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        **factors,
    }
    assert isinstance(passes_of(model, 2, 32), SlotPasses)
    with pytest.raises(BadValue, match="longest sequence of the batch"):
        passes_of(model, 2, 33)


def test_a_cache_has_as_many_bytes_as_its_slots_and_tokens_ask_for():
    model = model_of("llama", torch.float32)
    passes = SlotPasses(model, 3, 10)
    assert passes.cache_bytes == 0
    passes.read_tokens([1], [[5, 6]], [0])
    # Keys and values of 2 layers, 2 heads of 8 features; one more column for padding.
    assert passes.cache_bytes == 2 * 2 * 3 * 11 * 2 * 8 * 4
