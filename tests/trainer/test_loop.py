"""One step of the loop: what it waits for, and what it leaves alone when the loss is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hyper_parallel.backends.torch import local, materialize
from hyper_parallel.config import Training
from hyper_parallel.errors import LossNotFinite
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import spec_from_config
from hyper_parallel.planner import plan as make_plan
from hyper_parallel.runtime import World, launch, parallelize
from hyper_parallel.topology import detect_local
from hyper_parallel.trainer.data import Batch
from hyper_parallel.trainer.engine.optimizer import build_optimizer
from hyper_parallel.trainer.engine.step_gauges import MemoryGauge, SpanRecorder
from hyper_parallel.trainer.engine.step_loop import Loop, LossScale
from tests.e2e.runs import CONFIG


class OneBatch:
    """Two sequences of 16 tokens, in every step the same."""

    sequences_per_step = 2

    def num_valid(self, step: int) -> int:
        return 32

    def microbatches(self, step, dp_rank, dp_size, microbatch, rounds):
        tokens = np.tile(np.arange(16), (microbatch, 1))
        return [Batch(tokens, tokens, 16 * microbatch)] * rounds


def make_loop(world: World, ranks: int = 1) -> Loop:
    from transformers import AutoConfig, AutoModelForCausalLM

    strategy = Strategy(dp_shard=ranks)
    work = Workload(16, microbatch=1, accumulation_steps=2 // ranks, compute_dtype="float32")
    spec = spec_from_config(CONFIG, name="small")
    plan = make_plan(spec, detect_local(ranks), work.resolve(ranks), strategy=strategy)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).train()
    parallelize(model, plan, world)
    materialize(model, seed=0, device=world.device)
    optimizer = build_optimizer(model, Training(lr=1e-2))
    recorder = SpanRecorder(world.rank, world.device)
    return Loop(model, optimizer, plan, world, recorder, MemoryGauge(world.device), 1.0)


@pytest.mark.torch
def test_nothing_is_read_by_the_host_before_the_update():
    """On tensors without values the first read raises: by then the optimizer has taken its step."""
    loop = make_loop(World(0, 1, 0, torch.device("cpu"), ""))
    updates = []
    loop.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(DataDependentOutputException),
    ):
        loop.step(1, OneBatch(), 1e-2)
    assert updates == [1]


def state_of(loop: Loop) -> list[torch.Tensor]:
    slots = [loop.optimizer.state[p] for p in loop.model.parameters()]
    tensors = [*loop.model.parameters(), *(v for slot in slots for v in slot.values())]
    return [local(t.detach()).clone() for t in tensors]


@pytest.mark.dist
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(where):
    def rank_body(rank: int) -> tuple[bool, bool]:
        with World.join("cpu") as world:
            loop = make_loop(world, 2)
            first = state_of(loop)
            loop.step(1, OneBatch(), 1e-2)
            before = state_of(loop)
            plain = loop.gradients

            def poisoned(*arguments):
                loss_sum, norm = plain(*arguments)
                if where == "gradient":
                    return loss_sum, norm * float("nan")
                return loss_sum * (float("inf") if rank else 1.0), norm

            loop.gradients = poisoned
            with pytest.raises(LossNotFinite):
                loop.step(2, OneBatch(), 1e-2)
            after = state_of(loop)
        changed = any(not torch.equal(a, b) for a, b in zip(first, before, strict=False))
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        return changed, all(same)

    assert launch(rank_body, 2, timeout_s=120) == [(True, True)] * 2


def gradients_of(loop: Loop, scale: LossScale | None) -> tuple[float, list[torch.Tensor]]:
    loop.scale, loop.max_grad_norm = scale, None
    loss, _ = loop.gradients(loop.inputs(OneBatch(), 1, 1e-2))
    found = [local(p.grad).clone() for p in loop.model.parameters()]
    loop.optimizer.zero_grad(set_to_none=True)
    return float(loss), found


@pytest.mark.torch
def test_a_loss_scale_leaves_loss_and_gradients_as_they_are():
    loop = make_loop(World(0, 1, 0, torch.device("cpu"), ""))
    loss, plain = gradients_of(loop, None)
    scaled_loss, scaled = gradients_of(loop, LossScale(2.0**14))
    assert scaled_loss == loss  # a power of two changes exponents only
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


@pytest.mark.torch
def test_an_overflow_skips_the_step_and_lowers_the_scale():
    loop = make_loop(World(0, 1, 0, torch.device("cpu"), ""))
    before = [local(p).clone() for p in loop.model.parameters()]
    loop.scale = LossScale(2.0**127, good_steps=7)  # a float32 overflows
    result = loop.step(1, OneBatch(), 1e-2)
    assert (result.skipped, result.loss_scale) == (1, 2.0**127)
    assert loop.scale == LossScale(2.0**126, 0)
    same = zip(loop.model.parameters(), before, strict=True)
    assert all(torch.equal(local(now), then) for now, then in same)
    loop.scale = LossScale(2.0**10, good_steps=1999)
    assert loop.step(2, OneBatch(), 1e-2).skipped == 0
    assert loop.scale == LossScale(2.0**11, 0)
    loop.scale = LossScale(1.0)
    with torch.no_grad():
        next(iter(loop.model.parameters())).fill_(float("inf"))
    with pytest.raises(LossNotFinite):  # no lower scale helps
        loop.step(3, OneBatch(), 1e-2)
