"""Several optimizer steps from the same completions, and steps that too few effective samples leave out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.errors import Contradiction
from hyper_parallel.trainer.data import load_tokenizer
from tests.e2e.runs import QUESTIONS, make_stage_place, rows, train

pytestmark = pytest.mark.e2e

REWARD = '''
def digits(prompts, completions, answer, **_):
    """Share of the first three characters that are digits."""
    return [sum(c.isdigit() for c in text[:3]) / 3 for text in completions]
'''
TWICE = ("grpo.num_iterations=2", "training.lr_schedule=constant", "training.lr=0.001")
EXPORT = "checkpoint.export=true"
AHEAD = ("grpo.rollout_ranks=1", "grpo.max_staleness=1", "training.deterministic=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("iterations")
    (place / "twice_rewards.py").write_text(REWARD)
    grpo = {
        "num_generations": 4,
        "max_completion_length": 3,
        "reward_funcs": ["twice_rewards.digits"],
    }
    shape = {"seq_len": 56, "sequences": 16, "microbatch": 4}
    return make_stage_place(place, "grpo", QUESTIONS, **shape, grpo=grpo, training={"steps": 4})


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)


def logprobs_of(run, made):
    """[N, S] log-probabilities of completions by an exported model, and the model."""
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float64)
    keep_float64(model)
    logp = model(made["tokens"][:, :-1]).logits.log_softmax(-1)
    return logp.gather(-1, made["tokens"][:, 1:, None])[..., 0], model


@pytest.mark.slow
def test_a_second_step_is_that_of_decoupled_ppo(place):
    """The fourth step in plain transformers: completions by the first weights, proximal those after two steps."""
    epsilon, high = 2e-3, 5e-3
    words = (*TWICE, *AHEAD, f"grpo.epsilon={epsilon}", f"grpo.epsilon_high={high}")
    for steps in (2, 3, 4):
        more = (f"training.steps={steps}", EXPORT)
        train(place, place / f"after {steps}", *words, *more)
    row = rows(place / "after 4" / "metrics.jsonl")[3]
    made = load_file(place / "after 4" / "rollouts" / "step_00000002.0.safetensors")
    proximal = logprobs_of(place / "after 2", made)[0].detach()
    logp, model = logprobs_of(place / "after 3", made)
    sampled = made["versions"][:, 1:] >= 0
    assert (made["versions"][:, 1:][sampled] == 0).all()
    tokenizer = load_tokenizer(place / "after 4" / "export")
    texts = [tokenizer.decode(t[s], skip_special_tokens=True) for t, s in
             zip(made["tokens"][:, 1:], sampled, strict=True)]  # fmt: skip
    groups = torch.tensor([sum(c.isdigit() for c in t[:3]) / 3 for t in texts]).double().view(4, 4)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    gained = advantages.view(-1, 1)
    grown = (proximal - made["logprobs"][:, 1:]).exp().clamp(max=2.0)
    ratio = (logp - proximal).exp()
    kept = torch.where(gained > 0, ratio <= 1 + high, ratio >= 1 - epsilon) | (gained == 0)
    assert 0.1 < float((kept & sampled).sum() / sampled.sum()) < 0.95
    least = torch.minimum(ratio * gained, ratio.clamp(1 - epsilon, 1 + high) * gained)
    (-(grown * least * sampled).sum() / sampled.sum()).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-10)
    clipped = float((~kept & sampled).sum() / sampled.sum())
    assert row["rollout"]["clip_ratio"] == pytest.approx(clipped, abs=1e-12)
    assert row["rollout"]["age"] == 1
    assert row["valid_tokens"] == int(sampled.sum())


def curve(out):
    return [
        (r["loss"], r["grad_norm"], r["rollout"]["reward"], r["rollout"]["clip_ratio"])
        for r in rows(out / "metrics.jsonl")
    ]


def flat(numbers):
    return [x for row in numbers for x in row]


@pytest.mark.slow
def test_layouts_learn_alike_and_a_run_goes_on_between_rollouts(place):
    held = (*TWICE, "grpo.beta=0.1", "data.validation=records.jsonl", "training.eval_every=1")
    train(place, place / "one", *held)
    one = curve(place / "one")
    assert one[0][2] == one[1][2]
    assert one[2][2] == one[3][2]
    assert one[0][:2] != one[1][:2]
    assert [row["tokens_seen"] for row in rows(place / "one" / "metrics.jsonl")] == [
        0,
        896,
        896,
        1792,
    ]
    train(place, place / "two", *held, "parallel.dp_shard=2", "grpo.rollout_ranks=1")
    assert flat(curve(place / "two")) == pytest.approx(flat(one), rel=1e-9, abs=1e-12)
    every = (*held, "checkpoint.every=2")
    train(place, place / "on", *every, "training.steps=2", "parallel.tp=2")
    train(place, place / "on", *every, "parallel.dp_replicate=2")
    assert flat(curve(place / "on")) == pytest.approx(flat(one), rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_steps_of_few_effective_samples_are_left_out(place):
    words = (*AHEAD, "grpo.max_staleness=2", "training.lr=0.03", "training.steps=8")
    words = (*words, "training.lr_schedule=constant")
    train(place, place / "all", *words)
    shares = [row["rollout"]["effective_samples"] for row in rows(place / "all" / "metrics.jsonl")]
    least = sorted(shares)[3]
    train(place, place / "gated", *words, f"grpo.min_effective_samples={least}")
    gated = rows(place / "gated" / "metrics.jsonl")
    left_out = [row["rollout"]["effective_samples"] < least for row in gated]
    assert 0 < sum(left_out) < 8
    assert [bool(row["skipped"]) for row in gated] == left_out
    first, common = left_out.index(True), (*words, f"grpo.min_effective_samples={least}", EXPORT)
    for steps in (first, first + 1):
        train(place, place / f"gated {steps}", *common, f"training.steps={steps}")
    before, after = (load_file(place / f"gated {first + i}/export/model.safetensors") for i in (0, 1))
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["grpo.num_iterations=2", "checkpoint.every=3"], "saved between rollouts"),
        (["grpo.epsilon=0.1"], "single optimizer step per rollout"),
        (["grpo.min_effective_samples=0.5"], "all samples are on-policy"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(place, change, match):
    with pytest.raises(Contradiction, match=match) as caught:
        train(place, place / "refused", *change)
    assert caught.value.hint
    assert not (place / "refused").exists()
