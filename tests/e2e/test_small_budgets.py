"""Small device budgets on two ranks: a run starts with the bits of one without offload, or is refused with a hint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.errors import BudgetImpossible
from tests.e2e import runs
from tests.e2e.runs import CONFIG, rows

pytestmark = pytest.mark.e2e

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "offload_small_budgets.py"
CELLS = 12
TOO_SMALL = 20_000  # fewer bytes than the embedding, its gradient and two moments take on a rank


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("small_budgets")
    (root / "model.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    runs.write_functions(root / "text.txt", 400)
    (root / "recipe.yaml").write_text(
        f"""
model: {{path: {root}/model.json}}
data: {{source: {root}/text.txt, seq_len: 16, vocab_size: 384, cache_dir: {root}/cache}}
training: {{steps: 1, warmup_steps: 0, dtype: float32, tokens_per_step: 16, microbatch: 1, eval_tokens: 16}}
parallel: {{tp_x: 2}}
checkpoint: {{every: 0, export: false}}
"""
    )
    return root


@pytest.mark.slow
def test_the_hint_of_an_impossible_budget_names_one_that_trains(place):
    with pytest.raises(BudgetImpossible, match="does not fit") as caught:
        runs.train(place, place / "small", f"offload.budget={TOO_SMALL}")
    hint = caught.value.hint.removeprefix("set `").removesuffix("`")
    assert hint == f"offload.budget={caught.value.least_bytes}"
    runs.train(place, place / "pasted", hint)
    (step,) = rows(place / "pasted" / "metrics.jsonl")
    # Not far below: the budget is the least that is known, not a generous one.
    assert 0.9 * caught.value.least_bytes < step["memory_bytes"] <= caught.value.least_bytes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", range(CELLS))
def test_drawn_cells(cell):
    words = [sys.executable, str(BENCHMARK), "--cpu", "--only", str(cell)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
