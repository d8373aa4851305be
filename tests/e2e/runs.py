"""Runs of the command as a person makes them, on models of 20 thousand parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

# What every rank would otherwise import on its own, or every fork look through for garbage.
import tensorboard.summary.writer.event_file_writer  # noqa: F401
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.tensor.experimental  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from typer.testing import CliRunner

import hyper_parallel.trainer  # noqa: F401
from hyper_parallel.cli import application

get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand patterns, once in a process

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


CURVE = ("checkpoint.export=false", "training.eval_tokens=100")
"""Of a run whose losses are compared: it evaluates, but on three sequences."""


def write_functions(path: Path, count: int) -> None:
    """A text of small Python functions."""
    path.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i % 7}" for i in range(count)))


def command(*arguments: str, report: bool = False) -> Any:
    """Run the command; raises what it raises.

    Args:
        arguments: Words of the command line.
        report: Let a run of training draw its page, which takes longer than its steps.
    """
    drawn = report or arguments[0] != "train"
    with nullcontext() if drawn else patch("hyper_parallel.reports.write_report", _files_of_report):
        result = CliRunner().invoke(application(arguments[0]), arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def _files_of_report(run: Path) -> tuple[Path, Path]:
    return run / "report.html", run / "trace.json"


def train(place: Path, out: Path, *overrides: str, report: bool = False) -> Any:
    """Train the recipe of a directory, predicted with the shipped cards."""
    words = (str(place / "recipe.yaml"), f"output_dir={out}", "--no-calibrate", *overrides)
    return command("train", *words, report=report)


def rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a file with one per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(out: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a run."""
    return [(r["loss"], r["grad_norm"]) for r in rows(out / "metrics.jsonl")]


def assert_same_curve(mine: list[tuple[float, float]], reference: list[tuple[float, float]]) -> None:
    """Equal to 10 digits."""
    assert len(mine) == len(reference)
    for (loss, norm), (loss_0, norm_0) in zip(mine, reference, strict=True):
        assert loss == pytest.approx(loss_0, rel=1e-10)
        assert norm == pytest.approx(norm_0, rel=1e-10)


def make_place(root: Path) -> Path:
    """A directory with a model config, a text file, a recipe and a data cache."""
    (root / "model.json").write_text(json.dumps(CONFIG))
    write_functions(root / "text.txt", 4000)
    (root / "recipe.yaml").write_text(
        f"""
model: {{path: {root}/model.json}}
data:
  source: {root}/text.txt
  seq_len: 32
  vocab_size: 384
  cache_dir: {root}/cache
training:
  steps: 4
  dtype: float64
  tokens_per_step: 256
  microbatch: 4
  lr: 1.0e-2
  warmup_steps: 2
  lr_schedule: constant
  eval_tokens: 1000
parallel: {{dp_shard: 1}}
"""
    )
    return root


SUMS = [(a, b) for a in range(4) for b in range(3)]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 1} or so"} for a, b in SUMS]
QUESTIONS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(4)]
ANSWERS = [{"prompt": f"{a}+{b}=", "completion": f"it is {a + b}" if b else "no", "label": bool(b)} for a, b in SUMS]


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """A file with one object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_stage_place(
    root: Path,
    stage: str,
    records: Sequence[dict[str, Any]],
    *,
    seq_len: int = 64,
    sequences: int = 8,
    microbatch: int = 2,
    **changes: dict[str, Any],
) -> Path:
    """A directory with a model config, records and a recipe of three steps; `changes` are by section of it."""
    (root / "model.json").write_text(json.dumps({**CONFIG, "vocab_size": 264}))
    write_records(root / "records.jsonl", records)
    recipe: dict[str, Any] = {
        "model": {"path": "model.json"}, "stage": stage,
        "data": {
            "source": "records.jsonl", "seq_len": seq_len, "packing": False, "holdout": 0, "vocab_size": 264,
        },
        "training": {
            "steps": 3, "dtype": "float64", "tokens_per_step": sequences * seq_len, "lr": 1e-2,
            "lr_schedule": "constant", "microbatch": microbatch,
        },
        "parallel": {"dp_shard": 1}, "checkpoint": {"export": False},
    }  # fmt: skip
    for section, keys in changes.items():
        recipe[section] = recipe.get(section, {}) | keys
    (root / "recipe.yaml").write_text(json.dumps(recipe))
    return root


def start(
    place: Path,
    out: Path,
    *overrides: str,
    launcher: Sequence[str] = ("-m", "hyper_parallel"),
    path: Path | str = "",
) -> subprocess.Popen[str]:
    """Start the command as a process of its own session, with `path` on its module path."""
    words = [sys.executable, *launcher, "train", str(place / "recipe.yaml"), "--no-calibrate"]
    modules = os.pathsep.join([*sys.path, str(path)])
    environment = {**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*words, f"output_dir={out}", *overrides], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def wait_for_steps(process: subprocess.Popen[str], out: Path, steps: int) -> None:
    """Wait until a run has recorded so many steps."""
    path = out / "metrics.jsonl"
    wait_until(process, lambda: path.exists() and len(path.read_text().splitlines()) >= steps)


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait, for 90 s at most, while the process lives."""
    deadline = time.monotonic() + 90
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def published(out: Path) -> list[str]:
    """Names of the checkpoints of a run."""
    return [p.name for p in (out / "checkpoints").glob("step_*")]
