"""Run directories and plans that somebody else may have written: shown, or refused with a code at little cost."""

import json
import os
import resource
import time
from dataclasses import replace

import pytest

from hyper_parallel.calibration import predict_file
from hyper_parallel.calibration.csv_rows import read_rows
from hyper_parallel.errors import HyperParallelError, PlanUnreadable, RunsUnreadable, RunUnreadable
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.reports import load_run, write_comparison, write_report
from hyper_parallel.serde import encode
from tests.reports.conftest import make_plan, make_timeline

pytestmark = pytest.mark.unit
ROLES = {"rollout_ranks": 2, "rollout_tp": 1, "max_staleness": 1, "sample_s": 1.0, "learn_s": 1.0, "sampler_bytes": 1}
PART = {"name": "language", "ranks": [0], "degrees": "", "forward_s": 1.0, "backward_s": 1.0}
SUBMODELS = {"parts": [PART], "bubble": 0.0, "lower_s": 1.0}


@pytest.fixture
def place(tmp_path):
    make_plan().save(tmp_path / "plan.json")
    rows = [{"step": i, "loss": 2.0, "step_s": 1.0, "memory_bytes": 9} for i in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class Cost:
    """Less than 5 s of the processor and 1 GiB."""

    def __enter__(self):
        self.start, self.kib = (
            time.process_time(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )

    def __exit__(self, *error):
        assert time.process_time() - self.start < 5
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.kib < 1 << 20


def changed(place, *path, value):
    plan = json.loads((place / "plan.json").read_text())
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (place / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("strategy", "dp_shard"), 10**9),
        (("strategy", "pp"), 10**18),
        (("strategy", "tp_x"), 10**400),
        (("strategy", "tp_x"), 0),
        (("strategy", "cp"), -4),
        (("strategy", "virtual_stages"), 1 << 19),
        (("strategy", "stage_layers"), [-1]),
        (("strategy", "order"), ["pp"] * 6),
        (("rejected", 0, "strategy", "ep"), 1 << 40),
        (("workload", "accumulation_steps"), 1 << 60),
        (("workload", "seq_len"), 0),
        (("notes",), ["x"] * 2_000_000),
        (("step_s",), "x"),
        (("memory_capacity_bytes",), 0),
        (("memory_capacity_bytes",), -1),
        (("roles",), ROLES | {"step_s": 0.0}),
        (("submodels",), SUBMODELS | {"step_s": -1.0}),
    ],
)  # fmt: skip
def test_a_plan_of_huge_numbers_is_refused(place, path, value):
    changed(place, *path, value=value)
    with Cost(), pytest.raises(PlanUnreadable):
        write_report(place)
    with Cost(), pytest.raises(PlanUnreadable):
        Plan.load(place / "plan.json")


def test_positive_step_times_are_read(place):
    changed(place, "roles", value=ROLES | {"step_s": 1.0})
    changed(place, "submodels", value=SUBMODELS | {"step_s": 1.0})
    assert Plan.load(place / "plan.json").whole_step_s == 1.0


def test_the_largest_plan_is_shown(place):
    replace(make_plan(), strategy=Strategy(dp_shard=1 << 4, tp_x=1 << 16)).save(place / "plan.json")
    with Cost():
        page, _ = write_report(place)
    assert "first 256 of 1048576 ranks" in page.read_text()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 6, "loss": 1' + "0" * 400 + "}",
        '{"step": 6, "memory_bytes": ' + "9" * 5000 + "}",
        '{"step": 1e300}',
        '{"step": -1}',
        '{"step": "6"}',
        '{"step": 6, "loss": "x"}',
        '{"step": 6, "loss": NaN}',
        '{"step": 6, "rollout": {"reward": []}}',
        '{"step": 6, "offload": 3}',
        '{"step": 6, "a": "' + "x" * (2 << 20) + '"}',
        "[" * 100_000,
        "{}",
    ],
    ids=[
        "loss",
        "bytes",
        "float",
        "negative",
        "text",
        "type",
        "nan",
        "rollout",
        "offload",
        "line",
        "deep",
        "none",
    ],
)
def test_a_line_of_metrics_is_refused_by_its_number(place, line):
    path = place / "metrics.jsonl"
    good = path.read_text()
    path.write_text(f"{line}\n{good}")
    for action in (lambda: write_report(place), lambda: write_comparison([place, place])):
        with Cost(), pytest.raises(RunUnreadable, match=r"metrics\.jsonl:1") as raised:
            action()
        assert len(raised.value.render()) < 1000


def test_missing_values_are_left_out(place):
    rows = [
        {"step": 1, "loss": None}, {"step": 2}, {"step": 3, "rollout": {"reward": None, "sample_s": 1.0}},
        {"step": 4, "rollout": {}, "step_s": 0.0}, {"step": 5, "rollout": {"wait_s": 0.5}, "tokens": 8},
    ]  # fmt: skip
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(place)
    assert load_run(place).busy == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"device": 3}'),
        ("run.json", '{"fused_kernels": [{"name": "k"}]}'),
        ("run.json", '{"program_memory": {"peak_bytes": 1}}'),
        ("run.json", '{"ranks": 1' + "0" * 99 + "}"),
        ("run.json", "[]"),
        ("timeline.json", '{"kind": "measured", "spans": [{"lane": 1}]}'),
        ("timeline.json", '{"kind": "measured", "spans": [' + "{}," * 200_000 + "{}]}"),
        ("timeline.json", "[" * 1_000_000),
        ("eval.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + '}\n{"step": 2}'),
        ("config.yaml", "- 1"),
    ],
)
def test_another_file_of_a_run_is_refused_by_name(place, name, text):
    (place / name).write_text(text)
    with Cost(), pytest.raises(HyperParallelError, match=name) as raised:
        load_run(place)
    assert len(raised.value.render()) < 1000


@pytest.mark.slow
def test_many_lanes_and_steps_are_drawn_in_little_time(place):
    timeline = encode(make_timeline())
    span = timeline["spans"][0]
    timeline["spans"] = [span | {"lane": f"rank {i}/compute", "step": i, "name": "rollout"} for i in range(5_000)]
    (place / "timeline.json").write_text(json.dumps(timeline))
    (place / "rollouts").mkdir()
    (place / "rollouts" / "timeline.0.json").write_text(json.dumps(timeline))
    (place / "predicted_timeline.json").write_text(json.dumps(timeline | {"kind": "simulated"}))
    with Cost():
        write_report(place)
    assert (place / "trace.json").stat().st_size < 1 << 30


def test_a_table_of_runs_that_is_a_pipe_or_endless_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "large.csv").touch()
    os.truncate(tmp_path / "large.csv", 1 << 40)
    (tmp_path / "zeros.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "large.csv", "zeros.csv"):
        with Cost(), pytest.raises(RunsUnreadable, match="cannot be read"):
            read_rows(tmp_path / name)


def test_runs_with_different_results_are_compared(place, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("plan.json", "metrics.jsonl"):
        (other / name).write_bytes((place / name).read_bytes())
    rows = [{"step": step, "loss": 3.0 - step, "tokens": 8, "seconds": 1.0} for step in (0, 1)]
    (other / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for runs in ([place, other], [other, place]):
        assert "held-out" in write_comparison(runs).read_text().lower()


def test_runs_that_are_not_there_are_refused_with_a_code(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(RunsUnreadable, match="cannot be read"):
            predict_file(path, tmp_path / "out.csv")
