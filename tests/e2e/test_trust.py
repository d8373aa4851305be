"""What a run may lose or change without a word: nothing. Runs are broken on purpose, through the command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from hyper_parallel.errors import (
    CheckpointMismatch,
    Contradiction,
    LossNotFinite,
    OutputNotWritable,
    RankFailed,
    RunInUse,
)
from hyper_parallel.trainer.run_directory import run_lock
from tests.e2e.runs import CONFIG, curve, rows, train, write_functions

pytestmark = pytest.mark.e2e

MINE = '''
import torch
from hyper_parallel.trainer import Callback

class Poisoned(torch.optim.SGD):
    """The second gradient of the last matrix is NaN."""

    def __init__(self, groups, **options):
        super().__init__(groups, **options)
        self.calls = 0
        self.param_groups[0]["params"][-1].register_hook(self.poison)

    def poison(self, gradient):
        self.calls += 1
        return gradient * float("nan") if self.calls == 2 else gradient

class Fails(Callback):
    def on_train_begin(self, job):
        raise ValueError("before a step")
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trust")
    changes = {
        "model": {},
        "theta": {"rope_theta": 5000.0},
        "wide": {"intermediate_size": 96},
        "drop": {"attention_dropout": 0.2},
    }
    for name, values in changes.items():
        (root / f"{name}.json").write_text(json.dumps({**CONFIG, **values}))
    write_functions(root / "text.txt", 300)
    (root / "mine_of_trust.py").write_text(MINE)
    (root / "recipe.yaml").write_text(
        f"model: {{path: {root}/model.json}}\n"
        f"data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 300, cache_dir: {root}/cache, holdout: 0}}\n"
        "training: {steps: 4, dtype: float64, tokens_per_step: 64, warmup_steps: 0, lr: 0.01, lr_schedule: constant}\n"
        "parallel: {dp_shard: 1}\n"
        "checkpoint: {export: false}\n"
    )
    train(root, root / "whole", "checkpoint.every=2")
    return root


def copied(place: Path, tmp_path: Path) -> Path:
    """The run as it was after step 2, but for metrics of two steps more."""
    run = Path(shutil.copytree(place / "whole", tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    return run


def files_of(run: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and ".run." not in p.name}


def test_what_would_be_another_run_is_refused_by_name_and_nothing_is_written(place, tmp_path):
    run = copied(place, tmp_path)
    before = files_of(run)
    for override, key in (
        ("model.path={place}/wide.json", "model.config.intermediate_size"),
        ("training.dtype=float32", "training.dtype"),
        ("training.seed=1", "training.seed"),
        ("training.optimizer=sgd", "training.optimizer"),
        ("model.path={place}/theta.json", "model.config.rope_parameters.rope_theta"),
    ):
        with pytest.raises(CheckpointMismatch) as caught:
            train(place, run, override.format(place=place))
        assert f"`{key}` differs" in caught.value.what
        assert caught.value.got != caught.value.allowed
        assert files_of(run) == before
    train(place, run, f"model.path={place}/theta.json", *caught.value.hint.split())
    assert curve(run) == curve(place / "whole")


def test_what_may_change_takes_effect_and_is_recorded(place, tmp_path):
    run = copied(place, tmp_path)
    train(place, run, "training.steps=2")  # nothing is left: it says so, and changes nothing
    assert curve(run) == curve(place / "whole")[:2]
    train(place, run, "training.weight_decay=0.5", "training.betas=[0.5, 0.9]")
    mine, plain = curve(run), curve(place / "whole")
    assert mine[:3] == plain[:3]  # the loss of step 3 is that of the weights in the checkpoint
    assert mine[3] != plain[3]
    resumes = json.loads((run / "run.json").read_text())["resumes"]
    assert resumes[-1] == {
        "step": 2,
        "changed": {
            "training.weight_decay": [0.1, 0.5],
            "training.betas": [[0.9, 0.95], [0.5, 0.9]],
            "checkpoint.every": [2, 0],
        },
    }


@pytest.mark.slow
def test_arguments_of_the_optimizer_take_effect_both_ways_or_are_refused(place, tmp_path):
    maximize = "training.optimizer_args={maximize: true}"
    run = copied(place, tmp_path)
    train(place, run, maximize, "checkpoint.every=2")
    up = curve(run)
    assert up[3][0] > curve(place / "whole")[3][0]  # uphill from step 3 on
    changed = json.loads((run / "run.json").read_text())["resumes"][-1]["changed"]
    assert changed == {"training.optimizer_args": [{}, {"maximize": True}]}
    train(place, run, "training.steps=5")  # and down again, although the checkpoint has it
    train(place, run, maximize, "training.steps=6")
    losses = [loss for loss, _ in curve(run)]
    assert losses[5] < losses[4] or losses[4] < losses[3]
    with pytest.raises(CheckpointMismatch, match="no state 'max_exp_avg_sq'") as caught:
        train(place, run, "training.optimizer_args={amsgrad: true}", "training.steps=7")
    assert caught.value.allowed == '{"maximize": true}'
    train(place, run, *shlex.split(caught.value.hint), "training.steps=7")


def test_a_run_that_has_ended_is_not_rewritten(place, tmp_path):
    run = Path(shutil.copytree(place / "whole", tmp_path / "run"))
    before = files_of(run)
    train(place, run, "training.lr=1.0", report=True)
    assert {p: c for p, c in files_of(run).items() if p in before} == before
    assert {p.name for p in files_of(run) if p not in before} <= {"report.html", "trace.json"}


def test_recipe_and_plan_state_what_was_trained_part_by_part(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    run = copied(place, tmp_path)
    stated = {name: (run / name).read_bytes() for name in ("config.yaml", "plan.json")}
    with pytest.raises(RankFailed, match="before a step"):
        train(place, run, "training.callbacks=[mine_of_trust.Fails]", "training.lr=0.5")
    assert {name: (run / name).read_bytes() for name in stated} == stated
    train(place, run, "training.lr=0.02", "parallel.dp_shard=2")
    parts = sorted(p.name for p in (run / "parts").iterdir())
    assert parts == ["step_00000000", "step_00000002"]
    first, second = ({name: (run / "parts" / part / name).read_bytes() for name in stated} for part in parts)
    assert first == stated
    assert second == {name: (run / name).read_bytes() for name in stated}
    assert b"lr: 0.02" in second["config.yaml"]


@pytest.mark.slow
def test_dropout_goes_on_with_the_same_masks(place, tmp_path):
    drop = (f"model.path={place}/drop.json", "training.deterministic=true", "parallel.dp_shard=2")
    train(place, tmp_path, *drop, "checkpoint.every=2")
    whole = curve(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004")
    train(place, tmp_path, *drop)
    assert curve(tmp_path) == whole  # bitwise
    assert whole[0] != pytest.approx(curve(place / "whole")[0], rel=1e-6)


def test_a_second_run_in_a_directory_is_refused_with_its_owner(place, tmp_path):
    run = copied(place, tmp_path)
    before = files_of(run)
    with run_lock(run), pytest.raises(RunInUse, match=f"process {os.getpid()} on "):
        train(place, run)
    assert files_of(run) == before


def test_damaged_records_are_mended_and_steps_are_never_doubled(place, tmp_path):
    run = copied(place, tmp_path)
    for name in ("run.json", "plan.json", "config.yaml"):
        (run / name).write_bytes(b"\xff{")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "loss": 1.0}\n[1]\n\xff\n{"step": 4, "lo')
    train(place, run)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert curve(run) == curve(place / "whole")
    json.loads((run / "run.json").read_text())
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(OutputNotWritable, match=r"metrics\.jsonl"):
        train(place, run, "training.steps=5")


def test_a_gradient_that_is_not_finite_is_named_or_left_out(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    poisoned = ("training.optimizer=mine_of_trust.Poisoned", "training.microbatch=2")
    with pytest.raises(LossNotFinite, match="step 2") as caught:
        train(place, tmp_path / "stop", *poisoned)
    assert "grad_norm=nan" in caught.value.got
    train(place, tmp_path / "skip", *poisoned, "training.on_nonfinite=skip")
    metrics = rows(tmp_path / "skip" / "metrics.jsonl")
    assert [row["skipped"] for row in metrics] == [0, 1, 0, 0]
    with pytest.raises(LossNotFinite, match="20 steps in a row"):
        train(place, tmp_path / "spikes", "training.skip_grad_norm=1.0e-9", "training.steps=30")
    assert len(rows(tmp_path / "spikes" / "metrics.jsonl")) == 19
    huge = ("training.lr=1.0e30", "training.dtype=float32", "parallel.pp=2")
    with pytest.raises(LossNotFinite) as caught:
        train(place, tmp_path / "huge", *huge)
    assert "`model.layers.1` in backward has NaN (rank 1)" in caught.value.got
    for key in ("training.on_nonfinite=skip", "training.skip_grad_norm=1.0"):
        with pytest.raises(Contradiction, match="planned step"):
            train(place, tmp_path / "off", key, "offload.budget=1GiB", "--dry-run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_of_every_format_are_read_or_refused_by_code(tmp_path, monkeypatch):
    """A short `make attack`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    import attack

    for name in ("XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    kinds = ["plan", "plan of a run", "adapter", "checkpoint", "run files"]
    found = attack.attack(kinds, 1, range(25), tmp_path / "kept")
    assert not found["found"]
    assert found["inputs"] == 25
    assert set(found["kinds"]) == set(kinds)
    assert 0.05 < found["outcomes"]["read"] / 25 < 0.7  # some are harmless, most are not
