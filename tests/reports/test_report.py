import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.errors import PlanUnreadable, RunUnreadable
from hyper_parallel.ir import Counter, Span, Timeline
from hyper_parallel.reports import chrome_trace, load_run, one_step, write_comparison, write_report
from hyper_parallel.reports.results import results
from hyper_parallel.reports.terms import BOTH, COLORS, RESUMED, RUNS, kind_of, time_kind, words
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
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["script"]:
            self.text.append(data)


def page_of(run_dir: Path) -> Balanced:
    page, _ = write_report(run_dir)
    parsed = Balanced()
    parsed.feed(page.read_text())
    parsed.close()
    assert not parsed.open
    return parsed


def charts_of(page: Path) -> list[dict]:
    """The data of every chart in a page, as the browser gets it."""
    document = re.search(r"const docs_json = '(.*?)';\n", page.read_text())[1]
    found, pending = [], [json.loads(document.encode().decode("unicode_escape"))]
    while pending:
        item = pending.pop()
        if isinstance(item, dict) and item.get("name") == "ColumnDataSource":
            entries = item["attributes"]["data"]["entries"]
            found.append(dict(entries))
        pending += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return found


def assert_charts_have_places(page: Path) -> None:
    """Bokeh draws no chart of a page where the place of one is absent."""
    text = page.read_text()
    (roots,) = re.findall(r'"roots":\{(.*?)\}', text.replace('\\"', '"'))
    for place in re.findall(r':"([^"]+)"', roots):
        assert f'id="{place}"' in text


def test_page_is_well_formed_and_refers_to_nothing_outside(run_dir: Path) -> None:
    parsed = page_of(run_dir)
    assert parsed.references == []
    page = run_dir / "report.html"
    assert page.stat().st_size < 5e6
    own = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert "http" not in own
    assert "@import" not in own
    assert "url(" not in own


