"""A command changes no file that it has not written, and a run reads nothing that it replaces.

Listings with checksums are compared before and after.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from hyper_parallel.errors import Contradiction, HyperParallelError, OutputNotWritable
from hyper_parallel.owned_folder import MARKER
from tests.e2e.runs import command, make_place, rows, train
from tests.owned_folder.test_replacement import listing
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e
FEW = (
    "training.steps=2",
    "training.eval_tokens=100",
    "training.report_to=[]",
    "training.warmup_steps=0",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, and `run`: what it wrote."""
    root = make_place(tmp_path_factory.mktemp("own"))
    train(root, root / "run", *FEW)
    return root


@pytest.fixture
def run(place, tmp_path):
    """A copy of the run, as somebody may receive one."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


def project(root: Path) -> Path:
    """A folder of somebody's work under names that a run, an export and a report have too."""
    for name in ("model", "export", "checkpoints/step_00000001", "logs", "rollouts", "tensorboard"):
        (root / name).mkdir(parents=True)
        (root / name / "weights.bin").write_bytes(os.urandom(64))
    for name in (
        "config.json", "config.yaml", "thesis.txt", "metrics.jsonl", "report.html", "trace.json", "comparison.html",
        "plan.json", "run.json", "model/config.json", "export/config.json", "checkpoints/best.pt", "logs/rank_0.log",
    ):  # fmt: skip
        (root / name).write_text(f"mine: {name}\n")
    return root


def test_a_project_folder_is_no_run_directory(place, tmp_path, monkeypatch):
    root = project(tmp_path / "project")
    shutil.copy(place / "recipe.yaml", root / "recipe.yaml")
    before = listing(root)
    monkeypatch.chdir(root)
    for more in ((), ("checkpoint.resume=never",), ("--dry-run",)):
        with pytest.raises(OutputNotWritable, match=r"HP105.*not the directory of a run") as refused:
            command("train", "recipe.yaml", "output_dir=.", "--no-calibrate", *FEW, *more)
        assert "hint: output_dir=run" in str(refused.value)
    assert listing(root) == before
    command("train", "recipe.yaml", "output_dir=run", "--no-calibrate", *FEW)
    after = listing(root)
    assert {n: v for n, v in after.items() if n.partition("/")[0] != "run"} == before


def test_a_folder_with_one_unknown_file_is_refused_and_one_with_logs_is_not(place, tmp_path):
    out = tmp_path / "out"
    (out / "logs" / "none_x" / "attempt_0" / "0").mkdir(parents=True)
    (out / "logs" / "none_x" / "attempt_0" / "0" / "stdout.log").write_text("rank 0")
    (out / "slurm-17.out").write_text("submitted")
    (out / ".gitkeep").touch()
    before = listing(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputNotWritable, match=r"notes\.txt"):
        train(place, out, *FEW)
    (out / "notes.txt").unlink()
    assert listing(out) == before
    train(place, out, *FEW)
    assert before.items() <= listing(out).items()
    (out / "notes.txt").write_text("mine")  # a run directory may hold more
    train(place, out, *FEW, "checkpoint.resume=never")
    assert (out / "notes.txt").read_text() == "mine"
    assert before.items() <= listing(out).items()


@pytest.mark.parametrize("left", [(), (f".{MARKER}.99.part",), (".run.lock", ".run.owner")])
def test_a_run_killed_before_it_marked_its_directory_is_started_again(place, tmp_path, left):
    (tmp_path / "out").mkdir()
    for name in left:
        (tmp_path / "out" / name).touch()
    command("train", str(place / "recipe.yaml"), f"output_dir={tmp_path}/out", "--dry-run", *FEW)
    train(place, tmp_path / "out", *FEW)
    assert (tmp_path / "out" / MARKER).is_file()


def test_a_directory_whose_marker_is_gone_goes_on_in_another_one(run):
    place = run.parent
    (run / MARKER).unlink()
    with pytest.raises(OutputNotWritable, match="HP105") as refused:
        command("train", str(run / "config.yaml"), f"output_dir={run}", "training.steps=3")
    hint = shlex.split(str(refused.value).rpartition("hint: ")[2])
    assert hint == [f"output_dir={place}/run-2", f"checkpoint.from_dir={run}"]
    command("train", str(run / "config.yaml"), *hint, "training.steps=3", "--no-calibrate")
    assert [r["step"] for r in rows(place / "run-2" / "metrics.jsonl")] == [3]


