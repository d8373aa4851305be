"""`hyper-parallel train` as a person calls it, on a model of 20 thousand parameters."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import (
    BadValue,
    CheckpointCorrupt,
    Contradiction,
    DegreesMismatch,
    HyperParallelError,
    LossNotFinite,
    ModelUnreadable,
    NoData,
    NotDivisible,
    OutputNotWritable,
    RecipeUnreadable,
    UnknownKey,
    UnknownModel,
    WeightsUnreadable,
)
from hyper_parallel.ir import Plan, Timeline
from hyper_parallel.serde import decode
from tests.e2e.runs import (
    CONFIG,
    assert_same_curve,
    command,
    curve,
    rows,
    train,
    write_functions,
)

pytestmark = pytest.mark.e2e
CURVE = ("checkpoint.export=false", "training.eval_tokens=100")
"""Of a run whose losses are compared: it evaluates, but on three sequences."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model config, a text file, a recipe and a data cache."""
    root = tmp_path_factory.mktemp("train")
    (root / "model.json").write_text(json.dumps(CONFIG))
    write_functions(root / "text.txt", 4000)
    (root / "recipe.yaml").write_text(
        f"""
model: {{path: {root}/model.json}}
data:
  source: {root}/text.txt
  seq_len: 32
  vocab_size: 384
  cache_dir: {root}/cache
training:
  steps: 4
  dtype: float64
  tokens_per_step: 256
  microbatch: 4
  lr: 1.0e-2
  warmup_steps: 2
  lr_schedule: constant
  eval_tokens: 1000
parallel: {{dp_shard: 1}}
"""
    )
    return root


@pytest.fixture(scope="module")
def one_rank(place):
    out = place / "one"
    train(place, out, "checkpoint.export=false")
    return out


def test_two_tensor_parallel_axes_equal_one_rank(place, one_rank):
    out = place / "grid"
    shapes = ("parallel.attention_shape=2d", "parallel.mlp_shape=weight")
    train(place, out, "parallel.tp_x=2", "parallel.tp_y=2", "training.steps=2", *shapes, *CURVE)
    assert_same_curve(curve(out), curve(one_rank)[:2])
    strategy = Plan.load(out / "plan.json").strategy
    assert (strategy.tp_x, strategy.tp_y, strategy.mlp_shape) == (2, 2, "weight")


