import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from hyper_parallel.config import Training, load_recipe, recipe_to_yaml
from hyper_parallel.errors import Contradiction
from hyper_parallel.trainer import LrSchedule

pytestmark = pytest.mark.torch

KINDS = ("cosine", "wsd", "linear", "constant")
sections = st.builds(
    Training,
    lr_schedule=st.sampled_from(KINDS),
    lr=st.floats(1e-6, 1.0),
    steps=st.integers(2, 500),
    warmup_steps=st.integers(0, 50),
    decay_steps=st.integers(1, 100),
    min_lr_ratio=st.floats(0, 1),
)


@given(sections)
def test_factor_rises_to_the_peak_and_never_rises_again(section):
    schedule = LrSchedule(section)
    factors = [schedule.factor(step) for step in range(1, section.steps + 1)]
    warm = min(section.warmup_steps, section.steps)
    assert all(0 <= f <= 1 for f in factors)
    assert factors[:warm] == sorted(factors[:warm])
    after = factors[warm:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if warm:
        assert factors[warm - 1] == warm / section.warmup_steps


@given(sections)
def test_the_decay_ends_one_step_after_the_last_and_every_step_trains(section):
    if section.steps <= section.warmup_steps or section.lr_schedule == "constant":
        return
    schedule = LrSchedule(section)
    assert math.isclose(schedule.factor(section.steps + 1), section.min_lr_ratio, abs_tol=1e-12)
    assert all(schedule.factor(step) > 0 for step in range(1, section.steps + 1))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 0), (2, 1), (12, 0), (12, 5)])
@pytest.mark.parametrize(
    ("kind", "theirs", "options"),
    [
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("constant", "constant_with_warmup", {}),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "linear"}),
    ],
)
def test_rates_are_those_of_transformers_one_step_earlier_in_warm_up(kind, theirs, options, steps, warmup):
    decay = min(options.get("num_decay_steps", 0), steps - warmup)
    options = options | ({"num_decay_steps": decay} if "num_decay_steps" in options else {})
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = get_scheduler(theirs, optimizer, warmup, steps, scheduler_specific_kwargs=options)
    ratio = options.get("min_lr_rate", 0.0)
    section = Training(
        lr_schedule=kind, lr=2.0, steps=steps, warmup_steps=warmup, decay_steps=decay or None, min_lr_ratio=ratio
    )  # fmt: skip
    schedule = LrSchedule(section)
    for step in range(1, steps + 1):
        (rate,) = scheduler.get_last_lr()
        if step <= warmup:
            assert schedule.lr(step) == pytest.approx(rate + 2.0 / warmup)
        else:
            assert schedule.lr(step) == pytest.approx(rate)
            assert rate > 0
        optimizer.step()
        scheduler.step()


def test_wsd_decays_over_a_tenth_of_the_run_by_default():
    schedule = LrSchedule(Training(steps=200, lr_schedule="wsd", warmup_steps=0, lr=1.0))
    assert schedule.lr(181) == 1.0
    assert schedule.lr(182) < 1.0


def test_the_rate_depends_on_the_step_alone():
    schedule = LrSchedule(Training(lr_schedule="cosine", lr=1.0, steps=10, warmup_steps=2))
    assert [schedule.lr(s) for s in (7, 3, 7)] == [schedule.lr(7), schedule.lr(3), schedule.lr(7)]


THEIRS = (
    ("constant_with_warmup", {}, {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {}),
    ("cosine_with_min_lr", {"min_lr": 0.3, "num_cycles": 1.5}, {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"lr_schedule_args": {}}),
    ("cosine_with_restarts", {}, {}),
    ("cosine_with_restarts", {"num_cycles": 3}, {}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}, {}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.05}, {}),
    ("inverse_sqrt", {}, {}),
    ("inverse_sqrt", {"timescale": 4}, {}),
    ("polynomial", {}, {}),
    ("polynomial", {"lr_end": 0.2, "power": 2.0}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 4}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 4}, {"lr_schedule_args": {}, "decay_steps": 4}),
    ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "1-sqrt", "warmup_type": "cosine"}, {}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 3, "num_stable_steps": 2, "warmup_type": "1-sqrt", "min_lr_ratio": 0.1},
        {},
    ),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(("name", "options", "keys"), THEIRS)
def test_a_schedule_of_transformers_has_its_values_at_every_step(name, options, keys):
    for steps, warmup in ((1, 0), (12, 0), (12, 5), (40, 7), (200, 1)):
        if options.get("num_decay_steps", 0) > steps - warmup:
            continue
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=dict(options))
        section = Training(
            **{"lr": 2.0, "steps": steps, "warmup_steps": warmup, "lr_schedule": name}
            | ({"min_lr_ratio": 0.0} if name == "warmup_stable_decay" else {})
            | {"lr_schedule_args": options}
            | keys
        )
        schedule = LrSchedule(section)
        for step in range(1, steps + 1):
            assert schedule.lr(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12), step
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(
    "words",
    [
        ("training.lr_schedule=polynomial", "training.lr_schedule_args={num_cycles: 2}"),
        ("training.lr_schedule=cosine", "training.lr_schedule_args={num_cycles: 2}"),
        ("training.lr_schedule=cosine_with_restarts", "training.lr_schedule_args={num_cycles: two}"),
        ("training.lr_schedule=polynomial", "training.lr_schedule_args={lr_end: 1.0}"),
        ("training.lr_schedule=inverse_sqrt", "training.lr_schedule_args={timescale: 0}"),
        ("training.lr_schedule=polynomial", "training.min_lr_ratio=0.2"),
        ("training.lr_schedule=inverse_sqrt", "training.min_lr_ratio=0.2"),
        ("training.lr_schedule=cosine_with_min_lr", "training.lr_schedule_args={min_lr: 0, min_lr_rate: 0}"),
        ("training.lr_schedule=warmup_stable_decay", "training.lr_schedule_args={decay_type: steep}"),
    ],
)  # fmt: skip
def test_a_pasted_hint_mends_arguments_of_a_schedule(tmp_path, words):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: m}\nparallel: {dp_shard: 1}\n")
    with pytest.raises(Contradiction) as caught:
        load_recipe(path, words)
    pasted = " ".join(re.findall("`([^`]*)`", caught.value.hint)).split()
    loaded = load_recipe(path, [*words, *pasted])
    (path.parent / "config.yaml").write_text(recipe_to_yaml(loaded.recipe))
    assert load_recipe(path.parent / "config.yaml").recipe.training == loaded.recipe.training


def test_a_stable_decay_ends_at_0_as_in_transformers(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: m}\ntraining: {lr_schedule: warmup_stable_decay, steps: 20}\n")
    loaded = load_recipe(path)
    assert LrSchedule(loaded.recipe.training).factor(21) == 0.0
    path.write_text(recipe_to_yaml(loaded.recipe))
    assert LrSchedule(load_recipe(path).recipe.training).factor(21) == 0.0
