import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hyper_parallel.errors import RunUnreadable
from hyper_parallel.ir import Span, Timeline
from hyper_parallel.reports import chrome_trace, load_run, one_step, write_report
from hyper_parallel.reports._charts import gantt
from hyper_parallel.serde import encode
from tests.reports.conftest import make_plan, make_timeline

pytestmark = pytest.mark.unit

VOID = {"meta", "line", "rect", "path", "circle", "i", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed without being open; collects text and references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.references += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page_of(run_dir: Path) -> Balanced:
    page, _ = write_report(run_dir)
    parsed = Balanced()
    parsed.feed(page.read_text())
    parsed.close()
    assert not parsed.open
    return parsed


def test_page_is_well_formed_and_refers_to_nothing_outside(run_dir: Path) -> None:
    parsed = page_of(run_dir)
    assert parsed.references == []
    assert "http" not in (run_dir / "report.html").read_text()


def test_page_shows_predicted_beside_measured(run_dir: Path) -> None:
    text = " ".join(page_of(run_dir).text)
    assert "predicted 1 s (+10.0 %)" in text  # median step 1.1 s after the slow first steps
    assert "from 9.700 before training" in text
    assert "3.400" in text
    assert "predicted 320.00 MiB (-6.2 %)" in text
    assert "slower by 9 %: fsdp communication" in text
    assert "tiny <llama>" in text  # escaped in the source, shown as written


def test_layout_drawing_cuts_as_the_layout_says(run_dir: Path) -> None:
    write_report(run_dir)
    html = (run_dir / "report.html").read_text()
    assert "cut into 4 x 1; rank 0 holds the filled part" in html  # heads over tp_x and dp_shard
    assert "cut into 2 x 2; rank 0 holds the filled part" in html  # down_proj over both dims


def test_trace_holds_both_lanes_aligned(run_dir: Path) -> None:
    _, trace = write_report(run_dir)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"predicted (dp_shard=2 tp_x=2)", "measured"}
    spans = [e for e in events if e["ph"] == "X"]
    first_measured = min(e["ts"] for e in spans if e["pid"] == 2)
    first_predicted = min(e["ts"] for e in spans if e["pid"] == 1)
    assert first_measured == pytest.approx(first_predicted)
    assert sum(e["dur"] for e in spans if e["pid"] == 1) == pytest.approx(
        3 * 1e6
    )  # three steps of one second


def test_trace_without_a_measured_timeline_still_predicts() -> None:
    events = chrome_trace(None, make_plan())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == [
        "compute",
        "tp communication",
        "optimizer",
    ]


def test_one_step_starts_at_zero_and_keeps_order() -> None:
    step = one_step(make_timeline())
    assert min(s.start_s for s in step.spans) == 0.0
    assert {s.step for s in step.spans} == {4}
    assert step.lanes == ("rank 0/compute", "rank 1/compute", "rank 2/compute", "rank 3/compute")


def test_a_resumed_step_counts_once_and_an_unfinished_line_is_ignored(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(
        path.read_text() + json.dumps({"step": 60, "loss": 1.25}) + '\n{"step": 61, "lo'
    )
    run = load_run(run_dir)
    assert len(run.metrics) == 60
    assert run.metrics[-1]["loss"] == 1.25


def test_broken_run_directories_are_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match=re.escape("has no metrics.jsonl")):
        load_run(tmp_path / "nothing")
    path = run_dir / "metrics.jsonl"
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(RunUnreadable, match=re.escape("metrics.jsonl:1")):
        load_run(run_dir)
    (run_dir / "plan.json").unlink()
    path.write_text('{"step": 1}\n')
    with pytest.raises(RunUnreadable, match=re.escape("no plan.json")):
        load_run(run_dir)


def test_simulated_lanes_stand_beside_the_measured_ones(run_dir: Path) -> None:
    spans = tuple(
        Span(f"rank {rank}/compute", f"{rank}{kind}{micro}", start, 0.1, "compute")
        for rank in range(2)
        for micro in range(2)
        for kind, start in (("F", 0.2 * micro + 0.1 * rank), ("B", 0.5 + 0.2 * micro))
    )
    simulated = Timeline("simulated", spans)
    (run_dir / "predicted_timeline.json").write_text(json.dumps(encode(simulated)))
    assert load_run(run_dir).simulated == simulated
    text = page_of(run_dir).text
    assert any("simulated" in part for part in text)
    assert {"forward", "backward", "1B1: 100 ms"} <= {part.strip() for part in text}
    assert "0F0" not in text  # one colour and one key for all forwards
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    lanes = {
        e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1
    }
    assert {"pipeline rank 0/compute", "pipeline rank 1/compute", "step"} == {*lanes.values()}
    drawn = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["name"] == "0F0"]
    measured = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["name"] == "data"]
    assert [e["ts"] for e in drawn] == pytest.approx(sorted({e["ts"] for e in measured}))


def test_long_names_of_lanes_have_room() -> None:
    for name in ("step", "rank 0/communication", "pipeline rank 12/communication"):
        timeline = Timeline("measured", (Span("lane", "2F0", 0.0, 1.0, "compute"),))
        chart = gantt(timeline, [("lane", name)], str)
        bar = chart["rows"][0]["spans"][0][0]
        assert 7.5 * len(name) <= chart["left"] - 8 < bar  # right-aligned, ends 8 left of the lanes
