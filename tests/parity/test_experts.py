"""Experts on every folding against one device: gradients, bytes, routing extras, checkpoints, and a whole run."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch._pretrained import load_pretrained
from hyper_parallel.backends.torch._weights import materialize
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import (
    Routing,
    RoutingStatistics,
    World,
    clip_grad_norm_,
    end_step,
    forward_backward,
    handle,
    launch,
    parallelize,
)
from hyper_parallel.trainer._checkpoint import Checkpointer
from hyper_parallel.trainer._export import export_hf
from tests.parity.universal import Reference, Setup, check

pytestmark = pytest.mark.parity

S = Strategy
QWEN, MIXTRAL = Setup("qwen3_moe", sequences=4), Setup("mixtral", sequences=4)
DEEPSEEK, GPT_OSS = Setup("deepseek_v3", sequences=4), Setup("gpt_oss", sequences=4)
UNEVEN = Setup("qwen3_moe", sequences=1, seq_len=5)
FEW = Setup("mixtral", sequences=8, config=(("num_local_experts", 4),))

TWO = {
    QWEN: (S(dp_shard=2, ep=2), S(tp_x=2), S(tp_x=2, ep=2, recompute="full")),
    GPT_OSS: (S(dp_shard=2, ep=2, recompute="full"),),
}
FOUR = {
    replace(QWEN, sequences=8, accumulation=2, tied=True): (
        S(dp_shard=4, ep=2),
        S(tp_x=2, dp_shard=2, ep=2, recompute="full"),
        S(pp=2, dp_shard=2, ep=2, schedule="zb-h1"),
    ),
    QWEN: (
        S(tp_x=2, tp_y=2, ep=4),
        S(dp_replicate=2, dp_shard=2, ep=2),
        S(tp_x=4, ep=2),
        S(tp_x=2, dp_shard=2, ep=1),
        S(cp=2, dp_shard=2, ep=4),
    ),
    MIXTRAL: (S(dp_shard=4, ep=4), S(tp_x=2, dp_replicate=2, ep=2)),
    DEEPSEEK: (S(dp_shard=4, ep=2, recompute="full"), S(tp_x=2, dp_shard=2, ep=4)),
    GPT_OSS: (S(tp_x=2, dp_shard=2, ep=4), S(dp_replicate=2, dp_shard=2, ep=2)),
    UNEVEN: (S(tp_x=4, ep=4), S(tp_x=4)),
}
EIGHT = {
    FEW: (
        S(dp_shard=8, ep=4),
        S(tp_x=2, dp_shard=2, dp_replicate=2, ep=4, recompute="full"),
        S(tp_x=2, dp_shard=4, ep=2),
    ),
    replace(QWEN, accumulation=2, tied=True): (S(pp=2, tp_x=4, ep=2),),
}


@functools.cache
def reference(setup: Setup) -> Reference:
    return Reference(setup)


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR), (8, EIGHT)])
def test_every_folding_equals_one_device(
    ranks: int, cases: dict[Setup, tuple[Strategy, ...]]
) -> None:
    for setup in cases:
        reference(setup)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for setup, strategies in cases.items():
                for strategy in strategies:
                    check(reference(setup), strategy, world)

    launch(rank, ranks, timeout_s=200)


def test_the_audit_names_both_expert_axes() -> None:
    def rank(_: int) -> tuple[tuple[int, ...], ...]:
        with World.join("cpu") as world:
            strategy = S(dp_shard=8, ep=4)
            model = parallelize(FEW.build(), FEW.plan(strategy), world)
            experts = model.model.layers[0].mlp.experts
            return tuple(experts.gate_up_proj._local_tensor.shape)

    assert set(launch(rank, 8, timeout_s=100)) == {(1, 32, 64)}


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


class _Dealt(Setup):
    """One device whose i-th microbatch has the i-th sequence of each of two data ranks."""

    def batch(self) -> dict[str, Tensor]:
        return {k: torch.stack(v.chunk(2), 1).flatten(0, 1) for k, v in super().batch().items()}


def test_the_auxiliary_loss_passes_over_pipeline_stages() -> None:
    """Some stages have no experts, all need the load of the others; the loss is that of all data ranks together."""
    mixed = (*AUX, ("num_hidden_layers", 4), ("decoder_sparse_step", 2))
    alone = Setup("qwen3_moe", sequences=4, seq_len=15, accumulation=4, config=mixed)
    shared = {"family": "mixtral", "sequences": 8, "accumulation": 4}
    shared["config"] = (*AUX, ("num_hidden_layers", 4))
    cases = [
        (reference(alone), (
            S(pp=4, schedule="1f1b"),
            S(pp=2, tp_x=2, ep=2, schedule="zb-h1"),
            S(pp=2, cp=2, schedule="dualpipev", virtual_stages=2, recompute="full"),
        )),
        (reference(_Dealt(**shared)).of(Setup(**shared)), (
            S(pp=2, dp_shard=2, ep=2, schedule="zbv", virtual_stages=2),
            S(pp=2, dp_replicate=2, schedule="interleaved", virtual_stages=2),
        )),
    ]  # fmt: skip

    def rank(_: int) -> list[float | None]:
        with World.join("cpu") as world:
            for expected, strategies in cases:
                for strategy in strategies:
                    check(expected, strategy, world, bytes_too=False)
            return [_mean_aux(alone, strategy, world) for strategy in (S(dp_shard=4), S(pp=4))]

    found = launch(rank, 4, timeout_s=100)
    assert found == [found[0]] * 4
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-12)


def _mean_aux(setup: Setup, strategy: Strategy, world: World) -> float | None:
    """The auxiliary loss of a step in which every data rank sees the same four microbatches."""
    plan = replace(setup, sequences=4 * strategy.dp).plan(strategy)
    model = parallelize(setup.build(), plan, world)
    parts = [{k: v[i : i + 1] for k, v in setup.batch().items()} for i in range(4)]
    forward_backward(model, parts, 100)
    return end_step(model).aux_loss


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
        cross_entropy = forward_backward(
            parallelize(plain.build(), plain.plan(S()), world), parts, tokens
        )
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
    found = launch(rank, 2, timeout_s=60)
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

    found = launch(rank, 2, timeout_s=60)
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


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 16, bias=False)
        self.down = nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class _Block(nn.Module):
    """The older form: a list of modules that the block calls one by one, an unused expert not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 5, bias=False)
        self.experts = nn.ModuleList(_Expert() for _ in range(5))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, 64)
        weights, index = torch.softmax(self.gate(flat), -1).topk(1, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (index[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows])
        return out.view_as(hidden)


def test_lists_of_expert_modules_work_without_ep() -> None:
    torch.manual_seed(0)
    setup = Setup("llama", sequences=2, seq_len=3)
    model = setup.build()
    for layer in model.model.layers:
        layer.mlp = _Block().double()
    batch = setup.batch()
    plain = copy.deepcopy(model)
    plain(**batch, labels=batch["shift_labels"], num_items_in_batch=6).loss.backward()
    unused = [n for n, p in plain.named_parameters() if p.grad is None]
    assert unused  # some expert saw no token

    def rank(rank: int) -> None:
        with World.join("cpu") as world:
            for strategy in (S(dp_shard=2), S(tp_x=2)):
                mine = copy.deepcopy(model)
                plan = setup.plan(strategy)
                layouts = _own_layouts(mine, strategy)
                parallelize(mine, replace(plan, layouts=layouts), world)
                parts = (
                    batch if strategy.dp == 1 else {k: v[rank : rank + 1] for k, v in batch.items()}
                )
                forward_backward(mine, [parts], 6)
                clip_grad_norm_(mine, None)
                for name, param in mine.named_parameters():
                    theirs = plain.get_parameter(name).grad
                    theirs = torch.zeros_like(param.full_tensor()) if theirs is None else theirs
                    error = (param.grad.full_tensor() - theirs).abs().max()
                    # `plain` rounds norms to float32 on the way.
                    assert float(error) <= 1e-5 * max(float(theirs.abs().max()), 1e-3), name

    launch(rank, 2, timeout_s=60)


def _own_layouts(model: nn.Module, strategy: Strategy) -> dict[str, object]:
    """Layouts as planning would give them for this model, by starred names."""
    from hyper_parallel.backends.torch._resolve import starred
    from hyper_parallel.shard import family_rules, plan_layouts

    params = {starred(n): (starred(n), tuple(p.shape), ()) for n, p in model.named_parameters()}
    rules = family_rules("llama")
    planned = plan_layouts(
        list(params.values()), rules, strategy, num_heads=8, num_kv_heads=4, head_dim=8, vocab_size=96
    )  # fmt: skip
    return planned.layouts


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def test_weights_checkpoints_and_exports_do_not_depend_on_ep(tmp_path) -> None:
    setup = QWEN

    def build() -> nn.Module:
        with torch.device("meta"):
            return setup.build()

    plain = build()
    materialize(plain, seed=5, device="cpu")
    plain.save_pretrained(tmp_path / "hf")
    want = _whole(plain)

    def saver(name: str) -> Checkpointer:
        return Checkpointer(tmp_path / name, keep=1, asynchronous=False, fingerprint={})

    def same(model: nn.Module, expected: dict[str, Tensor]) -> None:
        for name, value in _whole(model).items():
            assert torch.equal(value, expected[name]), name

    def step(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer

    def four(_: int) -> dict[str, Tensor]:
        with World.join("cpu") as world:
            model = parallelize(build(), setup.plan(S(dp_shard=4, ep=4)), world)
            materialize(model, seed=5, device="cpu")
            same(model, want)
            export_hf(model, model.config, None, tmp_path / "export")
            optimizer = step(model)
            saver("four").save(1, model, optimizer, {})
            return _whole(model)

    after = launch(four, 4, timeout_s=100)[0]

    def reshard(source: str, strategy: Strategy, target: str):
        def rank(_: int) -> None:
            with World.join("cpu") as world:
                model = parallelize(build(), setup.plan(strategy), world)
                load_pretrained(model, tmp_path / "export", device="cpu")
                same(model, want)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                saver(source).load(model, optimizer)
                same(model, after)
                saver(target).save(1, model, optimizer, {})

        return rank

    launch(reshard("four", S(dp_shard=4, ep=2), "edp"), 4, timeout_s=100)
    launch(reshard("edp", S(tp_x=2, ep=2), "two"), 2, timeout_s=100)
    last = build()
    materialize(last, seed=1, device="cpu")
    saver("two").load(last, torch.optim.AdamW(last.parameters()))
    same(last, after)
