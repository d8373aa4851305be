"""Reinforcement learning whose completions come from ranks of their own, by weights a bounded number of steps old."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.config import Grpo
from hyper_parallel.errors import Contradiction
from hyper_parallel.reports import load_run, write_report
from hyper_parallel.reports.results import results
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.stages.grpo import GrpoStage
from hyper_parallel.trainer.stages.rollouts import Sampler
from tests.e2e import slurm
from tests.e2e.runs import (
    QUESTIONS,
    make_stage_place,
    rows,
    start,
    train,
    wait_for_steps,
    wait_until,
)

pytestmark = pytest.mark.e2e

REWARD = '''
import itertools, pathlib, random, time

def digits(prompts, completions, answer, **_):
    """Share of the first three characters that are digits."""
    return [sum(c.isdigit() for c in text[:3]) / 3 for text in completions]

def late(prompts, completions, answer, **_):
    time.sleep(random.random() / 20)
    return digits(prompts, completions, answer)

calls, limit = itertools.count(1), pathlib.Path("calls_of_a_process")

def held(prompts, completions, answer, **_):
    call = next(calls)
    while limit.exists() and call > int(limit.read_text()):
        time.sleep(0.01)
    return digits(prompts, completions, answer)
'''
ROUTED = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EXPORT = "checkpoint.export=true"
ASYNC = ("grpo.rollout_ranks=1", "grpo.max_staleness=2", "training.deterministic=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("rollouts")
    (place / "late_rewards.py").write_text(REWARD)
    grpo = {
        "num_generations": 4,
        "max_completion_length": 3,
        "reward_funcs": ["late_rewards.digits"],
    }
    shape = {"seq_len": 56, "sequences": 16, "microbatch": 4}
    return make_stage_place(place, "grpo", QUESTIONS, **shape, grpo=grpo, training={"steps": 6})


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)


def curve(out):
    return [(r["loss"], r["grad_norm"], r["rollout"]["reward"]) for r in rows(out / "metrics.jsonl")]


def flat(out):
    return [x for row in curve(out) for x in row]


def ages(out):
    return [r["rollout"]["age"] for r in rows(out / "metrics.jsonl")]


def weights(out):
    return (out / "export" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_without_staleness_the_run_is_that_of_one_program(place):
    kept = (EXPORT, "grpo.beta=0.04")
    train(place, place / "serial", *kept)
    train(place, place / "apart", *kept, "grpo.rollout_ranks=2", "grpo.reference_role=sampler")
    assert curve(place / "apart") == curve(place / "serial")
    assert weights(place / "apart") == weights(place / "serial")
    assert ages(place / "apart") == [0] * 6
    # What a token is sampled by is what it is learned from, bit for bit, in another process too.
    exact = ("grpo.exact_logprobs=true", *kept)
    train(place, place / "exact", *exact)
    train(place, place / "exact apart", *exact, "grpo.rollout_ranks=2")
    assert weights(place / "exact apart") == weights(place / "exact")
    assert flat(place / "exact") == pytest.approx(flat(place / "serial"), rel=1e-10, abs=1e-12)
    for name, same in (("exact", True), ("exact apart", True), ("serial", False)):
        records = [row["rollout"] for row in rows(place / name / "metrics.jsonl")]
        assert all((r["logprob_error"] == 0.0) == same for r in records), name


@pytest.mark.slow
def test_who_trains_and_who_samples_may_be_cut_otherwise(place):
    train(place, place / "one", *ASYNC)
    assert ages(place / "one") == [0, 1, 2, 2, 2, 2]
    last = rows(place / "one" / "metrics.jsonl")[-1]["rollout"]
    assert 0 < last["effective_samples"] < 1
    for name, words in (
        ("two", ("grpo.rollout_ranks=2", "parallel.dp_shard=2")),
        ("group", ("grpo.rollout_ranks=2", "grpo.rollout_tp=2")),
        ("sharded", ("grpo.rollout_ranks=4", "grpo.rollout_tp=2", "grpo.rollout_dp_shard=2")),
    ):
        train(place, place / name, *ASYNC, *words)
        assert flat(place / name) == pytest.approx(flat(place / "one"), rel=1e-10, abs=1e-12)
    routed = place / "routed.json"
    routed.write_text(json.dumps({**json.loads((place / "model.json").read_text()), **ROUTED}))
    train(place, place / "routed", *ASYNC, f"model.path={routed}")
    experts = ("grpo.rollout_ranks=2", "grpo.rollout_dp_shard=2", "grpo.rollout_ep=2")
    train(place, place / "experts", *ASYNC, f"model.path={routed}", *experts)
    assert flat(place / "experts") == pytest.approx(flat(place / "routed"), rel=1e-10, abs=1e-12)
    # Whoever is late, weights are never older than said, and no completion is left out.
    words = (
        "grpo.rollout_ranks=1",
        "grpo.max_staleness=1",
        "grpo.reward_funcs=[late_rewards.late]",
    )
    train(place, place / "late", *words, "training.steps=12")
    assert set(ages(place / "late")) <= {0, 1}
    assert [r["step"] for r in rows(place / "late" / "metrics.jsonl")] == list(range(1, 13))
    check_report(place / "late")


def check_report(out):
    """Roles are lanes on one clock, and an arrow leads from where completions are sampled to where they are taken."""
    write_report(out)
    assert "ranks that only sample" in (out / "report.html").read_text()
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["name"] == "rollout"]
    arrows = {phase: [e for e in events if e["ph"] == phase] for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) >= 10
    for source, target in zip(arrows["s"], arrows["f"], strict=True):
        assert source["id"] == target["id"]
        assert source["ts"] < target["ts"], "sampled before it is taken"
        steps = [
            next(
                s["args"]["step"]
                for s in spans
                if s["tid"] == lanes[lane] == e["tid"] and s["ts"] <= e["ts"] < s["ts"] + s["dur"]
            )
            for lane, e in (("sampler 0/compute", source), ("rank 0/compute", target))
        ]
        assert steps[0] == steps[1]
    busy = {r.name: r.value for r in results(load_run(out)) if r.name.startswith("busy")}
    assert set(busy) == {"busy, ranks that train", "busy, ranks that sample"}
    assert all(0 < share < 1 for share in busy.values())


HELD = (
    *ASYNC,
    "training.steps=16",
    "training.lr_schedule=constant",
    EXPORT,
    "checkpoint.every=4",
    "grpo.reward_funcs=[late_rewards.held]",
    "grpo.beta=0.04",
    "grpo.reference_role=sampler",
)


@pytest.fixture(scope="module")
def whole(place):
    """A run in which nobody is killed."""
    before = Path.cwd()
    os.chdir(place)
    train(place, place / "whole", *HELD)
    os.chdir(before)
    return place / "whole"


@pytest.mark.slow
def test_roles_that_are_killed_change_nothing(place, whole):
    """First who samples, then, in the run that goes on, who trains."""
    out, limit = place / "killed", place / "calls_of_a_process"
    # The learner waits in step 8, and in step 11 of the run that goes on from 4, so both roles live when one is killed.
    limit.write_text("7")
    with start(place, out, *HELD, "training.max_restarts=2", path=place) as process:
        for steps, role, calls in ((5, 1, 6), (9, 0, 16)):
            wait_for_steps(process, out, steps)
            ranks = psutil.Process(process.pid).children()
            ranks.sort(key=lambda rank: (rank.create_time(), rank.pid))
            assert len(ranks) == 2
            limit.write_text(str(calls))
            os.kill(ranks[role].pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert len(json.loads((out / "run.json").read_text())["resumes"]) == 2
    assert curve(out) == curve(whole)
    assert weights(out) == weights(whole)


@pytest.mark.slow
def test_a_command_that_is_killed_and_given_again_changes_nothing(place, whole):
    """With whoever controls the run, all roles of it end, so that the next one meets none."""
    out, limit = place / "command killed", place / "calls_of_a_process"
    limit.write_text("6")
    with start(place, out, *HELD, path=place) as process:
        wait_for_steps(process, out, 5)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        process.wait()
        assert not psutil.wait_procs(ranks, timeout=30)[1]
    limit.unlink()
    train(place, out, *HELD)
    assert json.loads((out / "run.json").read_text())["resumes"][0]["step"] == 4
    assert curve(out) == curve(whole)
    assert weights(out) == weights(whole)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks_in_both_roles(place):
    """Samples of later steps that are on disk were divided into another number of shares."""
    words = (
        "training.deterministic=true",
        "grpo.max_staleness=2",
        "grpo.reward_funcs=[late_rewards.held]",
        "training.steps=12",
        "checkpoint.every=3",
    )
    out, limit = place / "resized", place / "calls_of_a_process"
    limit.unlink(missing_ok=True)
    train(place, place / "same size", *words, "grpo.rollout_ranks=1")
    limit.write_text("4")
    before = (*words, "grpo.rollout_ranks=2")
    with start(place, out, *before, path=place) as process:
        wait_until(process, lambda: len([*(out / "rollouts").glob("step_00000007.*")]) == 2)
        os.killpg(process.pid, signal.SIGKILL)
    limit.unlink()
    train(place, out, *words, "grpo.rollout_ranks=1", "parallel.dp_shard=2")
    assert json.loads((out / "run.json").read_text())["resumes"][0]["step"] == 3
    assert flat(out) == pytest.approx(flat(place / "same size"), rel=1e-10, abs=1e-12)


@pytest.mark.slow
def test_tokens_that_have_moved_too_far_leave_the_loss_and_its_count(place):
    """The third step in plain transformers, from its completions and the weights after two."""
    cap, words = 1.03, (*ASYNC, "training.lr_schedule=constant", EXPORT, "training.lr=0.001")
    words = (*words, "grpo.importance_sampling=mask", f"grpo.importance_sampling_cap={cap}")
    train(place, place / "two masked", *words, "training.steps=2")
    train(place, place / "masked", *words, "training.steps=3")
    row = rows(place / "masked" / "metrics.jsonl")[2]
    made = load_file(place / "masked" / "rollouts" / "step_00000003.0.safetensors")
    model = AutoModelForCausalLM.from_pretrained(place / "two masked/export", dtype=torch.float64)
    keep_float64(model)
    tokenizer = load_tokenizer(place / "masked" / "export")
    logp = model(made["tokens"][:, :-1]).logits.log_softmax(-1)
    logp = logp.gather(-1, made["tokens"][:, 1:, None])[..., 0]
    sampled = made["versions"][:, 1:] == 0
    apart = (logp.detach() - made["logprobs"][:, 1:]) * sampled
    kept = sampled & (apart.abs() <= math.log(cap))
    assert 0.1 < float(kept.sum() / sampled.sum()) < 0.9
    texts = [tokenizer.decode(t[s], skip_special_tokens=True) for t, s in
             zip(made["tokens"][:, 1:], sampled, strict=True)]  # fmt: skip
    groups = torch.tensor([sum(c.isdigit() for c in t[:3]) / 3 for t in texts]).double().view(4, 4)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    (-(advantages.view(-1, 1) * apart.exp() * logp * kept).sum() / kept.sum()).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert row["valid_tokens"] == int(kept.sum())
    assert row["rollout"]["masked"] == pytest.approx(1 - float(kept.sum() / sampled.sum()))
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-10)


def test_the_gradient_of_old_completions_is_weighted_by_what_they_have_become():
    torch.manual_seed(0)
    logprobs = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    old = logprobs.detach() + torch.randn(3, 5, dtype=torch.float64)
    advantages, counted = torch.randn(3, dtype=torch.float64), torch.rand(3, 5).double() > 0.3
    batch = {"advantages": advantages, "weights": counted.double() / 7, "rollout_logprobs": old}
    settings = Grpo(rollout_ranks=1, max_staleness=1, importance_sampling_cap=1.5)
    stage = GrpoStage(Sampler(None, None, settings, 0), None, 0)
    stage.objective(logprobs, batch).backward()
    grown = (logprobs.detach() - old).exp()
    wanted = -grown.clamp(max=1.5) * advantages[:, None] * counted / 7
    torch.testing.assert_close(logprobs.grad, wanted, rtol=1e-12, atol=0)
    assert (grown > 1.5).any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["grpo.max_staleness=1"], "have the newest weights"),
        (["grpo.reference_role=sampler", "grpo.beta=0.1"], "needs a reference"),
        (["grpo.rollout_ranks=3"], "sequences of a step cannot be divided evenly among"),
        (["grpo.rollout_ranks=3", "grpo.rollout_tp=2"], "form whole replicas"),
        (["grpo.rollout_ranks=8", "grpo.exact_logprobs=true"], "whole microbatches of training"),
    ],
)
def test_roles_that_cannot_be_are_refused_before_any_starts(place, change, match):
    with pytest.raises(Contradiction, match=match) as caught:
        train(place, place / "refused", *change)
    assert caught.value.hint
    assert not (place / "refused").exists()


def test_a_launcher_has_to_start_ranks_that_train_as_well(place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(Contradiction, match="no rank is left to train") as caught:
        train(place, place / "refused", "grpo.rollout_ranks=1")
    assert "grpo.rollout_ranks=0" in str(caught.value)


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "ray"])
def test_every_launcher_starts_the_roles(place, tmp_path, monkeypatch, launcher):
    """Two ranks that train, and two that share a copy to sample: the run that forked ranks make, bit for bit."""
    monkeypatch.setenv("PATH", slurm.install(tmp_path / "bin"))
    roles = ("parallel.dp_shard=2", "grpo.rollout_ranks=2", "grpo.rollout_tp=2", "training.steps=3")
    train(place, place / launcher, *ASYNC[1:], *roles)
    out = tmp_path / "run"
    words = (f"--launcher={launcher}", f"launch.nnodes={2 if launcher == 'slurm' else 1}")
    with start(place, out, *ASYNC[1:], *roles, *words, path=place) as process:
        said, errors = process.communicate(timeout=110)
    assert process.returncode == 0, (said, errors)
    assert curve(out) == curve(place / launcher)
    assert ages(out) == ages(place / launcher)
