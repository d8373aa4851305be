"""Pairs of answers through the command: the losses of the papers, the reference, and the same on every layout."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import Dpo, load_recipe
from hyper_parallel.errors import CheckpointMismatch, Contradiction
from hyper_parallel.trainer.data.conversations import conversations_of, shape_of
from hyper_parallel.trainer.job import prepare_job
from hyper_parallel.trainer.stages.dpo import DpoStage
from tests.e2e.runs import (
    PAIRS,
    assert_same_curve,
    curve,
    make_stage_place,
    rows,
    train,
    write_records,
)

pytestmark = pytest.mark.e2e

EXPORT = "checkpoint.export=true"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("dpo")
    write_records(place / "plain.jsonl", [{"prompt": "a", "completion": "b"}] * 9)
    return make_stage_place(place, "dpo", PAIRS)


@pytest.mark.slow
def test_every_layout_learns_what_one_rank_does_and_a_resumed_run_keeps_its_reference(place):
    train(place, place / "one", EXPORT)
    one = rows(place / "one" / "metrics.jsonl")
    assert one[0]["loss"] == pytest.approx(math.log(2), rel=1e-12), "the model is its reference"
    assert one[0]["preference"]["accuracy"] == 0.5, "neither answer of a pair is preferred"
    assert one[-1]["preference"]["accuracy"] > 0.5
    spans = json.loads((place / "one" / "timeline.json").read_text())["spans"]
    assert "rollout" not in {span["name"] for span in spans}
    train(
        place,
        place / "four",
        EXPORT,
        "parallel.pp=2",
        "parallel.cp=2",
        "checkpoint.every=2",
        "training.steps=2",
    )
    train(
        place,
        place / "four",
        EXPORT,
        "parallel.dp_shard=2",
        "parallel.tp=2",
        "checkpoint.every=2",
    )
    four = rows(place / "four" / "metrics.jsonl")
    assert_same_curve(curve(place / "four"), curve(place / "one"))
    for mine, theirs in zip(four, one, strict=True):
        assert mine["valid_tokens"] == theirs["valid_tokens"]
        assert mine["preference"] == pytest.approx(theirs["preference"], rel=1e-8, abs=1e-10)
    reference = place / "four" / "reference.npy"
    written = reference.stat()
    train(place, place / "four", EXPORT, "training.steps=4")
    assert reference.stat().st_mtime_ns == written.st_mtime_ns, "it is read by all ranks meanwhile"
    whole = reference.read_bytes()
    np.save(reference, np.load(reference) * 1.001)
    with pytest.raises(CheckpointMismatch, match="reference log-probabilities have changed"):
        train(place, place / "four", EXPORT, "training.steps=5")
    reference.write_bytes(whole[:100])
    with pytest.raises(CheckpointMismatch, match="lacks its reference"):
        train(place, place / "four", EXPORT, "training.steps=5")
    reference.unlink()
    with pytest.raises(CheckpointMismatch, match="lacks its reference"):
        train(place, place / "four", EXPORT, "training.steps=5")


def test_the_second_step_is_that_of_plain_transformers(place):
    def exported(name, *changes):
        train(place, place / name, EXPORT, *changes)
        model = AutoModelForCausalLM.from_pretrained(place / name / "export", dtype=torch.float64)
        keep_float64(model)
        return model

    before = exported("before", "training.steps=1", "training.lr=1e-30")
    after = exported("after", "training.steps=1")
    train(place, place / "both", "training.steps=2")
    job = prepare_job(load_recipe(place / "both" / "config.yaml", ["checkpoint.resume=never"]), progress=False)
    ids, labels = (torch.from_numpy(a) for a in job.packed.train.read(job.train_batches().step_batch(1)))
    mask = labels != -100

    def logp(model):
        logits = model(input_ids=ids).logits.log_softmax(-1)
        picked = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return (picked * mask).sum(-1)

    with torch.no_grad():
        ratio = logp(after) - logp(before)
    loss = -logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).mean()
    second = rows(place / "both" / "metrics.jsonl")[1]
    assert second["loss"] == pytest.approx(float(loss), rel=1e-10)
    assert second["valid_tokens"] == int(mask.sum())


def test_losses_are_those_of_their_papers():
    model = torch.nn.Linear(2, 2)
    workload = hp.Workload(seq_len=4, tokens_per_step=16, microbatch=4)
    plan = hp.plan_of(model, "", workload)
    torch.manual_seed(0)
    logps = -torch.rand(4, 4, dtype=torch.float64)
    labels = torch.tensor([[1, 1, 1, -100], [1, 1, -100, -100], [1, 1, 1, 1], [1, -100, -100, -100]])
    logps = (logps * (labels != -100)).requires_grad_()
    reference = torch.tensor([-1.0, -2.0, -0.5, -0.3], dtype=torch.float64)
    c, r = logps.sum(-1)[0::2], logps.sum(-1)[1::2]
    mc, mr = c / torch.tensor([3, 4]), r / torch.tensor([2, 1])
    h = (c - reference[0::2]) - (r - reference[1::2])
    per_token = (c - reference[0::2]) / torch.tensor([3, 4]) - (r - reference[1::2]) / torch.tensor([2, 1])
    odds = (mc - torch.log(1 - mc.exp())) - (mr - torch.log(1 - mr.exp()))
    wanted = {
        "sigmoid": -0.9 * logsigmoid(0.2 * h) - 0.1 * logsigmoid(-0.2 * h),
        "hinge": torch.clamp(1 - 0.2 * h, min=0),
        "ipo": (per_token - 1 / 0.4) ** 2,
        "simpo": -logsigmoid(0.2 * (mc - mr) - 0.5),
        "orpo": -mc - 0.2 * logsigmoid(odds),
    }
    for name, losses in wanted.items():
        smooth = 0.1 if name == "sigmoid" else 0.0
        settings = Dpo(loss_type=name, beta=0.2, label_smoothing=smooth)
        stage = DpoStage(plan, torch.device("cpu"), settings)
        given = {"shift_labels": labels} | ({} if name in ("orpo", "simpo") else {"reference": reference})
        assert stage.objective(logps, given).item() == pytest.approx(losses.mean().item(), rel=1e-12), name


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {
            "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
        },
        {
            "prompt": [{"role": "user", "content": "q"}],
            "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "b"}],
        },
    ],
    ids=["prompt", "alpaca", "sharegpt", "whole conversations", "turns"],
)
def test_pairs_are_read_in_the_formats_of_trl_and_llamafactory(record):
    assert shape_of(record, "text", "here") == "preference"
    asked = {"role": "user", "content": "q"}
    assert [one.messages for one in conversations_of(record, "preference", "here")] == [
        (asked, {"role": "assistant", "content": answer}) for answer in "ab"
    ]


def test_what_does_not_go_together_is_refused_by_name(place):
    for change, match in (
        (
            f"data.source={place / 'plain.jsonl'}",
            "trains on pairs of answers, but the source holds conversations",
        ),
        ("stage=sft", "the source holds pairs"),
        ("training.microbatch=1", "in the same microbatch"),
        ("training.tokens_per_step=192", "whole pairs"),
    ):
        with pytest.raises(Contradiction, match=match):
            train(
                place,
                place / "refused",
                change,
                *(["training.microbatch=1"] if "192" in change else []),
            )


def test_pairs_stay_neighbours_in_every_order(place):
    job = prepare_job(load_recipe(place / "recipe.yaml", [f"output_dir={place / 'order'}"]), progress=False)
    batches = job.train_batches()
    assert batches.num_sequences == 12
    parts = [{"source": str(place / "records.jsonl"), "weight": w} for w in (3, 1)]
    job = prepare_job(load_recipe(place / "recipe.yaml", [f"data.source={json.dumps(parts)}"]), progress=False)
    mixed = job.train_batches()
    rows = np.concatenate([mixed.step_batch(i) for i in range(256)]).reshape(-1, 2)
    assert (rows[:, 1] == rows[:, 0] + 1).all()
    assert (rows[:, 0] % 2 == 0).all()
    assert np.bincount(rows[:, 0] // 24).tolist() == [768, 256], "by weight"
    assert set(rows[:, 0]) == set(range(0, 48, 2)), "all of both sources"
    seen = np.concatenate([batches.step_batch(i) for i in range(3)]).reshape(-1, 2)
    assert (seen[:, 1] == seen[:, 0] + 1).all()
    assert (seen[:, 0] % 2 == 0).all()
    assert len(set(seen[:, 0])) == 12


@pytest.mark.slow
def test_orpo_is_a_stage_too_with_adapters_on_four_ranks_as_on_one(place):
    adapters = ("lora.r=2", "data.seq_len=32", "training.steps=2")
    tokens = "training.tokens_per_step=256"
    train(place, place / "loss", *adapters, tokens, "dpo.loss_type=orpo", "dpo.beta=0.3")
    axes = ("parallel.tp=2", "parallel.pp=2")
    train(place, place / "stage", *adapters, tokens, "stage=orpo", "orpo.beta=0.3", *axes)
    assert_same_curve(curve(place / "stage"), curve(place / "loss"))
    assert not (place / "stage" / "reference.npy").exists()
    with pytest.raises(Contradiction, match=r"`dpo.beta` applies to `stage: dpo` only"):
        train(place, place / "refused", "stage=orpo", "dpo.beta=0.3")


def test_scores_that_differ_by_rounding_only_are_no_preference():
    workload = hp.Workload(seq_len=64, tokens_per_step=256 * 64, microbatch=256)
    plan = hp.plan_of(torch.nn.Linear(2, 2), "", workload)
    torch.manual_seed(0)
    logps = -torch.rand(256, 64) * 6
    own = logps.double().sum(-1)
    batch = {"shift_labels": torch.ones(256, 64, dtype=torch.long), "reference": own}

    def accuracy(logps):
        stage = DpoStage(plan, torch.device("cpu"), Dpo(beta=0.1))
        stage.objective(logps, batch)
        return stage.record()["preference"]["accuracy"]

    noise = logps.sum(-1).double() - own
    assert (noise[0::2] - noise[1::2]).abs().max() > 0, "sums of float32 are rounded"
    assert accuracy(logps) == 0.5
    moved = logps.clone()
    moved[0::2, 0] += 0.01
    assert accuracy(moved) == 1
    moved[0:128:2, 0] -= 0.02
    assert accuracy(moved) == 0.5
    moved[0::2] = logps[0::2]
    moved[1, 0] += 0.01
    assert accuracy(moved) == (127 / 2) / 128
