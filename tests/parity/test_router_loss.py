"""The router loss of a model: measured on its class, and equal to transformers' own on every layout and in any loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3MoeForCausalLM,
)

import hyper_parallel as hp
from hyper_parallel.backends.torch import router_loss_facts
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments
from hyper_parallel.integration.llamafactory.parallel_model import shard_model
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import (
    Routing,
    World,
    end_step,
    forward_backward,
    launch,
    parallelize,
    plan_of,
)
from tests.parity.planned import whole

pytestmark = pytest.mark.parity

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
_QWEN = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": True,
    "router_aux_loss_coef": 1.0,
}  # fmt: skip
_OLMOE = {
    "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}  # fmt: skip
_DBRX = {
    "model_type": "dbrx", "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 96,
    "output_router_logits": True,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.5},
}  # fmt: skip
_DOGE = {
    "model_type": "doge", "is_moe": True, "num_experts": 16, "num_experts_per_tok": 3, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}  # fmt: skip
_HASHED = {
    "model_type": "deepseek_v4", "num_hidden_layers": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.5, "q_lora_rank": 16, "index_n_heads": 4,
    "index_head_dim": 8, "index_topk": 4, "o_lora_rank": 16, "o_groups": 2, "num_key_value_heads": 1, "head_dim": 16,
    "qk_rope_head_dim": 8, "sliding_window": 8,
}  # fmt: skip
_IMAGES = {
    "model_type": "qwen3_vl_moe",
    "text_config": {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.25},
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32,
                      "deepstack_visual_indexes": [0]},
}  # fmt: skip


def _build(values: dict[str, Any], meta: bool = False) -> nn.Module:
    own = {} if values is _DBRX or "text_config" in values else _SIZES
    config = AutoConfig.for_model(**{**own, **values})
    auto = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = auto.from_config(config, experts_implementation="eager").double().train()
    return model


IDS = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))


def _plain(model: nn.Module, ids: Tensor, labels: Tensor | None = None) -> tuple[float, float]:
    """Loss and gradient norm of transformers alone."""
    model = copy.deepcopy(model)
    keep_float64(model)
    loss = model(input_ids=ids, labels=ids if labels is None else labels, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), _norm(model)


def _norm(model: nn.Module) -> float:
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return float(torch.stack([g.norm() for g in grads]).norm())


@pytest.mark.parametrize(
    ("values", "coefficient", "requested", "experts", "top_k", "scale", "routers"),
    [
        (_QWEN, 1.0, True, 8, 3, 1.0, 2),
        (_DBRX, 0.5, True, 4, 2, 1.0, 2),
        (_DOGE, 0.5, True, 16, 3, 1 / 3, 2),
        (_HASHED, 0.5, True, 4, 2, 1.0, 1),
        (_IMAGES, 0.25, False, 4, 2, 1.0, 2),
    ],
)
def test_the_loss_of_a_class_is_measured(
    values: dict[str, Any], coefficient: float, requested: bool, experts: int, top_k: int, scale: float, routers: int
) -> None:  # fmt: skip
    model = _build(values, meta=True)
    facts = router_loss_facts(model)
    assert facts is not None
    found = facts.coefficient, facts.requested, facts.num_experts, facts.top_k, facts.scale
    assert found == (coefficient, requested, experts, top_k, scale)
    assert len(facts.routers) == routers


def test_the_coefficient_is_that_of_the_model_and_not_of_its_config() -> None:
    model = _build(_QWEN, meta=True)
    model.router_aux_loss_coef = 0.7
    assert router_loss_facts(model).coefficient == 0.7


def test_a_class_that_passes_all_arguments_on_has_the_loss_of_its_base() -> None:
    class Derived(Qwen3MoeForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    derived = Derived(AutoConfig.for_model(**_SIZES, **_QWEN))
    assert router_loss_facts(derived) == router_loss_facts(_build(_QWEN, meta=True))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama"},
        {"model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 48},
        {"model_type": "doge", "is_moe": False},
    ],
)
def test_a_model_without_a_router_loss_gets_none(values: dict[str, Any]) -> None:
    model = _build(values)
    assert router_loss_facts(model) is None
    with World.join("cpu") as world, pytest.raises(UnsupportedSharding) as caught:
        parallelize(model, plan_of(model, ""), world, routing=Routing(aux_loss_coef=0.5))
    assert caught.value.hint == "moe.aux_loss_coef=null"


def _loop(model: nn.Module, parts: Sequence[Tensor], tokens: int) -> float:
    """A step of a loop that calls the model itself; transformers divides by the tokens of the step."""
    total = 0.0
    for part in parts:
        loss = model(input_ids=part, labels=part, num_items_in_batch=tokens).loss
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize("lay", ["parallelize", "llamafactory"])
def test_a_loop_without_a_workload_has_the_weight_of_transformers(lay: str) -> None:
    plain = _build(_QWEN)
    with World.join("cpu") as world:
        for rows in (4, 2):  # the last step of an epoch is shorter
            for count in (1, 2):
                model, ids = copy.deepcopy(plain), IDS[:rows]
                if lay == "parallelize":
                    parallelize(model, plan_of(model, ""), world)
                else:
                    shard_model(model, Strategy(), HyperParallelArguments(), None)
                halves = [_plain(plain, half) for half in ids.chunk(count)]
                loss = _loop(model, ids.chunk(count), ids[:, 1:].numel())
                assert loss == pytest.approx(sum(part[0] for part in halves) / count, rel=1e-10)
                if count == 1:
                    assert _norm(model) == pytest.approx(halves[0][1], rel=1e-10)


CASES_ON_TWO = (
    (_DBRX, "dp_shard=2"),
    (_DOGE, "tp=2"),
    (_HASHED, "dp_shard=2"),
    (_OLMOE, "cp=2"),  # its forward is given the number of tokens as a tensor
)


def _rank(rank: int) -> list[tuple[float, float]]:
    found = []
    with World.join("cpu") as world:
        # Doge mixes the router scores of the tokens of a batch, which cannot be cut.
        for values, strategy in CASES_ON_TWO:
            model = _build(values)
            parallelize(model, plan_of(model, strategy), world)
            part = IDS if strategy in ("tp=2", "cp=2") else IDS[2 * rank : 2 * rank + 2]
            loss = float(forward_backward(model, [{"input_ids": part, "labels": part}]))
            found.append((loss, _norm(model)))
        model = _build(_QWEN)
        parallelize(model, plan_of(model, "tp=2"), world)
        found.append((_loop(model, [IDS[:2], IDS[2:]], IDS[:, 1:].numel()), _norm(model)))
        for scale in (1.0, 8.0):
            model = _build(_QWEN)
            parallelize(model, plan_of(model, "pp=2"), world)
            parts = [{"input_ids": part, "labels": part} for part in IDS.chunk(2)]
            loss = float(forward_backward(model, parts, scale=scale))
            squared = torch.tensor(_norm(model), dtype=torch.float64).square()
            torch.distributed.all_reduce(squared)
            found.append((loss, float(squared.sqrt()) / scale))
    return found


@pytest.mark.slow
def test_router_losses_on_two_ranks_are_those_of_transformers() -> None:
    expected = [_plain(_build(values), IDS) for values, _ in CASES_ON_TWO]
    model, loss = _build(_QWEN), 0.0
    keep_float64(model)
    for half in IDS.chunk(2):
        part = model(input_ids=half, labels=half).loss / 2
        part.backward()
        loss += float(part.detach())
    expected += [(loss, _norm(model))] * 3
    for found in launch(_rank, 2, timeout_s=110):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10)


def test_padding_counts_in_no_loss_statistic_or_bias() -> None:
    real = torch.arange(16) < torch.tensor([16, 9, 12, 5])[:, None]
    ids = IDS.masked_fill(~real, 0)
    labels = IDS.masked_fill(~real, -100)
    rows = [row[mask] for row, mask in zip(IDS, real, strict=True)]
    found = []
    with World.join("cpu") as world:
        for batch in (
            {"input_ids": ids, "labels": labels, "token_mask": real},
            {"input_ids": ids, "labels": labels, "attention_mask": real.long()},
        ):
            model = _build(_QWEN)
            parallelize(model, plan_of(model, ""), world)
            loss = forward_backward(model, [batch])
            found.append((float(loss), _norm(model), end_step(model)))
        model = _build(_QWEN)
        parallelize(model, plan_of(model, ""), world)
        joined = torch.cat(rows)[None]
        starts = torch.cat([torch.arange(len(row)) for row in rows])[None]
        labels = joined.clone()
        labels[starts == 0] = -100
        batch = {"input_ids": joined, "labels": labels, "position_ids": starts}
        alone = float(forward_backward(model, [batch])), _norm(model), end_step(model)
    for loss, norm, statistics in found:
        assert (loss, norm) == pytest.approx(alone[:2], rel=1e-10)
        assert statistics.max_load == alone[2].max_load
        assert statistics.aux_loss == pytest.approx(alone[2].aux_loss, rel=1e-10)


def test_padding_takes_no_place_of_a_capacity() -> None:
    found = []
    with World.join("cpu") as world:
        for width in (0, 9):
            model = _build(_QWEN)
            routing = Routing(capacity_factor=1.0)
            parallelize(model, plan_of(model, ""), world, routing=routing)
            ids, labels, real = (
                torch.nn.functional.pad(x, (0, width), value=fill)
                for x, fill in ((IDS, 0), (IDS, -100), (torch.ones_like(IDS), 0))
            )
            batch = {"input_ids": ids, "labels": labels, "token_mask": real.bool()}
            loss = float(forward_backward(model, [batch]))
            found.append((loss, _norm(model), end_step(model).dropped))
    assert found[0][2] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-10)


def test_router_logits_that_are_asked_for_in_a_call_are_refused() -> None:
    model = _build(_DBRX)
    hp.parallelize(model, plan_of(model, ""))
    with pytest.raises(UnsupportedSharding, match="already includes the auxiliary loss"):
        model(input_ids=IDS, labels=IDS, output_router_logits=True)