def test_curves_are_what_metrics_say(run_dir: Path) -> None:
    write_report(run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    drawn = charts_of(run_dir / "report.html")
    steps = [float(row["step"]) for row in rows]
    for key in ("loss", "lr", "grad_norm", "step_s", "tps"):
        values = [float(row[key]) for row in rows]
        assert any(d.get("x") == steps and d["y"] == values for d in drawn), key
    assert any(d.get("x") == [0.0, 60.0] and d["y"] == [9.7, 3.4] for d in drawn)


def test_long_curves_are_thinned_but_hold_measured_values(run_dir: Path) -> None:
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps(row | {"step": n, "loss": 1.0 + 1.0 / n}) for n in range(1, 9_001)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, _ = write_report(run_dir)
    assert page.stat().st_size < 5e6
    loss = next(d for d in charts_of(page) if d.get("label") and d["label"][0] == "training")
    assert 1000 < len(loss["x"]) <= 2000
    assert all(y == 1.0 + 1.0 / x for x, y in zip(loss["x"], loss["y"], strict=True))


def test_each_part_of_a_resumed_run_is_beside_its_own_prediction(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows[40:]:
        row |= {"memory_bytes": 100 << 20, "step_s": 0.5, "tps": 700.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plans = (run_dir / "plan.json").read_text(), json.loads((run_dir / "plan.json").read_text())
    plans[1]["memory"] = [{**term, "bytes": term["bytes"] // 4} for term in plans[1]["memory"]]
    later = json.dumps(plans[1] | {"step_s": 0.4})
    for step, plan, changed in ((0, plans[0], {}), (40, later, {"training.lr": [0.1, 0.2]})):
        part = run_dir / "parts" / f"step_{step:08d}"
        part.mkdir(parents=True)
        (part / "plan.json").write_text(plan)
        (part / "part.json").write_text(json.dumps({"step": step, "changed": changed}))
    (run_dir / "plan.json").write_text(later)
    text = " ".join(" ".join(page_of(run_dir).text).split())
    assert "peak memory per rank 100.00 MiB predicted 80.00 MiB (+25.0 %)" in text
    assert "step time (median) 500 ms predicted 400 ms (+25.0 %)" in text
    assert "1 to 40" in text
    assert "1 s 1.1 s 320.00 MiB 300.00 MiB - 41 to 60" in text
    assert "400 ms 500 ms 80.00 MiB 100.00 MiB training.lr" in text
    assert "medians of steps 41 to 60 without the first 3" in text
    drawn = charts_of(run_dir / "report.html")
    flat = [(d["x"], d["y"]) for d in drawn if d.get("label", [""])[0] == "predicted"]
    assert ([1.0, 40.0], [1.0, 1.0]) in flat
    assert ([41.0, 60.0], [0.4, 0.4]) in flat
    assert "[40.5]" in (run_dir / "report.html").read_text()


@pytest.mark.slow
def test_medians_say_how_many_steps_are_left_out(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "medians of all steps without the first 3." in " ".join(page_of(run_dir).text)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:3]))
    text = " ".join(" ".join(page_of(run_dir).text).split())
    assert "medians of all steps. Point" in text
    assert "step time (median) 3 s" in text


def test_no_colour_has_two_meanings() -> None:
    used = [*COLORS.values(), *RUNS, RESUMED]
    assert len({*used}) == len(used)


def test_measured_memory_is_broken_down_as_predicted(run_dir: Path) -> None:
    timeline, held = make_timeline(), {"parameters": 4.0, "gradients": 3.0, "optimizer states": 2.0}
    told = [Counter(f"rank 1/peak {k}", 13.5, gib * (20 << 20)) for k, gib in held.items()]
    within = [Counter("rank 1/memory", 13.2 + 0.1 * i, (290 + i) << 20) for i in range(9)]
    counted = Timeline("measured", timeline.spans, (*told, *within))
    (run_dir / "timeline.json").write_text(json.dumps(encode(counted)))
    write_report(run_dir)
    drawn = charts_of(run_dir / "report.html")
    bars = next(d for d in drawn if "activations and buffers" in d.get("what", ()))
    ends = dict(zip(zip(bars["y"], bars["what"], strict=True), bars["right"], strict=True))
    assert ends["measured: 300.00 MiB", "optimizer states"] == pytest.approx(180)
    assert ends["measured: 300.00 MiB", "activations and buffers"] == pytest.approx(300)
    assert ends["predicted: 320.00 MiB", "optimizer states"] == pytest.approx(120)
    curve = next(d for d in drawn if d.get("label", [""])[0] == "measured, rank 1")
    assert {*curve["y"]} == {290.0 + i for i in range(9)}


def test_runs_are_compared_in_one_page(run_dir: Path, tmp_path_factory, monkeypatch) -> None:
    other = tmp_path_factory.mktemp("other") / "slow"
    shutil.copytree(run_dir, other)
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"step_s": 2.2, "loss": row["loss"] + 1}) for row in rows]
    (other / "metrics.jsonl").write_text("\n".join(lines))
    (other / "config.yaml").write_text("model:\n  path: tiny\ntraining:\n  lr: 0.5\n")
    monkeypatch.setattr(sys, "argv", ["hyper-parallel", "report", str(run_dir), str(other)])
    with pytest.raises(SystemExit, match="0"):
        main()
    page = run_dir / "comparison.html"
    parsed = Balanced()
    parsed.feed(page.read_text())
    assert parsed.references == []
    text = " ".join(part.strip() for part in parsed.text if part.strip())
    assert "2.2 s (+100.0 %)" in text
    assert "training.lr - 0.5" in text
    assert "model.path" not in text  # it does not differ
    labels = {d["label"][0]: d for d in charts_of(page) if d.get("label")}
    first, second = labels[f"{run_dir.name}, training"], labels["slow, training"]
    assert second["y"] == [y + 1 for y in first["y"]]
    assert (other / "report.html").is_file()
    assert write_comparison([run_dir]).is_file()


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
    assert sum(e["dur"] for e in spans if e["pid"] == 1) == pytest.approx(3 * 1e6)  # three steps of one second


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
    path.write_text(path.read_text() + json.dumps({"step": 60, "loss": 1.25}) + '\n{"step": 61, "lo')
    run = load_run(run_dir)
    assert len(run.metrics) == 60
    assert run.metrics[-1]["loss"] == 1.25


def test_broken_run_directories_are_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match="not a run directory: it does not exist"):
        load_run(tmp_path / "nothing")
    for name in ("run.json", "plan.json"):
        whole = (run_dir / name).read_bytes() if (run_dir / name).exists() else b"{}"
        for damaged in (b'{"cut', b"\xff", b"[" * 100_000):
            (run_dir / name).write_bytes(damaged)
            with pytest.raises((RunUnreadable, PlanUnreadable), match=name):
                load_run(run_dir)
        (run_dir / name).write_bytes(whole)
    path = run_dir / "metrics.jsonl"
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(RunUnreadable, match=re.escape("metrics.jsonl:1")):
        load_run(run_dir)
    path.write_text('{"step": Infinity}\n' + path.read_text())
    with pytest.raises(RunUnreadable, match=re.escape("metrics.jsonl:1")):
        load_run(run_dir)
    (run_dir / "plan.json").unlink()
    path.write_text('{"step": 1}\n')
    with pytest.raises(RunUnreadable, match=re.escape("no plan.json")):
        load_run(run_dir)


