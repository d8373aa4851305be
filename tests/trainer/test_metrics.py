import json
import logging
import math
import time
from dataclasses import replace

import pytest

from hyper_parallel.errors import MissingDependency, RunDirectoryLost, TrackerFailed
from hyper_parallel.trainer.directory_watch import DirectoryWatch
from hyper_parallel.trainer.loop import (
    Display,
    EvalRecord,
    MetricsLog,
    StepRecord,
    log_line,
    trackers,
)

pytestmark = pytest.mark.torch


def _record(step, loss=0.1 + 0.2):
    return StepRecord(
        step=step, loss=loss, grad_norm=1.5, lr=1e-3, tokens=64, valid_tokens=60, tokens_seen=64 * step,
        step_s=0.5, tps=64.0, tflops=0.002, mfu=0.25, memory_bytes=2**20, pred_step_s=0.4,
    )  # fmt: skip


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_numbers_keep_full_precision(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.step(_record(1))
    log.evaluation(EvalRecord(1 / 3, 100, step=1, seconds=0.1))
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.1 + 0.2
    assert json.loads((tmp_path / "eval.jsonl").read_text())["loss"] == 1 / 3
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_resumed_run_continues_after_its_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 6):
        log.step(_record(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the run was killed here
    log = MetricsLog(tmp_path, 3)
    log.step(_record(4))
    log.close()
    assert _steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_new_run_starts_with_empty_files(tmp_path):
    for _ in range(2):
        log = MetricsLog(tmp_path, 0)
        log.step(_record(1))
        log.close()
    assert _steps(tmp_path / "metrics.jsonl") == [1]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_the_line_has_the_usual_order():
    line = log_line(_record(7), 100)
    words = ("step", "loss", "grad_norm", "lr", "tok/s", "MiB", "pred")
    assert [line.index(word) for word in words] == sorted(line.index(word) for word in words)
    assert line.endswith("pred +25%")


@pytest.mark.parametrize("steps", [7, 1000, 100_000, 10**9])
def test_the_line_of_a_step_has_at_most_80_columns(steps):
    large = replace(
        _record(steps),
        loss=12.34567,
        grad_norm=123.456,
        lr=2.5e-5,
        tps=123_456.0,
        memory_bytes=139 * 2**30,
    )
    line = log_line(large, steps)
    assert len(line) <= 80
    for fact in ("12.3457", "grad_norm 123", "lr 2.5e-05", "123k tok/s", "139 GiB", "pred +25%"):
        assert fact in line
    assert line.startswith(("step", str(steps)))


@pytest.mark.parametrize("steps", [8, 60, 600, 6000])
def test_all_lines_of_a_run_begin_alike(steps):
    """The first steps are slow, and the last ones have the longest numbers."""
    first = replace(_record(1), pred_step_s=0.01, step_s=0.105, tps=91.3, memory_bytes=20_551_680)
    last = replace(first, step=steps, grad_norm=0.857, pred_step_s=0.02, lr=7e-4)
    for record in (first, last):
        line = log_line(record, steps)
        assert line.split()[0] == "step"
        assert line.split(" loss ")[0].endswith(f"{record.step}/{steps}" if steps < 100 else str(record.step))
        assert len(line) <= 80


def test_a_line_too_long_for_the_total_still_says_that_it_is_of_a_step():
    record = replace(_record(1), grad_norm=5.42e-5, lr=5e-4, tps=341.0, memory_bytes=2_500_000, step_s=1.516)
    line = log_line(record, 10)
    assert line.startswith("step 1 loss 0.3000 grad_norm 5.42e-05 ")
    assert line.endswith("pred +279%")


@pytest.mark.parametrize("every", [1, 10, 25])
def test_a_new_epoch_is_said_before_the_next_line_once(capsys, every):
    logging.getLogger("hyper_parallel").setLevel(logging.INFO)
    display = Display(30, True)
    for step in range(1, 31):
        display.advance(step, step / 12)
        if step % every == 0:
            display.line(f"step {step}")
    said = [line for line in capsys.readouterr().err.splitlines() if "epoch" in line]
    second, third = "epoch 2 began after step 12", "epoch 3 began after step 24"
    assert said == ([third] if every == 25 else [second, third])


@pytest.mark.filterwarnings("ignore")
def test_trackers_get_the_same_numbers_and_go_on_in_their_runs(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow"):
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    with pytest.raises(TrackerFailed, match="MLFLOW_ALLOW_FILE_STORE"):
        MetricsLog(tmp_path / "run", 0, ["mlflow"])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    recipe = {"training": {"lr": 0.25}, "stage": "pt"}
    for done in (0, 1):
        log = MetricsLog(tmp_path / "run", done, ["mlflow", "wandb"], recipe)
        log.step(_record(done + 1, 1 / 3 + done))
        log.evaluation(EvalRecord(1 / 7 + done, 100, step=done + 1, seconds=0.1))
        log.close()
    (run,) = (tmp_path / "mlruns").glob("*/*/meta.yaml")
    points = (run.parent / "metrics" / "train" / "loss").read_text().splitlines()
    assert [line.split()[1:] for line in points] == [[repr(1 / 3), "1"], [repr(1 / 3 + 1), "2"]]
    assert (run.parent / "params" / "training.lr").read_text() == "0.25"
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name  # one run, for `wandb sync`
    for done, file in enumerate((first, second)):
        held, deadline = b"", time.monotonic() + 20
        while b"eval/loss" not in held and time.monotonic() < deadline:  # its service writes a moment later
            held = file.read_bytes()
        assert b"train/loss" in held
        assert all(repr(value + done).encode() in held for value in (1 / 3, 1 / 7))


def test_a_tracker_without_its_package_is_refused_with_the_line_for_pip(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency) as caught:
        trackers.check_trackers(["mlflow"], "training.report_to")
    assert caught.value.hint == "pip install mlflow-skinny, or leave it out: 'training.report_to=[]'"


def _broken(step, values):
    raise OSError("no route to host")


def test_the_line_of_a_skipped_step_names_its_possible_causes():
    skipped = replace(_record(1), skipped=1)
    assert log_line(skipped, 1).endswith("the gradient is above training.skip_grad_norm")
    rejected = log_line(replace(skipped, rollout={"reward": 1.0}), 1)
    assert "skip_grad_norm, or the effective sample size" in rejected
    assert log_line(replace(skipped, loss=math.nan), 1).endswith("gradient is not finite")


def test_a_service_that_is_down_does_not_end_the_run(tmp_path, caplog):
    log = MetricsLog(tmp_path, 0, ())
    log._trackers.append(trackers.Tracker("broken", _broken, lambda: None))
    log.step(_record(1))
    log.step(_record(2))
    log.close()
    assert caplog.text.count("broken receives no more metrics: no route to host") == 1
    assert _steps(tmp_path / "metrics.jsonl") == [1, 2]


def _make_trackers(run, watch):
    trackers.make_trackers(("tensorboard",), run, 0, {}, watch.check)


def _open_records(run, watch):
    MetricsLog(run, 0, watch=watch)


@pytest.mark.parametrize("write", [_make_trackers, _open_records])
def test_nothing_is_written_to_a_directory_that_took_the_path_of_the_run(tmp_path, write):
    run = tmp_path / "run"
    run.mkdir()
    watch = DirectoryWatch(run)
    run.rename(tmp_path / "moved")
    run.mkdir()
    with pytest.raises(RunDirectoryLost, match="moved"):
        write(run, watch)
    watch.close()
    assert not list(run.iterdir())
