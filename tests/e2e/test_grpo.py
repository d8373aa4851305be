"""Reinforcement learning through the command: completions, rewards, advantages, and the same on every layout."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import Grpo
from hyper_parallel.errors import BadValue, Contradiction, NotImportable
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.stages.grpo import GrpoStage
from hyper_parallel.trainer.stages.rewards import (
    check_columns,
    exact_match,
    prefix_match,
    score,
)
from hyper_parallel.trainer.stages.rollouts import Sampler
from hyper_parallel.trainer.stages.sampling import sample, uniform
from tests.e2e.runs import CONFIG, QUESTIONS, make_stage_place, rows, train, write_records

pytestmark = pytest.mark.e2e

OWN = '''
def digits(prompts, completions, answer, **_):
    """Share of the first three characters that are digits."""
    assert all("+" in p for p in prompts), prompts
    assert all(int(a) >= 0 for a in answer), answer
    return [sum(c.isdigit() for c in text[:3]) / 3 for text in completions]

def wrong(prompts, completions, answer):
    return [float("nan")] * len(completions)

def in_words(completions, ground_truth, levels=None, **kw):
    """Keeps its keywords, and rewards the length."""
    import json
    from pathlib import Path
    kept = {**kw, "completions": completions, "ground_truth": ground_truth, "levels": levels}
    with Path("seen.jsonl").open("a") as file:
        file.write(json.dumps(kept) + "\\n")
    return [len(text) + len(truth) for text, truth in zip(completions, ground_truth)]

def without(completions, solution, *, difficulty, **_):
    return [0.0] * len(completions)
'''
TALKS = [
    {
        "prompt": [{"role": "system", "content": "brief"}, {"role": "user", "content": f"{a}?"},
                   {"role": "assistant", "content": "say"}, {"role": "user", "content": f"{a}+{b}="}],
        "ground_truth": str(a + b), "levels": [a, b],
    }
    for a in range(4) for b in range(4)
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("grpo")
    (place / "own_rewards.py").write_text(OWN)
    grpo = {
        "num_generations": 4,
        "max_completion_length": 3,
        "reward_funcs": ["own_rewards.digits", "exact_match"],
    }
    shape = {"seq_len": 56, "sequences": 16, "microbatch": 4}
    return make_stage_place(place, "grpo", QUESTIONS, **shape, grpo=grpo)


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)


def records(out):
    return [(r["loss"], r["grad_norm"], r["valid_tokens"], r["rollout"]) for r in rows(out / "metrics.jsonl")]


@pytest.mark.slow
def test_layouts_sample_reward_and_learn_alike_and_a_resumed_run_goes_on(place):
    train(place, place / "one")
    one = records(place / "one")
    assert [r["rollout"]["groups_without_spread"] < 1 for r in rows(place / "one" / "metrics.jsonl")]
    for name, layout in (
        ("replicas", ["parallel.dp_shard=1", "parallel.dp_replicate=2"]),
        ("tensor", ["parallel.dp_shard=1", "parallel.tp=2", "training.microbatch=8"]),
    ):
        train(place, place / name, *layout)
        for mine, theirs in zip(records(place / name), one, strict=True):
            assert mine[2] == theirs[2], "the same tokens were sampled"
            assert mine[:2] == pytest.approx(theirs[:2], rel=1e-10, abs=1e-12)
            for key, value in theirs[3].items():
                assert mine[3][key] == pytest.approx(value, rel=1e-10, abs=1e-12), key
    train(
        place,
        place / "shard",
        "parallel.dp_shard=2",
        "checkpoint.every=2",
        "training.steps=2",
        "training.lr_schedule=constant",
    )
    train(place, place / "shard", "parallel.dp_shard=1", "training.lr_schedule=constant")
    assert records(place / "shard")[1][2] == one[1][2]
    assert records(place / "shard")[1][3] == pytest.approx(one[1][3], rel=1e-10, abs=1e-12)
    assert [r["step"] for r in rows(place / "shard" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
def test_rewards_rise(place):
    train(
        place,
        place / "rise",
        "training.steps=30",
        "training.dtype=float32",
        "grpo.reward_funcs=[own_rewards.digits]",
        "training.microbatch=16",
        "training.tokens_per_step=3584",
        "checkpoint.export=true",
        "data.validation=records.jsonl",
        "training.eval_every=15",
    )
    rewards = [r["rollout"]["reward"] for r in rows(place / "rise" / "metrics.jsonl")]
    assert max(rewards[:3]) < 0.2
    assert min(rewards[-3:]) > 0.5
    first, _, last = rows(place / "rise" / "eval.jsonl")
    assert first["rollout"]["reward"] < 0.2
    assert last["rollout"]["reward"] > 0.5
    assert last["loss"] == pytest.approx(-last["rollout"]["reward"], rel=1e-6)


@pytest.mark.slow
def test_held_out_prompts_are_rewarded_alike_on_every_layout(place):
    """Five prompts, so that ranks have rows that are none."""
    write_records(place / "held_out.jsonl", QUESTIONS[3:8])
    words = ("data.validation=held_out.jsonl", "training.eval_tokens=280", "training.steps=1")
    found = {}
    for name, layout in (
        ("one", ["training.microbatch=1"]),
        ("two", ["parallel.dp_shard=2"]),
        ("tensor", ["parallel.tp=2"]),
        ("held near", ["grpo.beta=0.1"]),
        ("apart", ["grpo.rollout_ranks=1", "grpo.max_staleness=1"]),
    ):
        train(place, place / f"eval {name}", *words, *layout)
        found[name] = rows(place / f"eval {name}" / "eval.jsonl")[0]
        assert found[name]["tokens"] == found["one"]["tokens"] <= 5 * 3
        assert found[name]["loss"] == pytest.approx(-found[name]["rollout"]["reward"], rel=1e-10)
        for key in ("reward", "reward_digits", "completion_tokens", "stopped"):
            value = found["one"]["rollout"][key]
            assert found[name]["rollout"][key] == pytest.approx(value, rel=1e-12), key
    assert found["one"]["rollout"]["completion_tokens"] * 5 == found["one"]["tokens"]


def read_export(run):
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float64)
    keep_float64(model)
    return model


def test_a_step_is_that_of_the_formula(place):
    """Recompute steps in plain transformers from the same weights and the same draws."""
    common = ("training.lr_schedule=constant", "checkpoint.export=true")
    train(place, place / "zero", *common, "training.steps=1", "training.lr=1e-30")
    reference = read_export(place / "zero")
    check_step(place, records(place / "zero")[0], reference, 0)
    held = (*common, "grpo.beta=0.5", "training.lr=0.1")
    train(place, place / "first", *held, "training.steps=1")
    train(place, place / "second", *held, "training.steps=2")
    _, second = records(place / "second")
    assert second[3]["kl"] > 1e-3, "the weights have moved"
    check_step(place, second, read_export(place / "first"), 1, reference, 0.5)


@pytest.mark.slow
def test_adapters_keep_no_copy_of_the_rest_and_a_resumed_run_keeps_its_reference(place):
    held = (
        "training.lr_schedule=constant",
        "grpo.beta=0.5",
        "training.lr=0.1",
        "lora.r=2",
        "lora.target_modules=[q_proj,down_proj]",
        "checkpoint.every=1",
        "checkpoint.export=false",
    )
    train(place, place / "lora", *held)
    train(place, place / "lora on", *held, "training.steps=1", "parallel.dp_shard=2")
    train(place, place / "lora on", *held, "parallel.tp=2", "training.microbatch=8")
    for mine, theirs in zip(records(place / "lora on"), records(place / "lora"), strict=True):
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-9, abs=1e-11)
        assert mine[3]["kl"] == pytest.approx(theirs[3]["kl"], rel=1e-9, abs=1e-12)


def check_step(place, recorded, model, done, reference=None, beta=0.0):
    """Compare a record with step `done` + 1 of a model in plain transformers."""
    tokenizer = load_tokenizer(place / "zero" / "export")
    _, norm, valid, record = recorded
    from hyper_parallel.config import load_recipe
    from hyper_parallel.trainer.job import prepare_job

    job = prepare_job(load_recipe(place / "zero" / "config.yaml", ["checkpoint.resume=never"]), progress=False)
    order = job.train_batches().step_batch(done)
    assert (order.reshape(4, 4) == order[::4, None]).all(), "groups of one prompt"
    inputs, labels = job.packed.train.read(order)
    draws = np.stack(list(uniform(0, done + 1, 0, 16, 3)))
    total, rewards, terms, apart = 0, [], [], torch.zeros(())
    stop = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for row, label, drawn in zip(inputs, labels, draws, strict=True):
        start = int((label != -100).argmax()) + 1
        ids, made = list(row[:start]), []
        for u in drawn:
            probabilities = model(torch.tensor([ids])).logits[0, -1].softmax(-1).cumsum(-1)
            token = int(torch.searchsorted(probabilities, u * probabilities[-1], right=True))
            ids, made = [*ids, token], [*made, token]
            if token in stop:
                break
        text = tokenizer.decode(made, skip_special_tokens=True)
        answer = tokenizer.decode(label[label != -100], skip_special_tokens=True)
        rewards.append(sum(c.isdigit() for c in text[:3]) / 3 + (text.strip() == answer.strip()))
        logp = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        logp = logp.gather(1, torch.tensor(made)[:, None])
        terms.append(logp.sum())
        if reference is not None:
            with torch.no_grad():
                before = reference(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
            ratio = (before.gather(1, torch.tensor(made)[:, None]) - logp).exp()
            apart = apart + (ratio - ratio.log() - 1).sum()
        total += len(made)
    groups = np.array(rewards).reshape(4, 4)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    objective = -sum(a * t for a, t in zip(advantages.ravel(), terms, strict=True)) / total
    objective = objective + beta * apart / total
    objective.backward()
    grads = [p.grad.square().sum() for p in model.parameters()]
    assert valid == total
    assert record["reward"] == pytest.approx(groups.mean(), rel=1e-10)
    assert norm == pytest.approx(float(torch.stack(grads).sum().sqrt()), rel=1e-10)
    assert record["logprob_error"] < 1e-12
    if reference is not None:
        assert record["kl"] == pytest.approx(float(apart.detach()) / total, rel=1e-9)


def test_a_sequence_is_drawn_alike_in_any_batch(place):
    torch.manual_seed(0)
    from transformers import AutoConfig

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, "vocab_size": 264}), dtype=torch.float64)
    prompts = torch.randint(0, 264, (6, 12))
    starts = torch.tensor([3, 5, 8, 11, 2, 9])
    draws = torch.from_numpy(np.stack(list(uniform(7, 2, 0, 6, 4))))
    read = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    made = sample(model, prompts, starts, stops=[1], max_completion_length=4, draws=draws, microbatch=4)
    # Prompts are read once, at most 4 at a time; then a pass reads one token of each sequence.
    assert max(rows for rows, _ in read) == 4
    assert sum(rows for rows, width in read if width > 1) == 6
    assert sum(rows for rows, width in read if width == 1) == int((made.ends - starts - 1).sum())
    assert (made.ends <= 12).all()
    assert (made.ends[~made.stopped] == (starts + 4).clamp(max=12)[~made.stopped]).all()
    for i in range(6):
        alone = sample(
            model,
            prompts[i : i + 1],
            starts[i : i + 1],
            stops=[1],
            max_completion_length=4,
            draws=draws[i : i + 1],
            microbatch=1,
        )
        assert torch.equal(alone.tokens[0, : alone.ends[0]], made.tokens[i, : made.ends[i]])


def test_a_prompt_of_several_turns_is_completed_behind_the_last_and_rewards_read_the_columns(place):
    write_records(place / "talks.jsonl", TALKS)
    words = ("data.source=talks.jsonl", "data.seq_len=160", "training.tokens_per_step=2560")
    words = (
        *words,
        "training.steps=1",
        "training.lr=1e-30",
        "data.holdout=0.25",
        "parallel.dp_shard=2",
    )
    rewards = "grpo.reward_funcs=[own_rewards.in_words]"
    train(place, place / "talks", *words, rewards, "training.eval_every=1")
    seen = rows(place / "seen.jsonl")
    sizes = {len(call["completions"]) for call in seen}
    assert sizes == {4, 8}, "two shares of a step, and four held-out prompts"
    for call in seen:
        assert {*call} == {"prompts", "completions", "completion_ids", "ground_truth", "levels"}
        facts = (call[k] for k in ("prompts", "completions", "completion_ids", "ground_truth", "levels"))
        for prompt, text, ids, truth, (a, b) in zip(*facts, strict=True):
            assert prompt == f"system\nbrief\nuser\n{a}?\nassistant\nsay\nuser\n{a}+{b}=\nassistant\n"
            assert truth == str(a + b)
            assert len(ids) <= 3
            assert "say" not in text
    (row,) = rows(place / "talks" / "metrics.jsonl")
    trained = [call for call in seen if len(call["completions"]) == 8]
    lengths = [
        len(t) + len(g) for call in trained for t, g in zip(call["completions"], call["ground_truth"], strict=True)
    ]
    assert row["rollout"]["reward"] == pytest.approx(np.mean(lengths), rel=1e-12)


def test_a_function_gets_the_columns_that_it_names():
    given = {"prompts": ["p"] * 2, "completions": ["a", "b"], "completion_ids": [[1], [2]]}
    given |= {"ground_truth": ["1", "2"], "level": [None, 3]}

    def named(completions, *, level, other=None):
        assert other is None
        return [0 if one is None else np.float32(one) for one in level]

    class Called:
        def __call__(self, ground_truth, **more):
            assert {*more} == {*given} - {"ground_truth"}
            return [int(one) for one in ground_truth]

    assert score("named", named, given, {"rows": []}) == [0.0, 3.0]
    assert score("called", Called(), given, {"rows": []}) == [1.0, 2.0]
    assert score("exact_match", exact_match, {**given, "answer": ["a", 7]}, {"rows": []}) == [
        1.0,
        0.0,
    ]
    check_columns("named", named, ("level",), "here")
    for function, columns, match in (
        (named, (), "level"),
        (exact_match, ("level",), "answer"),
        (Called(), ("answer",), "ground_truth"),
    ):
        with pytest.raises(Contradiction, match="needs a column that the data does not have") as caught:
            check_columns("named", function, columns, "here")
        assert caught.value.got == match
        assert [*caught.value.allowed] == ["prompts", "completions", "completion_ids", *columns]
    for function in (
        lambda completions, **_: completions[0]["content"],
        lambda completions: [1.0, None],
    ):
        with pytest.raises(BadValue):
            score("fails", function, given, {})


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_records_are_means_over_tokens_whatever_the_loss_weighs(loss_type):
    """Two microbatches; advantages of 0 are among them."""
    torch.manual_seed(0)
    plan = hp.plan_of(torch.nn.Linear(2, 2), "", hp.Workload(5, tokens_per_step=20, microbatch=2))
    settings = Grpo(loss_type=loss_type, beta=0.5, num_iterations=2, epsilon=0.1, epsilon_high=0.3)
    stage = GrpoStage(Sampler(None, None, settings, 0), plan, 0)
    logprobs, before, proximal = 0.3 * torch.randn(3, 4, 5, dtype=torch.float64)
    counted = torch.arange(5) < torch.tensor([5, 3, 2, 4])[:, None]
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    per_token = counted / counted.sum()
    if loss_type == "grpo":
        per_token = counted / counted.sum(1, keepdim=True) / 4
    batch = {"advantages": advantages, "weights": per_token.double(), "rollout_logprobs": proximal,
             "proximal_logprobs": proximal, "reference_logprobs": before}  # fmt: skip
    parts = ({name: value[at : at + 2] for name, value in batch.items()} for at in (0, 2))
    losses = [stage.objective(logprobs[2 * i : 2 * i + 2], part) for i, part in enumerate(parts)]
    ratio, gained = (logprobs - proximal).exp(), advantages[:, None]
    divergence = (before - logprobs).exp() - (before - logprobs) - 1
    least = torch.minimum(ratio * gained, ratio.clamp(0.9, 1.3) * gained)
    wanted = ((0.5 * divergence - least) * per_token).sum()
    assert sum(losses).item() == pytest.approx(wanted.item(), rel=1e-12)
    found = stage.record()["rollout"]
    assert found["kl"] == pytest.approx(float(divergence[counted].mean()), rel=1e-12)
    cut = ((ratio < 0.9) & (gained < 0)) | ((ratio > 1.3) & (gained > 0))
    assert 0 < cut[counted].sum() < counted.sum()
    assert found["clip_ratio"] == pytest.approx(float(cut[counted].double().mean()), rel=1e-12)


def test_rewards_by_name():
    assert exact_match([" 12", "1", ""], answer=["12", "12", ""]) == [1.0, 0.0, 1.0]
    assert prefix_match(["12", "13", "123", "2"], answer=["12"] * 4) == [1.0, 0.5, 2 / 3, 0.0]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (["data.packing=true"], Contradiction, "one conversation in a sequence"),
        (["parallel.pp=2"], Contradiction, "does not support pp or cp"),
        (["grpo.num_generations=6"], Contradiction, "whole groups"),
        (["stage=sft"], Contradiction, "applies to `stage: grpo` only"),
        (
            ["grpo.reward_funcs=[own_rewards.none]"],
            NotImportable,
            "`own_rewards.none` cannot be imported",
        ),
        (["grpo.reward_weights=[1.0]"], Contradiction, "exactly one weight"),
        (["grpo.reward_funcs=[own_rewards.wrong]"], BadValue, "one finite number"),
        (["grpo.reward_funcs=[own_rewards.without]"], Contradiction, "needs a column"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_does_not_go_together_is_refused_by_name(place, change, error, match):
    with pytest.raises(error, match=match) as caught:
        train(place, place / "refused", *change)
    assert caught.value.hint or error in (NotImportable, BadValue)
    assert not (place / "refused" / "checkpoints").exists()
