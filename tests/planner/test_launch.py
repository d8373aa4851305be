"""Launch settings: our recipe is read back to the same plan, others name what they cannot express; the chart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BadValue
from hyper_parallel.ir import Overlap, Rule, Strategy, Workload
from hyper_parallel.mpmd import make_schedule
from hyper_parallel.planner import gantt, launch_settings, plan, plan_recipe

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("devices", "pins"),
    [
        (8, {"pp": 1, "zero": 3, "tp_y": 1}),
        (16, {"pp": 4, "cp": 2, "zero": 3, "tp_y": 1}),
        (16, {"pp": 2, "schedule": "interleaved", "zero": 2, "tp_y": 1}),
    ],
)
def test_our_recipe_plans_the_same(tmp_path, devices, pins):
    chosen = plan(
        "llama-3-8b", "dgx-h100", num_devices=devices,
        pins={**pins, "recompute": "full", "order": "pp>dp_replicate>dp_shard>cp>tp_x>tp_y"},
    )  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(launch_settings(chosen, "ours"), encoding="utf-8")
    again = plan_recipe(load_recipe(file).recipe)
    assert again.strategy == chosen.strategy
    assert again.workload.microbatch == chosen.workload.microbatch
    assert again.step_s == pytest.approx(chosen.step_s)
    assert again.layouts == chosen.layouts


@pytest.mark.parametrize(
    ("pins", "named"),
    [
        ({"tp": 4, "tp_y": 1, "gathered_inputs": "re-gather"}, {"gathered_inputs": "re-gather"}),
        ({"tp_x": 2, "tp_y": 2, "attention_shape": "2d", "attention_scatter": "token"}, {"attention_scatter": "token"}),
        ({"cp": 4, "cp_kind": "all_gather", "tp_y": 1}, {"cp_kind": "all_gather"}),
    ],
)  # fmt: skip
def test_our_recipe_names_how_inputs_and_attention_are_gathered(tmp_path, pins, named):
    fixed = {
        "pp": 1,
        "zero": 3,
        "recompute": "none",
        "order": "pp>dp_replicate>dp_shard>cp>tp_x>tp_y",
    }
    chosen = plan("llama-3-8b", "dgx-h100", num_devices=16, pins={**fixed, **pins})
    settings = launch_settings(chosen, "ours")
    parallel = yaml.safe_load(settings)["parallel"]
    assert named.items() <= parallel.items()
    file = tmp_path / "recipe.yaml"
    file.write_text(settings, encoding="utf-8")
    again = plan_recipe(load_recipe(file).recipe)
    assert again.strategy == chosen.strategy
    assert again.step_s == pytest.approx(chosen.step_s)


def test_megatron_gets_what_it_can_express():
    chosen = plan("qwen3-30b-a3b", "dgx-h100", num_devices=16, pins={"pp": 2, "ep": 8, "cp": 1})
    megatron = launch_settings(chosen, "megatron")
    assert "--pipeline-model-parallel-size 2" in megatron
    assert "--expert-model-parallel-size 8" in megatron
    two = plan("llama-3-8b", "dgx-h100", Workload(8192, 8192 * 64), strategy=Strategy(tp_x=4, tp_y=2))
    assert "# not expressed: two tensor-parallel axes" in launch_settings(two, "megatron")
    assert yaml.safe_load(launch_settings(two, "ours"))["parallel"]["tp_y"] == 2
    for stack in ("deepspeed", "torchtitan"):
        with pytest.raises(BadValue):
            launch_settings(chosen, stack)


def test_a_recipe_keeps_the_dtype_and_names_choices_that_do_not_run():
    work = Workload(8192, 8192 * 64, compute_dtype="float16")
    chosen = plan("llama-3-8b", "dgx-h100", work, strategy=Strategy(dp_shard=8, zero=0))
    settings = launch_settings(chosen, "ours")
    assert "# not supported: zero=0" in settings
    assert yaml.safe_load(settings)["training"]["dtype"] == "float16"


def test_uneven_stages_and_sharded_optimizer_states_are_expressed():
    chosen = plan(
        "llama-3-405b", "cloudmatrix384", num_devices=2048,
        pins={"pp": 16, "tp": 8, "cp": 4, "schedule": "zbv", "zero": 1},
    )  # fmt: skip
    per_rank = [0] * 16
    for rank in range(16):
        per_rank[rank] = sum(chosen.stages[i].layers for i in chosen.strategy.stages_of(rank))
    assert sum(per_rank) == 126
    assert per_rank[0] != per_rank[1]
    assert f"--decoder-first-pipeline-num-layers {per_rank[0]}\n" in launch_settings(chosen, "megatron")
    assert "# not expressed: schedule zbv; 1F1B" in launch_settings(chosen, "megatron")
    assert yaml.safe_load(launch_settings(chosen, "ours"))["parallel"]["zero"] == 1


def test_the_chart_of_a_schedule_file_has_all_its_microbatches(tmp_path):
    path = tmp_path / "actions.csv"
    path.write_text(make_schedule("1f1b", 2, 6).to_csv())
    strategy = Strategy(pp=2, dp_shard=4, schedule_file=str(path))
    workload = Workload(4096, microbatch=1, accumulation_steps=6)
    chosen = plan("llama-3-8b", "dgx-h100", workload, strategy=strategy)
    assert "microbatches" not in gantt(chosen).splitlines()[0]
    shorter = plan("llama-3-8b", "dgx-h100", workload, strategy=replace(strategy, schedule_file=""))
    assert "4 of 6 microbatches" in gantt(shorter).splitlines()[0]


def test_the_chart_has_a_line_for_every_pipeline_rank():
    chosen = plan("llama-3-8b", "dgx-h100", num_devices=16, pins={"pp": 4, "schedule": "zb-h1"})
    lines = gantt(chosen, width=60).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["rank", str(r)] for r in range(4)]
    assert {len(line) for line in lines[1:]} == {70}
    assert all({"F", "I", "W"} <= set(line) for line in lines[1:])


def test_our_recipe_has_the_overlap_of_the_plan():
    strategy = Strategy(tp_x=2, dp_shard=4, overlap=Overlap(tp_chunks=2))
    settings = launch_settings(plan("llama-3-8b", "dgx-h100", strategy=strategy), "ours")
    assert yaml.safe_load(settings)["overlap"] == {"tp": "chunks", "ep": "none", "chunks": 2}


def test_our_recipe_names_the_rules_that_it_omits():
    made = plan("llama-3-8b", "dgx-h100", strategy=Strategy(dp_shard=8))
    assert "not written" not in launch_settings(made, "ours")
    ruled = replace(made, strategy=replace(made.strategy, rules=(Rule("layers.*.up", "replicate"),)))
    assert "# not written: parallel.rules" in launch_settings(ruled, "ours")
