"""Reward models through the command: the loss on plain transformers, every layout, adapters, and what is exported."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import hyper_parallel as hp
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import Rm, load_recipe
from hyper_parallel.errors import Contradiction, ModelUnreadable
from hyper_parallel.trainer.data import IGNORE_INDEX, load_tokenizer
from hyper_parallel.trainer.job import prepare_job
from hyper_parallel.trainer.stages.reward_model import RewardModelStage
from tests.e2e.runs import (
    CONFIG,
    PAIRS,
    assert_same_curve,
    command,
    curve,
    make_stage_place,
    rows,
    train,
    write_records,
)

pytestmark = pytest.mark.e2e

CENTRED = "rm.center_rewards_coefficient=0.05"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_stage_place(tmp_path_factory.mktemp("rm"), "rm", PAIRS)


@pytest.fixture(scope="module")
def one(place):
    """Three steps on one rank."""
    train(place, place / "one", CENTRED, "checkpoint.export=true")
    return rows(place / "one" / "metrics.jsonl")


def scored(directory, ids):
    """Scores by transformers, which finds the last token itself."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    keep_float64(model)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.squeeze(-1)


def step_rows(run, step):
    """Inputs and targets of a step, counted from 1."""
    kept = load_recipe(run / "config.yaml", ["checkpoint.resume=never"])
    job = prepare_job(kept, progress=False)
    at = job.train_batches().step_batch(step - 1)
    return tuple(torch.from_numpy(a) for a in job.packed.train.read(at))


@pytest.mark.slow
def test_every_layout_learns_what_one_rank_does_and_goes_on_bit_for_bit(place, one):
    assert one[-1]["preference"]["accuracy"] > 0.5
    again = ("checkpoint.every=2", "training.steps=2")
    axes = ("parallel.pp=2", "parallel.cp=2")
    train(place, place / "ranks", CENTRED, *again, *axes)
    train(place, place / "ranks", CENTRED, "parallel.dp_shard=2", "parallel.tp=2")
    assert_same_curve(curve(place / "ranks"), curve(place / "one"))
    for mine, theirs in zip(rows(place / "ranks" / "metrics.jsonl"), one, strict=True):
        assert mine["valid_tokens"] == theirs["valid_tokens"] == 8, "one score of each row"
        assert mine["preference"] == pytest.approx(theirs["preference"], rel=1e-8, abs=1e-10)
    train(place, place / "resumed", CENTRED, *again)
    train(place, place / "resumed", CENTRED)
    assert curve(place / "resumed") == curve(place / "one")


def test_the_last_step_is_that_of_plain_transformers_on_the_exported_model(place, one):
    train(place, place / "two_steps", CENTRED, "training.steps=2", "checkpoint.export=true")
    ids, targets = step_rows(place / "one", 3)
    scores = scored(place / "two_steps" / "export", ids)
    chosen, rejected = scores[0::2], scores[1::2]
    loss = -logsigmoid(chosen - rejected).mean() + 0.05 * ((chosen + rejected) ** 2).mean()
    last = one[2]
    assert last["loss"] == pytest.approx(float(loss), rel=1e-10)
    assert last["preference"]["margin"] == pytest.approx(float((chosen - rejected).mean()))
    # The token that is read is the last one that does not pad, in the answer.
    read = targets != IGNORE_INDEX
    assert (read.sum(1) == 1).all()
    assert (targets[read] == ids[read]).all()
    config = json.loads((place / "one" / "export" / "config.json").read_text())
    padding = config["pad_token_id"]
    assert [int((row != padding).nonzero()[-1]) for row in ids] == read.int().argmax(1).tolist()
    assert len(config["id2label"]) == 1


