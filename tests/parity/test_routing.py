"""What routing adds to a step: the auxiliary loss, router biases, dropped rows; on every layout as on one device."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch import count_routing
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import (
    Routing,
    RoutingStatistics,
    World,
    end_step,
    forward_backward,
    handle,
    launch,
    parallelize,
)
from tests.parity.universal import Setup, check, reference

pytestmark = pytest.mark.parity

S = Strategy
QWEN, MIXTRAL = Setup("qwen3_moe", sequences=4), Setup("mixtral", sequences=4)
DEEPSEEK = Setup("deepseek_v3", sequences=4)


AUX = (("output_router_logits", True), ("router_aux_loss_coef", 0.5))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_auxiliary_loss_of_one_device_is_that_of_the_model(family: str) -> None:
    setup = Setup(family, sequences=4, config=AUX)
    plain, ours = setup.build(), setup.build()
    batch = {"input_ids": setup.batch()["input_ids"], "labels": setup.batch()["input_ids"]}
    expected = plain.float()(**batch)
    expected.loss.backward()
    with World.join("cpu") as world:
        parallelize(ours, setup.plan(S()), world)
        found = ours(**batch)
        found.loss.backward()
        statistics = end_step(ours)
    assert statistics is not None
    assert statistics.aux_loss == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        error = (mine.grad - theirs.grad).abs().max()
        assert float(error) <= 2e-4 * scale, name  # theirs is float32


@pytest.mark.slow
def test_the_auxiliary_loss_of_many_ranks_is_that_of_one_device() -> None:
    setups = [Setup("qwen3_moe", sequences=4, seq_len=15, config=AUX), Setup("gpt_oss", config=AUX)]
    for setup in setups:
        reference(setup)
    without = reference(replace(setups[0], config=())).result
    assert abs(without.share - reference(setups[0]).result.share) > 0.1
    strategies = (S(dp_shard=4, ep=2), S(dp_replicate=2, cp=2, ep=2, recompute="full"))

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for setup in setups:
                for strategy in strategies:
                    check(reference(setup), strategy, world, bytes_too=False)
            check(reference(setups[0]), S(tp_x=2, dp_shard=2, ep=4), world, bytes_too=False)

    launch(rank, 4, timeout_s=100)


def test_microbatches_share_the_weight_of_the_auxiliary_loss() -> None:
    """A step's loss has the mean of its microbatches' auxiliary losses."""
    twice = Setup("qwen3_moe", sequences=4, accumulation=2, config=AUX)
    parts = [{k: v.chunk(2)[i] for k, v in twice.batch().items()} for i in range(2)]
    tokens = int((twice.batch()["shift_labels"] != -100).sum())
    losses = []
    with World.join("cpu") as world:
        model = parallelize(twice.build(), twice.plan(S()), world)
        for part in parts:
            forward_backward(model, [part], tokens)
            losses.append(end_step(model).aux_loss)
        plain = replace(twice, config=())
        cross_entropy = forward_backward(parallelize(plain.build(), plain.plan(S()), world), parts, tokens)
        both = forward_backward(model, parts, tokens)
        assert end_step(model).aux_loss == pytest.approx(sum(losses) / 2)
    assert float(both - cross_entropy) == pytest.approx(0.5 * sum(losses) / 2)


def _moves(strategy: Strategy, world: World) -> tuple[list[Tensor], RoutingStatistics]:
    """How a step moves the router biases of this rank, and what was routed."""
    routing = Routing(bias_update_rate=0.25)
    plan = replace(DEEPSEEK, accumulation=2).plan(strategy)
    model = parallelize(DEEPSEEK.build(), plan, world, routing=routing)
    share = DEEPSEEK.sequences // strategy.dp
    batch = {k: v[world.rank % strategy.dp * share :][:share] for k, v in DEEPSEEK.batch().items()}
    parts = [{k: v.chunk(2)[i] for k, v in batch.items()} for i in range(2)]
    routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    before = [m.e_score_correction_bias.clone() for m in routers]
    forward_backward(model, parts, 64)
    statistics = end_step(model)
    moves = [m.e_score_correction_bias - b for m, b in zip(routers, before, strict=True)]
    forward_backward(model, parts, 64)
    assert end_step(model) != statistics  # other biases, other experts
    return moves, statistics


@pytest.mark.parametrize("strategy", [S(dp_shard=2, ep=2, recompute="full"), S(pp=2)])
def test_routing_is_counted_and_router_biases_follow_the_global_load(strategy: Strategy) -> None:
    def rank(_: int) -> tuple[list[Tensor], RoutingStatistics]:
        with World.join("cpu") as world:
            return _moves(strategy, world)

    with World.join("cpu") as world:
        (move,), statistics = _moves(S(), world)
    found = launch(rank, 2, timeout_s=180)
    # The first layer is dense, so that the first of two stages has no router.
    assert [len(mine) for mine, _ in found] == ([0, 1] if strategy.pp > 1 else [1, 1])
    for mine, theirs in found:
        assert theirs == statistics
        assert all(torch.equal(m, move) for m in mine)
    assert {-0.25, 0.25} <= {*move.tolist()} <= {-0.25, 0.0, 0.25}
    assert statistics.max_load > 1
    assert 0 < statistics.entropy < 1
    assert statistics.dropped == 0


def _dense(model: nn.Module, hidden: Tensor, factor: float) -> Tensor:
    """A Mixtral block with a capacity, one expert and token at a time."""
    block = model.model.layers[0].mlp
    _, weights, index = block.gate(hidden)
    experts = block.experts
    limit = math.ceil(factor * index.numel() / experts.num_experts)
    taken = [0] * experts.num_experts
    out = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for choice in range(index.shape[1]):
            expert = int(index[token, choice])
            taken[expert] += 1
            if taken[expert] <= limit:
                gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
                row = experts.down_proj[expert] @ (experts.act_fn(gate) * up)
                out[token] += weights[token, choice] * row
    return out


def test_rows_above_the_capacity_are_dropped_on_every_layout() -> None:
    factor = 0.75
    model = MIXTRAL.build()
    hidden = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    halves = torch.cat([_dense(model, part, factor) for part in hidden.chunk(2)])

    def block_of(strategy: Strategy, world: World) -> nn.Module:
        mine = copy.deepcopy(model)
        plan = MIXTRAL.plan(strategy)
        return parallelize(mine, plan, world, routing=Routing(capacity_factor=factor))

    def rank(rank: int) -> tuple[Tensor, float]:
        with World.join("cpu") as world:
            mine = block_of(S(dp_shard=2, ep=2), world)
            for module in handle(mine).fsdp:
                module.unshard()
            out = mine.model.layers[0].mlp(hidden.chunk(2)[rank].unsqueeze(0))[0]
            return out.detach(), end_step(mine).dropped

    found = launch(rank, 2, timeout_s=180)
    assert torch.allclose(torch.cat([out for out, _ in found]), halves, rtol=1e-12, atol=1e-14)
    assert found[0][1] == found[1][1] > 0
    with World.join("cpu") as world:
        mine = block_of(S(), world)
        alone = torch.cat([mine.model.layers[0].mlp(h.unsqueeze(0))[0] for h in hidden.chunk(2)])
    assert torch.allclose(alone, halves, rtol=1e-12, atol=1e-14)


def test_choices_a_model_has_nothing_for_are_refused() -> None:
    llama = Setup("llama")
    with World.join("cpu") as world:
        for setup, routing, hint in (
            (llama, Routing(capacity_factor=1.0), "moe.capacity_factor=null"),
            (DEEPSEEK, Routing(aux_loss_coef=0.1), "moe.aux_loss_coef=null"),
            (QWEN, Routing(bias_update_rate=0.1), "moe.bias_update_rate=0"),
        ):
            with pytest.raises(UnsupportedSharding) as caught:
                parallelize(setup.build(), setup.plan(S()), world, routing=routing)
            assert caught.value.hint == hint


class _NoReads(TorchDispatchMode):
    """No value of a tensor is read by the host: on an accelerator that would wait for all that was issued."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_load_of_a_step_is_counted_without_reading_it() -> None:
    model = DEEPSEEK.build()
    ids = DEEPSEEK.batch()["input_ids"]
    with World.join("cpu") as world:
        parallelize(model, DEEPSEEK.plan(S()), world, routing=Routing(bias_update_rate=0.1))
        model(input_ids=ids, labels=ids).loss.backward()
        with _NoReads():
            counted = count_routing(model)
    assert counted is not None
    assert counted[0][:, :-1].sum() == counted[0][:, -1].sum() == 2 * ids.numel()
