"""Runs that end where the held-out loss is no better: by the rule of transformers, on all ranks, resumed ones too."""

import random
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import Contradiction
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.loop.early_stopping import EarlyStopping
from tests.e2e.runs import curve, make_place, rows, train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("early"))


ENDS = (
    "checkpoint.export=false",
    "training.steps=9",
    "training.eval_every=1",
    "training.early_stopping_patience=2",
    # No loss of this run falls by so much: the first evaluation after a step is the best one.
    "training.early_stopping_threshold=100",
)


@pytest.mark.torch
def test_the_rule_is_that_of_transformers():
    draw = random.Random(0)
    for _ in range(200):
        patience, threshold = draw.randint(1, 3), draw.choice([0.0, 0.1])
        losses = [draw.choice([0.5, 0.55, 1.0, 2.0, float("nan")]) for _ in range(12)]
        theirs = EarlyStoppingCallback(patience, threshold)
        state = SimpleNamespace(best_metric=None)
        arguments = SimpleNamespace(greater_is_better=False, metric_for_best_model="loss")
        mine, control = EarlyStopping(patience, threshold), SimpleNamespace()
        for loss in losses:
            control.should_training_stop = False
            theirs.on_evaluate(arguments, state, control, {"eval_loss": loss})
            # `Trainer._determine_best_metric` comes behind it.
            best = float("inf") if state.best_metric is None else state.best_metric
            state.best_metric = loss if loss < best else best
            mine.update(loss)
            assert mine.waited == theirs.early_stopping_patience_counter, losses
            assert mine.should_stop == control.should_training_stop
            mine = EarlyStopping(patience, threshold, **mine.state_dict())


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_ends_on_all_ranks_and_one_that_goes_on_remembers(place, tmp_path):
    train(place, tmp_path / "one", *ENDS)
    assert [r["step"] for r in rows(tmp_path / "one" / "eval.jsonl")] == [0, 1, 2, 3]
    assert len(curve(tmp_path / "one")) == 3
    assert steps(tmp_path / "one" / "checkpoints")[-1] == 3, "the last state is saved"
    train(place, tmp_path / "two", *ENDS, "parallel.dp_shard=2")
    assert len(curve(tmp_path / "two")) == 3

    train(place, tmp_path / "goes_on", *ENDS, "training.steps=2")
    train(place, tmp_path / "goes_on", *ENDS)
    assert curve(tmp_path / "goes_on") == curve(tmp_path / "one")
    train(place, tmp_path / "goes_on", *ENDS)
    assert len(curve(tmp_path / "goes_on")) == 3
    train(place, tmp_path / "goes_on", *ENDS, "training.early_stopping_patience=3")
    assert len(curve(tmp_path / "goes_on")) == 4


@pytest.mark.e2e
def test_what_would_have_no_effect_is_refused(place):
    for change, match in (
        (("training.early_stopping_patience=2",), "early stopping needs evaluations"),
        (("training.early_stopping_threshold=0.1",), "no effect without early stopping"),
    ):
        with pytest.raises(Contradiction, match=match):
            load_recipe(place / "recipe.yaml", change)
