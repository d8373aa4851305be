"""Weights, checkpoints and export on models that `parallelize` laid out."""

import pytest
import torch

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.pretrained import load_pretrained
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch, parallelize
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.model_export import export_hf
from tests.parity._case import _CLASSES, Case
from tests.weights.models import assert_same

STRATEGIES = [{"dp_replicate": 2, "tp_x": 2}, {"dp_shard": 2, "tp_x": 2}]


def on_meta(case):
    with torch.device("meta"):
        return _CLASSES[case.family][1](case.config())


def whole(model, optimizer=None):
    state = {}
    for name, parameter in model.named_parameters():
        entries = optimizer.state[parameter] if optimizer else {}
        for key, value in {"": parameter, **entries}.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}/{key}"] = value.detach().clone()
    return state


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.dist
def test_every_layout_starts_resumes_and_exports_alike(tmp_path):
    case = Case(family="qwen3", tied=True, dtype="float32")
    plain = on_meta(case)
    materialize(plain, seed=5)
    want = whole(plain)
    plain.eval().save_pretrained(tmp_path / "hf")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    step(plain, optimizer)
    after = whole(plain, optimizer)

    def checkpointer(name):
        return Checkpointer(tmp_path / name, keep=1, asynchronous=True, fingerprint={})

    saver = checkpointer("one")
    saver.save(1, plain, optimizer, {})
    saver.finish()  # a fork copies the locks of a running thread, but not the thread

    def rank_fn(rank):
        source = "one"
        with World.join() as world:
            for number, degrees in enumerate(STRATEGIES):
                plan = case.plan(Strategy(**degrees))
                model = parallelize(on_meta(case), plan, world)
                load_pretrained(model, tmp_path / "hf", device=world.device)
                assert_same(whole(model), want)
                model = parallelize(on_meta(case), plan, world)
                materialize(model, seed=5, device=world.device)
                assert_same(whole(model), want)
                assert model.lm_head.weight is model.model.embed_tokens.weight
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
                step(model, optimizer)
                assert_same(whole(model, optimizer), after)
                checkpointer(source).load(model, optimizer)
                assert_same(whole(model, optimizer), after)
                source = f"layout_{number}"
                saving = checkpointer(source)
                saving.save(1, model, optimizer, {})
                step(model, optimizer)
                saving.finish()
            export_hf(model, model.config, None, tmp_path / "export")
        return source

    source = launch(rank_fn, 4, timeout_s=110)[0]
    step(plain, optimizer)
    exported = on_meta(case)
    load_pretrained(exported, tmp_path / "export")
    assert_same(whole(exported), whole(plain))
    checkpointer(source).load(plain, optimizer)
    assert_same(whole(plain, optimizer), after)
