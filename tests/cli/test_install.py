"""An installed wheel does what the README says, command by command; a machine without torch plans."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """Variables of an environment that holds the wheel, and the packages of this one, but not the source.

    The wheel is made of what the Dockerfile copies.
    """
    pytest.importorskip("hatchling")
    place = tmp_path_factory.mktemp("install")
    source = place / "source"
    for copied in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        for name in copied.split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name)
            else:
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, source]
    subprocess.run([*pip, *wheel], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
    python = place / "env/bin/python"
    install = ["install", "-q", "--no-deps", "--no-index", next(place.glob("*.whl"))]
    subprocess.run([*pip, "--python", python, *install], check=True)
    library = next((place / "env/lib").glob("python*/site-packages"))
    (library / "packages.pth").write_text("\n".join(site.getsitepackages()))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    left = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {**left, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_every_command_of_the_readme_runs_as_written(environ, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    assert lines.pop(0) == 'pip install "hyper-parallel[torch]"'
    commands = {line.split()[1] for line in lines}
    assert {"init", "plan", "train", "generate", "report"} <= commands
    for line in lines:
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert "site-packages" not in done.stderr
    assert len((tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()) >= 2
    assert (tmp_path / "plan.json").is_file()
    where = "import hyper_parallel as hp; print(hp.__file__, hp.Plan.load('plan.json')._repr_html_())"
    shown = subprocess.check_output(["python", "-c", where], cwd=tmp_path, env=environ, text=True)
    assert str(ROOT) not in shown.split("<table>")[0]
    assert "<th>step time</th>" in shown


@pytest.mark.sanity
def test_without_torch_plans_are_made_and_training_names_the_extra(tmp_path):
    def run(*args):
        code = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "datasets", "tokenizers", "safetensors")))
sys.argv = ["hyper-parallel", *{args!r}]
from hyper_parallel.cli import main
main()
"""
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip

    assert run("plan", "llama-3-8b", "-t", "dgx-h100").returncode == 0
    assert run("init", "quickstart").returncode == 0
    done = run("train", "recipes/quickstart.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("error[HP501]: this command needs `torch`")
    assert "pip install 'hyper-parallel[torch]'" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.sanity
def test_the_package_is_typed_and_the_shell_completes_its_commands(environ):
    def run(code, **more):
        return subprocess.check_output(["sh", "-c", code], env={**environ, **more}, text=True)

    assert "_HYPER_PARALLEL_COMPLETE=complete_bash" in run(
        "hyper-parallel --show-completion bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    words = {"COMP_WORDS": "hyper-parallel ch", "COMP_CWORD": "1"}
    found = run("hyper-parallel", _HYPER_PARALLEL_COMPLETE="complete_bash", **words)
    assert found.split() == ["checkpoint"]
    where = run("cd / && python -c 'import hyper_parallel; print(hyper_parallel.__path__[0])'")
    assert (Path(where.strip()) / "py.typed").is_file()
    assert str(ROOT) not in where


@pytest.mark.sanity
def test_init_lists_recipes_and_keeps_what_is_there(environ, tmp_path):
    def run(*args):
        return subprocess.run(
            ["hyper-parallel", "init", *args], cwd=tmp_path, env=environ, capture_output=True, text=True
        )  # fmt: skip

    listed = run()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"{recipe.stem}\n" in listed.stdout
        assert run(recipe.stem).returncode == 0
        assert (tmp_path / "recipes" / recipe.name).read_text() == recipe.read_text()
    (tmp_path / "recipes/quickstart.yaml").write_text("mine")
    assert "error[HP105]" in run("quickstart").stderr
    assert (tmp_path / "recipes/quickstart.yaml").read_text() == "mine"
    assert "hint: hyper-parallel init quickstart" in run("quikstart").stderr
