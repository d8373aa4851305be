"""`hyper-parallel train` as a person calls it, on a model of 20 thousand parameters."""

import json
import os
import shlex
import shutil

import pytest
from typer.testing import CliRunner

from hyper_parallel.backends.torch.tensor import gradients
from hyper_parallel.cli import application
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import (
    BadValue,
    CheckpointCorrupt,
    Contradiction,
    DegreesMismatch,
    HyperParallelError,
    LayoutDiffers,
    LossNotFinite,
    ModelUnreadable,
    NoData,
    NotDivisible,
    OutputNotWritable,
    RecipeUnreadable,
    UnknownKey,
    UnknownModel,
    WeightsUnreadable,
    printable,
)
from hyper_parallel.ir import Plan, Timeline
from hyper_parallel.serde import decode
from hyper_parallel.trainer.checkpoints import checkpointer
from hyper_parallel.trainer.engine import step_loop
from tests.e2e.runs import (
    CURVE,
    assert_same_curve,
    command,
    curve,
    make_place,
    rows,
    start,
    train,
)
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def one_rank(place):
    out = place / "one"
    train(place, out, "checkpoint.export=false")
    return out


@pytest.mark.slow
def test_two_tensor_parallel_axes_equal_one_rank(place, one_rank):
    out = place / "grid"
    shapes = ("parallel.attention_shape=2d", "parallel.mlp_shape=weight")
    train(place, out, "parallel.tp_x=2", "parallel.tp_y=2", "training.steps=2", *shapes, *CURVE)
    assert_same_curve(curve(out), curve(one_rank)[:2])
    strategy = Plan.load(out / "plan.json").strategy
    assert (strategy.tp_x, strategy.tp_y, strategy.mlp_shape) == (2, 2, "weight")


def test_two_ranks_write_a_whole_run_that_equals_one_rank(place, one_rank):
    out = place / "two"
    result = train(place, out, "parallel.dp_shard=2", "sample_prompt=def \n  x", report=True)
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
    assert row["mfu"] == pytest.approx(row["tps"] * plan.model.flops_per_token / plan.peak_flops, rel=1e-12)
    assert row["memory_bytes"] > 0
    timeline = decode(Timeline, json.loads((out / "timeline.json").read_text()))
    assert timeline.kind == "measured"
    names = {(s.lane, s.name) for s in timeline.spans if s.step == 3}
    assert {(f"rank {r}/compute", n) for r in (0, 1) for n in ("forward", "backward")} <= names
    assert {"report.html", "trace.json", "run.json"} <= {p.name for p in out.iterdir()}
    assert list((out / "tensorboard").iterdir())
    sample = (out / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert printable(sample).strip() in result.stdout

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "export", dtype="auto")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("next "))
    program, *words = shlex.split(line.removeprefix("next"))
    assert program == "hyper-parallel"
    assert command(*words, "--max-new-tokens=2").stdout.startswith("def ")


@pytest.mark.slow
def test_parity_proves_a_layout_and_names_the_parameter_that_a_fault_changes(place, monkeypatch):
    words = ("parity", str(place / "recipe.yaml"), "--steps=1")
    degrees = ("parallel.tp=4", "parallel.cp=2")
    shown = command(*words, *degrees).stdout
    assert "note: tp_x=4 is 2 here" in shown
    assert "cp=2 tp_x=2 cp_kind=ring on 4 ranks" in shown
    assert "equal to 1e-10: loss, gradient norm and 24 gradients of 1 steps" in shown

    # Each rank keeps the part of a norm's gradient that its own tokens give.
    monkeypatch.setattr(gradients, "all_reduce", lambda x, *_: x)
    with pytest.raises(LayoutDiffers, match=r"`model.layers.0.self_attn.q_norm.weight` in step \d+ differs") as caught:
        command(*words, "parallel.tp=2")
    assert "`model.layers.0.input_layernorm.weight`" in caught.value.others
    assert not any("proj" in line for line in caught.value.others)
    monkeypatch.undo()

    # The mean over the tokens of a rank, where ranks have different numbers of them.
    said = ["".join(chr(97 + i * j % 26) for j in range(1 + i * 7 % 31)) for i in range(64)]
    lone = [{"instruction": "a", "output": text} for text in said]
    (place / "uneven.json").write_text(json.dumps(lone))
    uneven = ("stage=sft", f"data.source={place}/uneven.json", "data.packing=false")
    command(*words, *uneven, "parallel.dp_replicate=2", "parallel.cp=2")
    honest = step_loop.forward_backward

    def local_mean(model, parts, tokens, *rest, **more):
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        labels = [part["shift_labels"] for part in parts]
        if axis == "cp" and size > 1:  # its own part of every sequence
            labels = [whole.chunk(size, 1)[rank] for whole in labels]
        own = sum(int((part != -100).sum()) for part in labels)
        return honest(model, parts, max(own, 1) * size, *rest, **more)

    monkeypatch.setattr(step_loop, "forward_backward", local_mean)
    for axis in ("dp_replicate", "cp"):
        with pytest.raises(LayoutDiffers, match=r"`model.embed_tokens.weight` in step \d+ differs"):
            command(*words, *uneven, f"parallel.{axis}=2")


