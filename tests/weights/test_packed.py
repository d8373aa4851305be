"""Weights, checkpoints and export of models whose projections are packed, and of others with special parameters."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.pretrained import load_pretrained
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch, parallelize
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.model_export import export_hf
from tests.parity.universal import Setup
from tests.slow import slow_cells
from tests.weights.models import assert_same
from tests.weights.test_with_parallelize import step, whole

pytestmark = pytest.mark.dist

ONE = (("num_hidden_layers", 1),)
BOTH = (Strategy(dp_shard=2, tp_x=2), Strategy(tp_x=4))
CASES = {
    "phi3": (Setup("phi3", config=(*ONE, ("num_key_value_heads", 8))), BOTH),  # cut part by part
    "phi3-exchanged": (Setup("phi3", tied=True, config=ONE), BOTH[:1]),
    "glm4": (Setup("glm4", config=ONE), BOTH[:1]),
    "olmo2": (Setup("olmo2", config=(*ONE, ("num_key_value_heads", 2))), BOTH[1:]),
    "gpt_oss": (Setup("gpt_oss", config=(*ONE, ("layer_types", ["full_attention"]))), BOTH[:1]),
}


def on_meta(setup):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(setup.model_config()).double()


@slow_cells("phi3", "glm4", "gpt_oss", "phi3-exchanged", "olmo2")
@pytest.mark.parametrize("name", CASES)
def test_every_layout_loads_resumes_and_exports_alike(name, tmp_path):
    setup, strategies = CASES[name]
    plain = on_meta(setup)
    materialize(plain, seed=5)
    want = whole(plain)
    plain.eval().save_pretrained(tmp_path / "hf")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    step(plain, optimizer)
    after = whole(plain, optimizer)

    def checkpointer(folder, asynchronous=False):
        return Checkpointer(tmp_path / folder, keep=1, asynchronous=asynchronous, fingerprint={})

    checkpointer("one").save(1, plain, optimizer, {})

    def rank_fn(rank):
        source = "one"
        with World.join() as world:
            for number, strategy in enumerate(strategies):
                model = parallelize(on_meta(setup), setup.plan(strategy), world)
                report = load_pretrained(model, tmp_path / "hf", device=world.device)
                assert report.tensors == len(want)
                assert_same(whole(model), want)
                model = parallelize(on_meta(setup), setup.plan(strategy), world)
                materialize(model, seed=5, device=world.device)
                assert_same(whole(model), want)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
                step(model, optimizer)
                assert_same(whole(model, optimizer), after)
                checkpointer(source).load(model, optimizer)
                assert_same(whole(model, optimizer), after)
                source = f"layout_{number}"
                saving = checkpointer(source, asynchronous=True)
                saving.save(1, model, optimizer, {})
                step(model, optimizer)
                saving.finish()
            export_hf(model, model.config, None, tmp_path / "export")

    launch(rank_fn, 4, timeout_s=110)
    # Every layout's checkpoint loads on one device, bitwise, and the export is the state after the next step.
    for number in range(len(strategies)):
        again = copy.deepcopy(plain)
        fresh = torch.optim.AdamW(again.parameters(), lr=1e-2, fused=True)
        step(again, fresh)
        checkpointer(f"layout_{number}").load(again, fresh)
        assert_same(whole(again, fresh), after)
    step(plain, optimizer)
    exported = on_meta(setup)
    load_pretrained(exported, tmp_path / "export")
    assert_same(whole(exported), whole(plain))
    assert AutoConfig.from_pretrained(tmp_path / "export").model_type == setup.family
