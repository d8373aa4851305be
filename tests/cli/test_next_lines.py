"""Lines under `next:` work when they are pasted, or say what to edit or to run first."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import PlanMismatch
from hyper_parallel.ir import Plan
from hyper_parallel.planner import check_saved_plan, plan_overrides, plan_recipe

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def call(*words) -> str:
    done = CliRunner().invoke(application(), list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def next_lines(text: str) -> list[str]:
    return [line.strip() for line in text.partition("next:\n")[2].splitlines()]


def test_init_lists_whole_descriptions_with_the_quickstart_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = call("init")
    assert listed.startswith("quickstart\n")
    assert next_lines(listed) == ["hyper-parallel init quickstart"]
    assert "from rewards alone" in " ".join(listed.split())
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_trained_after_what_its_next_lines_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *before, last = next_lines(call("init", name))
    assert last == f"hyper-parallel train recipes/{name}.yaml"
    recipe, trained = load_recipe(f"recipes/{name}.yaml").recipe, []
    for line in before:
        if line.startswith("hyper-parallel init"):
            call(*shlex.split(line)[1:])
        elif line.startswith("hyper-parallel train"):
            trained.append(load_recipe(shlex.split(line)[2]).recipe.output_dir)
        else:
            file, key, value = re.fullmatch(r"# edit (\S+): (\S+) \((\S+) does not exist\)", line).groups()
            assert file == f"recipes/{name}.yaml"
            section, field = key.split(".")
            assert getattr(getattr(recipe, section), field) == value
    missing = [
        value
        for value in (recipe.model.path, recipe.data.source, recipe.data.tokenizer)
        if value and "/" in value and not Path(value).exists() and "Qwen/" not in value
    ]
    named = " ".join(before)
    assert all(v in named or any(v.startswith(out) for out in trained) for v in missing)


def test_init_says_which_files_existed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "written: recipes/quickstart.yaml\n" in call("init", "quickstart")
    again = call("init", "quickstart")
    assert "unchanged: recipes/quickstart.yaml\n" in again
    assert "written:" not in again


def test_a_plan_without_a_file_is_no_argument_of_the_next_command(saved, tmp_path):
    """A dry run of `plan` writes no plan, so the next command reads none."""
    words = ("plan", "--recipe", str(saved / "recipe.yaml"), "-o", str(tmp_path / "plan.json"))
    lines = " ".join(next_lines(call(*words, "--dry-run")))
    assert "hyper-parallel train" in lines
    assert "--plan" not in lines
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_accepts_records_of_another_format_in_place_of_its_own(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("init", name)
    assert load_recipe(f"recipes/{name}.yaml").recipe.data.format == "auto"


RECIPE = (
    "model: {path: llama-3-8b}\ndata: {seq_len: 4096}\ntopology: dgx-h100\n"
    "training: {tokens_per_step: 262144}\nparallel: auto\n"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "recipe.yaml").write_text(RECIPE)
    printed = call("plan", "--recipe", str(folder / "recipe.yaml"), "-o", str(folder / "plan.json"))
    assert f"--plan {folder / 'plan.json'}" in " ".join(printed.replace("\\\n", " ").split())
    return folder


def applied(saved: Path, *overrides: str) -> Plan:
    """Plan of a recipe that carries out the saved plan, checked as `train --plan` checks it."""
    file, path = saved / "plan.json", saved / "recipe.yaml"
    plan, loaded = Plan.load(file), load_recipe(path, overrides)
    given = plan_overrides(plan, loaded.recipe, loaded.where, str(file))
    made = plan_recipe(load_recipe(path, [*overrides, *given]).recipe)
    check_saved_plan(plan, made, str(file))
    return made


def test_a_saved_plan_is_the_plan_of_the_run(saved):
    plan, made = Plan.load(saved / "plan.json"), applied(saved)
    assert made.strategy == plan.strategy
    assert made.workload == plan.workload
    # Also where the recipe itself names another layout.
    other = applied(saved, "parallel.pp=2", "parallel.dp_shard=4", "overlap.tp=chunks")
    assert other.strategy == plan.strategy


@pytest.mark.parametrize("override", ["parallel.dp_shard=2", "overlap=none"])
def test_degrees_beside_a_saved_plan_are_refused(saved, override):
    words = ("train", str(saved / "recipe.yaml"), "--plan", str(saved / "plan.json"))
    with pytest.raises(PlanMismatch, match="already determines them") as caught:
        call(*words, override)
    assert override in caught.value.hint


@pytest.mark.parametrize(
    "override", ["training.microbatch=3", "training.accumulation_steps=3", "training.recompute=none"]
)
def test_values_that_a_saved_plan_would_replace_are_refused(saved, override):
    words = ("train", str(saved / "recipe.yaml"), "--plan", str(saved / "plan.json"))
    with pytest.raises(PlanMismatch, match="to different values") as caught:
        call(*words, override)
    assert caught.value.hint == f"repeat the command without `{override}`"


@pytest.mark.parametrize(
    "override",
    ["data.seq_len=2048", "training.tokens_per_step=524288", "training.dtype=float16", "model.path=qwen3-8b"],
)  # fmt: skip
def test_a_saved_plan_that_does_not_fit_is_refused(saved, override):
    with pytest.raises(PlanMismatch) as caught:
        applied(saved, override)
    hint = caught.value.hint
    if not hint.startswith("hyper-parallel"):
        applied(saved, override, hint)


@pytest.mark.parametrize(
    "own",
    [
        ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "parallel.dp_shard=4"),
        ("parallel.dp_shard=8", "parallel.zero=1"),
        ("parallel.cp=4", "parallel.cp_kind=hybrid", "parallel.cp_ulysses=2", "parallel.dp_shard=2"),
    ],
)
def test_choices_of_a_recipe_give_way_to_a_saved_plan(saved, own):
    assert str(applied(saved, *own).strategy) == str(Plan.load(saved / "plan.json").strategy)
