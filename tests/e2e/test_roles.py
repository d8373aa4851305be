"""Reinforcement learning whose ranks the planner splits among the roles, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hyper_parallel.errors import DoesNotFit
from hyper_parallel.ir import Plan
from tests.e2e.runs import command, rows

pytestmark = pytest.mark.e2e

RECIPE = Path(__file__).parents[2] / "recipes/grpo_arithmetic.yaml"
SHORT = (
    "training.steps=3",
    "training.warmup_steps=0",
    "training.tokens_per_step=2560",
    "training.microbatch=16",
    "checkpoint.export=false",
    "topology=local-cpu",
)


def words(out, cache, *more):
    where = (f"output_dir={out}", f"data.cache_dir={cache}", "--no-calibrate")
    return ("train", str(RECIPE), *SHORT, *where, *more)


@pytest.mark.slow
def test_the_ranks_of_a_run_are_split_as_planned_and_its_recipe_has_the_numbers(tmp_path):
    auto = (
        "parallel=auto",
        "parallel.world_size=3",
        "grpo.rollout_ranks=auto",
        "grpo.rollout_tp=auto",
    )
    command(*words(tmp_path / "run", tmp_path, *auto, "grpo.max_staleness=1"), report=True)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    # Three ranks cannot share the groups of a step.
    assert plan.roles.rollout_ranks > 0
    assert plan.strategy.world_size + plan.roles.rollout_ranks == 3
    grpo = resolved["grpo"]
    assert (grpo["rollout_ranks"], grpo["rollout_tp"]) == (
        plan.roles.rollout_ranks,
        plan.roles.rollout_tp,
    )
    assert resolved["parallel"]["world_size"] == plan.strategy.world_size
    measured = rows(tmp_path / "run" / "metrics.jsonl")
    assert max(row["rollout"]["age"] for row in measured) <= 1
    # `local-cpu` names no device, so this machine is it, and times are compared.
    assert {row["pred_step_s"] for row in measured} == {plan.roles.step_s}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "predicted, without rollouts" not in page
    # The resolved recipe is one, and plans the same.
    again = ("plan", "--recipe", str(tmp_path / "run" / "config.yaml"), "--json")
    found = json.loads(command(*again).stdout)
    assert found["roles"]["rollout_ranks"] == plan.roles.rollout_ranks
    assert found["roles"]["step_s"] == pytest.approx(plan.roles.step_s)


def test_where_nobody_only_samples_nothing_runs_ahead(tmp_path):
    auto = ("parallel=auto", "parallel.world_size=2", "grpo.rollout_ranks=auto")
    ahead = ("grpo.max_staleness=1", "grpo.partial_rollout=true", "training.steps=1")
    command(*words(tmp_path / "run", tmp_path, *auto, *ahead))
    grpo = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["grpo"]
    assert [grpo[key] for key in ("rollout_ranks", "rollout_tp", "max_staleness")] == [0, 1, 0]
    assert not grpo["partial_rollout"]
    assert "age" not in rows(tmp_path / "run" / "metrics.jsonl")[0]["rollout"]


def test_a_rank_that_cannot_hold_the_model_is_refused_before_any_starts(tmp_path):
    preset = Path(__file__).parents[2] / "src/hyper_parallel/topology/presets/local-cpu.yaml"
    small = tmp_path / "small.yaml"
    small.write_text(preset.read_text().replace("memory_gib: {value: 4,", "memory_gib: {value: 0.001,"))
    one = ("parallel.dp_replicate=1", "grpo.rollout_ranks=1", f"topology={small}")
    with pytest.raises(DoesNotFit, match="only samples"):
        command(*words(tmp_path / "run", tmp_path, *one))
    assert not (tmp_path / "run").exists()
