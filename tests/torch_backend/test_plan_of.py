"""A plan of a module in hand, from a strategy in words: any module, and a refusal by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, HyperParallelError, UnknownKey
from hyper_parallel.ir import Rule
from hyper_parallel.planner import parse_strategy
from tests.parity.planned import whole

pytestmark = pytest.mark.torch


def _qwen() -> nn.Module:
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(
            vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ))  # fmt: skip


class Blocks(nn.Module):
    """No config, no list of layers, and an argument of its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.tanh(self.up(points))))


def test_words_are_the_keys_of_a_recipe() -> None:
    words = "parallel.pp=2 tp=2 schedule=zb-h1 training.recompute=full rules.layers.*.up=colwise"
    assert parse_strategy(words) == hp.Strategy(
        pp=2, tp_x=2, schedule="zb-h1", recompute="full", rules=(Rule("layers.*.up", "colwise"),)
    )
    assert parse_strategy("") == hp.Strategy()


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ("dp_shrad=4", UnknownKey, "write `dp_shard=4`"),
        ("tp", BadValue, "key=value"),
        ("tp=two", BadValue, "an integer >= 1"),
        ("tp=2 tp_x=4", BadValue, "two names of one degree"),
        ("auto=true", BadValue, "not of a strategy"),
        ("dp_shard=4 tp=2 world_size=8", BadValue, "not of a strategy"),
    ],
)
def test_wrong_words(words: str, error: type[HyperParallelError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        hp.plan_of(_qwen(), words)
    hint = raised.value.hint
    if hint is not None:
        quoted = re.search("`(.*)`", hint)
        parse_strategy(quoted[1] if quoted else hint)


def test_degrees_that_do_not_fit_name_some_that_do() -> None:
    with pytest.raises(HyperParallelError) as raised:
        hp.plan_of(_qwen(), "tp=3")
    assert raised.value.code == "HP203"
    pasted = eval(str(raised.value.hint), {"hp": hp, "model": _qwen()})
    assert pasted.strategy.tp == 2


def test_formats_are_those_of_the_module() -> None:
    plan = hp.plan_of(_qwen(), "dp_shard=2 tp=2")
    assert plan.strategy == hp.Strategy(dp_shard=2, tp_x=2)
    assert plan.workload.compute_dtype == plan.workload.param_dtype == "float32"


def _loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output - batch["wanted"]).square().sum() / 8


@pytest.mark.dist
def test_any_module_on_data_and_on_its_own_rules() -> None:
    torch.manual_seed(0)
    workload = hp.Workload(1, microbatch=4, compute_dtype="float64", param_dtype="float64", reduce_dtype="float64")
    model = Blocks().double()
    points, wanted = torch.randn(2, 8, 6, dtype=torch.float64)
    loss = _loss(model(points), {"wanted": wanted})
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    state = model.state_dict()

    def rank(_: int) -> None:
        for words in (
            "dp_shard=2",
            "dp_replicate=2",
            "tp=2 rules.up=colwise rules.down=rowwise rules.*=replicate",
        ):
            model = Blocks().double()
            model.load_state_dict(state)
            average = words.startswith("dp")  # the loss of a whole step is the same with it
            hp.parallelize(model, hp.plan_of(model, words, workload), average=average)
            at, size = hp.data_share(model)
            mine = {"points": points.chunk(size)[at], "wanted": wanted.chunk(size)[at]}
            value = hp.forward_backward(model, [mine], objective=_loss)
            torch.testing.assert_close(value, loss.detach(), rtol=1e-12, atol=0)
            for name, param in model.named_parameters():
                torch.testing.assert_close(whole(param.grad), expected[name], rtol=1e-10, atol=1e-12)
            with pytest.raises(HyperParallelError, match="a causal language model"):
                hp.forward_backward(model, [mine])

    hp.launch(rank, 2, timeout_s=120)


@pytest.mark.dist
def test_a_head_that_classifies_keeps_its_own_loss() -> None:
    """In a loop of the kind Lightning runs: a module with `training_step` and `configure_optimizers`."""
    config = BertConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=3,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).double()
    ids, labels = torch.randint(1, 48, (8, 12)), torch.arange(8) % 3
    workload = hp.Workload(12, microbatch=4, compute_dtype="float64", param_dtype="float64", reduce_dtype="float64")

    class Task(nn.Module):
        def __init__(self, words: str) -> None:
            super().__init__()
            own = BertForSequenceClassification(config).double()
            own.load_state_dict(model.state_dict())
            self.model = hp.parallelize(own, hp.plan_of(own, words, workload), average=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2, foreach=True)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**batch).loss

    def fit(words: str) -> list[float]:
        task = Task(words)
        optimizer, (rank, size) = task.configure_optimizers(), hp.data_share(task.model)
        batch = {"input_ids": ids.chunk(size)[rank], "labels": labels.chunk(size)[rank]}
        norms = []
        for i in range(3):
            optimizer.zero_grad()
            task.training_step(batch, i).backward()
            norms.append(hp.clip_grad_norm_(task.model, 1.0).item())
            optimizer.step()
        with pytest.raises(HyperParallelError, match="a causal language model"):
            hp.forward_backward(task.model, [batch])
        return norms

    plain = model(input_ids=ids, labels=labels).loss
    plain.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    one = fit("")
    assert one[0] == pytest.approx(norm.item(), rel=1e-5)  # transformers' own norms round to float32
    assert hp.launch(lambda _: fit("dp_shard=2"), 2, timeout_s=120)[1] == pytest.approx(one, rel=1e-10)


@pytest.mark.dist
def test_a_loop_of_accelerate_repeats_one_rank() -> None:
    """See docs/how-to/use_accelerate_or_lightning.md; a prepared scheduler takes one step per process."""
    torch.manual_seed(0)
    state = Blocks().double().state_dict()
    points, wanted = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    workload = hp.Workload(1, microbatch=8, compute_dtype="float64", param_dtype="float64", reduce_dtype="float64")

    def fit(words: str) -> list[float]:
        from accelerate import Accelerator

        model = Blocks().double()
        model.load_state_dict(state)
        hp.parallelize(model, hp.plan_of(model, words, workload), average=True)
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer = accelerator.prepare(optimizer)
        rank, size = hp.data_share(model)
        norms = []
        for _ in range(3):
            given, goal = (x.chunk(size)[rank] for x in (points, wanted))
            accelerator.backward((model(given) - goal).square().mean())
            norms.append(float(hp.clip_grad_norm_(model, 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return norms

    one = hp.launch(lambda _: fit(""), 1, timeout_s=120)[0]
    assert hp.launch(lambda _: fit("dp_shard=2"), 2, timeout_s=120)[1] == pytest.approx(one, rel=1e-10)
