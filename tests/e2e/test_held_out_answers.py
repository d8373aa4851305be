"""Held-out pairs and answers through the command: loss, accuracy and margin on every layout, and by plain torch."""

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.trainer.job import prepare_job
from tests.e2e.runs import (
    ANSWERS,
    PAIRS,
    assert_same_curve,
    curve,
    make_stage_place,
    rows,
    train,
    write_records,
)
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e

STAGES = {
    "dpo": ("dpo.beta=0.5",),
    "orpo": (),
    "kto": ("kto.beta=0.5", "kto.undesirable_weight=0.75"),
    "rm": ("rm.center_rewards_coefficient=0.05",),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("held_out")
    write_records(place / "answers.jsonl", ANSWERS)
    write_records(place / "few.jsonl", PAIRS[:2])
    changes = {
        "data": {"holdout": 0.25},
        "training": {"steps": 2, "eval_every": 1},
        "checkpoint": {"every": 1},
    }
    return make_stage_place(place, "dpo", PAIRS, seq_len=32, **changes)


def run(place, stage, out, *overrides):
    source = () if stage != "kto" else (f"data.source={place / 'answers.jsonl'}",)
    train(place, place / out, f"stage={stage}", *STAGES[stage], *source, *overrides)
    return rows(place / out / "eval.jsonl")


@pytest.fixture(scope="module")
def one(place):
    """The evaluations of two steps on one rank, by stage."""
    return {stage: run(place, stage, stage, "checkpoint.export=true") for stage in STAGES}


def held_out(place, stage):
    kept = load_recipe(place / stage / "config.yaml", ["checkpoint.resume=never"])
    packed = prepare_job(kept, progress=False).packed
    at = torch.arange(len(packed.holdout)).numpy()
    assert len(at) == 6, "three of twelve, in twos"
    assert len(packed.train) == 18
    return packed.holdout, at, *(torch.from_numpy(a) for a in packed.holdout.read(at))


def logps(place, name, ids, targets):
    model = AutoModelForCausalLM.from_pretrained(place / name / "export", dtype=torch.float64)
    keep_float64(model)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.log_softmax(-1)
    picked = logits.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return (picked * (targets != -100)).sum(-1)


@slow_cells("dpo-tp")
@pytest.mark.parametrize(
    ("stage", "axes"),
    [
        ("dpo", "tp"),
        pytest.param("orpo", "pp", marks=pytest.mark.slow),
        pytest.param("kto", "cp", marks=pytest.mark.slow),
        pytest.param("rm", "pp", marks=pytest.mark.slow),
    ],
)
def test_every_layout_measures_what_one_rank_does(place, one, stage, axes):
    assert [r["step"] for r in one[stage]] == [0, 1, 2]
    # With two data ranks, of one pair each in a round, there is a dummy pair.
    words = [f"parallel.{axis}=2" for axis in ("dp_shard", *axes.split())]
    found = run(place, stage, f"{stage}_ranks", *words)
    assert_same_curve(curve(place / f"{stage}_ranks"), curve(place / stage))
    for mine, theirs in zip(found, one[stage], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
        if mine["step"]:  # before it the model is its reference, and rounding says which answer is better
            assert mine["preference"] == pytest.approx(theirs["preference"], rel=1e-8, abs=1e-10)


@slow_cells("kto", "orpo", "rm", "dpo")
@pytest.mark.parametrize("stage", STAGES)
def test_an_evaluation_leaves_no_trace_and_a_resumed_run_measures_the_same(place, one, stage):
    run(place, stage, f"{stage}_blind", "training.eval_every=0")
    assert curve(place / f"{stage}_blind") == curve(place / stage)
    run(place, stage, f"{stage}_resumed", "training.steps=1")
    found = run(place, stage, f"{stage}_resumed")
    assert [(r["step"], r["loss"]) for r in found] == [
        (r["step"], r["loss"]) for r in (*one[stage][:2], *one[stage][1:])
    ]
    reference = place / f"{stage}_resumed" / "reference_holdout.npy"
    assert reference.exists() == (stage in ("dpo", "kto"))
    if reference.exists():
        reference.unlink()
        with pytest.raises(CheckpointMismatch, match="lacks its reference"):
            run(place, stage, f"{stage}_resumed", "training.steps=3")


def test_the_numbers_are_those_of_plain_transformers(place, one):
    run(place, "dpo", "before", "training.steps=1", "training.lr=1e-30", "checkpoint.export=true")
    _, _, ids, targets = held_out(place, "dpo")
    score = 0.5 * (logps(place, "dpo", ids, targets) - logps(place, "before", ids, targets))
    margin = score[0::2] - score[1::2]
    last = one["dpo"][-1]
    assert last["loss"] == pytest.approx(float(-logsigmoid(margin).mean()), rel=1e-10)
    assert last["preference"]["margin"] == pytest.approx(float(margin.mean()), rel=1e-8)
    assert last["preference"]["accuracy"] == float((margin > 0).double().mean())
    assert last["tokens"] == int((targets != -100).sum())

    _, _, ids, _ = held_out(place, "rm")
    model = AutoModelForSequenceClassification.from_pretrained(place / "rm" / "export", dtype=torch.float64)
    keep_float64(model)
    with torch.no_grad():
        chosen, rejected = model.eval()(input_ids=ids).logits.view(-1, 2).unbind(1)
    loss = -logsigmoid(chosen - rejected).mean() + 0.05 * ((chosen + rejected) ** 2).mean()
    last = one["rm"][-1]
    assert last["loss"] == pytest.approx(float(loss), rel=1e-10)
    assert last["preference"]["accuracy"] == float((chosen > rejected).double().mean())

    sequences, at, ids, targets = held_out(place, "kto")
    moved = logps(place, "kto", ids, targets) - logps(place, "before", ids, targets)
    answers, kl = moved[0::2], moved[1::2].mean().clamp(min=0)
    good = torch.from_numpy(sequences.desirable(at[0::2]))
    gain = torch.where(good, answers - kl, kl - answers)
    losses = (1 - torch.sigmoid(0.5 * gain)) * torch.where(good, 1.0, 0.75)
    last = one["kto"][-1]
    assert last["loss"] == pytest.approx(float(losses.mean()), rel=1e-10)
    assert last["preference"]["kl"] == pytest.approx(float(kl), rel=1e-8, abs=1e-12)
    assert last["tokens"] == int((targets[0::2] != -100).sum())


def test_pairs_of_a_file_of_their_own(place):
    words = ("data.holdout=0", f"data.validation={place / 'few.jsonl'}", "training.steps=1")
    found = run(place, "orpo", "validation", *words)
    assert [len(rows(place / "few.jsonl")), len(found)] == [2, 2]
    assert found[-1]["preference"]["accuracy"] in (0, 0.5, 1)