@pytest.mark.slow
def test_scores_are_to_differ_by_the_margin_of_their_pair(place):
    pairs = [{**pair, "margin": 0.5 * i - 1} for i, pair in enumerate(PAIRS)]
    write_records(place / "margins.jsonl", pairs)
    words = (f"data.source={place / 'margins.jsonl'}", "data.holdout=0.25", "training.steps=2")
    axes = ("parallel.pp=2", "parallel.cp=2", "training.lr=1e-30", "checkpoint.export=true")
    train(place, place / "margins", CENTRED, *words, *axes)
    kept = load_recipe(place / "margins" / "config.yaml", ["checkpoint.resume=never"])
    packed = prepare_job(kept, progress=False).packed

    def wanted(part, at):
        ids, _ = part.read(at)
        scores = scored(place / "margins" / "export", torch.from_numpy(ids))
        chosen, rejected = scores[0::2], scores[1::2]
        margins = torch.from_numpy(part.margins(at))[0::2]
        assert margins.unique().numel() > 2
        loss = -logsigmoid(chosen - rejected - margins).mean()
        return float(loss + 0.05 * ((chosen + rejected) ** 2).mean())

    job = prepare_job(kept, progress=False)
    steps = rows(place / "margins" / "metrics.jsonl")
    for step in (0, 1):
        loss = wanted(packed.train, job.train_batches().step_batch(step))
        assert steps[step]["loss"] == pytest.approx(loss, rel=1e-9)
    held = rows(place / "margins" / "eval.jsonl")[0]
    loss = wanted(packed.holdout, np.arange(len(packed.holdout)))
    assert held["loss"] == pytest.approx(loss, rel=1e-9)


def test_an_answer_that_is_too_long_is_scored_where_it_is_cut(place):
    train(
        place,
        place / "short",
        "data.seq_len=36",
        "training.tokens_per_step=144",
        "training.steps=1",
    )
    ids, targets = step_rows(place / "short", 1)
    assert ids.shape[1] == 36
    assert ((targets != IGNORE_INDEX).sum(1) == 1).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own, about transformers
def test_adapters_and_the_head_learn_on_a_layout_what_they_do_on_one_rank(place, one):
    causal = place / "causal"
    train(place, causal, "stage=dpo", "training.steps=1", "checkpoint.export=true")
    AutoModelForCausalLM.from_pretrained(causal / "export")  # has no head `score`
    start = (
        f"model.path={causal / 'export'}",
        "lora.r=2",
        "training.lr=0.05",
        "checkpoint.every=2",
    )
    train(place, place / "lora", *start, "checkpoint.export=true")
    train(place, place / "lora2", *start, "parallel.pp=2", "parallel.tp=2")
    assert_same_curve(curve(place / "lora2"), curve(place / "lora"))
    first, *_, last = rows(place / "lora" / "metrics.jsonl")
    assert first["loss"] == pytest.approx(math.log(2), rel=0.2)
    assert last["loss"] < first["loss"]
    from peft import PeftModel

    ids, _ = step_rows(place / "lora", 1)
    padding = json.loads((place / "lora" / "model" / "config.json").read_text())["pad_token_id"]
    base = AutoModelForSequenceClassification.from_pretrained(
        causal / "export", num_labels=1, pad_token_id=padding, dtype=torch.float64
    )
    adapted = PeftModel.from_pretrained(base, place / "lora" / "export")
    keep_float64(adapted)
    command("checkpoint", "export", str(place / "lora2"), "--merge")
    with torch.no_grad():
        by_peft = adapted.eval()(input_ids=ids).logits.squeeze(-1)
    merged = scored(place / "lora2" / "merged", ids)
    assert merged.numpy() == pytest.approx(by_peft.numpy(), rel=1e-6)