def test_offloaded_steps_are_shown_and_incomplete_records_refused(run_dir: Path) -> None:
    for kind in ("predicted", "measured"):
        spans = (
            Span("compute", "forward", 0.0, 1.0, "compute"),
            Span("store", "w", 0.1, 0.2, "store"),
        )
        counters = (Counter("device", 0.0, 1e6), Counter("device", 0.5, 2e6))
        timeline = Timeline(kind, spans, counters)
        (run_dir / f"offload_{kind}.json").write_text(json.dumps(encode(timeline)))
    record = {
        "difference_bytes": 3, "outside_bytes": 0, "dram_bytes": 5, "flash_bytes": 0, "replanned": False,
        "sim_step_s": 2.0, "pred_sim_step_s": 1.0, "wait_s": 0.5, "pred_wait_s": 0.25,
    }  # fmt: skip
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "loss": 1.0, "offload": record}) + "\n")
    text = " ".join(page_of(run_dir).text)
    assert "Simulated step 2 s, predicted 1 s; waiting for copies 500 ms, predicted 250 ms" in text
    assert "Device memory" in text
    del record["wait_s"]
    rows = [{"step": step, "offload": record} for step in (1, 2)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunUnreadable, match=r"metrics\.jsonl:1"):
        load_run(run_dir)


def test_half_a_surrogate_pair_in_a_run_is_shown_as_its_escape(run_dir: Path) -> None:
    about = json.loads((run_dir / "run.json").read_text()) if (run_dir / "run.json").exists() else {}
    (run_dir / "run.json").write_text(json.dumps({**about, "recipe": "\ud800.yaml", "device": "\ud800"}))
    page, _ = write_report(run_dir)
    assert "\\ud800" in page.read_text(encoding="utf-8")


def test_lanes_that_are_not_drawn_are_counted_over_all_lanes_of_a_rank(run_dir: Path) -> None:
    lanes = [f"rank {rank}/{kind}" for rank in range(10) for kind in ("compute", "communication")]
    spans = tuple(Span(lane, "forward", 0.0, 0.1, "compute", 3) for lane in lanes)
    timeline = Timeline("measured", spans)
    (run_dir / "timeline.json").write_text(json.dumps(encode(timeline)))
    page, _ = write_report(run_dir)
    assert "4 more lanes are not drawn" in page.read_text(encoding="utf-8")


