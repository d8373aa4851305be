"""Generation on a device smaller than the model: the same tokens, exactly the predicted bytes."""

from itertools import accumulate

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.decode_slots import (
    FixedPasses,
    GrowingPasses,
    Passes,
    SlotPasses,
    SlotSteps,
)
from hyper_parallel.backends.torch.memory.generation import MemoryLimits, PlannedSlots
from hyper_parallel.errors import BudgetImpossible, CaptureUnsupported, TierFull
from hyper_parallel.memory import Channel, MemoryMachine, Roofline
from hyper_parallel.trainer.decoding import Decoder, DecodingSequence
from hyper_parallel.trainer.generation import Sampling, decode_tokens
from tests.slow import slow_cells
from tests.torch_memory.models import tiny_model

pytestmark = pytest.mark.torch

ROOFLINE = Roofline(1e9, 1e9, 1e-6)
LINK = Channel(1e9, 1e-6)
PROMPT = [5, 9, 17, 33, 2, 7, 8, 9, 10, 11]
AS_GEMMA3 = pytest.mark.slow
"""Cells of bfloat16 and of windows: gemma3_text has both."""
WINDOW = {"sliding_window": 8, "head_dim": 8}
OTHERS = {
    "mistral": WINDOW,
    "gemma3_text": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": WINDOW  # the last two layers use keys and values of the first two
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "falcon": {"alibi": False},  # its code makes tensors of numbers in every step
    "gpt_oss": WINDOW
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@pytest.fixture(autouse=True)
def own_cache_of_plans(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model_of(family, dtype=torch.float32):
    if family in OTHERS:
        values = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**values, **OTHERS[family]})
        model = AutoModelForCausalLM.from_config(config)
    else:
        layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
        model = tiny_model(family, initializer_range=0.3, **{layers: 2})
    return model.to(dtype).eval()


def limits(device_bytes, dram=None, flash=None):
    drive = None if flash is None else Channel(2e8, 1e-6)
    machine = MemoryMachine(LINK, LINK, drive, drive, dram_bytes=dram)
    return MemoryLimits(device_bytes, machine, ROOFLINE, flash)


def within(model, prompt_tokens, length, budget):
    """Passes of one text under a budget."""
    return PlannedSlots(model, SlotSteps(1, prompt_tokens, length), budget)


def logits_after(passes, *parts):
    """Logits [V] after each of the parts of a text."""
    starts = accumulate(map(len, parts), initial=0)
    return [passes.read_tokens([0], [part], [start])[0] for part, start in zip(parts, starts, strict=False)]


def planned(model, sampling, device_bytes, **tiers):
    """Tokens under a budget, and what was used."""
    length = len(PROMPT) + sampling.max_new_tokens - 1
    steps = within(model, len(PROMPT), length, limits(device_bytes, **tiers))
    tokens = list(decode_tokens(model, PROMPT, sampling, passes=steps))
    steps.close()
    return tokens, steps.use


