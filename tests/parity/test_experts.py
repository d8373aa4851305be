"""Experts on every folding against one device: gradients, bytes, and checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.pretrained import load_pretrained
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import (
    World,
    clip_grad_norm_,
    forward_backward,
    launch,
    parallelize,
)
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.model_export import export_hf
from tests.parity.universal import Setup, check_on_ranks
from tests.slow import slow_cells

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
        S(tp_x=2, dp_shard=2, ep=2, recompute="full", recompute_layers=1, zero=1),
    ),
    QWEN: (
        S(tp_x=2, tp_y=2, ep=4),
        S(cp=2, dp_shard=2, ep=4),
    ),
    DEEPSEEK: (S(tp_x=2, dp_shard=2, ep=4),),
    UNEVEN: (S(tp_x=4, ep=4),),
}
MORE = {
    # In every commit test_overlap.py runs this pipeline, with its experts in chunks.
    replace(QWEN, sequences=8, accumulation=2, tied=True): (S(pp=2, dp_shard=2, ep=2, schedule="zb-h1"),),
    QWEN: (S(tp_x=4, ep=2), S(tp_x=2, dp_shard=2, ep=1), S(dp_replicate=2, dp_shard=2, ep=2)),
    MIXTRAL: (S(dp_shard=4, ep=4), S(tp_x=2, dp_replicate=2, ep=2)),
    DEEPSEEK: (S(dp_shard=4, ep=2, recompute="full"),),
    GPT_OSS: (S(dp_replicate=2, dp_shard=2, ep=2), S(tp_x=2, dp_shard=2, ep=4)),
    UNEVEN: (S(tp_x=4),),
}
EIGHT = {
    FEW: (
        S(dp_shard=8, ep=4),
        S(tp_x=2, dp_shard=2, dp_replicate=2, ep=4, recompute="full"),
    ),
    replace(QWEN, accumulation=2, tied=True): (S(pp=2, tp_x=4, ep=2),),
}


@slow_cells("4-cases1")
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, TWO),
        (4, FOUR),
        pytest.param(4, MORE, marks=pytest.mark.slow),
        pytest.param(8, EIGHT, marks=pytest.mark.slow),
    ],
)
def test_every_folding_equals_one_device(ranks: int, cases: dict[Setup, tuple[Strategy, ...]]) -> None:
    check_on_ranks(ranks, [(setup, s) for setup in cases for s in cases[setup]])


def test_the_audit_names_both_expert_axes() -> None:
    def rank(_: int) -> tuple[tuple[int, ...], ...]:
        with World.join("cpu") as world:
            strategy = S(dp_shard=8, ep=4)
            model = parallelize(FEW.build(), FEW.plan(strategy), world)
            experts = model.model.layers[0].mlp.experts
            return tuple(experts.gate_up_proj._local_tensor.shape)

    assert set(launch(rank, 8, timeout_s=100)) == {(1, 32, 64)}


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
                parts = batch if strategy.dp == 1 else {k: v[rank : rank + 1] for k, v in batch.items()}
                forward_backward(mine, [parts], 6)
                clip_grad_norm_(mine, None)
                for name, param in mine.named_parameters():
                    theirs = plain.get_parameter(name).grad
                    theirs = torch.zeros_like(param.full_tensor()) if theirs is None else theirs
                    error = (param.grad.full_tensor() - theirs).abs().max()
                    # `plain` rounds norms to float32 on the way.
                    assert float(error) <= 1e-5 * max(float(theirs.abs().max()), 1e-3), name

    launch(rank, 2, timeout_s=180)


def _own_layouts(model: nn.Module, strategy: Strategy) -> dict[str, object]:
    """Layouts as planning would give them for this model, by starred names."""
    from hyper_parallel.backends.torch.model_layouts import starred
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


@pytest.mark.slow
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
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
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
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
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