@slow_cells("4-ranks-to-2")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("parallel.dp_shard=2", "parallel.tp=2"), ("parallel.dp_replicate=2",)),
        # 32 tokens do not divide into 6 chunks, nor 3 ranks into the parameters.
        pytest.param(
            ("parallel.cp=3",),
            ("parallel.cp=2", "parallel.cp_kind=ulysses"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["4-ranks-to-2", "cp3-to-cp2"],
)
def test_a_run_resumes_on_another_layout(place, one_rank, tmp_path, before, after):
    train(place, tmp_path, *before, "training.steps=2", *CURVE)
    train(place, tmp_path, *after, "checkpoint.resume=must", *CURVE)
    assert_same_curve(curve(tmp_path), curve(one_rank))
    assert [r["step"] for r in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_resumes_with_other_stages_and_layers_that_are_mixed_up_show(place, one_rank, tmp_path, monkeypatch):
    """Stages number their layers from 0 of their own in other frameworks; here a fault does."""
    train(place, tmp_path / "run", "training.steps=2", *CURVE)
    faulty = shutil.copytree(tmp_path / "run", tmp_path / "faulty")
    train(place, tmp_path / "run", "parallel.pp=2", *CURVE)
    assert_same_curve(curve(tmp_path / "run"), curve(one_rank))

    honest = checkpointer.read_tensors

    def of_stage(targets, index, path):
        honest({n.replace("layers.1.", "layers.0."): t for n, t in targets.items()}, index, path)

    monkeypatch.setattr(checkpointer, "read_tensors", of_stage)
    train(place, faulty, "parallel.pp=2", *CURVE)
    (loss, _), (loss_0, _) = curve(faulty)[2], curve(one_rank)[2]
    assert loss != pytest.approx(loss_0, rel=1e-4)


@slow_cells("parallel.dp_shard=2")
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    anew = "checkpoint.resume=never"  # a run that has ended keeps its plan
    first, second = command(*arguments, anew).stderr, command(*arguments).stderr
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


@pytest.mark.slow
def test_ranks_that_are_lost_again_and_again_are_planned_anew_on_fewer(place, one_rank, tmp_path, monkeypatch, caplog):
    (tmp_path / "losing.py").write_text(
        "import os, signal\n"
        "from hyper_parallel.trainer import Callback\n"
        "class Lose(Callback):\n"
        "    def on_step_end(self, step, row):\n"
        "        if step == 2 and self.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hyper_parallel.runtime.supervision._BACKOFF_S", 0.0)
    elastic = ("parallel.dp_shard=2", "training.elastic=true", "checkpoint.every=1", *CURVE)
    train(place, tmp_path / "run", *elastic, "training.max_restarts=2", "checkpoint.asynchronous=false",
          "training.callbacks=[losing.Lose]")  # fmt: skip
    assert "replanned for 1 of 2 ranks" in caplog.text
    assert_same_curve(curve(tmp_path / "run"), curve(one_rank))
    assert Plan.load(tmp_path / "run" / "plan.json").strategy.world_size == 1

    # Another launcher starts as many ranks as are left.
    train(place, tmp_path / "node", *elastic, "training.steps=2")
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "-m",
        "hyper_parallel",
    )
    with start(place, tmp_path / "node", *elastic, launcher=launcher) as process:
        _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert "step 2" in errors.partition("resumed from")[2]
    assert_same_curve(curve(tmp_path / "node"), curve(one_rank))


@pytest.mark.slow
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
    overrides = ("--launcher=torchrun", "training.max_restarts=1")
    overrides += ("parallel.dp_shard=2", "training.timeout_s=5", *CURVE)
    overrides += ("checkpoint.every=2", "checkpoint.asynchronous=false")
    overrides += ("training.callbacks=[freezing.Freeze]", "checkpoint.resume=never")
    with start(place, out, *overrides, path=place) as process:
        _, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert "torchrun --standalone --nproc-per-node=2 --max-restarts=1 -m hyper_parallel" in errors
    assert errors.count("error[HP620]: rank 1 is stopped by a signal") == 1
    assert errors.count("resumed from") == 1
    assert_same_curve(curve(out), curve(one_rank))
    assert (out / "report.html").exists()