@pytest.mark.slow
def test_completions_are_rewarded_by_a_reward_model(place, one):
    (place / "sums.jsonl").write_text("".join(f'{{"prompt": "{a}+1=", "completion": "{a + 1}"}}\n' for a in range(4)))
    directory = place / "one" / "export"
    grpo = (
        "stage=grpo", f"data.source={place / 'sums.jsonl'}", f"data.tokenizer={directory}", "grpo.num_generations=4",
        "grpo.max_completion_length=6", f"grpo.reward_funcs=[{directory},exact_match]", "training.tokens_per_step=1024",
        "training.steps=1",
    )  # fmt: skip
    words = ("training.deterministic=true", "grpo.rollout_ranks=1")
    train(place, place / "grpo", *grpo, *words)
    train(place, place / "grpo_two", *grpo, "parallel.dp_shard=2")
    record, two = (rows(place / n / "metrics.jsonl")[0]["rollout"] for n in ("grpo", "grpo_two"))
    made = load_file(place / "grpo" / "rollouts" / "step_00000001.0.safetensors")
    assert 0 < made["stopped"].sum() < 16
    # ChatML writes one behind the token that ends an answer.
    (line_break,) = load_tokenizer(directory)("\n", add_special_tokens=False)["input_ids"]
    scores = []
    for tokens, end, stopped in zip(made["tokens"], made["ends"], made["stopped"], strict=True):
        ids = [*tokens[:end].tolist(), *([line_break] if stopped else [])]
        assert len(ids) > 10
        scores.append(scored(directory, torch.tensor([ids])).item())
    assert record["reward_export"] == pytest.approx(np.mean(scores), rel=1e-5)
    assert np.std(scores) > 1e-3
    assert two["reward_export"] == pytest.approx(record["reward_export"], rel=1e-5)
    causal = train(place, place / "other", "stage=dpo", "training.steps=1", "checkpoint.export=true")
    assert causal.exit_code == 0
    for changes, error, match in (
        (
            (f"grpo.reward_funcs=[{place / 'other' / 'export'}]",),
            ModelUnreadable,
            "must contain a reward model",
        ),
        (("data.tokenizer=null",), Contradiction, "different tokenizer"),
    ):
        with pytest.raises(error, match=match):
            train(place, place / "refused", *grpo, *changes)


def test_the_loss_is_that_of_its_formula():
    plan = hp.plan_of(torch.nn.Linear(2, 2), "", hp.Workload(4, tokens_per_step=16, microbatch=4))
    scores = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = np.array([3, 1, 2, 0])
    targets = torch.full((4, 4), IGNORE_INDEX)
    targets[torch.arange(4), torch.from_numpy(ends)] = 7
    r = scores[torch.arange(4), torch.from_numpy(ends)]
    for coefficient in (None, 0.3):
        stage = RewardModelStage(plan, scores.device, Rm(center_rewards_coefficient=coefficient))
        given = scores.clone().requires_grad_()
        loss = stage.objective(given, {"shift_labels": targets})
        wanted = -logsigmoid(r[0::2] - r[1::2]) + (coefficient or 0) * (r[0::2] + r[1::2]) ** 2
        assert loss.item() == pytest.approx(wanted.mean().item(), rel=1e-12)
        loss.backward()
        assert ((given.grad != 0) == (targets != IGNORE_INDEX)).all()
        apart = torch.tensor([0.5, 0.5, -2.0, -2.0], dtype=torch.float64)
        loss = stage.objective(scores, {"shift_labels": targets, "margin": apart})
        wanted = wanted + logsigmoid(r[0::2] - r[1::2]) - logsigmoid(r[0::2] - r[1::2] - apart[0::2])
        assert loss.item() == pytest.approx(wanted.mean().item(), rel=1e-12)


def test_what_does_not_go_together_is_refused_by_name(place):
    for change, match in (
        ("sample_prompt=hello", "needs a model that predicts tokens"),
        ("stage=dpo", "`rm.center_rewards_coefficient` applies to `stage: rm` only"),
        ("training.microbatch=1", "in the same microbatch"),
    ):
        with pytest.raises(Contradiction, match=match):
            train(place, place / "refused", CENTRED, change)
    # A family whose classifier has no linear head of the last hidden state, and one without a classifier.
    for family, match in (
        ("cohere", "cannot build a sequence classifier"),
        ("bert", "has no head `score`"),
    ):
        (place / f"{family}.json").write_text(json.dumps({**CONFIG, "model_type": family}))
        with pytest.raises(ModelUnreadable, match=match):
            train(place, place / "refused", f"model.path={place / family}.json")
    with pytest.raises(Contradiction, match="a reward model has another loss"):
        train(place, place / "refused", "--dry-run", "--topology", "local-cpu")