def test_two_ranks_write_a_whole_run_that_equals_one_rank(place, one_rank):
    out = place / "two"
    result = train(place, out, "parallel.dp_shard=2", "sample_prompt=def ", report=True)
    assert_same_curve(curve(out), curve(one_rank))
    evals, evals_0 = rows(out / "eval.jsonl"), rows(one_rank / "eval.jsonl")
    assert [e["step"] for e in evals] == [0, 4]
    assert evals[1]["loss"] == pytest.approx(evals_0[1]["loss"], rel=1e-10)
    assert evals[0]["tokens"] == 31 * 32  # whole sequences only, the same on every layout
    assert evals[1]["loss"] < evals[0]["loss"]

    assert load_recipe(out / "config.yaml").recipe.parallel.dp_shard == 2
    plan = Plan.load(out / "plan.json")
    row = rows(out / "metrics.jsonl")[-1]
    assert row["tokens"] == 256
    assert row["tokens_seen"] == 4 * 256
    assert row["valid_tokens"] == 256
    assert row["tps"] == pytest.approx(256 / row["step_s"] / 2)
    assert row["mfu"] == pytest.approx(
        row["tps"] * plan.model.flops_per_token / plan.peak_flops, rel=1e-12
    )
    assert row["memory_bytes"] > 0
    timeline = decode(Timeline, json.loads((out / "timeline.json").read_text()))
    assert timeline.kind == "measured"
    names = {(s.lane, s.name) for s in timeline.spans if s.step == 3}
    assert {(f"rank {r}/compute", n) for r in (0, 1) for n in ("forward", "backward")} <= names
    assert {"report.html", "trace.json", "run.json"} <= {p.name for p in out.iterdir()}
    assert list((out / "tensorboard").iterdir())
    sample = (out / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample.strip() in result.stdout

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "export", dtype="auto")
    assert type(model).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("parallel.dp_shard=2", "parallel.tp=2"), ("parallel.dp_replicate=2",)),
        # 32 tokens do not divide into 6 chunks, nor 3 ranks into the parameters.
        (("parallel.cp=3",), ("parallel.cp=2", "parallel.cp_kind=ulysses")),
    ],
    ids=["4-ranks-to-2", "cp3-to-cp2"],
)
def test_a_run_resumes_on_another_layout(place, one_rank, tmp_path, before, after):
    train(place, tmp_path, *before, "training.steps=2", *CURVE)
    train(place, tmp_path, *after, "checkpoint.resume=must", *CURVE)
    assert_same_curve(curve(tmp_path), curve(one_rank))
    assert [r["step"] for r in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("degrees", ["parallel.dp_shard=1", "parallel.dp_shard=2"])
def test_bfloat16_computes_near_float64_with_float32_parameters(place, one_rank, tmp_path, degrees):
    train(place, tmp_path, degrees, "training.dtype=bfloat16", *CURVE)
    mine, exact = curve(tmp_path), curve(one_rank)
    for (loss, norm), (loss_0, norm_0) in zip(mine, exact, strict=True):
        # 8 bits of mantissa: near, and visibly not the float64 run.
        assert loss == pytest.approx(loss_0, rel=0.01)
        assert loss != pytest.approx(loss_0, rel=1e-7)
        assert norm == pytest.approx(norm_0, rel=0.1)


def test_tokens_seen_goes_on_after_a_resume_with_another_batch(place, tmp_path):
    train(place, tmp_path, "training.steps=2", *CURVE)
    train(place, tmp_path, "training.tokens_per_step=128", "checkpoint.resume=must", *CURVE)
    assert [r["tokens_seen"] for r in rows(tmp_path / "metrics.jsonl")] == [256, 512, 640, 768]


def test_never_resuming_starts_over(place, one_rank):
    out = place / "again"
    for _ in range(2):
        train(place, out, "training.steps=2", "checkpoint.resume=never", *CURVE)
        assert curve(out) == curve(one_rank)[:2]


def test_microbatches_and_recompute_change_nothing(place, one_rank):
    out = place / "accumulated"
    train(place, out, "training.microbatch=1", "training.recompute=full", *CURVE)
    assert_same_curve(curve(out), curve(one_rank))


def test_ranks_with_different_numbers_of_labels_share_one_mean(place):
    """Conversations: packed rows hold different numbers of assistant tokens, on ranks and in microbatches."""
    conversations = [
        {"conversations": [
            {"from": "human", "value": f"add {i}"},
            {"from": "gpt", "value": "yes " * (1 + i % 9)},
        ]}
        for i in range(300)
    ]  # fmt: skip
    chats = place / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    common = (
        "stage=sft", f"data.source={chats}", "data.format=sharegpt", "training.steps=3", *CURVE
    )  # fmt: skip
    outs = [place / f"chat_{n}" for n in (1, 2)]
    train(place, outs[0], *common)
    train(place, outs[1], "parallel.dp_shard=2", *common)
    assert_same_curve(curve(outs[1]), curve(outs[0]))
    counts = [[r["valid_tokens"] for r in rows(out / "metrics.jsonl")] for out in outs]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1
    assert all(0 < count < 256 for count in counts[0])


def test_the_first_run_on_a_machine_measures_it_once(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = [
        "train",
        str(place / "recipe.yaml"),
        "training.steps=2",
        f"output_dir={tmp_path}/run",
        *CURVE,
    ]
    assert "first run with 1 ranks" not in command(*arguments, "--no-calibrate").stderr
    first, second = command(*arguments).stderr, command(*arguments).stderr
    assert first.count("first run with 1 ranks on this machine: measured it in") == 1
    assert "first run" not in second
    card = (tmp_path / "cache" / "hyper-parallel" / "card.yaml").read_text()
    assert "3 small training steps on 1 ranks" in card
    terms = Plan.load(tmp_path / "run" / "plan.json").cost
    assert any("device card local:" in term.source for term in terms)


def test_dry_run_starts_nothing_and_writes_nothing(place):
    out = place / "dry"
    result = train(place, out, "parallel.dp_shard=2", "--dry-run")
    assert not out.exists()
    assert "torchrun --standalone --nproc-per-node=2 -m hyper_parallel train" in result.stdout
    assert "parallel.dp_shard=2" in result.stdout


def test_a_loss_that_is_not_finite_stops_before_the_step(place):
    out = place / "diverged"
    with pytest.raises(LossNotFinite) as caught:
        train(place, out, "training.lr=1e300", "training.dtype=float32", "training.warmup_steps=0")
    assert "training.lr" in caught.value.hint
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == [1]
    assert not list((out / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        (["training.lrr=1"], UnknownKey, "training.lr"),
        (["training.lr=-1"], BadValue, "training.lr"),
        (["parallel.dp_shard=2", "parallel.world_size=3"], DegreesMismatch, "3"),
        (["parallel.tp=3"], NotDivisible, "tp=3"),
        (["model.path=/nowhere/model"], UnknownModel, "/nowhere/model"),
        (["model.init=pretrained"], WeightsUnreadable, "pretrained"),
        (["data.source={root}/empty.txt"], NoData, "empty.txt"),
        (["data.source={root}/missing.txt"], NoData, "missing.txt"),
        (["output_dir={root}/text.txt"], OutputNotWritable, "text.txt"),
        (["checkpoint.resume=must"], CheckpointCorrupt, "checkpoint"),
        (["sample_prompt=x", "checkpoint.export=false"], Contradiction, "export"),
        (["model.path={root}/strange.json"], (ModelUnreadable, UnknownModel), "strange"),
    ],
)
def test_mistakes_are_refused_before_any_rank(place, overrides, error, says):
    (place / "empty.txt").write_text("")
    (place / "strange.json").write_text('{"model_type": "no_such_model"}')
    out = place / "refused"
    with pytest.raises(error) as caught:
        train(place, out, *(text.format(root=place) for text in overrides))
    assert says in caught.value.render()
    assert not (out / "metrics.jsonl").exists()
    assert not (out / "logs").exists()


def test_a_missing_recipe_is_refused(place):
    result = CliRunner().invoke(application(), ["train", str(place / "nothing.yaml")])
    assert isinstance(result.exception, RecipeUnreadable)


def test_degrees_that_do_not_fit_torchrun_are_refused(place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(HyperParallelError) as caught:
        train(place, place / "refused", "parallel.dp_shard=2")
    assert caught.value.code == "HP301"


def _start(place, out, *overrides, launcher=("-m", "hyper_parallel"), path=""):
    words = [sys.executable, *launcher, "train", str(place / "recipe.yaml"), "--no-calibrate"]
    modules = os.pathsep.join([*sys.path, str(path)])
    environment = {**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*words, f"output_dir={out}", *overrides], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def _wait_for_steps(process, out: Path, steps: int):
    path = out / "metrics.jsonl"
    _wait_until(process, lambda: path.exists() and len(path.read_text().splitlines()) >= steps)


def _wait_until(process, reached):
    deadline = time.monotonic() + 90
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


LAUNCHERS = {
    "local": ("-m", "hyper_parallel"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "hyper_parallel"),
}  # fmt: skip


def _published(out: Path) -> list[str]:
    return [p.name for p in (out / "checkpoints").glob("step_*")]


def test_when_a_rank_dies_the_run_ends_with_its_name(place):
    out = place / "killed"
    with _start(place, out, "parallel.dp_shard=3", "training.tokens_per_step=192", "training.microbatch=2",
                "training.steps=100000", "checkpoint.every=5") as process:  # fmt: skip
        _wait_for_steps(process, out, 8)
        _wait_until(
            process, lambda: _published(out)
        )  # saved beside the steps, on a slow disk later
        ranks = sorted(child.pid for child in psutil.Process(process.pid).children())
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert process.returncode == 1
    assert "error[HP601]: rank 1 failed (killed by SIGKILL)" in errors
    assert sum(line.startswith(("rank 0:", "rank 2:")) for line in errors.splitlines()) == 2
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert [r["step"] for r in rows(out / "metrics.jsonl")][:8] == list(range(1, 9))
    published = _published(out)
    assert published
    assert all((out / "checkpoints" / name / "manifest.json").exists() for name in published)


def test_killed_and_frozen_ranks_and_damaged_checkpoints_change_nothing(tmp_path):
    """A short `make chaos`: curves bit for bit, the right rank to blame, no step lost after a save."""
    words = ["--faults", "3", "--only", "kill,stop,flip", "--dir", str(tmp_path)]
    tool = [sys.executable, str(Path(__file__).parents[2] / "tools" / "chaos.py"), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(tool, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] == {"kill": 1, "stop": 1, "flip": 1}
    losses = ("steps_lost", "wrong_results", "hangs", "uncoded", "wrong_blame", "runs_ended")
    assert not any(result[kind] for kind in losses)


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_command_that_goes_on(
    place, tmp_path, monkeypatch, launcher
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out, word = place / f"ended {launcher}", LAUNCHERS[launcher]
    with _start(place, out, "parallel.dp_shard=2", "training.steps=100000", launcher=word) as run:
        _wait_for_steps(run, out, 2)
        ranks = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        # A terminal sends its interrupt to all; a scheduler tells the first process.
        os.killpg(run.pid, signal.SIGINT) if launcher == "local" else run.terminate()
        _, errors = run.communicate(timeout=60)
    (saved,) = _published(out)
    done = rows(out / "metrics.jsonl")[-1]["step"]
    assert saved == f"step_{done:08d}"
    assert f"ended after step {done}, whose checkpoint is saved" in errors
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert not (out / "export").exists()
    if launcher == "local":
        assert run.returncode == 130
        assert not list(tmp_path.glob("*hyper_parallel*"))
        hint = errors.rpartition("hint: hyper-parallel ")[2]
        command(*shlex.split(hint), f"training.steps={done + 1}", "--no-calibrate", *CURVE)
        assert [r["step"] for r in rows(out / "metrics.jsonl")] == list(range(1, done + 2))
    else:
        assert "hint: torchrun --standalone --nproc-per-node=2 -m hyper_parallel train" in errors


def test_a_second_signal_stops_at_once(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = place / "at_once"
    # A step of the largest batch takes long enough for two signals.
    with _start(place, out, "training.tokens_per_step=2097152", "training.microbatch=8") as run:
        _wait_until(run, lambda: (out / "eval.jsonl").exists() and rows(out / "eval.jsonl"))
        run.send_signal(signal.SIGHUP)
        time.sleep(1.2)
        run.terminate()
        _, errors = run.communicate(timeout=20)
    assert run.returncode == 143
    assert "SIGHUP: ends after this step" in errors
    assert "before a checkpoint was saved" in errors
    assert not list(tmp_path.glob("*hyper_parallel*"))


def test_a_checkpoint_is_saved_when_the_minutes_are_over(place, tmp_path):
    train(place, tmp_path, "checkpoint.every_minutes=1.0e-9", "checkpoint.keep=9", *CURVE)
    assert sorted(_published(tmp_path)) == [f"step_{step:08d}" for step in range(1, 5)]


def test_torchrun_starts_the_same_run_and_again_when_a_rank_freezes(place, one_rank):
    (place / "freezing.py").write_text(
        "import os, signal\n"
        "from hyper_parallel.trainer import Callback\n"
        "class Freeze(Callback):\n"
        "    def on_step_end(self, step, row):\n"
        "        if (self.rank, step, os.environ['TORCHELASTIC_RESTART_COUNT']) == (1, 3, '0'):\n"
        "            os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    out = place / "torchrun"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    overrides = ("parallel.dp_shard=2", "training.timeout_s=5", *CURVE)
    overrides += ("checkpoint.every=2", "checkpoint.asynchronous=false")
    overrides += ("training.callbacks=[freezing.Freeze]", "checkpoint.resume=never")
    launcher = (*torchrun, "--max-restarts=1", "-m", "hyper_parallel")
    with _start(place, out, *overrides, launcher=launcher, path=place) as process:
        _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert errors.count("error[HP620]: rank 1 is stopped by a signal") == 1
    assert errors.count("resumed from") == 1
    assert_same_curve(curve(out), curve(one_rank))
    assert (out / "report.html").exists()