@slow_cells(
    "gemma3_text-dtype5-17000",
    "gpt_oss-dtype6-95000",
    "qwen3_moe-dtype2-30000",
    "falcon-dtype7-34000",
    "gpt2-dtype3-33000",
)
@pytest.mark.parametrize(
    ("family", "dtype", "budget"),
    [
        ("llama", torch.float32, 25_000),
        pytest.param("llama", torch.bfloat16, 15_000, marks=AS_GEMMA3),
        ("qwen3_moe", torch.float32, 30_000),
        ("gpt2", torch.float32, 33_000),
        pytest.param("mistral", torch.float32, 25_000, marks=AS_GEMMA3),
        ("gemma3_text", torch.bfloat16, 17_000),
        ("gpt_oss", torch.float32, 95_000),
        ("falcon", torch.float32, 34_000),
        pytest.param("gemma3n_text", torch.float32, 90_000, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens_on_a_smaller_device(family, dtype, budget):
    model = model_of(family, dtype)
    greedy, drawn = Sampling(10, temperature=0), Sampling(10, temperature=3.0, seed=3)
    plain = [list(decode_tokens(model, PROMPT, s)) for s in (greedy, drawn)]
    assert len(set(plain[1])) > 3
    for sampling, expected in zip((greedy, drawn), plain, strict=True):
        tokens, use = planned(model, sampling, budget)
        assert tokens == expected
        assert use.measured_bytes == use.predicted_bytes
        assert use.measured_bytes["device"] <= budget < 0.4 * use.state_bytes
        assert use.steps == 10
    # The model has its weights back.
    assert list(decode_tokens(model, PROMPT, greedy)) == plain[0]


def test_experts_of_widths_that_only_float32_has():
    """20 columns are 80 bytes in float32, which grouped products take, and 40 in bfloat16, which they do not."""
    widths = {"moe_intermediate_size": 20, "num_hidden_layers": 1, "initializer_range": 0.3}
    model = tiny_model("qwen3_moe", **widths).eval()
    sampling = Sampling(4, temperature=0)
    tokens, use = planned(model, sampling, 60_000)
    assert tokens == list(decode_tokens(model, PROMPT, sampling))
    assert use.measured_bytes == use.predicted_bytes
    with pytest.raises(CaptureUnsupported, match="rows of 20 in bfloat16 are no multiple of 16 bytes"):
        planned(model.bfloat16(), sampling, 60_000)


def test_an_impossible_budget_is_refused_with_one_that_works():
    model, sampling = model_of("llama"), Sampling(4, temperature=0)
    length = len(PROMPT) + 3
    with pytest.raises(BudgetImpossible, match="HP402") as caught:
        within(model, len(PROMPT), length, limits(1024))
    least = int(caught.value.allowed.split()[2])
    assert caught.value.hint == f"--device-memory {least}"
    _, use = planned(model, sampling, least)
    assert use.measured_bytes["device"] == use.predicted_bytes["device"] <= least
    with pytest.raises(BudgetImpossible):
        within(model, len(PROMPT), length, limits(least // 2))


@pytest.mark.slow
def test_bytes_are_predicted_for_every_budget():
    model, sampling = model_of("gpt2"), Sampling(3, temperature=0)
    expected = list(decode_tokens(model, PROMPT, sampling))
    for budget in range(98_000, 120_000, 3_000):
        steps = within(model, len(PROMPT), len(PROMPT) + 2, limits(budget))
        assert list(decode_tokens(model, PROMPT, sampling, passes=steps)) == expected
        steps.close()
        assert steps.use.measured_bytes == steps.use.predicted_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logits_are_bitwise_those_of_the_steps_without_a_budget(family):
    model = model_of(family)
    free, length = FixedPasses(model, SlotSteps(1, len(PROMPT), 20)), 20
    expected = logits_after(free, PROMPT, [4], [7], [100])
    steps = within(model, len(PROMPT), length, limits(30_000))
    found = logits_after(steps, PROMPT, [4], [7], [100])
    steps.close()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_two_generations_in_one_flash_folder_keep_to_their_own_files(tmp_path):
    """Their storages have the same numbers and sizes: a file of the other one would be read without a word."""
    wide = {"initializer_range": 0.3, "num_hidden_layers": 2}
    models = [tiny_model("llama", seed, **wide).eval() for seed in (0, 1)]
    free = [FixedPasses(model, SlotSteps(1, len(PROMPT), 20)) for model in models]
    expected = [logits_after(one, PROMPT, [4]) for one in free]
    tiers = limits(30_000, dram=60_000, flash=tmp_path / "flash")
    steps = [within(model, len(PROMPT), 20, tiers) for model in models]
    found = [logits_after(one, PROMPT) for one in steps]  # both hold their weights from here on
    for logits, one in zip(found, steps, strict=True):
        logits.append(one.read_tokens([0], [[4]], [len(PROMPT)])[0])
    for one in steps:
        one.close()
        assert one.use.measured_bytes["flash"] > 0
    for mine, plain in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    assert not list((tmp_path / "flash").iterdir())


def test_through_flash(tmp_path):
    model = model_of("llama")
    sampling, folder = Sampling(12, temperature=0), tmp_path / "flash"
    expected = list(decode_tokens(model, PROMPT, sampling))
    tokens, use = planned(model, sampling, 30_000, dram=60_000, flash=folder)
    assert tokens == expected
    assert use.measured_bytes == use.predicted_bytes
    assert use.measured_bytes["flash"] > 0
    assert 0 < use.wait_s < use.seconds
    assert use.measured_bytes["dram"] <= 60_000
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_dram_that_is_too_small_is_refused_with_what_is_enough():
    """Prompt and decode step need buffers of other sizes; the number is for both."""
    model, sampling = model_of("llama"), Sampling(6, temperature=0)
    with pytest.raises(TierFull, match="flash none") as caught:
        planned(model, sampling, 30_000, dram=20_000)
    enough = int(caught.value.hint.removeprefix("--dram "))
    tokens, use = planned(model, sampling, 30_000, dram=enough)
    assert tokens == list(decode_tokens(model, PROMPT, sampling))
    assert use.measured_bytes == use.predicted_bytes
    assert use.measured_bytes["dram"] <= enough


def test_weights_in_the_memory_of_another_library():
    """Torch cannot resize such weights, for example those of a mapped file."""
    model = model_of("llama")
    expected = list(decode_tokens(model, PROMPT, Sampling(6, temperature=0)))
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
    assert not next(model.parameters()).untyped_storage().resizable()
    tokens, use = planned(model, Sampling(6, temperature=0), 25_000)
    assert tokens == expected
    assert use.measured_bytes == use.predicted_bytes


def test_nothing_moves_when_everything_fits():
    model = model_of("llama")
    tokens, use = planned(model, Sampling(6, temperature=0), 10**9)
    assert tokens == list(decode_tokens(model, PROMPT, Sampling(6, temperature=0)))
    assert use.wait_s == 0
    assert use.measured_bytes["dram"] == 0
    assert use.measured_bytes["device"] == use.predicted_bytes["device"] > use.state_bytes


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_a_cache_of_fixed_length_changes_logits_by_rounding_only(family):
    """Against a growing cache; a prompt longer than the window, a continuation that fills the cache."""
    model = model_of(family, torch.float64 if family != "gpt_oss" else torch.float32)
    grown, fixed = GrowingPasses(model), FixedPasses(model, SlotSteps(1, len(PROMPT), 30))
    parts = (PROMPT, *([token] for token in range(3, 23)))
    bound = 1e-5 if family == "gpt_oss" else 1e-6
    for found, expected in zip(logits_after(fixed, *parts), logits_after(grown, *parts), strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


_RECURRENT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "initializer_range": 0.3,
}
_STATES = {"state_size": 8, "expand": 2, "conv_kernel": 4}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("mamba", _RECURRENT | _STATES | {"time_step_rank": 4}),
        ("mamba2", _RECURRENT | _STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
        ("rwkv", _RECURRENT | {"attention_hidden_size": 32, "context_length": 64}),
        (
            "minimax",
            _RECURRENT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
                          "intermediate_size": 64, "block_size": 8,
                          "layer_types": ["linear_attention", "full_attention"]},
        ),
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "initializer_range": 0.3}),
    ],
)  # fmt: skip
def test_what_a_model_remembers_goes_from_step_to_step(family, values):
    """Under whatever name its forward takes it, or not at all: every step's logits are those of the whole text."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values)).eval()
    parts = (PROMPT, *([20 + count] for count in range(1, 6)))
    for count, logits in enumerate(logits_after(GrowingPasses(model), *parts)):
        text = torch.tensor([[*PROMPT, *range(21, 21 + count)]])
        with torch.no_grad():
            whole = model(input_ids=text, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_model_without_steps_of_fixed_shape_is_refused():
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(CaptureUnsupported, match="HP511") as caught:
        within(model, 4, 8, limits(10**6))
    assert caught.value.hint == "leave out --device-memory"
    moe = model_of("qwen3_moe", torch.float64)
    moe.set_experts_implementation("eager")
    with pytest.raises(CaptureUnsupported, match="HP511"):
        within(moe, 4, 8, limits(10**6))


class ReadsItsInput(torch.nn.Module):
    """A layer whose code reads a value of every input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) if x.sum().item() > -1e9 else x


