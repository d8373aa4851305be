"""NEFTune's noise: bounds and place of transformers, and the same numbers on every layout."""

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

import hyper_parallel as hp
from hyper_parallel.backends.torch.embedding_noise import EmbeddingNoise, hash32
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import Contradiction
from tests.e2e.runs import assert_same_curve, curve, make_place, rows, train

ALPHA, ROWS, LENGTH, WIDTH = 5.0, 4, 64, 128


@pytest.fixture
def noisy():
    """A model with noise, and what adds it."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=50, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    ))  # fmt: skip
    work = hp.Workload(LENGTH, microbatch=ROWS, compute_dtype="float32", param_dtype="float32")
    hp.parallelize(model, hp.plan_of(model, "", work))
    return model.train(), EmbeddingNoise.attach(model, ALPHA)


def noise_of(model, ids):
    """What is added to the embeddings in a forward pass."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(input_ids=ids, use_cache=False)
    hook.remove()
    return (seen[0] - model.model.embed_tokens.weight[ids]).detach()


@pytest.mark.torch
def test_noise_is_uniform_within_the_bound_of_transformers(noisy):
    model, noise = noisy
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    noise.key = 7
    found, bound = noise_of(model, ids), ALPHA / math.sqrt(LENGTH * WIDTH)
    embedding = torch.nn.Embedding(50, WIDTH).train()
    embedding.neftune_noise_alpha = ALPHA
    theirs = neftune_post_forward_hook(embedding, None, torch.zeros(ROWS, LENGTH, WIDTH))
    for one in (found, theirs):
        assert 0.999 * bound < one.abs().max() < 1.0001 * bound
        # 32,768 numbers: four standard errors.
        assert abs(one.mean()) < 4 * bound / math.sqrt(3 * one.numel())
        assert one.var().item() == pytest.approx(bound**2 / 3, rel=0.03)
    # No axis repeats: numbers of rows, positions and features are not alike.
    for dim in range(3):
        flat = found.transpose(0, dim).reshape(found.shape[dim], -1)[:4]
        likeness = torch.corrcoef(flat) - torch.eye(len(flat))
        assert likeness.abs().max() < 0.3 if dim else likeness.abs().max() < 0.05


@pytest.mark.torch
def test_noise_is_a_function_of_key_and_row_and_is_not_there_in_evaluation(noisy):
    model, noise = noisy
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    noise.key = 7
    first = noise_of(model, ids)
    assert torch.equal(noise_of(model, ids.flip(0)).flip(0), first), "whatever the batch is"
    other = ids.clone()
    other[0, -1] += 1
    changed = noise_of(model, other)
    assert torch.allclose(changed[1:], first[1:], atol=1e-6)
    assert not torch.allclose(changed[0, :-1], first[0, :-1], atol=1e-3)
    noise.key = 8
    assert not torch.allclose(noise_of(model, ids), first, atol=1e-3)
    assert noise_of(model.eval(), ids).abs().max() == 0
    numbers = torch.arange(1 << 16) * 65521
    assert len(hash32(numbers).unique()) == len(numbers), "no two of them become one"


@pytest.mark.e2e
@pytest.mark.slow
def test_every_layout_trains_with_the_same_noise(tmp_path):
    place = make_place(tmp_path)
    noise = (
        "training.neftune_noise_alpha=5",
        "training.eval_tokens=100",
        "checkpoint.export=false",
        "training.warmup_steps=1",
        "training.steps=2",
    )
    train(place, tmp_path / "plain", *noise[1:])
    train(place, tmp_path / "one", *noise)
    plain, one = curve(tmp_path / "plain"), curve(tmp_path / "one")
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(plain, one, strict=True))
    first = [rows(tmp_path / name / "eval.jsonl")[0]["loss"] for name in ("plain", "one")]
    assert first[0] == first[1], "an evaluation has none"
    for name, words in {
        "stages": ("parallel.cp=2", "parallel.pp=2"),
        "grid": ("parallel.tp_x=2", "parallel.tp_y=2"),
        "two": ("parallel.dp_shard=2", "training.microbatch=1", "training.recompute=full"),
    }.items():
        train(place, tmp_path / name, *noise, *words)
        assert_same_curve(curve(tmp_path / name), one)
    train(place, tmp_path / "resumed", *noise, "training.steps=1")
    train(place, tmp_path / "resumed", *noise)
    assert curve(tmp_path / "resumed") == one
    for words in (("offload.budget=auto",), ("stage=grpo", "data.holdout=0", "data.packing=false")):
        with pytest.raises(Contradiction, match="neftune_noise_alpha"):
            load_recipe(place / "recipe.yaml", [noise[0], *words])
