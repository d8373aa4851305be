"""save and load in a loop of the user's own: any layout to any, any optimizer, extra values."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, CheckpointCorrupt, CheckpointMismatch
from tests.torch_backend.test_objective import WORKLOAD, build, pairs

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, fused=True),
}


def start(model: nn.Module, words: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    shared = copy.deepcopy(model)
    hp.parallelize(shared, hp.plan_of(shared, words, WORKLOAD))
    return shared, OPTIMIZERS[kind](shared)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    rank, size = hp.data_share(model)
    batch = {k: v.chunk(size)[rank] for k, v in pairs().items() if k != "teacher"}
    parts = [{k: v.chunk(2)[i] for k, v in batch.items()} for i in range(2)]
    loss = hp.forward_backward(model, parts)
    hp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.slow
@pytest.mark.dist
def test_any_layout_continues_what_another_saved(tmp_path: Path) -> None:
    model = build()
    expected = {}
    for kind in OPTIMIZERS:
        one, optimizer = start(model, "", kind)
        expected[kind] = [step(one, optimizer) for _ in range(3)]
        assert expected[kind][0] > expected[kind][2] + 0.05

    def saves(_: int) -> None:
        for kind in OPTIMIZERS:
            shared, optimizer = start(model, "tp=2 pp=2", kind)
            hp.save_pretrained(shared, tmp_path / "huggingface")
            assert step(shared, optimizer) == pytest.approx(expected[kind][0], rel=1e-10)
            hp.save(shared, optimizer, tmp_path / kind, step=1, epoch=7, lr=[0.1])

    def loads(_: int) -> None:
        for kind in OPTIMIZERS:
            shared, optimizer = start(build(5), "dp_shard=2", kind)
            found = hp.load(shared, optimizer, tmp_path / kind)
            assert found == {"epoch": 7, "lr": [0.1], "step": 1}
            losses = [step(shared, optimizer) for _ in range(2)]
            assert losses == pytest.approx(expected[kind][1:], rel=1e-10)
        with pytest.raises(CheckpointMismatch, match="optimizer"):
            hp.load(shared, optimizer, tmp_path / "sgd")

    hp.launch(saves, 4, timeout_s=120)
    hp.launch(loads, 2, timeout_s=120)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float64)
    for name, param in model.named_parameters():
        assert torch.equal(read.get_parameter(name), param)
    damaged = next((tmp_path / "sgd" / "step_00000001").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    one, optimizer = start(model, "", "sgd")
    with pytest.raises(CheckpointCorrupt, match=damaged.name) as caught:
        hp.load(one, optimizer, tmp_path / "sgd")
    assert str(caught.value.hint).endswith("from the start without `hp.load`")
    with pytest.raises(BadValue, match="rng"):
        hp.save(one, optimizer, tmp_path / "sgd", rng=torch.get_rng_state())
    with pytest.raises(BadValue, match="max_file_bytes"):
        hp.save_pretrained(one, tmp_path / "empty", max_file_bytes=0)
    with pytest.raises(BadValue, match="keep"):
        hp.save(one, optimizer, tmp_path / "sgd", keep=0)
