"""Training with pipeline stages as a person calls it: the run, its files, and going on with other stages."""

import itertools
import json

import pytest

from hyper_parallel.ir import Plan, Timeline
from hyper_parallel.serde import decode
from tests.e2e.runs import CONFIG, assert_same_curve, curve, rows, train, write_functions

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of four layers with tied embeddings, a text and a recipe of four microbatches."""
    root = tmp_path_factory.mktemp("pipeline")
    (root / "model.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    write_functions(root / "text.txt", 2000)
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
  microbatch: 1
  tokens_per_step: 256
  lr: 1.0e-2
  warmup_steps: 2
  lr_schedule: constant
  eval_tokens: 200
checkpoint: {{asynchronous: false}}
parallel: {{dp_shard: 1}}
"""
    )
    return root


@pytest.fixture(scope="module")
def one_rank(place):
    out = place / "one"
    train(place, out, "checkpoint.export=false")
    return out


def test_a_pipeline_run_equals_one_rank_and_goes_on_on_one(place, one_rank):
    out = place / "pipeline"
    pipeline = ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2")
    train(place, out, *pipeline, "training.steps=2", "sample_prompt=def ", report=True)
    assert (out / "sample.txt").read_text().startswith("def ")
    assert (out / "export" / "model.safetensors").exists()
    assert Plan.load(out / "plan.json").strategy.stage_layers == (1, 1, 1, 1)
    # Saved by two pipeline ranks, continued on one.
    train(place, out, "checkpoint.export=false")
    assert_same_curve(curve(out), curve(one_rank))
    mine, reference = ([r["loss"] for r in rows(d / "eval.jsonl")] for d in (out, one_rank))
    assert mine == pytest.approx([reference[0], mine[1], mine[1], reference[1]], rel=1e-10)


@pytest.mark.slow
def test_the_timeline_shows_every_action_of_every_rank(place):
    out = place / "timeline"
    train(place, out, "parallel.pp=2", "checkpoint.export=false", "training.compile=false")
    timeline = decode(Timeline, json.loads((out / "timeline.json").read_text()))
    for rank in (0, 1):
        names = {s.name for s in timeline.spans if s.step == 4 and s.lane.startswith(f"rank {rank}/")}
        wanted = {f"{rank}{kind}{i}" for kind, i in itertools.product("FB", range(8))}
        waits = {f"1RECV_F{i}" for i in range(8)} if rank else {f"0RECV_B{i}" for i in range(8)}
        assert wanted | waits <= names
