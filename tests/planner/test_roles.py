"""Plans of `stage: grpo`: closed forms of a step, splits of the devices against all of them, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from hyper_parallel.config import Recipe, load_recipe
from hyper_parallel.errors import (
    Contradiction,
    DoesNotFit,
    HyperParallelError,
    NoLegalStrategy,
    NotDivisible,
    UnsupportedSharding,
)
from hyper_parallel.ir import Plan, role_tasks
from hyper_parallel.mpmd import on_shared_cores
from hyper_parallel.planner import plan_recipe
from hyper_parallel.sim import steady_step_s
from tests.slow import slow_cells

pytestmark = pytest.mark.unit

MACHINE = """
name: test
description: devices of a test
num_devices: 4
device:
  name: one
  kind: npu
  peak_tflops:
    bfloat16: {{value: 400, source: test, certainty: stated}}
    float32: {{value: 100, source: test, certainty: stated}}
  memory_gib: {{value: {memory}, source: test, certainty: stated}}
  memory_gb_s: {{value: 1600, source: test, certainty: stated}}
tiers:
  - name: node
    size: 0
    kind: full_mesh
    gb_s: {{value: {link}, source: test, certainty: stated}}
    latency_us: {{value: 5, source: test, certainty: stated}}
"""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GRPO = {"num_generations": 4, "max_completion_length": 256}
AUTO = {"rollout_ranks": "auto", "rollout_tp": "auto"}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def make(*, memory=64, link=100, grpo=(), training=(), **sections):
        topology = tmp_path / f"machine_{memory}_{link}.yaml"
        topology.write_text(MACHINE.format(memory=memory, link=link))
        values = {
            "model": {"path": str(tmp_path)},
            "topology": str(topology),
            "stage": "grpo",
            "data": {"source": "x.jsonl", "seq_len": 512, "packing": False},
            "grpo": {**GRPO, **dict(grpo)},
            "training": {"tokens_per_step": 512 * 32, **dict(training)},
            **sections,
        }
        return Recipe.model_validate(values)

    return make


def steady(sample_s, learn_s, staleness, *more):
    steps = 4 * ((staleness or 0) + 2)
    return steady_step_s(role_tasks(sample_s, learn_s, staleness, steps, *more), staleness)


@pytest.mark.parametrize(("sample_s", "learn_s"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_in_turn_and_in_step_take_the_sum_and_ahead_the_longer_role(sample_s, learn_s):
    assert steady(sample_s, learn_s, None) == pytest.approx(sample_s + learn_s, abs=1e-8)
    assert steady(sample_s, learn_s, 0) == pytest.approx(sample_s + learn_s, abs=1e-8)
    for staleness in (1, 2, 5):
        assert steady(sample_s, learn_s, staleness) == pytest.approx(max(sample_s, learn_s), abs=1e-8)


def test_two_roles_on_one_core_gain_nothing_by_running_ahead():
    """While both work each is half as fast; with cores of their own the longer role decides."""
    graph = role_tasks(1.0, 3.0, 1, 12)
    alone = steady_step_s(on_shared_cores(role_tasks(2.0, 6.0, 1, 12), (2.0, 1.0)), 1)
    assert alone == pytest.approx(4.0, abs=1e-6)
    assert steady_step_s(on_shared_cores(graph, ()), 1) == pytest.approx(3.0, abs=1e-8)
    # Two ranks learn, one samples, on two cores: 2 x 3 + 1 seconds of work on two of them.
    shared = role_tasks(1.5 * 1.0, 1.5 * 3.0, 1, 12, (2, 1))
    paced = on_shared_cores(shared, (1.5, 1.5, 1.0))
    assert steady_step_s(paced, 1) == pytest.approx(3.5, abs=1e-6)


def test_a_step_is_sampling_and_learning_and_a_pass_for_the_reference_and_one_for_the_mask(recipe):
    parallel = {"dp_replicate": 2}
    plain = plan_recipe(recipe(parallel=parallel))
    more = plan_recipe(recipe(parallel=parallel, grpo={"beta": 0.1}))
    both = plan_recipe(recipe(parallel=parallel, grpo={"beta": 0.1, "importance_sampling": "mask"}))
    sft = plan_recipe(recipe(parallel=parallel, stage="sft"))
    cost, steps = sft.stages[0].cost, sft.workload.accumulation_steps
    forward = steps * (cost.forward_s + cost.exposed_forward_s)
    assert (plain.step_s, plain.roles.learn_s) == (sft.step_s, sft.step_s)
    twice = plan_recipe(recipe(parallel=parallel, grpo={"beta": 0.1, "num_iterations": 2}))
    assert twice.roles.learn_s == pytest.approx(2 * sft.step_s + forward)
    assert 2 * twice.roles.step_s == pytest.approx(twice.roles.sample_s + twice.roles.learn_s)
    exact = plan_recipe(recipe(parallel=parallel, grpo={"exact_logprobs": True}))
    assert exact.roles is None
    assert "without a cache is not priced" in exact.notes[-1]
    assert more.roles.learn_s == pytest.approx(sft.step_s + forward)
    assert both.roles.learn_s == pytest.approx(sft.step_s + 2 * forward)
    for plan in (plain, more, both):
        r = plan.roles
        assert plan.whole_step_s == r.step_s == pytest.approx(r.sample_s + r.learn_s)
        assert plan.predicted_mfu < sft.predicted_mfu
    assert sft.roles is None
    assert sft.whole_step_s == sft.step_s


def test_ranks_that_sample_take_their_completions_in_turns_of_a_microbatch(recipe):
    def sampled(**more):
        parallel, training = {"dp_replicate": 2}, {"microbatch": more.pop("microbatch", 4)}
        return plan_recipe(recipe(parallel=parallel, training=training, grpo=more)).roles

    one, two = sampled(rollout_ranks=1), sampled(rollout_ranks=2)
    assert one.sample_s == pytest.approx(2 * two.sample_s)
    colocated = sampled()
    assert colocated.sample_s == pytest.approx(two.sample_s)
    assert sampled(rollout_ranks=2, microbatch=16).sample_s < two.sample_s
    assert sampled(rollout_ranks=2, microbatch=16).sampler_bytes > two.sampler_bytes
    ahead = sampled(rollout_ranks=1, max_staleness=1)
    assert ahead.step_s == pytest.approx(max(ahead.sample_s, ahead.learn_s), abs=1e-8)
    assert one.step_s == pytest.approx(one.sample_s + one.learn_s, abs=1e-8)
    (told,) = one.rejected
    assert (told.max_staleness, told.step_s) == (1, pytest.approx(ahead.step_s, abs=1e-8))
    assert "faster" in told.reason
    assert "grpo.max_staleness=1" in told.reason


def explicit(make, ranks, tp, staleness, devices, tight, more):
    """Seconds per step of every layout of a split that is legal and fits, as explicit degrees."""
    degrees = [d for d in (1, 2, 4) if d <= devices]
    grpo = {"rollout_ranks": ranks, "rollout_tp": tp, "max_staleness": staleness if ranks else 0, **more}
    # Where there is enough memory, nothing is done again: it would only take longer.
    again = [{}, *({"recompute": "full", "recompute_layers": n} for n in range(1, 5) if tight)]
    inputs = ("keep", "re-gather") if tight else ("keep",)
    for replicate, shard, wide, batch, freed, kept, zero in itertools.product(
        degrees, degrees, degrees, (1, 2, 4, 8), again, inputs, (3, 2, 1)
    ):
        if replicate * shard * wide != devices or (shard == 1 and zero != 3):
            continue
        if wide == 1 and kept != "keep":
            continue
        parallel = {"dp_replicate": replicate, "dp_shard": shard, "tp": wide}
        parallel |= {3: {}, 2: {"reshard_after_forward": False}, 1: {"zero": 1}}[zero]
        parallel["gathered_inputs"] = kept
        training = {"microbatch": batch, "tokens_per_step": 512 * 8, **freed}
        rows = 8 // (replicate * shard)
        # As before the ranks start: every data-parallel rank has whole groups, every copy as many completions.
        even = rows % 4 == 0 and (not ranks or (ranks % tp == 0 and 8 % (ranks // tp) == 0))
        if not even:
            continue
        try:
            plan = plan_recipe(make(parallel=parallel, training=training, grpo=grpo))
        except HyperParallelError:
            continue
        capacity = plan.memory_capacity_bytes * 0.95
        if max(plan.memory_bytes, plan.roles.sampler_bytes) <= capacity:
            yield plan.roles.step_s


@slow_cells("64-1-1", "64-100-0")
@pytest.mark.parametrize(
    ("memory", "link", "staleness"),
    [(64, 100, 0), (64, 100, 1), (64, 1, 1), pytest.param(2.4, 20, 1, marks=pytest.mark.slow)],
)
def test_the_search_finds_the_best_of_all_splits_and_layouts(recipe, memory, link, staleness):
    check_search(recipe, memory, link, staleness)


def test_the_search_divides_sampling_by_the_iterations_that_learn_from_it(recipe):
    check_search(recipe, 64, 100, 0, num_iterations=4)


def check_search(recipe, memory, link, staleness, **more):
    def make(**sections):
        return recipe(memory=memory, link=link, **sections)

    every = {}
    for ranks in range(4):
        for tp in [t for t in (1, 2, 4) if ranks and ranks % t == 0] or [1]:
            times = [*explicit(make, ranks, tp, staleness, 4 - ranks, memory < 64, more)]
            if times:
                every[ranks, tp] = min(times)
    grpo = {**AUTO, "max_staleness": staleness, **more}
    parallel = {"auto": True, "world_size": 4}
    training = {"tokens_per_step": 512 * 8}
    found = plan_recipe(make(parallel=parallel, grpo=grpo, training=training)).roles
    assert found.step_s == pytest.approx(min(every.values()), rel=1e-6)
    chosen = (found.rollout_ranks, found.rollout_tp)
    assert every[chosen] == pytest.approx(found.step_s, rel=1e-6)
    assert found.rejected
    for other in found.rejected:
        if other.max_staleness == (staleness if other.rollout_ranks else 0):
            key = (other.rollout_ranks, other.rollout_tp)
            assert other.step_s == pytest.approx(every[key], rel=1e-6)


def split(make, devices, **grpo):
    parallel = {"auto": True, "world_size": devices}
    return plan_recipe(make(parallel=parallel, grpo={**AUTO, **grpo}))


def test_where_both_roles_divide_evenly_ranks_that_do_both_win(recipe):
    found = split(recipe, 2, max_staleness=1, max_completion_length=1)
    assert (found.roles.rollout_ranks, found.strategy.world_size) == (0, 2)
    assert {(r.rollout_ranks, r.max_staleness) for r in found.roles.rejected} == {(1, 0), (1, 1)}
    assert all("slower" in r.reason for r in found.roles.rejected)
    assert "colocated" in found.explain()
    assert "synchronous, 1 sampler rank" in found.explain()


def test_where_a_pass_over_few_sequences_takes_as_long_one_rank_samples_for_both(recipe):
    """Decode reads as much for half of the completions as for all."""
    found = split(recipe, 2, max_staleness=1, max_completion_length=64)
    assert found.roles.rollout_ranks == 1
    colocated = next(r for r in found.roles.rejected if not r.rollout_ranks)
    assert "slower" in colocated.reason


def test_where_learning_shards_weights_over_slow_links_ranks_that_only_sample_win(recipe):
    """A sharded layout gathers all weights for every token; a rank that samples has them."""

    def make(**sections):
        return recipe(memory=3.2, link=1, **sections)

    for staleness in (0, 1):  # even in step
        found = split(make, 4, max_staleness=staleness, max_completion_length=128)
        assert found.roles.rollout_ranks > 0
        assert found.strategy.world_size == 4 - found.roles.rollout_ranks
        colocated = next(r for r in found.roles.rejected if not r.rollout_ranks)
        assert colocated.step_s > found.roles.step_s


def test_a_rank_that_samples_is_refused_where_it_has_too_little_memory(recipe):
    given = {"parallel": {"dp_shard": 2}, "training": {"microbatch": 16}}
    fits = plan_recipe(recipe(grpo={"rollout_ranks": 2}, **given)).roles.sampler_bytes
    short = recipe(grpo={"rollout_ranks": 2}, memory=fits * 0.9 / 2**30, **given)
    with pytest.raises(DoesNotFit) as error:
        plan_recipe(short)
    assert error.value.hint
    key, _, value = error.value.hint.partition("=")
    section, name = key.split(".")
    sections = {"grpo": {"rollout_ranks": 2}, **given}
    sections[section] = {**sections[section], name: int(value)}
    again = plan_recipe(recipe(memory=fits * 0.9 / 2**30, **sections))
    assert again.roles.sampler_bytes <= fits * 0.9
    with pytest.raises(DoesNotFit):
        plan_recipe(recipe(grpo=AUTO, memory=0.05, parallel={"auto": True, "world_size": 4}))


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"rollout_tp": 3}, "grpo.rollout_tp=2"),
        ({"rollout_dp_shard": 3, "rollout_ep": 3}, "grpo.rollout_ep=1"),
    ],
)
@pytest.mark.parametrize("parallel", [{"auto": True, "world_size": 1}, {"dp_shard": 1}])
def test_a_copy_that_cannot_be_laid_out_is_refused_in_its_own_keys(recipe, change, hint, parallel):
    with pytest.raises(NotDivisible) as caught:
        plan_recipe(recipe(grpo={"rollout_ranks": 3, **change}, parallel=parallel))
    assert caught.value.hint == hint
    assert caught.value.where.startswith("grpo.rollout_")


def test_ranks_without_a_whole_group_are_refused_whichever_batch_number_is_set(recipe):
    with pytest.raises(NoLegalStrategy, match="whole groups of completions"):
        plan_recipe(recipe(parallel={"auto": True}, training={"tokens_per_step": None, "microbatch": 1}))


def test_sampling_ranks_that_form_no_whole_replicas_are_named(recipe):
    grpo = {"rollout_ranks": 3, "rollout_tp": "auto", "rollout_dp_shard": 2}
    with pytest.raises(UnsupportedSharding, match="whole sampler replicas") as caught:
        plan_recipe(recipe(grpo=grpo, parallel={"auto": True}))
    assert caught.value.where == "grpo.rollout_ranks"


@pytest.mark.parametrize("key", ["rollout_ranks", "rollout_tp"])
def test_auto_roles_with_given_degrees_are_refused(tmp_path, key):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "{model: {path: m}, stage: grpo, data: {source: x.jsonl, packing: false}, parallel: {dp_shard: 2}, "
        f"grpo: {{{key}: auto}}}}"
    )
    with pytest.raises(Contradiction, match="only with `parallel: auto`") as error:
        load_recipe(file)
    assert "parallel=auto" in error.value.hint
    assert load_recipe(file, ["parallel=auto"]).recipe.parallel.auto


def test_a_plan_keeps_its_roles_in_a_file_and_one_of_before_has_none(recipe):
    found = split(recipe, 2)
    assert Plan.from_json(found.to_json()) == found
    data = json.loads(found.to_json())
    del data["roles"]
    assert Plan.from_json(json.dumps(data)) == replace(found, roles=None)


def test_ranks_that_share_this_machine_are_slower_while_both_roles_work(recipe, tmp_path, monkeypatch):
    """On a machine whose ranks share cores, asynchrony gives less than the longer role, and never more than in step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without a calibrated card
    given = {"parallel": {"dp_replicate": 1}, "topology": "local"}
    numbers = {"rollout_ranks": 1, "max_staleness": 1}
    plan = plan_recipe(recipe(grpo=numbers, training={"dtype": "float32"}, **given))
    ahead = plan.roles
    (in_step,) = ahead.rejected
    longer = max(ahead.sample_s, ahead.learn_s)
    assert longer * (1 - 1e-6) <= ahead.step_s <= in_step.step_s * (1 + 1e-6)
    assert in_step.step_s == pytest.approx(ahead.sample_s + ahead.learn_s, rel=1e-3)
    # A rank has the cores and the memory of one of two, whatever the other does.
    both = plan_recipe(recipe(training={"dtype": "float32"}, topology="local", parallel={"dp_replicate": 2}))
    assert plan.peak_flops == both.peak_flops
    assert plan.memory_capacity_bytes == both.memory_capacity_bytes


def test_the_pass_of_the_reference_is_with_the_role_that_makes_it(recipe):
    given = {"parallel": {"dp_replicate": 2}}
    numbers = {"rollout_ranks": 1, "max_staleness": 1, "beta": 0.1}
    by_learner = plan_recipe(recipe(grpo=numbers, **given)).roles
    by_sampler = plan_recipe(recipe(grpo={**numbers, "reference_role": "sampler"}, **given)).roles
    without = plan_recipe(recipe(grpo={**numbers, "beta": 0.0}, **given)).roles
    forward = by_learner.learn_s - without.learn_s
    assert forward > 0
    assert by_sampler.learn_s == without.learn_s
    assert by_sampler.sample_s == pytest.approx(without.sample_s + 2 * forward)
    assert by_sampler.sampler_bytes > without.sampler_bytes == by_learner.sampler_bytes
