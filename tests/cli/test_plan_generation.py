"""`hyper-parallel plan --for generate` as a user types it."""

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

pytestmark = pytest.mark.sanity
ROOT = Path(__file__).resolve().parents[2]
ASKED = ("llama-3-70b", "-t", "dgx-h100", "--for", "generate")


def planned(*args, options=()):
    done = CliRunner().invoke(application(), [*options, "plan", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_has_layout_seconds_bytes_and_runners_up():
    made = json.loads(planned(*ASKED, "--prompts", "64", "--top", "2", "--json"))
    assert made["workload"] == {
        "prompts": 64, "prompt_len": 512, "new_tokens": 128, "dtype": "bfloat16",
    }  # fmt: skip
    assert (made["devices"], made["objective"], len(made["runners_up"])) == (8, "throughput", 2)
    best = made["best"]
    assert set(best) == {
        "parallel", "slots", "batch", "prefill_s", "token_s", "total_s", "tokens_s", "tokens_s_device",
        "weight_bytes", "cache_bytes", "memory_bytes", "largest_batch", "prefill", "decode",
    }  # fmt: skip
    assert set(made["runners_up"][0]) == set(best)
    assert best["tokens_s"] == pytest.approx(8 * best["tokens_s_device"])
    assert best["weight_bytes"] + best["cache_bytes"] < best["memory_bytes"] <= made["device_bytes"]
    assert best["token_s"] == pytest.approx(sum(best["decode"].values()))
    alone = planned(*ASKED, "--prompts", "64", "--parallel", best["parallel"], "--json")
    assert json.loads(alone)["best"] == best


def test_the_panel_is_narrow_says_predicted_and_ends_with_a_command():
    panel = planned(*ASKED, "--objective", "latency", "--prompts", "16")
    plan, _, command = panel.partition("\nnext:\n")
    assert "all numbers are predicted" in plan
    assert max(map(len, plan.splitlines())) <= 80
    for label in ("layout", "prefill", "decode", "throughput", "memory", "next best", "searched"):
        assert f"\n  {label} " in plan
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["hyper-parallel", "generate"]
    assert words[words.index("--slots") + 1] == "16"
    assert planned(*ASKED, options=["-q"]).count("\n") == 1


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--for", "sing"), "HP102"),
        (("llama-3-8b", "--prompts", "4"), "HP104"),
        ((*ASKED, "--pin", "tp=8"), "HP104"),
        ((*ASKED, "--offload"), "HP104"),
        ((*ASKED, "--recipe", "r.yaml"), "HP104"),
        ((*ASKED, "--objective", "step-time"), "HP102"),
        ((*ASKED, "--parallel", "cp=2"), "HP205"),
        ((*ASKED, "--dtype", "int8"), "HP102"),
        ((*ASKED, "--prompts", "0"), "HP102"),
        ((*ASKED, "--prompts", "1000000", "--objective", "latency"), "HP401"),
        ((*ASKED, "--prompt-len", "131072"), "HP102"),
        ((*ASKED, "--devices", "83", "--prompts", "1"), "HP302"),
        (("deepseek-v3", *ASKED[1:]), "HP401"),
        (("--for", "generate"), "HP102"),
    ],
)
def test_mistakes_are_coded_errors_whose_hints_plan(args, code):
    with pytest.raises(HyperParallelError, match=code) as caught:
        planned(*args)
    hint, words = caught.value.hint, [*args]
    if hint is None:
        return
    if hint.startswith("hyper-parallel"):
        words = shlex.split(hint)[2:]
    elif hint.startswith("leave out"):
        at = words.index(hint.split()[-1])
        del words[at : at + (1 if words[at] == "--offload" else 2)]
    else:
        for name in [word for word in shlex.split(hint) if word.startswith("--")]:
            if name in words and name != "--for":
                del words[words.index(name) : words.index(name) + 2]
        words += shlex.split(hint)
    planned(*words)


def test_plans_of_training_do_not_load_it():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from hyper_parallel.cli import application\n"
        "done = CliRunner().invoke(application(), ['plan', 'llama-3-8b', '-t', 'dgx-h100'])\n"
        "assert done.exit_code == 0, done.output\n"
        "found = [m for m in sys.modules if m.endswith(('_generation', '_passes', '_plan_to_generate'))]\n"
        "assert not found, found\n"
        "import hyper_parallel as hp\n"
        "made = hp.plan_generation('llama-3-8b', 'dgx-h100', hp.GenerateWorkload(prompts=8))\n"
        "assert made.best.tokens_s > 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_given_layout_beyond_memory_is_not_counted_as_fitting():
    panel = planned("llama-3-70b", "-t", "dgx-h100", "--for", "generate", "--devices", "1", "--parallel", "")
    assert "does not fit" in panel
    assert "; 0 fit" in panel
