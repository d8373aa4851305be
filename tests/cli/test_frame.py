"""The frame of the command line: start-up, exit codes, streams, doctor, config show, the reference pages."""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from hyper_parallel.cli import application
from hyper_parallel.cli.doctor_command import check_package, release
from hyper_parallel.cli.overview import overview
from hyper_parallel.cli.requirements import REQUIREMENTS, Requirement

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "mindspore", "datasets", "numpy", "hyper_parallel.topology")


@pytest.fixture
def environ(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return {**env, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def _python(code, environ):
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)


def _run(environ, *args):
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *args],
        env=environ, capture_output=True, text=True, timeout=60, cwd=environ["XDG_CACHE_HOME"] + "/..",
    )  # fmt: skip


# --- start-up -------------------------------------------------------------------------------------------------------


@pytest.mark.sanity
@pytest.mark.parametrize("args", [["--help"], ["config", "show", "--help"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(environ, args):
    # typer itself imports pydantic for the help of a single command.
    heavy = (*HEAVY, "pydantic", "typer") if args == ["--help"] else HEAVY
    code = f"""
import sys
sys.argv = ["hyper-parallel", *{args!r}]
from hyper_parallel.cli import main
try:
    main()
finally:
    sys.stderr.write(",".join(sorted(set({heavy!r}) & set(sys.modules))))
"""
    done = _python(code, environ)
    assert done.returncode == 0
    assert "Usage: hyper-parallel" in done.stdout
    assert done.stderr == ""


@pytest.mark.sanity
@pytest.mark.parametrize("args", [[], ["checkpoint"], ["plan"], ["train"]])
def test_no_line_of_help_is_cut_off(environ, tmp_path, args):
    (tmp_path / "cache").mkdir()
    text = _run({**environ, "COLUMNS": "80"}, *args, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    cut = [line for line in text.splitlines()[1:] if line.endswith("...") and "<" not in line]
    assert not cut, cut


@pytest.mark.sanity
@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_the_overview_is_the_help_of_the_whole_application(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    command = typer.main.get_command(application())
    context = command.make_context("hyper-parallel", ["init"], resilient_parsing=True)
    assert overview(command.list_commands(context)) == f"{command.get_help(context)}\n"


@pytest.mark.sanity
def test_commands_on_recipes_and_machines_import_no_framework(environ, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: tiny}\n")
    for args in (["doctor", "--json"], ["config", "show", str(recipe)]):
        code = f"""
import sys
sys.argv = ["hyper-parallel", *{args!r}]
from hyper_parallel.cli import main
try:
    main()
finally:
    sys.stderr.write(",".join(sorted({{"torch", "transformers", "mindspore", "datasets"}} & set(sys.modules))))
"""
        done = _python(code, environ)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sanity
@pytest.mark.parametrize(("override", "code"), [("tp=3", "HP203"), ("dp_shard=3", "HP308")])
def test_degrees_that_the_config_refuses_need_no_torch(environ, tmp_path, override, code):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: llama-3-8b}\ndata: {seq_len: 64}\ntraining: {tokens_per_step: 128}\n")
    words = ["train", str(recipe), f"parallel.{override}", f"output_dir={tmp_path / 'run'}"]
    done = _python(
        f"""
import sys
sys.argv = ["hyper-parallel", *{words!r}]
from hyper_parallel.cli import main
try:
    main()
finally:
    print({{"torch", "transformers"}} & {{*sys.modules}})
""",
        environ,
    )
    assert f"error[{code}]" in done.stderr
    assert done.stdout == "set()\n"


@pytest.mark.sanity
@pytest.mark.parametrize(("command", "seconds"), [("--help", 0.6), ("doctor", 1.0)])
def test_commands_start_fast(environ, command, seconds):
    """Processor seconds, not wall time, so that a busy machine does not decide; doctor counts from its second run."""
    code = f"""
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "hyper_parallel", "{command}"], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
    assert min(float(_python(code, environ).stdout) for _ in range(3)) < seconds


# --- exit codes and streams -----------------------------------------------------------------------------------------

APP = """
import sys, typer
from hyper_parallel.cli.app import build_app, run
from hyper_parallel.errors import BadValue
def coded() -> None:
    raise BadValue("the value is odd", where="here", got=3, allowed="2, 4", hint="write 4")
def defect() -> None:
    raise KeyError("lost")
def wait() -> None:
    import time
    print("ready", flush=True)
    time.sleep(30)
def flood() -> None:
    for i in range(200000):
        typer.echo("line")
sys.argv[0] = "hyper-parallel"
run(build_app([coded, defect, wait, flood]))
"""


def _app(environ, *args):
    return subprocess.run([sys.executable, "-c", APP, *args], env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.unit
def test_coded_error_is_printed_without_traceback(environ):
    done = _app(environ, "coded")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == ("error[HP102]: the value is odd\n  --> here\n  got: 3      allowed: 2, 4\n\nhint: write 4\n")


@pytest.mark.unit
def test_defect_keeps_its_traceback(environ):
    done = _app(environ, "defect")
    assert done.returncode == 70
    assert "Traceback" in done.stderr
    assert "internal error: KeyError" in done.stderr


@pytest.mark.unit
@pytest.mark.parametrize("args", [["nonsense"], ["coded", "--nonsense"]])
def test_wrong_usage_ends_with_2(environ, args):
    done = _app(environ, *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nonsense" in done.stderr


@pytest.mark.unit
def test_interrupt_ends_with_130(environ):
    process = subprocess.Popen(
        [sys.executable, "-c", APP, "wait"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr


@pytest.mark.unit
def test_a_reader_that_leaves_is_no_defect(environ):
    process = subprocess.Popen(
        [sys.executable, "-c", APP, "flood"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 1
    assert stderr == b""


@pytest.mark.unit
def test_version(environ, tmp_path):
    (tmp_path / "cache").mkdir()
    assert _run(environ, "--version").stdout.startswith("hyper-parallel 0.")


# --- config show ----------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_config_show(environ, tmp_path):
    (tmp_path / "cache").mkdir()
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: tiny}\ntraining: {lr: 1e-3}\n")
    text = _run(environ, "config", "show", str(recipe), "training.seed=7")
    assert text.returncode == 0, text.stderr
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in text.stdout.splitlines()}
    assert rows["training.lr"] == ["0.001", "recipe"]
    assert rows["training.seed"] == ["7", "command line"]
    assert rows["data.seq_len"] == ["512", "default"]
    values = json.loads(_run(environ, "config", "show", str(recipe), "--json").stdout)
    assert values["training.lr"] == {"value": 0.001, "origin": "recipe"}
    resolved = _run(environ, "config", "show", str(recipe), "training.seed=7", "--yaml")
    (tmp_path / "resolved.yaml").write_text(resolved.stdout)
    again = _run(environ, "config", "show", str(tmp_path / "resolved.yaml"), "--yaml")
    assert again.stdout == resolved.stdout
    bad = _run(environ, "config", "show", str(recipe), "training.sede=7")
    assert bad.returncode == 1
    assert "training.seed=7" in bad.stderr


# --- doctor ---------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_doctor(environ, tmp_path):
    (tmp_path / "cache").mkdir()
    done = _run({**environ, "NO_COLOR": "1"}, "doctor")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "planning: works" in done.stdout
    report = json.loads(_run(environ, "doctor", "--json").stdout)
    assert report["planning"] is True
    by_name = {f["name"]: f for f in report["findings"]}
    assert by_name["numpy"]["detail"] == importlib.metadata.version("numpy")
    assert all(f["fix"] for f in report["findings"] if f["status"] in ("missing", "old"))
    assert report["topology"]["name"] == "local"


@pytest.mark.unit
def test_package_findings():
    missing = check_package(Requirement("surely-not-installed-here", "1.0", "optional", "nothing"))
    assert missing.status == "missing"
    assert missing.fix.endswith("pip install 'surely-not-installed-here>=1.0'")
    old = check_package(Requirement("numpy", "999", "core", "planning"))
    assert (old.status, old.fix.split()[-1]) == ("old", "'numpy>=999'")
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("2.9.1") < release("2.11") < release("2.11.0a0")


@pytest.mark.sanity
def test_doctor_agrees_with_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {*project["dependencies"], *project["optional-dependencies"]["torch"]}
    known = {r.wanted for r in REQUIREMENTS if r.need != "optional"}
    assert known == declared


# --- generated pages ------------------------------------------------------------------------------------------------


@pytest.mark.sanity
def test_reference_pages_equal_the_code():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools/make_reference.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    stale = [p.name for p, text in tool.pages().items() if p.read_text(encoding="utf-8") != text]
    assert not stale, "run python tools/make_reference.py"
