"""What is not torch works without it: the same trainer drives an engine of another back end, written in NumPy."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BadValue
from hyper_parallel.trainer import prepare_job
from tests.e2e.runs import CONFIG, curve, rows

pytestmark = pytest.mark.torch

CHILD = """
import json, math, pickle, sys, time
sys.modules["torch"] = None  # any import of it raises
import numpy as np
import hyper_parallel.trainer.checkpoints.manifest
import hyper_parallel.trainer.data
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.trainer import Job, LrSchedule
from hyper_parallel.trainer.loop import Display, EvalResult, StepResult, Trainer

class UnigramEngine:
    '''Logits of every token, the same at every place, by gradient descent.'''

    rank, world_size = 0, 1

    def __init__(self, job):
        self.plan, self.file = job.plan, job.checkpoint_dir / "logits.json"
        self.logits, self.exported = np.zeros(job.packed.vocab_size), False

    def load(self):
        if not self.file.exists():
            return 0, {}
        step, logits, extra = json.loads(self.file.read_text())
        self.logits = np.array(logits)
        return step, extra

    def begin(self, done, batches):
        self.first = done + 1

    def loss(self, step, batches):
        parts = batches.microbatches(step, 0, 1, 1, batches.sequences_per_step)
        labels = np.concatenate([b.shift_labels.ravel() for b in parts])
        counts = np.bincount(labels[labels >= 0], minlength=len(self.logits))
        share = np.exp(self.logits) / np.exp(self.logits).sum()
        return float(-(counts * np.log(share)).sum() / counts.sum()), share - counts / counts.sum(), int(counts.sum())

    def step(self, step, batches, lr):
        loss, gradient, valid = self.loss(step - 1, batches)
        self.logits -= lr * gradient
        return StepResult(loss, float(np.linalg.norm(gradient)), valid, 1e-3, 8 * len(self.logits))

    def evaluate(self, batches):
        loss, _, tokens = self.loss(0, batches)
        return EvalResult(loss, tokens)

    def save(self, step, extra):
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(json.dumps([step, self.logits.tolist(), extra]))

    def finish(self): pass
    def timeline(self): return None
    def export(self): self.exported = True
    def facts(self): return {"device": "numpy"}

job = pickle.load(open(sys.argv[1], "rb"))
engine = UnigramEngine(job)
summary = Trainer(job, engine, Display(job.recipe.training.steps, False)).train()
print(json.dumps([summary.steps, summary.first_eval_loss, summary.last_eval_loss, engine.exported, engine.first]))
"""


def drive(job, out: Path) -> list:
    out.mkdir(exist_ok=True)
    (out / "job.pickle").write_bytes(pickle.dumps(job))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(out / "job.pickle")],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_trainer_drives_an_engine_without_torch_and_resumes_exactly(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 400)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{path: {Path("recipes/models/quickstart.json").absolute()}}}
data: {{source: {tmp_path}/text.txt, seq_len: 32, vocab_size: 300, cache_dir: {tmp_path}/cache}}
training: {{steps: 6, tokens_per_step: 64, dtype: float32, lr: 5.0, eval_tokens: 100, eval_every: 3}}
checkpoint: {{every: 3}}
parallel: {{dp_shard: 1}}
"""
    )

    def job(out: str, steps: int):
        overrides = [f"output_dir={tmp_path / out}", f"training.steps={steps}"]
        overrides += ["training.lr_schedule=constant", "training.warmup_steps=0"]
        return prepare_job(load_recipe(recipe, overrides), progress=False)

    steps, first, last, exported, begun = drive(job("whole", 6), tmp_path / "whole")
    assert (steps, exported, begun) == (6, True, 1)
    assert last < first
    drive(job("parts", 3), tmp_path / "parts")
    assert drive(job("parts", 6), tmp_path / "parts")[4] == 4
    assert len(curve(tmp_path / "whole")) == 6
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert [r["step"] for r in rows(tmp_path / "parts" / "eval.jsonl")] == [0, 3, 3, 6]
    assert rows(tmp_path / "whole" / "metrics.jsonl")[-1]["tokens_seen"] == 6 * 64
    assert (tmp_path / "whole" / "run.json").exists()
    assert not any((tmp_path / "whole").glob("timeline.json"))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 400)
    (tmp_path / "small.json").write_text(json.dumps(CONFIG | {"vocab_size": 270}))
    recipe = tmp_path / "recipe.yaml"
    data = f"{{source: {tmp_path}/text.txt, seq_len: 32, vocab_size: 300, cache_dir: {tmp_path}/cache}}"
    recipe.write_text(f"model: {{path: {tmp_path}/small.json}}\ndata: {data}\noutput_dir: {tmp_path}/out\n")
    with pytest.raises(BadValue, match="model=270") as caught:
        prepare_job(load_recipe(recipe, ["parallel.dp_shard=1"]), progress=False)
    assert caught.value.hint == "data.vocab_size=270"
