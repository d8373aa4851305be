"""Parameters that are whole on every tensor-parallel rank: each gradient is summed exactly once.

Inputs of adapters are dropped: where activations are whole, at the places of one rank.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from tests.parity.planned import whole

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.torch, pytest.mark.dist]

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "pad_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
WORKLOAD = hp.Workload(16, microbatch=2, compute_dtype="float64", param_dtype="float64", reduce_dtype="float64")
QWEN = {"num_key_value_heads": 2, "head_dim": 8}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    # Attention with a norm over the whole width stays whole; its adapters act on whole activations.
    "whole attention": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, ATTENTION, (), ""),
    # Projections around the layers are whole beside split ones.
    "whole projections": ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 48, "dropout": 0.0}, "all-linear", (), ""),
    # Norms on the heads of a rank, beside modules that a rule of the user keeps whole.
    "norms on heads": ("qwen3", QWEN, None, (), "rules.model.layers.*.mlp=whole"),
    "norms over heads": ("olmo2", {}, None, (), "rules.model.layers.*.mlp=whole"),
    # Modules trained whole beside adapters.
    "saved modules": ("qwen3", QWEN, ["up_proj", "o_proj"], ["q_norm", "model.norm"], "rules.lm_head=whole"),
}  # fmt: skip


def _model(family: str, own: dict, targets: object, saved: object) -> nn.Module:
    from hyper_parallel.backends.torch.peft_adapters import add_adapters

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | own, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if targets is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's own, about tied weights
            add_adapters(
                model,
                peft.LoraConfig(r=4, lora_dropout=0.25, target_modules=targets, modules_to_save=saved),
            )
        for name, p in model.named_parameters():
            if name.endswith((".lora_A", ".lora_B")):
                nn.init.normal_(p, std=0.1)
    for p in model.parameters():
        p.data = p.data.double()
    return model


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 48, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "shift_labels": F.pad(ids[:, 1:], (0, 1), value=-100)}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_of_two_tensor_parallel_ranks_are_those_of_one() -> None:
    models = {name: _model(*case[:4]) for name, case in CASES.items()}
    expected = {}
    with hp.World.join("cpu") as world:
        for name, model in models.items():
            alone = copy.deepcopy(model)
            hp.parallelize(alone, hp.plan_of(alone, "", WORKLOAD), world)
            torch.manual_seed(5)
            torch.manual_seed(int(torch.randint(1 << 62, (1,))))  # as rank 0 draws it for all
            hp.forward_backward(alone, [_batch()])
            expected[name] = _gradients(alone)

    def rank(_: int) -> None:
        with hp.World.join("cpu") as world:
            for name, model in models.items():
                words = f"tp=2 {CASES[name][-1]}"
                hp.parallelize(model, hp.plan_of(model, words, WORKLOAD), world)
                torch.manual_seed(5)
                hp.forward_backward(model, [_batch()])
                found = _gradients(model)
                assert found.keys() == expected[name].keys()
                for parameter, grad in found.items():
                    assert grad.abs().max() > 0, (name, parameter)
                    torch.testing.assert_close(
                        grad, expected[name][parameter], rtol=1e-9, atol=1e-13,
                        msg=lambda text, at=(name, parameter): f"{at}: {text}",
                    )  # fmt: skip

    hp.launch(rank, 2, timeout_s=120)


class Gated(nn.Module):
    """A width that is scaled between its two projections, without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.gain, self.norm = nn.Linear(1, 1), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, points: Tensor) -> Tensor:
        inside = torch.tanh(self.up(self.norm(points)))
        return self.down(self.gain(inside.unsqueeze(-1)).squeeze(-1)) * self.scale


def test_a_module_of_style_inner_in_any_model() -> None:
    torch.manual_seed(0)
    model = Gated().double()
    points = torch.randn(4, 6, dtype=torch.float64)
    alone = copy.deepcopy(model)
    alone(points).square().sum().backward()
    expected = _gradients(alone)

    def rank(_: int) -> None:
        words = "tp=2 rules.up=colwise rules.down=rowwise rules.gain=inner rules.*=replicate"
        hp.parallelize(model, hp.plan_of(model, words, WORKLOAD))
        hp.forward_backward(model, [{"points": points}], objective=lambda out, _: out.square().sum())
        for name, grad in _gradients(model).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)

    hp.launch(rank, 2, timeout_s=120)
