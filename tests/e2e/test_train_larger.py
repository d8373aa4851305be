"""State that is three times what the device may hold trains from start to export, and never is there at once."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.errors import BudgetImpossible, TransferFailed
from hyper_parallel.trainer.engine.offload import PlannedSteps
from hyper_parallel.trainer.engine.step_loop import Loop
from tests.e2e import runs
from tests.e2e.runs import CONFIG, rows

pytestmark = pytest.mark.e2e

BUDGET = 320_000
STEPS = 4
SHORT = ("training.steps=2", "training.eval_every=0", "checkpoint.every=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("larger")
    for name, layers in {"model": 4, "deep": 8}.items():
        config = CONFIG | {"num_hidden_layers": layers, "intermediate_size": 160}
        (root / f"{name}.json").write_text(json.dumps(config))
    runs.write_functions(root / "text.txt", 4000)
    (root / "recipe.yaml").write_text(
        f"""
model: {{path: {root}/model.json}}
data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 384, cache_dir: {root}/cache}}
training:
  steps: {STEPS}
  dtype: float32
  tokens_per_step: 64
  microbatch: 1
  lr: 1.0e-2
  warmup_steps: 2
  eval_every: {STEPS // 2}
  eval_tokens: 200
parallel: {{dp_shard: 1}}
checkpoint: {{every: {STEPS // 2}}}
"""
    )
    return root


@pytest.fixture
def metered(monkeypatch):
    """Count the bytes of parameters and optimizer state that are beside the arena, whoever brings them there."""
    here, limit = {}, {"bytes": BUDGET}
    resize, opened = torch.UntypedStorage.resize_, PlannedDevice.__init__

    def watch(self, captured, plan, *rest, **more):
        for s, tensor in captured.state.items():
            if plan.program.storages[s].kind != "input":
                here[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        opened(self, captured, plan, *rest, **more)

    def resized(self, size):
        resize(self, size)
        if self._cdata in here:
            here[self._cdata] = self.nbytes()
            assert sum(here.values()) <= limit["bytes"], "all of the state is on the device"

    monkeypatch.setattr(PlannedDevice, "__init__", watch)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    return limit


def files_of(run):
    """Bytes of everything that is saved of a run, by tensor."""
    paths = [*run.glob("checkpoints/*/rank*.safetensors"), *run.glob("export/*.safetensors")]
    return {(str(p.relative_to(run)), k): t for p in paths for k, t in load_file(p).items()}


def assert_same(mine, plain, budget=BUDGET):
    """Bitwise the same run, within the budget in steps and outside of them; bytes of the smallest rank's state."""
    for file in ("metrics.jsonl", "eval.jsonl"):
        ours, theirs = rows(mine / file), rows(plain / file)
        assert [row["step"] for row in ours][-1] == STEPS
        for a in ours:
            (b,) = (row for row in theirs if row["step"] == a["step"])
            assert [a.get(k) for k in ("loss", "grad_norm")] == [b.get(k) for k in ("loss", "grad_norm")]
    ours, theirs = files_of(mine), files_of(plain)
    assert ours.keys() == theirs.keys()
    assert any("export" in file for file, _ in ours)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    for row in rows(mine / "metrics.jsonl"):
        assert row["memory_bytes"] == row["offload"]["pred_memory_bytes"] <= budget
        assert budget // 2 < row["offload"]["outside_bytes"] <= budget
        assert row["offload"]["difference_bytes"] == 0
    parts = mine.glob(f"checkpoints/*{STEPS}/rank*.safetensors")
    return min(part.stat().st_size for part in parts)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_from_start_to_export_and_resumed_through_files(place, metered):
    runs.train(place, place / "plain")
    runs.train(place, place / "mine", f"offload.budget={BUDGET}")
    assert assert_same(place / "mine", place / "plain") >= 3 * BUDGET
    resumed, flash = place / "resumed", place / "flash"
    shutil.copytree(place / "mine", resumed, ignore=shutil.ignore_patterns(f"step_*{STEPS}", "export"))
    for file in ("metrics.jsonl", "eval.jsonl"):
        lines = [r for r in rows(resumed / file) if r["step"] <= STEPS // 2]
        (resumed / file).write_text("".join(json.dumps(r) + "\n" for r in lines))
    more = metered["bytes"] = 500_000
    tiers = ("offload.dram=1MiB", f"offload.flash_dir={flash}")
    runs.train(place, resumed, f"offload.budget={more}", *tiers)
    assert rows(resumed / "metrics.jsonl")[-1]["offload"]["flash_bytes"] > 0
    assert assert_same(resumed, place / "plain", more) >= 2 * more
    assert not list(flash.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_that_share_parameters_and_state(place, metered):
    given = ("parallel.dp_shard=2", f"model.path={place}/deep.json")
    runs.train(place, place / "two-plain", *given)
    runs.train(place, place / "two", *given, f"offload.budget={BUDGET}")
    assert assert_same(place / "two", place / "two-plain") >= 3 * BUDGET


@pytest.mark.slow
def test_a_finished_run_is_evaluated_and_exported_again_within_the_budget(place):
    done = place / "done"
    runs.train(place, done, f"offload.budget={BUDGET}", *SHORT)
    before = files_of(done)
    shutil.rmtree(done / "export")
    runs.train(place, done, f"offload.budget={BUDGET}", *SHORT)
    after = files_of(done)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


@pytest.mark.slow
def test_state_that_is_brought_to_the_device_is_seen(place, metered, monkeypatch):
    monkeypatch.setattr(PlannedSteps, "streamed", lambda self: self._device.materialize_state())
    with pytest.raises(TransferFailed, match="all of the state is on the device"):
        runs.train(place, place / "seen", f"offload.budget={BUDGET}", *SHORT)


@pytest.mark.slow
def test_an_evaluation_above_the_budget_is_refused_before_the_first_step(place, monkeypatch):
    evaluate = Loop.evaluate

    def larger(self, batches):
        torch.zeros(BUDGET // 4 + 1)
        return evaluate(self, batches)

    monkeypatch.setattr(Loop, "evaluate", larger)
    with pytest.raises(BudgetImpossible, match="an evaluation does not fit") as caught:
        runs.train(place, place / "above", f"offload.budget={BUDGET}")
    assert "offload.budget=" in str(caught.value.hint)
    assert not rows(place / "above" / "metrics.jsonl")
