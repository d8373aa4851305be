"""A forward pass does not depend on the passes before it: rotary frequencies that follow the longest text."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import hyper_parallel as hp
from hyper_parallel.backends.torch.rotary_lengths import reset_before_calls, rotate_by_document
from tests.e2e.runs import assert_same_curve, curve, make_stage_place, train

TOOLS = Path(__file__).resolve().parents[2] / "tools"
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LLAMA = {
    **{"model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 24, "rope_parameters": ROPE},
}
TEXTS = [{"prompt": "n " * (1 + 7 * i % 11), "completion": "a b" * (1 + 5 * i % 17)} for i in range(24)]


def model(rope_type="dynamic", seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(**LLAMA | {"rope_parameters": ROPE | {"rope_type": rope_type}})
    return LlamaForCausalLM(config).double().eval()


def logits(of, length):
    with torch.no_grad():
        return of(input_ids=torch.arange(length)[None] + 3, use_cache=False).logits


def test_the_change_is_measured_by_name(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from sweeps.history import changed_state

    assert changed_state(model(), lambda: None) == ()
    dynamic, plain = model(), model("default")
    assert changed_state(plain, lambda: logits(plain, 60)) == ()
    assert set(changed_state(dynamic, lambda: logits(dynamic, 60))) == {
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.max_seq_len_cached",
    }


def test_a_pass_after_longer_ones_is_that_of_a_new_model():
    expected = {length: logits(model(), length) for length in (20, 30, 60)}
    kept = model()
    assert not torch.equal((logits(kept, 60), logits(kept, 30))[1], expected[30])
    kept = model()
    reset_before_calls(kept)
    for length in (20, 60, 30, 20, 60, 30):
        assert torch.equal(logits(kept.train(length == 60), length), expected[length])
    kept.float()
    half = logits(kept, 30)
    assert torch.equal((logits(kept, 60), logits(kept, 30))[1], half), "moved after a pass"


def test_parallelize_resets_it():
    work = hp.Workload(60, microbatch=1, compute_dtype="float64", param_dtype="float64")
    kept, new = (hp.parallelize(m, hp.plan_of(m, "", work)) for m in (model(), model()))
    logits(kept, 60)
    assert torch.equal(logits(kept, 30), logits(new, 30))


LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 24, "rope_theta": 10000.0},
    **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}


@pytest.mark.parametrize("rope", [ROPE, LONGROPE], ids=lambda rope: rope["rope_type"])
def test_every_document_has_the_frequencies_that_it_has_alone(rope):
    def rotary():
        return LlamaModel(LlamaConfig(**LLAMA | {"rope_parameters": rope})).rotary_emb

    def tables(of, positions):
        return torch.stack(of(torch.zeros(1, dtype=torch.float64), positions))

    rows = ((20, 44), (30, 34), (64,), (10, 10, 44))
    texts = [[torch.arange(length)[None] for length in row] for row in rows]
    alone = torch.cat([torch.cat([tables(rotary(), t) for t in row], 2) for row in texts], 1)
    packed = torch.cat([torch.cat(row, 1) for row in texts])
    assert not torch.equal(tables(rotary(), packed), alone)
    by_document = rotary()
    rotate_by_document(by_document)
    reset_before_calls(by_document)
    for _ in range(2):
        assert torch.equal(tables(by_document, packed), alone)
        assert torch.equal(tables(by_document, packed[2:]), alone[:, 2:])
    # One new token of each of two texts, as in generation.
    new = torch.tensor([[40], [12]])
    expected = [tables(rotary(), torch.arange(n + 1)[None])[:, :, -1:] for n in (40, 12)]
    assert torch.equal(tables(by_document, new), torch.cat(expected, 1))


@pytest.mark.slow
@pytest.mark.e2e
def test_layouts_and_resumed_runs_with_packed_documents_learn_what_one_rank_learns(tmp_path):
    place = make_stage_place(tmp_path, "sft", TEXTS, seq_len=128, sequences=4, microbatch=4, data={"packing": True})
    (place / "model.json").write_text(json.dumps(LLAMA))
    train(place, place / "one", "training.steps=4")
    one = curve(place / "one")
    two = ("parallel.dp_shard=2", "training.microbatch=1")
    train(place, place / "two", "training.steps=2", *two)
    train(place, place / "two", "training.steps=4", *two)
    assert_same_curve(curve(place / "two"), one)