def test_a_model_that_reads_values_is_refused():
    model = tiny_model("llama").eval()
    model.model.layers[0].mlp = ReadsItsInput(model.model.layers[0].mlp)
    with pytest.raises(CaptureUnsupported, match="reads a tensor's value at"):
        PlannedSlots(model, SlotSteps(1, 4, 8), limits(10**7))


TEXTS = [PROMPT, [3, 4], [7], [8, 9, 17, 33, 2], [6, 6, 100, 4, 19, 3, 3]]


class UnplannedPasses(Passes):
    """The same steps without a budget."""

    def __init__(self, model, fixed):
        super().__init__(model, fixed.slots)
        self.fixed, self.cache, self.at = fixed, fixed.new_cache(model), [*range(fixed.slots)]

    def read_tokens(self, rows, tokens, starts):
        prompt = max(map(len, tokens)) > 1
        at = [self.at[row] for row in rows]
        inputs = self.fixed.inputs(self._model, at, tokens, starts, prompt=prompt)
        return self.fixed.run(self._model, self.cache, inputs)[at]

    def move_sequence(self, source, target):
        self.at[source], self.at[target] = self.at[target], self.at[source]


@slow_cells("gemma3_text-dtype4-112000", "llama-dtype1-33000")
@pytest.mark.parametrize(
    ("family", "dtype", "budget"),
    [
        ("llama", torch.float64, 110_000),
        ("llama", torch.bfloat16, 33_000),
        ("qwen3_moe", torch.float32, 60_000),
        pytest.param("mistral", torch.float64, 110_000, marks=AS_GEMMA3),
        ("gemma3_text", torch.float64, 112_000),
    ],
)
def test_texts_of_other_lengths_at_once_on_a_smaller_device(family, dtype, budget):
    """In slots that are all in every step, as some texts end before others; each as if it were alone."""
    model = model_of(family, dtype)

    def run(passes, limits_of):
        going = [
            DecodingSequence(i, [*text], len(text), limit)
            for i, (text, limit) in enumerate(zip(TEXTS, limits_of, strict=True))
        ]
        decoder = Decoder(passes, Sampling(9, temperature=0))
        decoder.add(going)
        for _ in decoder.run():
            pass
        return going

    limits_of = (9, 2, 7, 5, 9)
    length = max(len(text) + limit - 1 for text, limit in zip(TEXTS, limits_of, strict=True))
    plain = run(SlotPasses(model, 5, length), limits_of)
    fixed = SlotSteps(5, max(map(len, TEXTS)), length)
    passes = PlannedSlots(model, fixed, limits(budget))
    found = run(passes, limits_of)
    passes.close()
    exact = run(UnplannedPasses(model, fixed), limits_of)
    for mine, same, other in zip(found, exact, plain, strict=True):
        assert (mine.text, mine.logprobs) == (same.text, same.logprobs)
        if dtype == torch.float64:
            assert mine.text == other.text
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    assert passes.use.measured_bytes == passes.use.predicted_bytes
    assert passes.use.measured_bytes["device"] <= budget < 0.5 * passes.use.state_bytes
