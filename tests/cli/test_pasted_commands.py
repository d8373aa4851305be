"""Commands in hints are pasted: they succeed, or fail with another error than the first."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.errors import HyperParallelError

RECIPE = "model: {path: llama-3-8b}\ndata: {seq_len: 4096}\ntopology: dgx-h100\nparallel: auto\n"


def outcome(words):
    """Return the coded error of a command, or None where it succeeds."""
    try:
        done = CliRunner().invoke(application(), words, catch_exceptions=False)
    except HyperParallelError as error:
        return error
    assert done.exit_code == 0, done.output
    return None


@pytest.mark.parametrize(
    "written",
    [
        "init quikstart", "init", "plan", "plan --recipe recipe.yaml --seq-len 128", "plan lama-3-8b -t dgx-h100",
        "plan --recipe absent.yaml", "train absent.yaml", "train recipe.yml --dry-run", "plan llama-3-8b -t dgxh100",
        "config show recipe.yaml training.lrr=1", "config show recipe.yaml training.lr",
        "config show recipe.yaml --launcher", 
        "checkpoint export absent", "report absent",
        "plan llama-3-8b -t dgx-h100 --launch vllm", "plan llama-3-8b -t dgx-h100 --objective fast",
    ],
)  # fmt: skip
def test_a_pasted_command_leads_on(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = shlex.split(written)
    try:
        first = outcome(words)
    except AssertionError:
        return  # a usage error of the command line, which names its own help
    if first is None:
        return
    hint = first.hint
    assert hint or first.allowed, first.render()
    if hint is None:
        return
    command = re.search(r"hyper-parallel ((?:(?! or |, with|;|`).)*)", hint)
    if command is not None:
        pasted = shlex.split(re.sub(r"\b(RECIPE|RUN_DIR)(\.yaml)?\b", "recipe.yaml", command[1]))
        pasted += ["--dry-run"] * (pasted[0] == "train" and "--dry-run" not in pasted)
    elif hint.startswith("did you mean"):
        pasted = [hint.split("`")[1] if word in (first.got, first.where) else word for word in words]
    elif hint.startswith(("ls ", "hf ", "HF_HUB_OFFLINE=0 hf ", "pip ")):
        return  # another program's command
    elif hint.startswith("--"):
        pasted = [*words, *shlex.split(hint)]
    else:
        (override,) = re.findall(r"[\w.]+=\S+?(?=`|$)", hint)
        pasted = [
            *(w for w in words if "." not in w or "yaml" in w),
            override.replace("VALUE", "1"),
        ]
    second = outcome(pasted)
    told = (first.what, first.where, first.got)
    assert second is None or (second.what, second.where, second.got) != told, second.render()
