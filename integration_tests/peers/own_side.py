"""A row through `hyper-parallel train`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration_tests.peers.rows import EPSILON, LEARNING_RATE, SEQ_LEN, STEPS, TRAINERS, Row


def recipe_of(row: Row, place: Path) -> dict[str, Any]:
    """Return the recipe of a row: the common keys, those of its trainer, and its own."""
    trainer = TRAINERS[row.trainer]
    flat: dict[str, Any] = {
        "stage": trainer.stage,
        "model.path": str(place / "model"),
        "model.init": "pretrained",
        "data.source": str(place / "records.jsonl"),
        "data.cache_dir": str(place / "cache"),
        "data.seq_len": SEQ_LEN,
        "data.holdout": 0.0,
        "data.shuffle": False,
        "training.steps": STEPS,
        "training.dtype": "float64",
        "training.tokens_per_step": row.sequences * SEQ_LEN,
        "training.microbatch": row.sequences // row.accumulation // row.ranks,
        "training.lr": LEARNING_RATE,
        "training.lr_schedule": "constant",
        "training.warmup_steps": 0,
        "training.weight_decay": 0.0,
        "training.betas": [0.9, 0.999],
        "training.eps": EPSILON,
        "training.max_grad_norm": None,
        "training.report_to": [],
        "parallel.dp_shard": row.ranks,
        **trainer.recipe,
        **row.recipe,
    }
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return nested


def run_own(row: Row, place: Path) -> dict[str, Any]:
    """Train a row and return its curves; the run directory is `place`/own.

    Raises:
        RuntimeError: The command failed; its error line.
    """
    recipe = place / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_of(row, place), indent=1), encoding="utf-8")  # JSON is YAML
    words = ["train", str(recipe), f"output_dir={place / 'own'}", "--no-calibrate"]
    log = place / "own.log"
    if run_forked(lambda: command(words), log):
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        raise RuntimeError(next((x for x in lines if x.startswith("error")), " | ".join(lines[-3:])))
    lines = (place / "own" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "targets": steps[0]["valid_tokens"],
    }


def command(words: list[str]) -> None:
    """Run `hyper-parallel` with these words, without the page of the run, which takes longer than its steps."""
    import hyper_parallel.reports as reports
    from hyper_parallel.cli import main

    reports.write_report = lambda run: (run / "report.html", run / "trace.json")
    sys.argv = ["hyper-parallel", *words]
    main()


def run_forked(work: Callable[[], None], log: Path) -> int:
    """Run a function in a forked process that writes to a log, and return its exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 0
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            work()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
