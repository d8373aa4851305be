"""`hyper-parallel plan` as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import Plan
from hyper_parallel.topology import find_accelerators, rank_capacity

ROOT = Path(__file__).resolve().parents[2]
BIG = ("llama-3-405b", "--topology", "cloudmatrix384", "--devices", "2048")

pytestmark = pytest.mark.sanity


def run(*args, cwd, options=()):
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *options, "plan", *args],
        env=environ, cwd=cwd, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


TITLE = "llama-3-405b: 405.85B parameters, on 2048 devices of cloudmatrix384"


def test_the_next_command_repeats_an_option_whose_value_is_zero():
    words = ["plan", "llama-3-8b", "-t", "dgx-h100", "--media", "0"]
    done = CliRunner().invoke(application(), words, catch_exceptions=False)
    assert "--media 0" in done.stdout.split("next:\n")[1]


def test_plan_prints_a_panel_and_the_next_command(tmp_path):
    done = run(*BIG, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == TITLE
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    strategy = text.split("strategy ")[1].split(" batch ")[0]
    assert text.count(strategy) == 1
    for label in (
        "step time",
        "in 80 % of cases",
        "MFU",
        "GiB per device",
        "why not",
        "does not fit",
    ):
        assert label in text
    pasted = done.stdout.split("next:\n")[1].replace("hyper-parallel", "echo")
    pasted = pasted.replace("> recipe.yaml", "")
    spoken = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True).stdout.split("\n")
    assert spoken[0] == f"plan {' '.join(BIG)} --launch ours"
    capacity = rank_capacity(len(find_accelerators())).num_ranks
    larger = int(BIG[BIG.index("--devices") + 1]) > capacity
    assert spoken[1] == "train recipe.yaml" + " --dry-run" * larger


@pytest.mark.slow
def test_quiet_is_one_line_and_explain_has_everything(tmp_path):
    done = run(*BIG, cwd=tmp_path, options=["-q"])
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert "per step" in done.stdout
    done = run(*BIG, "--explain", cwd=tmp_path)
    assert done.stdout.startswith(TITLE)
    assert max(map(len, done.stdout.splitlines())) <= 80
    for part in ("layouts", "collectives per rank and step", "why not", "smaller in memory"):
        assert f"\n{part}\n" in done.stdout


def test_json_file_and_dry_run(tmp_path):
    done = run(*BIG, "--pin", "tp=8", "--top", "2", "-o", "plan.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["strategy"]["tp_x"] * printed["strategy"]["tp_y"] == 8
    assert Plan.load(tmp_path / "plan.json") == Plan.from_json(done.stdout)
    done = run(*BIG, "-o", "other.json", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "other.json").exists()


def planned(tmp_path, *args):
    done = run(*args, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return Plan.from_json(done.stdout)


def test_a_search_chooses_what_runs_and_pins_what_they_ask_for(tmp_path):
    asked = ("llama-3-70b", "-t", "dgx-h100", "--devices", "64")
    studied = planned(tmp_path, *asked, "--all-layouts")
    assert any("cannot run this plan yet" in note for note in studied.notes)
    chosen = planned(tmp_path, *asked)
    assert chosen.layouts
    assert not any("cannot run" in note for note in chosen.notes)
    assert chosen.step_s >= studied.step_s
    etp = planned(tmp_path, "mixtral-8x7b", "-t", "dgx-h100", "--devices", "16",
                  "--pin", "etp=2", "--pin", "ep=2", "--pin", "tp=2")  # fmt: skip
    assert etp.strategy.expert_tp == 2
    assert any("cannot run this plan yet (etp=2" in note for note in etp.notes)


@pytest.mark.slow
def test_tp_is_tp_x_as_in_a_recipe(tmp_path):
    strategy = planned(tmp_path, *BIG, "--pin", "tp=8").strategy
    assert (strategy.tp_x, strategy.tp_y) == (8, 1)
    strategy = planned(tmp_path, *BIG, "--pin", "tp=4", "--pin", "tp_y=2").strategy
    assert (strategy.tp_x, strategy.tp_y) == (4, 2)


@pytest.mark.slow
def test_a_share_of_the_memory_stays_free(tmp_path):
    asked = ("llama-3-70b", "-t", "dgx-h100", "--devices", "64")
    usual, half = planned(tmp_path, *asked), planned(tmp_path, *asked, "--memory-headroom", "50%")
    assert usual.memory_bytes <= 0.95 * usual.memory_capacity_bytes
    assert half.memory_bytes <= 0.5 * half.memory_capacity_bytes
    assert half.memory_capacity_bytes == usual.memory_capacity_bytes
    full = planned(tmp_path, *asked, "--memory-headroom", "0")
    assert full.memory_bytes > 0.95 * full.memory_capacity_bytes
    assert "5% of" in run(*asked, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "args",
    [
        ("llama-3-8b", "-t", "dgx-h100", "--pin", "tp=3"),
        ("llama-3-8b", "-t", "dgx-h100", "--devices", "12", "--pin", "tp=8"),
        ("llama-3-8b", "-t", "dgx-h100", "--pin", "tpx=2"),
        ("llama-3-8b", "-t", "dgx-h100", "--pin", "tp"),
        ("llama-3-8b", "-t", "dgx-h100", "--tokens-per-step", "1000"),
        ("llama-3-8b", "-t", "dgx-h100", "--deadline", "3"),
        ("llama-3-8b", "-t", "dgx-h100", "--memory-headroom", "200%"),
        ("lama-3-8b", "-t", "dgx-h100"),
        ("llama-3-8b", "-t", "dgxh100"),
        ("llama-3-405b", "-t", "dgx-h100"),
        (),
    ],
)
def test_a_pasted_hint_plans(args):
    """An option of a hint stands for the one that was given; a name for the argument that was meant."""
    with pytest.raises(HyperParallelError) as caught:
        CliRunner().invoke(application(), ["plan", *args], catch_exceptions=False)
    hint, words = caught.value.hint, [*args]
    if hint.startswith("did you mean"):
        wrong = str(caught.value.got)
        words[words.index(wrong)] = hint.split("`")[1]
    elif hint.startswith("hyper-parallel"):
        words = shlex.split(hint)[2:]
    else:
        option = shlex.split(hint)
        for name in option[::2]:
            if name in words:
                del words[words.index(name) : words.index(name) + 2]
        words += option
    done = CliRunner().invoke(application(), ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_a_pipeline_is_printed_and_written_as_csv(tmp_path):
    recipe = (
        "model: {path: llama-3-8b}\ndata: {seq_len: 8192}\ntopology: dgx-h100\n"
        "training: {microbatch: 1, accumulation_steps: 16}\n"
    )
    (tmp_path / "pp.yaml").write_text(f"{recipe}parallel: {{pp: 4, dp_shard: 8}}\n")
    (tmp_path / "one.yaml").write_text(f"{recipe}parallel: {{dp_shard: 32}}\n")
    done = run("--recipe", "pp.yaml", "--schedule-csv", "s.csv", "--explain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pipeline: 4 stages on 4 ranks, schedule 1f1b" in done.stdout
    assert "layers per stage: 8, 9, 9, 6" in done.stdout
    assert "0F0  0F1" in done.stdout
    rows = (tmp_path / "s.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("0F0,0SEND_F0,0F1")
    done = run("--recipe", "one.yaml", "--schedule-csv", "none.csv", cwd=tmp_path)
    assert done.returncode != 0
    assert "HP104" in done.stderr
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.slow
def test_diff_of_two_files(tmp_path):
    for name, seq_len in (("a.json", "4096"), ("b.json", "8192")):
        done = run("llama-3-8b", "-t", "dgx-h100", "--seq-len", seq_len, "-o", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = run("--diff", "a.json", "b.json", cwd=tmp_path)
    assert "workload.seq_len: 4096 -> 8192" in done.stdout
    done = run("--diff", "a.json", "a.json", cwd=tmp_path)
    assert done.stdout == "the plans do not differ\n"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((), "HP102"),
        (("no-such-model",), "HP304"),
        (("llama-3-8b", "-t", "no-such-machine"), "HP303"),
        (("llama-3-8b", "-t", "dgx-h100", "--pin", "tp=x"), "HP102"),
        (("llama-3-8b", "-t", "dgx-h100", "--pin", "tp=3"), "HP302"),
        (("llama-3-405b", "-t", "dgx-h100"), "HP401"),
        (("--diff", "a.json", "b.json"), "HP306"),
        (("llama-3-8b", "--recipe", "r.yaml"), "HP104"),
        (("llama-3-8b", "-t", "dgx-h100", "-o", "no/such/dir/plan.json"), "HP105"),
    ],
)
def test_mistakes_are_coded_errors(tmp_path, args, code):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 1
    assert f"error[{code}]" in done.stderr
    assert "Traceback" not in done.stderr


def test_recipe_is_planned(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: {path: llama-3-8b}\ntopology: dgx-h100\nparallel: {dp_shard: 8}\ndata: {seq_len: 4096}\n",
        encoding="utf-8",
    )
    done = run("--recipe", "r.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "strategy   dp_shard=8" in done.stdout


def test_planning_for_2048_devices_imports_no_framework():
    code = (
        "import sys, hyper_parallel as hp\n"
        "hp.plan('llama-3-405b', 'cloudmatrix384', num_devices=2048)\n"
        "found = {'torch', 'transformers', 'rich', 'jinja2'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_plan_is_written_if_the_reader_of_the_text_has_left(tmp_path):
    words = ["plan", "llama-3-8b", "-t", "dgx-h100", "-o", "plan.json"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hyper_parallel", *words]
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        process.stdout.close()
        process.wait(60)
    assert Plan.load(tmp_path / "plan.json").strategy.world_size == 8
