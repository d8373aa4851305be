"""Outputs that cannot be written: a run goes on without those it can do without, and says which."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.errors import OutputNotWritable, TrackerFailed, written
from hyper_parallel.trainer.files import check_writable
from hyper_parallel.trainer.loop.metrics import MetricsLog, StepRecord
from hyper_parallel.trainer.loop.trackers import make_trackers
from tests.e2e.runs import make_place, rows, train

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("train"))


def record(step):
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "step_s", "tps", "tflops", "mfu"), 0.5)
    counts = dict.fromkeys(("tokens", "valid_tokens", "tokens_seen", "memory_bytes"), 8)
    return StepRecord(step=step, pred_step_s=None, **numbers, **counts)


def test_a_run_ends_with_its_summary_when_reports_and_records_cannot_be_written(place, tmp_path):
    out = tmp_path / "run"
    train(place, out, "training.steps=2")
    for name in ("report.html", "timeline.json", "run.json", "sample.txt"):
        (out / name).unlink(missing_ok=True)
        (out / name).mkdir()
        (out / name / "file").touch()  # a directory that nothing can be renamed to
    words = (
        str(place / "recipe.yaml"),
        f"output_dir={out}",
        "--no-calibrate",
        "training.steps=4",
        "sample_prompt=def",
    )
    result = CliRunner().invoke(application("train"), ["train", *words])
    assert result.exit_code == 1, result.output
    said = result.output
    assert "held-out loss" in said  # the summary
    assert "def" in said  # the sample
    for name in ("report.html", "timeline.json", "run.json", "sample.txt"):
        assert f"{out / name}" in said.replace("\n", "")
    assert said.count("error[HP105]") >= 4
    assert "Traceback" not in said
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (out / "export" / "model.safetensors").is_file()
    assert not [*out.rglob("*.part")]


def test_a_tracker_that_cannot_begin_is_left_out_by_its_hint(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(TrackerFailed) as raised:
        make_trackers(("tensorboard",), tmp_path, 0, {})
    assert raised.value.hint == "'training.report_to=[]'"


def test_curves_on_a_full_disk_are_left_out_and_said(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.step(record(1))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size > 100
    opened = {os.path.realpath(p): int(p.name) for p in Path("/proc/self/fd").iterdir()}
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, opened[str(events)])
    os.close(full)
    log.step(record(2))
    log.step(record(3))
    log.close()
    (error,) = log.unwritten.errors
    assert error.code == "HP105"
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_damaged_file_of_trackers_is_refused(tmp_path):
    (tmp_path / "trackers.json").write_text('{"wandb": [1]}')
    with pytest.raises(TrackerFailed, match="run ids"):
        make_trackers(("tensorboard",), tmp_path, 3, {})


@pytest.mark.parametrize("path", ["d/" * 3000, "n" * 300, "d/" * 1500], ids=["path", "name", "deep"])
def test_an_output_directory_that_cannot_be_is_refused(tmp_path, path):
    with pytest.raises(OutputNotWritable) as raised:
        check_writable(tmp_path / path, "output_dir")
    assert len(raised.value.render()) < 3000
    assert not [*tmp_path.iterdir()]


def test_records_of_other_steps_and_sizes_are_dropped_when_a_run_goes_on(tmp_path):
    good = json.dumps({"step": 1, "loss": 0.5})
    lines = [
        good,
        '{"step": 1e400}',
        '{"step": ' + "1" * 400 + "}",
        '{"step": -5}',
        '{"step": true}',
        "[" * 9999,
        good[:9],
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    log = MetricsLog(tmp_path, 2, ())
    log.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    assert log.notes == ["metrics.jsonl: dropped 6 lines that are not records"]
    assert math.isfinite(rows(tmp_path / "metrics.jsonl")[0]["loss"])


def test_a_disk_that_is_full_when_trackers_begin_is_the_reason(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("hyper_parallel.trainer.loop.trackers.create_file", full)
    with pytest.raises(OutputNotWritable) as raised, written(tmp_path):
        MetricsLog(tmp_path, 0)
    assert "tensorboard" in raised.value.where
