import json

import pytest

from hyper_parallel.trainer.loop import EvalRecord, MetricsLog, StepRecord, log_line

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
    log.evaluation(EvalRecord(1, 1 / 3, 100, 0.1))
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
    line = log_line(_record(7), 100, 2**21)
    words = ("step", "loss", "grad_norm", "memory", "tps", "tflops", "mfu", "pred")
    assert [line.index(word) for word in words] == sorted(line.index(word) for word in words)
    assert "(50.0%)" in line
    assert line.endswith("pred +25.0%")