@pytest.mark.parametrize(
    "words",
    [
        ("model.path={run}/export", "checkpoint.resume=never"),
        ("model.path={run}/export",),
        ("model.path={run}/../run/./export", "checkpoint.resume=never"),
        ("model.path={link}", "checkpoint.resume=never"),
        ("model.path={weights}", "checkpoint.resume=never"),
        ("model.path={run}/model", "model.init=random", "checkpoint.resume=never"),
        ("data.tokenizer={run}/export", "checkpoint.resume=never"),
        ("data.source={run}/metrics.jsonl", "data.text_key=step"),
        ("data.source=[{{source: {run}/logs}}]",),
        ("data.source={hard}", "data.text_key=step"),
        ("data.validation={run}",),
        ("data.cache_dir={run}/checkpoints",),
        ("offload.flash_dir={run}/export", "offload.budget=1GiB"),
    ],
)
def test_what_a_run_reads_is_not_replaced_by_it(place, run, words):
    (run.parent / "link").symlink_to(run / "export")
    (run.parent / "weights").mkdir()
    for file in (run / "export").iterdir():
        (run.parent / "weights" / file.name).symlink_to(file)
    os.link(run / "metrics.jsonl", run.parent / "hard.jsonl")
    named = {"run": run, "link": run.parent / "link", "weights": run.parent / "weights"}
    named["hard"] = run.parent / "hard.jsonl"
    before = listing(run.parent)
    with pytest.raises(Contradiction, match="the run would replace or remove files of"):
        train(place, run, *FEW, *(word.format(**named) for word in words))
    assert listing(run.parent) == before


def test_a_second_stage_beside_the_first_keeps_weights_and_tokenizer(place, run):
    words = (f"model.path={run}/export", "checkpoint.resume=never")
    with pytest.raises(Contradiction, match="would replace or remove files of") as refused:
        train(place, run, *FEW, *words)
    hint = refused.value.hint
    assert hint == f"output_dir={run}-2"
    command("train", str(place / "recipe.yaml"), "--no-calibrate", *FEW, *words, hint)
    assert (Path(f"{run}-2") / "export" / "tokenizer.json").is_file()


