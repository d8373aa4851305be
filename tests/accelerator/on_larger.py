"""The command line on the emulated accelerator, with more state than the device has room for."""

import json

from tests.accelerator.on_product import assert_as_planned, place, trained
from tests.e2e.runs import CONFIG, rows


def on_train_with_state_larger_than_the_device(knobs, folder):
    """The allocator's peak since the process began is within the budget, with evaluations and checkpoints."""
    config = CONFIG | {"num_hidden_layers": 4, "intermediate_size": 160}
    (place() / "larger.json").write_text(json.dumps(config))
    one = ("training.microbatch=1", "training.tokens_per_step=64", "training.steps=2")
    given = (f"model.path={place()}/larger.json", *one)
    budget = 440_000
    reference = trained("smaller", *given)
    mine = trained("larger", *given, f"offload.budget={budget}")
    assert_as_planned(mine, reference)
    (state,) = mine.glob("checkpoints/*2/rank*.safetensors")
    assert state.stat().st_size > 2 * budget
    assert rows(mine / "metrics.jsonl")[-1]["offload"]["outside_bytes"] <= budget
