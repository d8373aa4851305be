"""`hp.offload` around a loop that a user starts on several ranks: FSDP, tensor parallelism or replicas of torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel as hp
from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.runtime import World, launch
from tests.slow import slow_cells
from tests.torch_memory.models import tiny_model

pytestmark = pytest.mark.torch

WIDTH, ROWS, BLOCKS = 32, 24, 4
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    )


def cut(kind: str) -> nn.Module:
    """The model as a user of torch cuts it."""
    model, mesh = net(), init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tensor":
        for block in model:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model
    if kind.startswith("replicas"):
        views = kind.endswith("views")
        return DistributedDataParallel(model, bucket_cap_mb=0.03, gradient_as_bucket_view=views)
    policy = {"mp_policy": HALF} if kind == "half" else {}
    for block in model:
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def train(kind: str, budget: int | None) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses and evaluations, this rank's part of the state at the end, and counted device bytes."""
    model, first = cut(kind), kind == "zero first"
    inner = getattr(model, "module", model)  # a step may name a model and what wraps it
    parameters = list(model.parameters())
    # torch's fused updates take no mixture: biases of the second product are not cut.
    groups = [[p for p in parameters if isinstance(p, DTensor) == cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW([{"params": g} for g in groups if g], lr=1e-2, fused=True)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def step(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if first:
            optimizer.zero_grad()
        loss = (model(rows).float() - wanted).square().mean()
        loss.backward()
        if kind != "tensor":
            nn.utils.clip_grad_norm_(inner.parameters(), 0.5)
        optimizer.step()
        if not first:
            optimizer.zero_grad()
        return loss.detach()

    run = step if budget is None else hp.offload(step, budget=budget)
    draws = torch.Generator().manual_seed(0 if kind == "tensor" else dist.get_rank())
    found, most = [], 0
    for at in range(7 if kind == "zero first" else 5):
        rows = ROWS // 2 if kind == "zero first" and at in (3, 5) else ROWS  # planned anew
        batch = torch.randn(2, rows, WIDTH, generator=draws)
        found.append(float(run(*batch)))
        rates.step()
        if budget is None or at < 3:
            continue
        most = max(most, run.measured.device_bytes if run.measured else 0)
        with run.materialized(), torch.no_grad():
            inner(batch[0])
    if budget is not None:
        run.close()
    state = [*parameters, *(v for slots in optimizer.state.values() for v in slots.values())]
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in state]
    return found, [t.detach().clone() for t in parts], most


def rank_body(kinds: tuple[str, ...]) -> None:
    with World.join("cpu"):
        for kind in kinds:
            losses, state, _ = train(kind, None)
            budget = int(0.8 * sum(t.nbytes for t in state))
            found, mine, most = train(kind, budget)
            assert found == losses, kind
            assert all(map(torch.equal, mine, state)), kind
            assert 0 < most <= budget, kind


@slow_cells("kinds0")
@pytest.mark.dist
@pytest.mark.parametrize(
    "kinds",
    [
        ("half", "zero first", "tensor", "replicas of views"),
        pytest.param(("fsdp", "replicas"), marks=pytest.mark.slow),
    ],
)
def test_a_loop_on_ranks_has_the_values_of_plain_steps_in_less_than_its_state(kinds) -> None:
    launch(lambda _: rank_body(kinds), 2, timeout_s=100)


def parallel(layout: str, budget: int | None) -> tuple[list[float], list[torch.Tensor]]:
    """The same with a model that this library has cut."""
    torch.manual_seed(0)
    model = tiny_model("qwen3", num_hidden_layers=2)
    plan = hp.plan_of(model, layout, hp.Workload(seq_len=16, tokens_per_step=64))
    model = hp.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = hp.forward_backward(model, [{"input_ids": ids, "labels": ids}])
        hp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = step if budget is None else hp.offload(step, budget=budget, model=model)
    draws = torch.Generator().manual_seed(0)
    found = [float(run(torch.randint(3, 128, (4, 16), generator=draws))) for _ in range(5)]
    if budget is not None:
        assert run.measured.device_bytes <= budget
        run.close()
    state = [
        *model.parameters(),
        *(v for slots in optimizer.state.values() for v in slots.values()),
    ]
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in state]
    return found, [t.detach().clone() for t in parts]


def parallel_body(layout: str) -> None:
    with World.join("cpu"):
        losses, state = parallel(layout, None)
        found, mine = parallel(layout, sum(t.nbytes for t in state))
        assert found == losses
        assert all(map(torch.equal, mine, state))


@slow_cells("pp=2")
@pytest.mark.dist
@pytest.mark.parametrize("layout", ["pp=2", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_a_loop_around_a_parallelized_model(layout: str) -> None:
    launch(lambda _: parallel_body(layout), 2, timeout_s=100)


def refused(rank: int) -> None:
    with World.join("cpu"):
        wide = nn.Linear(WIDTH, WIDTH * (1 + 7 * rank))  # only one rank has too little
        optimizer = torch.optim.SGD(wide.parameters(), lr=1e-2, fused=True, momentum=0.9)

        def step(rows: torch.Tensor) -> torch.Tensor:
            loss = wide(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = hp.offload(step, budget=20_000)
        run(torch.ones(4, WIDTH))
        with pytest.raises(BudgetImpossible) as caught:
            run(torch.ones(4, WIDTH))
        assert "hp.offload(step, ..., budget=" in caught.value.hint


@pytest.mark.dist
def test_a_rank_without_a_plan_ends_all_of_them() -> None:
    launch(refused, 2, timeout_s=100)