def test_the_recipe_and_the_model_of_a_run_go_on_with_it(run):
    command("train", str(run / "config.yaml"), f"output_dir={run}", "training.steps=3", "--no-calibrate")
    words = (f"model.path={run}/model", "model.init=random", "training.steps=4", "--no-calibrate")
    kept = (run / "model" / "tokenizer.json").read_bytes()
    command("train", str(run / "config.yaml"), f"output_dir={run}", *words)
    assert (run / "model" / "tokenizer.json").read_bytes() == kept
    assert [r["step"] for r in rows(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_recipe_of_a_run_that_was_edited_is_kept(run):
    recipe = (run / "config.yaml").read_text()
    edited = "# tried on Monday\n" + recipe.replace("steps: 2", "steps: 3")
    (run / "config.yaml").write_text(edited)
    command("train", str(run / "config.yaml"), f"output_dir={run}", "--no-calibrate")
    assert (run / "config.edited-1.yaml").read_text() == edited
    command("train", str(run / "config.yaml"), f"output_dir={run}", "--no-calibrate")
    assert not (run / "config.edited-2.yaml").exists()
    assert [r["step"] for r in rows(run / "metrics.jsonl")] == [1, 2, 3]


def test_starting_over_removes_what_the_run_wrote_and_nothing_else(place, run):
    mine = {
        "checkpoints/best.pt": "a",
        "logs/notes.txt": "b",
        "tensorboard/mine.txt": "c",
        "thesis.txt": "d",
        "sample.txt": "e",
    }
    (run / "tensorboard").mkdir(exist_ok=True)
    for name, text in mine.items():
        (run / name).write_text(text)
    (run / "checkpoints" / ".step_backup.tmp").mkdir()
    (run / "checkpoints" / ".step_backup.tmp" / "weights.bin").write_text("e")
    train(place, run, "checkpoint.resume=never", *FEW, "training.steps=1")
    assert {name: (run / name).read_text() for name in mine} == mine
    assert (run / "checkpoints" / ".step_backup.tmp" / "weights.bin").read_text() == "e"
    assert [p.name for p in (run / "checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.parametrize(
    "name",
    [
        "export/thesis.txt", "model/notes.md", "checkpoints/step_00000002/notes.txt", ".export.tmp/weights.bin",
        ".export.old/weights.bin", ".model.tmp/weights.bin", ".model.old/weights.bin",
        "checkpoints/step_00000007/weights.bin",
    ],
)  # fmt: skip
def test_a_file_in_a_folder_that_would_be_replaced_is_named_before_anything_starts(place, run, name):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("mine")
    before = listing(run)
    with pytest.raises(OutputNotWritable, match="HP105"):
        train(place, run, *FEW, "checkpoint.resume=never")
    assert listing(run) == before


def test_a_checkpoint_with_a_file_of_somebody_else_is_not_pruned(place, run):
    (run / "checkpoints" / "step_00000002" / "notes.txt").write_text("mine")
    train(
        place,
        run,
        "training.steps=5",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "training.eval_tokens=100",
    )
    assert (run / "checkpoints" / "step_00000002" / "notes.txt").read_text() == "mine"
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_00000002", "step_00000005"}


LINKS = (
    "metrics.jsonl", "eval.jsonl", "config.yaml", "plan.json", "run.json", "checkpoints", "export", "model", "logs",
    "tensorboard", "rollouts", "profile", ".run.lock", ".run.owner", "logs/rank_0.log", "logs/restart_1",
    "checkpoints/step_00000009", "reference.npy", MARKER, ".export.tmp", ".model.old",
)  # fmt: skip


EVERY_LINK = [(name, kind) for name in LINKS for kind in ("dangling", "file", "folder")]
FIRST_LINKS = {
    ("metrics.jsonl", "dangling"), ("checkpoints", "folder"), (".run.lock", "file"), ("logs/rank_0.log", "file"),
}  # fmt: skip


@slow_cells(*[link for link in EVERY_LINK if link not in FIRST_LINKS])
@pytest.mark.parametrize("link", EVERY_LINK)
def test_a_received_run_directory_writes_nothing_outside_of_itself(place, run, link):
    name, kind = link
    outside = run.parent / "outside"
    outside.mkdir()
    victim = outside / "victim"
    if kind == "file":
        victim.write_text("mine")
    elif kind == "folder":
        victim.mkdir()
        (victim / "weights.bin").write_text("mine")
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(Path("../" * (1 + name.count("/"))) / "outside" / "victim")
    before = listing(run.parent)
    for resume in ("auto", "never"):
        with pytest.raises(OutputNotWritable, match="HP105"):
            train(place, run, *FEW, "training.steps=3", f"checkpoint.resume={resume}")
    assert listing(run.parent) == before


def test_links_under_names_of_temporary_files_are_not_followed(place, run):
    victim = run.parent / "victim"
    victim.write_text("mine")
    for name in ("metrics.jsonl", "config.yaml", "plan.json", "report.html", MARKER):
        for pid in range(os.getpid(), os.getpid() + 40):
            (run / f".{name}.{pid}.part").symlink_to(victim)
    train(place, run, *FEW, "training.steps=3")
    assert victim.read_text() == "mine"


def test_the_output_directory_itself_may_be_a_link_to_another_disk(place, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    for steps in (1, 2):
        train(place, tmp_path / "run", *FEW, f"training.steps={steps}")
    assert (tmp_path / "run").is_symlink()
    assert [r["step"] for r in rows(tmp_path / "disk" / "metrics.jsonl")] == [1, 2]


WRITERS = {
    "train": "train {place}/recipe.yaml output_dir={mine} --no-calibrate training.steps=3",
    "train, starting over": "train {place}/recipe.yaml output_dir={mine} checkpoint.resume=never",
    "train, cluster": "train {place}/recipe.yaml output_dir={mine} --launcher slurm launch.nnodes=1",
    "export": "checkpoint export {run} --out {mine}",
    "export, inside": "checkpoint export {run} --out {mine}/model",
    "export, file": "checkpoint export {run} --out {mine}/thesis.txt",
    "import": "checkpoint import {run}/export {mine}",
    "plan": "plan llama-3-8b -t dgx-h100 --pin pp=2 -o {mine}/plan.json",
    "schedule": "plan llama-3-8b -t dgx-h100 --pin pp=2 --schedule-csv {mine}/thesis.txt",
    "predict": "predict {mine}/runs.csv -o {mine}/runs.csv",
    "generate": "generate {run} --prompts {mine}/prompts.jsonl -o {mine}/prompts.jsonl",
    "report": "report {mine}",
    "init": "init {recipe}",
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_command_changes_a_file_of_somebody_else(place, run, tmp_path, monkeypatch, name):
    mine = project(tmp_path / "mine")
    (mine / "runs.csv").write_text("id,model,devices\nmine,llama-3-8b,8\n")
    (mine / "prompts.jsonl").write_text('{"prompt": "def"}\n')
    (mine / "recipes").mkdir()
    known = next(p for p in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    (mine / "recipes" / known.name).write_text("mine: true\n")
    monkeypatch.chdir(mine)
    before = listing(mine)
    words = WRITERS[name].format(place=place, run=run, mine=mine, recipe=known.stem)
    with pytest.raises(HyperParallelError) as refused:
        command(*shlex.split(words))
    assert listing(mine) == before
    assert re.match(r"error\[HP(105|306)\]", str(refused.value))


def test_an_export_is_replaced_as_it_was_written_and_not_with_other_files(run, tmp_path):
    out = tmp_path / "exported"
    for _ in range(2):
        command("checkpoint", "export", str(run), "--out", str(out))
    (out / "thesis.txt").write_text("years of work")
    before = listing(out)
    with pytest.raises(OutputNotWritable, match=r"thesis\.txt"):
        command("checkpoint", "export", str(run), "--out", str(out))
    assert listing(out) == before


@pytest.mark.slow
def test_a_report_of_a_run_is_written_again_and_the_pages_of_others_are_not(run):
    for _ in range(2):
        command("report", str(run))
    (run / "report.html").write_text("<html>mine</html>")
    with pytest.raises(OutputNotWritable, match="HP105"):
        command("report", str(run))
    assert (run / "report.html").read_text() == "<html>mine</html>"
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