def test_lanes_and_bars_name_the_terms_of_a_step_alike() -> None:
    for term in ("gradient norm", "optimizer", "every step", "stragglers", "offload copies"):
        assert kind_of(f"3 {term}") == time_kind(term) != BOTH
    assert words("3 gradient norm") == "gradient norm, stage 3"


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
    assert {"forward", "backward"} <= {part.strip() for part in text}
    lanes = next(d for d in charts_of(run_dir / "report.html") if d.get("what", [""])[0][-1:] == "0")
    assert "backward, stage 1, microbatch 1" in lanes["what"]
    assert len({*lanes["color"]}) == 2  # one for all forwards, one for all backwards
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert {"pipeline rank 0/compute", "pipeline rank 1/compute", "step"} == {*lanes.values()}
    drawn = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["name"] == "0F0"]
    measured = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["name"] == "data"]
    assert [e["ts"] for e in drawn] == pytest.approx(sorted({e["ts"] for e in measured}))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_phone_shows_the_whole_width(run_dir: Path) -> None:
    write_report(run_dir)
    frame = run_dir / "phone.html"
    frame.write_text(
        '<iframe src="report.html" width="390" height="844" style="border:0"></iframe><p></p>'
        "<script>addEventListener('load', () => setTimeout(() => {"
        "const page = document.querySelector('iframe').contentDocument;"
        "document.querySelector('p').textContent = [page.documentElement.scrollWidth,"
        "page.querySelectorAll('.bk-Figure').length].join(' ')}, 2000))</script>"
    )
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    shown = subprocess.run(
        ["chromium", *words, "--virtual-time-budget=8000", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    width, charts = map(int, re.search(r"<p>(\d+) (\d+)</p>", shown).groups())
    assert charts >= 4
    assert width <= 390


def test_preference_stages_are_shown_by_the_names_of_their_scores(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(
        "stage: dpo\ndpo: {loss_type: ipo}\ntraining: {lr: 5.0e-7, lr_schedule: cosine, warmup_steps: 4}\n"
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        share = row["step"] / 60
        row["preference"] = {
            "chosen": share,
            "rejected": -share,
            "margin": 2 * share,
            "accuracy": share,
        }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = {"step": 0, "loss": 0.7, "preference": {"margin": 0.0, "accuracy": 0.5}}
    last = {"step": 60, "loss": 0.4, "preference": {"margin": 1.5, "accuracy": 0.75}}
    (run_dir / "eval.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    found = {r.name: (r.text, r.note) for r in results(load_run(run_dir))}
    assert found["steps"] == ("60", "480 pairs"), "of 256 tokens for each answer"
    assert found["accuracy"] == ("100.0 %", "from 1.7 %")
    assert found["held-out accuracy"] == ("75.0 %", "from 50.0 %")
    assert found["margin"] == ("2", "chosen 1, rejected -1")
    assert found["learning rate"] == ("5e-07", "cosine, warm-up 4 steps")
    assert found["elapsed time"] == ("69.8 s", "69.8 s in steps")
    assert "IPO loss" in found
    text = "".join(page_of(run_dir).text)
    for title in ("IPO loss", "Accuracy", "Margin", "Rewards of answers"):
        assert title in text
    write_comparison([run_dir, run_dir])
    for page in ("report.html", "comparison.html"):
        assert_charts_have_places(run_dir / page)
    assert text.index("Conditions of all numbers") > text.index("How the prediction was made")


def test_a_model_that_a_run_has_exported_is_named_with_that_run(run_dir: Path) -> None:
    plan = json.loads((run_dir / "plan.json").read_text())
    plan["model"]["name"] = "export"
    (run_dir / "plan.json").write_text(json.dumps(plan))
    (run_dir / "config.yaml").write_text("model: {path: /home/me/runs/sft/export}\n")
    assert "sft/export on " in "".join(page_of(run_dir).text)


@pytest.mark.slow
def test_rewards_and_lengths_of_completions_have_curves(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("stage: grpo\n")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["rollout"] = {"reward": row["step"] / 60, "completion_tokens": 40.0 - row["step"] / 2}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {r.name: (r.text, r.note) for r in results(load_run(run_dir))}
    assert found["completion length"] == ("10.0", "tokens, from 39.5")
    assert found["steps"] == ("60", "960 completions")
    text = "".join(page_of(run_dir).text)
    assert "Length of completions" in text
    assert "GRPO loss" in text
    write_comparison([run_dir, run_dir])
    for page in ("report.html", "comparison.html"):
        assert_charts_have_places(run_dir / page)


def test_exposed_communication_is_shown_with_both_figures_of_masking(run_dir: Path) -> None:
    timeline = make_timeline()
    lane = "rank 0/communication"
    flying = Span(lane, "sequence gather", 13.5, 0.2, "in flight", 3)
    measured = Timeline("measured", (*timeline.spans, flying))
    (run_dir / "timeline.json").write_text(json.dumps(encode(measured)))
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, exposed_s in zip(rows[1:4], (0.1, 0.2, 0.4), strict=True):
        row["overlap"] = {
            "halved_layers": 2,
            "exposed_s": {"tp": exposed_s},
            "masking_timeline": 0.75,
            "masking_wait": -0.5,
        }
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = " ".join(page_of(run_dir).text)
    assert "tp 200 ms" in text
    assert "computes in 75% of the time with a collective in flight" in text
    assert "waits take 150% of the time of the same collectives alone" in text
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    (thread,) = [e for e in trace if e["ph"] == "M" and e["args"].get("name") == lane]
    (event,) = [e for e in trace if e.get("name") == "sequence gather"]
    assert (event["pid"], event["tid"]) == (thread["pid"], thread["tid"])


def test_fused_kernels_are_listed_with_their_operators(run_dir: Path) -> None:
    kernels = [
        {"name": "Fused_Exp_Mul", "operators": ["Exp", "Mul", "Add"]},
        {"name": "Fused_Rsqrt", "operators": ["ReduceSum", "Rsqrt"]},
    ]
    (run_dir / "run.json").write_text(json.dumps({"fused_kernels": kernels}))
    text = " ".join(page_of(run_dir).text)
    assert "Exp, Mul, Add" in text
    assert text.index("Fused_Exp_Mul") < text.index("Fused_Rsqrt")
    (tile,) = [r for r in results(load_run(run_dir)) if r.name == "fused kernels"]
    assert (tile.text, tile.note) == ("2", "generated from 5 operators")
    (run_dir / "run.json").write_text("{}")
    assert "used kernels" not in " ".join(page_of(run_dir).text)


def test_the_memory_of_a_step_program_is_labelled_as_simulated(run_dir: Path) -> None:
    memory = {
        "peak_bytes": 2**20,
        "unplanned_bytes": 2**21,
        "host_bytes": 2**19,
        "origin": "simulated",
    }
    about = {"program_memory": memory | {"seconds": 1.0, "unplanned_s": 0.5}}
    (run_dir / "run.json").write_text(json.dumps(about))
    (tile,) = [r for r in results(load_run(run_dir)) if "program" in r.name]
    assert (tile.name, tile.text) == ("peak memory of the program (simulated)", "1.00 MiB")
    assert tile.note == "2.00 MiB without the plan, 512.00 KiB on the host"
