"""Expert parallelism on experts in a list of modules: against one device, bytes, refusals, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy
from hyper_parallel.runtime import Routing, World, forward_backward, handle, launch, parallelize
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from tests.parity.listed import EXPERTS, WIDTH, Listed, SparseBlock
from tests.parity.universal import Reference, check
from tests.slow import slow_cells

pytestmark = pytest.mark.parity

S = Strategy
HALVES = Overlap(half_batch=True)
USUAL = Listed(sequences=4)
# Fewer rows than experts and an uneven cut: some ranks call no expert, some experts get nothing.
FEW = Listed(sequences=2, seq_len=3, config=(("num_hidden_layers", 2),))
STEPS = Listed(sequences=8, accumulation=2, tied=True)
CASES: dict[int, dict[Listed, tuple[Strategy, ...]]] = {
    2: {
        USUAL: (S(dp_shard=2, ep=2), S(tp_x=2, ep=2), S(cp=2, ep=2)),
        FEW: (S(dp_shard=2, ep=2), S(tp_x=2, ep=2, recompute="full")),
    },
    4: {
        STEPS: (
            S(dp_shard=4, ep=4),
            S(dp_shard=4, ep=2, recompute="full"),
            S(pp=2, dp_shard=2, ep=2, schedule="zb-h1"),
            S(dp_replicate=2, dp_shard=2, ep=2, reshard_after_forward=False),
        ),
        USUAL: (S(tp_x=2, dp_shard=2, ep=4), S(tp_x=2, tp_y=2, ep=4)),
    },
}


@slow_cells(4, "2")
@pytest.mark.parametrize("ranks", CASES)
def test_lists_repeat_one_device(ranks: int) -> None:
    references = {setup: Reference(setup) for setup in CASES[ranks]}

    def rank(_: int) -> list[set[str]]:
        with World.join("cpu") as world:
            return [
                set(check(references[setup], strategy, world, bytes_too=False).grads)
                for setup, strategies in CASES[ranks].items()
                for strategy in strategies
            ]

    found = launch(rank, ranks, timeout_s=100)
    setups = [setup for setup, strategies in CASES[ranks].items() for _ in strategies]
    for setup, *names in zip(setups, *found, strict=True):
        assert set().union(*names) == {n for n, _ in references[setup].model.named_parameters()}


def test_rows_travel_and_experts_stay() -> None:
    """Two all-to-alls of rows and one of counts per layer, forward and backward; a rank holds its experts alone."""
    reference = Reference(Listed(sequences=2))

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            strategy = S(dp_shard=2, ep=2)
            counted = check(reference, strategy, world, bytes_too=False).counted
            model = parallelize(reference.setup.build(), reference.setup.plan(strategy), world)
            batch = {k: v[world.rank :][:1] for k, v in reference.setup.batch().items()}
            forward_backward(model, [batch], 10)
            routed = handle(model).experts.layers.values()
            sent, received = sum(r.sent for r in routed), sum(r.received for r in routed)
            assert sent > 0
            assert received > 0
            counts = 2 * 8 * EXPERTS // 2
            assert counted["all_to_all", ("dp_shard",)] == (
                2 * 5,
                counts + 2 * (sent + received) * WIDTH * 8,
            )
            held = {n.split(".")[5] for n, _ in model.named_parameters() if ".experts." in n}
            assert held == {str(i + world.rank * 4) for i in range(4)}

    launch(rank, 2, timeout_s=180)


def test_router_and_shared_experts_run_once_per_half_batch() -> None:
    """The second half-batch begins while the first one waits for the exchange of its rows."""
    runs = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(len(x))
            return super().forward(x)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            setup, strategy = Listed(sequences=8), S(dp_shard=2, ep=2, overlap=HALVES)
            model = setup.build()
            for layer in model.model.layers:
                layer.mlp.gate = Counted(WIDTH, EXPERTS, bias=False).double()
            parallelize(model, setup.plan(strategy), world)
            runs.clear()  # of trials on meta tensors
            batch = {k: v[4 * world.rank :][:4] for k, v in setup.batch().items()}
            for _ in range(2):
                forward_backward(model, [batch], 10)
            layers = len(model.model.layers)
            assert handle(model).halves.take_counts()["halved_layers"] == 2 * layers
            tokens = batch["input_ids"].numel()
            assert runs == [tokens // 2] * (2 * 2 * layers)

    launch(rank, 2, timeout_s=180)


def test_what_cannot_be_sent_is_refused() -> None:
    class Inside(SparseBlock):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.experts[0].up(hidden).sum()

    class Random(SparseBlock):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden * torch.rand_like(hidden))

    def broken(kind: type[nn.Module]) -> nn.Module:
        model = USUAL.build()
        model.model.layers[1].mlp = kind().double()
        return model

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            plan, batch = USUAL.plan(S(dp_shard=2, ep=2)), USUAL.batch()
            for kind, words in ((Inside, "reads the attribute `up`"), (Random, "random numbers")):
                with pytest.raises(UnsupportedSharding, match=words):
                    parallelize(broken(kind), plan, world)(**batch)
            with pytest.raises(UnsupportedSharding, match="capacity"):
                parallelize(USUAL.build(), plan, world, routing=Routing(capacity_factor=2.0))
            model = USUAL.build()
            for layer in model.model.layers:
                layer.mlp.experts.append(type(layer.mlp.experts[0])().double())
            with pytest.raises(NotDivisible, match="the 9 experts"):
                parallelize(model, plan, world)

    launch(rank, 2, timeout_s=180)


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_ep(tmp_path: Path) -> None:
    def saver(name: str) -> Checkpointer:
        return Checkpointer(tmp_path / name, keep=1, asynchronous=False, fingerprint={})

    def values(model: nn.Module) -> dict[str, Tensor]:
        named = model.named_parameters()
        return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named}

    def two(_: int) -> dict[str, Tensor]:
        with World.join("cpu") as world:
            model = parallelize(USUAL.build(), USUAL.plan(S(dp_shard=2, ep=2)), world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            saver("two").save(1, model, optimizer, {})
            return values(model)

    trained = {}
    for part in launch(two, 2, timeout_s=180):
        trained |= part
    whole = USUAL.build()
    materialize(whole, seed=1, device="cpu")
    saver("two").load(whole, torch.optim.AdamW(whole.parameters()))
    found = values(whole)
    assert found.keys() == trained.keys()
    for name, value in found.items():
        assert torch.equal(value, trained[name]), name
