"""A model cut into stages: weights, checkpoints, exports, evaluation, accumulation, formats, refusals."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from safetensors.torch import load_file

from hyper_parallel.backends.torch import load_pretrained, materialize
from hyper_parallel.errors import BatchMismatch, NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import (
    World,
    audit,
    clip_grad_norm_,
    forward_backward,
    forward_loss,
    launch,
    parallelize,
)
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.model_export import export_hf
from tests.parity.universal import Setup
from tests.slow import slow_cells

SETUP = Setup("qwen3", tied=True, accumulation=4, config=(("num_hidden_layers", 4),))
LAYOUTS = (
    Strategy(pp=2, dp_shard=2),
    Strategy(pp=4),
    Strategy(dp_shard=4),
    Strategy(pp=2, tp_x=2, schedule="zbv", virtual_stages=2),
)


def _parts(setup=SETUP, strategy=None, rank=0):
    batch = setup.batch()
    dp = strategy.dp if strategy else 1
    where = strategy.mesh().coordinate(rank) if strategy else {"dp_replicate": 0, "dp_shard": 0}
    index = where["dp_replicate"] * (strategy.dp_shard if strategy else 1) + where["dp_shard"]
    mine = {k: v.chunk(dp)[index] for k, v in batch.items()}
    count = int((batch["shift_labels"] != -100).sum())
    chunks = {k: v.chunk(setup.accumulation) for k, v in mine.items()}
    return [{k: v[i] for k, v in chunks.items()} for i in range(setup.accumulation)], count


def _train(model, strategy, rank, optimizer, steps):
    parts, count = _parts(strategy=strategy, rank=rank)
    for _ in range(steps):
        forward_backward(model, parts, count)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _whole(state):
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in state.items()
        if torch.is_tensor(t)
    }


def _fresh(strategy, world, lr=1e-2):
    model = parallelize(SETUP.build(), SETUP.plan(strategy), world)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


@pytest.mark.slow
@pytest.mark.dist
def test_checkpoints_and_exports_move_between_any_stages_bitwise(tmp_path) -> None:
    """Saved on one layout, loaded on each other one: weights, moments and what is written for others are equal."""

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            expected = None
            for number, saved in enumerate(LAYOUTS):
                model, optimizer = _fresh(saved, world)
                if number == 0:
                    _train(model, saved, world.rank, optimizer, 2)
                else:  # what the layout before saved
                    _load(model, optimizer, tmp_path / str(number - 1))
                mine = (_whole(model.state_dict()), _moments(model, optimizer))
                everyone = [None] * world.world_size
                torch.distributed.all_gather_object(everyone, mine)
                merged = tuple({k: v for part in everyone for k, v in part[i].items()} for i in (0, 1))
                if expected is None:
                    expected = merged
                for found, reference in zip(merged, expected, strict=True):
                    assert found.keys() == reference.keys()
                    assert all(torch.equal(found[k], reference[k]) for k in reference)
                saver = Checkpointer(tmp_path / str(number), keep=1, asynchronous=number % 2 == 1, fingerprint={})
                saver.save(1, model, optimizer, {})
                saver.finish()
                export_hf(model, model.config, None, tmp_path / f"export{number}")

    launch(rank, 4, timeout_s=120)
    first, *others = (load_file(tmp_path / f"export{i}/model.safetensors") for i in range(4))
    assert set(first) == {name for name, _ in SETUP.build().named_parameters()}
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[k], first[k]) for k in first)

    def read(_: int) -> None:
        with World.join("cpu") as world:
            for strategy in (Strategy(pp=2), Strategy(pp=2, schedule="zbv", virtual_stages=2)):
                with torch.device("meta"):
                    model = type(SETUP.build())(SETUP.model_config()).double()
                parallelize(model, SETUP.plan(strategy), world)
                load_pretrained(model, tmp_path / "export0")
                for name, param in model.named_parameters():
                    assert torch.equal(param, first[name]), name
                assert forward_loss(model, *_parts()) >= 0

    launch(read, 2, timeout_s=180)


def _load(model, optimizer, directory):
    loader = Checkpointer(directory, keep=1, asynchronous=False, fingerprint={})
    loader.load(model, optimizer)


def _moments(model, optimizer):
    return _whole(
        {f"{name}.{key}": value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()}
    )


@pytest.mark.dist
def test_random_weights_are_those_of_one_device() -> None:
    one = SETUP.build()
    materialize(one, seed=3)
    expected = dict(one.named_parameters())

    def rank(_: int) -> set[str]:
        seen = set()
        with World.join("cpu") as world:
            for strategy in (
                Strategy(pp=2),
                Strategy(pp=2, schedule="interleaved", virtual_stages=2),
            ):
                with torch.device("meta"):
                    model = type(one)(SETUP.model_config()).double()
                parallelize(model, SETUP.plan(strategy), world)
                materialize(model, seed=3)
                audit(model)
                for name, param in model.named_parameters():
                    assert torch.equal(param, expected[name]), name
                    seen.add(name)
        return seen

    assert set().union(*launch(rank, 2, timeout_s=180)) == set(expected)


@functools.cache
def _one_device() -> tuple[float, dict[str, torch.Tensor]]:
    model = SETUP.build()
    with World.join("cpu") as world:
        parallelize(model, SETUP.plan(Strategy()), world)
        parts, count = _parts()
        loss = float(forward_loss(model, parts, count))
        forward_backward(model, parts, count)
        forward_backward(model, parts, count)
    return loss, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.dist
def test_steps_without_zeroing_add_up_and_evaluation_gives_the_same_loss() -> None:
    loss, grads = _one_device()

    def rank(_: int) -> list[float]:
        shares = []
        with World.join("cpu") as world:
            for strategy in (
                Strategy(pp=4), Strategy(pp=2, dp_shard=2), Strategy(pp=2, tp_x=2, schedule="zb-h1"),
            ):  # fmt: skip
                model, _ = _fresh(strategy, world)
                parts, count = _parts(strategy=strategy, rank=world.rank)
                shares.append(float(forward_loss(model, parts, count)))
                # Another number of microbatches than the step has, and then steps again.
                if strategy.dp == 1:
                    halves = [{k: v[[i]] for k, v in p.items()} for p in parts for i in (0, 1)]
                    shares.append(float(forward_loss(model, halves, count)))
                forward_backward(model, parts, count)
                forward_backward(model, parts, count)
                for name, grad in _whole({n: p.grad for n, p in model.named_parameters()}).items():
                    torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-12)
        return shares

    for shares in zip(*launch(rank, 4, timeout_s=180), strict=True):
        assert sum(shares) == pytest.approx(loss, rel=1e-10)


@slow_cells("zbv")
@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_bfloat16_stages_compute_what_one_device_computes(schedule) -> None:
    """Float32 parameters, bfloat16 activations between the stages, float32 gradients."""

    def plan(strategy):
        found = SETUP.plan(strategy)
        formats = {"compute_dtype": "bfloat16", "param_dtype": "float32", "reduce_dtype": "float32"}
        return dataclasses.replace(found, workload=dataclasses.replace(found.workload, **formats))

    def grads(strategy, world):
        model = parallelize(SETUP.build(), plan(strategy), world)
        share = forward_backward(model, *_parts())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return float(share), _whole({n: p.grad for n, p in model.named_parameters()})

    def alone(_: int):
        with World.join("cpu") as world:
            return grads(Strategy(), world)

    ((loss, expected),) = launch(alone, 1, timeout_s=180)
    strategy = Strategy(pp=2, schedule=schedule, virtual_stages=2 if schedule == "zbv" else 1)

    def rank(_: int):
        with World.join("cpu") as world:
            return grads(strategy, world)

    results = launch(rank, 2, timeout_s=180)
    assert sum(share for share, _ in results) == pytest.approx(loss, rel=1e-3)
    for _, found in results:
        for name, grad in found.items():
            error = (grad - expected[name]).abs().max() / expected[name].abs().max()
            assert error < 0.03, name  # bfloat16 rounds at 2^-9; sums are made in another order


@pytest.mark.dist
def test_what_one_rank_cannot_do_is_refused() -> None:
    def rank(_: int) -> None:
        with World.join("cpu") as world:
            model, _ = _fresh(Strategy(pp=2), world)
            with pytest.raises(UnsupportedSharding, match="called directly"):
                model(input_ids=torch.zeros(1, 4, dtype=torch.long))
            for strategy, accumulation, error in (
                (Strategy(pp=2, schedule="zbv"), 4, UnsupportedSharding),
                (Strategy(pp=2, schedule="interleaved", virtual_stages=3), 4, NotDivisible),
                (Strategy(pp=2, stage_layers=(3, 2)), 4, NotDivisible),
                (Strategy(pp=2), 1, BatchMismatch),
            ):
                plan = SETUP.plan(Strategy(pp=2))
                workload = dataclasses.replace(plan.workload, accumulation_steps=accumulation)
                plan = dataclasses.replace(plan, strategy=strategy, workload=workload)
                with pytest.raises(error):
                    parallelize(SETUP.build(), plan, world)

    launch(rank, 2, timeout_s=180)
