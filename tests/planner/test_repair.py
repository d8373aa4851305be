"""A refused strategy: its hint makes it legal."""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace

import pytest

from hyper_parallel.errors import BatchMismatch, DegreesMismatch, HyperParallelError, NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy, Workload
from hyper_parallel.model import load_model
from hyper_parallel.planner import plan
from hyper_parallel.planner.refusals import follow_changes
from hyper_parallel.shard import check_overlap
from hyper_parallel.topology import load_topology
from tests.slow import slow_cells

pytestmark = pytest.mark.unit

CHOICES = {
    "pp": (1, 1, 1, 2, 3, 7, 64), "dp_replicate": (1, 1, 2, 3), "dp_shard": (1, 2, 3, 8), "cp": (1, 1, 2, 3, 8),
    "tp_x": (1, 2, 3, 8, 12), "tp_y": (1, 1, 2, 3, 4), "ep": (1, 1, 2, 5, 16),
    "attention_shape": ("1d", "2d", "weight"), "mlp_shape": ("1d", "2d", "weight"),
    "attention_scatter": ("head", "token"), "cp_kind": ("ring", "ulysses", "hybrid", "all_gather"),
    "cp_ulysses": (1, 1, 2, 3), "virtual_stages": (1, 2, 3),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"),
}  # fmt: skip


def applied(hint, strategy, workload):
    """A strategy and a workload after the overrides of a hint, read as a recipe would."""
    for change in shlex.split(hint):
        key, value = change.split("=")
        section, name = key.split(".")
        number = json.loads(value) if re.fullmatch(r"\d+|\[.*\]", value) else value
        if section == "training":
            workload = replace(workload, **{name: number})
        else:
            number = tuple(number) if isinstance(number, list) else number
            strategy = replace(strategy, **{"tp_x" if name == "tp" else name: number})
    return strategy, workload


def refusal(model, machine, workload, strategy):
    try:
        plan(model, machine, workload, strategy=strategy)
    except HyperParallelError as error:
        return error
    return None


@slow_cells("deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b")
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_the_hint_of_every_refusal_makes_the_strategy_legal(name):
    draw, model, machine = random.Random(name), load_model(name), load_topology("dgx-h100")
    refused = 0
    for _ in range(40):
        strategy = Strategy(**{key: draw.choice(values) for key, values in CHOICES.items()})
        if strategy.pp > 1 and draw.random() < 0.2:
            strategy = replace(strategy, stage_layers=(4,) * strategy.pp)
        workload = Workload(4096, draw.choice((None, None, 4096 * 48)), 1, draw.choice((None, 1, 6, 8)))
        error = refusal(model, machine, workload, strategy)
        if error is None:
            continue
        refused += 1
        assert "\n" not in error.what
        assert error.hint, error
        mended, batch = applied(error.hint, strategy, workload)
        assert refusal(model, machine, batch, mended) is None
    assert refused > 20


def test_changes_are_data_and_hints_are_text():
    def check(strategy, workload):
        if strategy.tp_x != 4:
            raise NotDivisible("tp", hint="any text", changes={"parallel.tp": 4})

    wrong = Strategy(tp_x=3)
    text = NotDivisible("tp", hint="`parallel.tp=4` would do on another machine")
    assert follow_changes(text, wrong, Workload(512), check) == {}
    data = NotDivisible("tp", changes={"parallel.ep": 2, "parallel.stage_layers": (1, 2)})
    assert data.hint == "parallel.ep=2 'parallel.stage_layers=[1, 2]'"
    followed = follow_changes(data, wrong, Workload(512), check)
    assert followed == {**data.changes, "parallel.tp": 4}


def test_the_number_of_devices_is_kept():
    workload = Workload(4096, microbatch=1, accumulation_steps=1)
    for wrong in (Strategy(tp_x=3, dp_shard=5), Strategy(tp_x=3, dp_shard=16), Strategy(cp=3)):
        with pytest.raises(DegreesMismatch) as caught:
            plan("llama-3-8b", "dgx-h100", workload, strategy=wrong, num_devices=24)
        hint = caught.value.hint
        if "start" in hint:
            continue
        mended, batch = applied(hint, wrong, workload)
        assert plan("llama-3-8b", "dgx-h100", batch, strategy=mended).mesh.size == 24


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"tokens_per_step": 8 * 512, "microbatch": 3}, "training.microbatch=2"),
        ({"tokens_per_step": 8 * 512, "accumulation_steps": 3}, "training.accumulation_steps=2"),
        ({"tokens_per_step": 8 * 512, "microbatch": 2, "accumulation_steps": 3},
         "training.tokens_per_step=6144"),
        ({"tokens_per_step": 3 * 512, "microbatch": 1}, "training.tokens_per_step=2048"),
        ({"tokens_per_step": 3 * 512, "microbatch": 3}, "training.tokens_per_step=2048 training.microbatch=2"),
        ({"tokens_per_step": 3 * 512, "microbatch": 3, "accumulation_steps": 2}, "training.tokens_per_step=6144"),
    ],
)  # fmt: skip
def test_batch_numbers_that_do_not_agree_are_mended(given, hint):
    with pytest.raises(BatchMismatch) as caught:
        Workload(512, **given).resolve(2)
    assert caught.value.hint == hint
    _, mended = applied(hint, Strategy(), Workload(512, **given))
    mended.resolve(2)


@pytest.mark.parametrize("tokens", [6, 12])
def test_hinted_microbatch_keeps_batch_numbers_consistent(tokens):
    strategy = Strategy(dp_shard=2, tp_x=2, overlap=Overlap(half_batch=True))
    workload = Workload(511, tokens_per_step=tokens * 511, microbatch=3)
    with pytest.raises(UnsupportedSharding, match="cannot be halved") as caught:
        check_overlap(strategy, workload)
    _, changed = applied(caught.value.hint, strategy, workload)
    check_overlap(strategy, changed.resolve(2))
