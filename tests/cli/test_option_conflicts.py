"""Options that a command would ignore are refused by name, and leaving them out as hinted succeeds."""

import shlex

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.errors import Contradiction, HyperParallelError

MACHINE = "llama-3-8b -t dgx-h100"
RECIPE = "model: {path: llama-3-8b}\ndata: {seq_len: 4096}\ntopology: dgx-h100\nparallel: {dp_shard: 8}\n"


def call(words):
    return CliRunner().invoke(application(), shlex.split(words), catch_exceptions=False)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("plan llama-3-8b --diff a.json b.json", "model has no effect with --diff"),
        ("plan --diff a.json b.json --json --top 2", "--top, --json have no effect with --diff"),
        (f"plan {MACHINE} --launch ours --json", "--json has no effect with --launch"),
        (f"plan {MACHINE} --launch ours --explain --gantt", "--explain, --gantt have no effect with --launch"),
        (f"plan {MACHINE} --json --gantt", "--gantt has no effect with --json"),
        (f"--quiet plan {MACHINE} --explain", "--explain has no effect with --quiet"),
        ("config show r.yaml --yaml --json", "--json has no effect with --yaml"),
        ("calibrate --steps 20", "--steps has no effect without --check"),
        ("calibrate --runs runs.csv --steps 20", "--steps has no effect with --runs"),
        ("calibrate --runs runs.csv --ranks 2 --check r.yaml", "--ranks, --check have no effect with --runs"),
        ("train r.yaml --dry-run --trace --launcher slurm", "--launcher has no effect with --trace"),
    ],
)
def test_an_option_without_effect_is_refused(recipe, words, problem):
    with pytest.raises(Contradiction) as caught:
        call(words)
    assert caught.value.what == problem
    assert problem.split(" has ")[0].split(" have ")[0] in caught.value.hint


@pytest.mark.parametrize("name", ["--explain", "--gantt"])
def test_leaving_out_the_option_of_the_hint_succeeds(recipe, name):
    with pytest.raises(HyperParallelError) as caught:
        call(f"plan {MACHINE} --devices 8 --json {name}")
    assert caught.value.hint == f"leave out {name}, or --json"
    assert call(f"plan {MACHINE} --devices 8 --json").exit_code == 0
    assert call(f"plan {MACHINE} --devices 8 {name}").exit_code == 0


@pytest.mark.parametrize(
    ("options", "problem", "hint"),
    [
        ("--prompt a --parallel tp=2", "--parallel needs --prompts", "leave out --parallel, or give --prompts"),
        ("--json -o out.jsonl", "-o needs --prompts", "leave out -o, or give --prompts"),
        ("-o out.jsonl --parallel tp=2", "-o and --parallel need --prompts", "--prompts FILE.jsonl"),
    ],
)
def test_an_option_for_many_prompts_is_refused_by_name_without_them(recipe, options, problem, hint):
    with pytest.raises(HyperParallelError) as caught:
        call(f"generate runs/run {options}")
    assert caught.value.what == problem
    assert caught.value.hint.startswith(hint)


def test_options_that_are_satisfied_are_accepted(recipe):
    assert call(f"plan {MACHINE} --devices 8 --no-code").exit_code == 0
    assert call("plan --recipe r.yaml --no-code --json").exit_code == 0


def test_options_with_an_effect_are_accepted(recipe):
    assert call("plan --recipe r.yaml --no-code --explain --gantt").exit_code == 0
    assert call("-q plan --recipe r.yaml --json").exit_code == 0
    assert call("config show r.yaml --json").exit_code == 0
