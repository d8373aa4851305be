"""A checkpoint goes through a chain of strategies, saved from each and loaded into the next, and stays bitwise equal.

Parameters and both moments of AdamW are compared whole after every link, so every strategy is once the source and once
the target; the last link returns to the first strategy.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, forward_backward, launch, parallelize
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from tests.parity.universal import Setup
from tests.slow import slow_cells

pytestmark = [pytest.mark.parity, pytest.mark.timeout(300)]

DENSE = (
    Strategy(dp_shard=4),
    Strategy(tp_x=2, tp_y=2),
    Strategy(pp=2, dp_shard=2),
    Strategy(tp_x=4),
    Strategy(cp=2, tp_x=2),
    Strategy(pp=2, tp_x=2, schedule="zbv", virtual_stages=2),
    Strategy(tp_x=2, tp_y=2, attention_shape="weight", mlp_shape="1d"),
    Strategy(dp_replicate=2, dp_shard=2),
    Strategy(pp=4, schedule="gpipe"),
)
EXPERTS = (
    Strategy(dp_shard=4, ep=4),
    Strategy(dp_shard=4, ep=2),
    Strategy(tp_x=4, ep=4),
    Strategy(pp=2, dp_shard=2, ep=2),
    Strategy(dp_shard=2, cp=2),
    Strategy(dp_shard=2, tp_x=2, ep=2),
    Strategy(tp_x=2, tp_y=2, ep=4),
    Strategy(dp_replicate=2, dp_shard=2, ep=2),
)
TIED = Setup("qwen3", tied=True, config=(("num_hidden_layers", 4),))
CHAINS = {
    # Stages of two layers and of one.
    "qwen3-tied": (replace(TIED, config=(("num_hidden_layers", 3),)), DENSE[:5]),
    "qwen3-tied on": (TIED, DENSE[4:]),
    "qwen3_moe": (Setup("qwen3_moe"), EXPERTS),
    "gpt_oss": (Setup("gpt_oss"), EXPERTS[1:6:2]),
}


@slow_cells("qwen3-tied on", "qwen3_moe", "gpt_oss", "qwen3-tied")
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_passes_through_every_strategy(chain: str, tmp_path: Path) -> None:
    setup, strategies = CHAINS[chain]
    source = setup.build()

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            model, optimizer = _build(setup, source, strategies[0], world)
            _step(setup, model, optimizer, strategies[0], world)
            saver = Checkpointer(tmp_path, keep=2, asynchronous=False, fingerprint={"of": chain})
            saver.save(1, model, optimizer, {})
            expected = _whole(model, optimizer)
            for number, strategy in enumerate((*strategies[1:], strategies[0]), start=2):
                with torch.no_grad():
                    other = copy.deepcopy(source)
                    for param in other.parameters():
                        param.zero_()
                model, optimizer = _build(setup, other, strategy, world)
                assert saver.load(model, optimizer)[0] == number - 1
                found = _whole(model, optimizer)
                assert found.keys() == expected.keys(), strategy
                for name, value in expected.items():
                    assert torch.equal(found[name], value), f"{strategy}: {name}"
                saver.save(number, model, optimizer, {})

    launch(rank, 4, timeout_s=280)


def _build(
    setup: Setup, source: nn.Module, strategy: Strategy, world: World
) -> tuple[nn.Module, torch.optim.Optimizer]:
    # A pipeline needs microbatches for its stages.
    microbatches = 2 * strategy.pp if strategy.pp > 1 else 1
    plan = replace(setup, accumulation=microbatches).plan(strategy)
    model = parallelize(copy.deepcopy(source), plan, world)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _step(
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    world: World,
) -> None:
    where = strategy.mesh().coordinate(world.rank)
    share = setup.sequences // strategy.dp
    first = (where["dp_replicate"] * strategy.dp_shard + where["dp_shard"]) * share
    batch = {name: tensor[first : first + share] for name, tensor in setup.batch().items()}
    forward_backward(model, [batch], 100)
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state of all ranks, by name, whole."""
    own: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        own[name] = _full(param)
        for key, value in optimizer.state[param].items():
            own[f"{name}/{key}"] = _full(value)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert name not in found or torch.equal(found[name], value), name
            found[name] = value
    return found


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
