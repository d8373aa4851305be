from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.parameter_roles import parameter_roles
from hyper_parallel.config import Training
from hyper_parallel.trainer import build_optimizer, parameter_groups
from hyper_parallel.trainer.engine.muon import describe_muon
from hyper_parallel.trainer.engine.optimizer import step_unless

pytestmark = pytest.mark.torch


def _model():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model[3].weight = model[0].weight  # tied
    return model


def test_vectors_are_not_decayed_and_tied_weights_count_once():
    model = _model()
    matrices, vectors = parameter_groups(model, 0.1)
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0.0
    assert [tuple(p.shape) for p in matrices["params"]] == [(8, 4), (4, 4)]
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = _model()
    model[1].requires_grad_(False)
    names = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert all(p.requires_grad for p in names)
    assert len(names) == 4


def test_one_step_is_adamw_by_hand():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    module = nn.Module()
    module.weight = weight
    start = weight.detach().clone()
    training = Training(lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-8)
    optimizer = build_optimizer(module, training)
    gradient = torch.randn_like(weight)
    weight.grad = gradient.clone()
    optimizer.step()
    # First step: the bias-corrected moments are the gradient and its square.
    expected = start * (1 - 0.1 * 0.5) - 0.1 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_skipped_where_the_flag_says_so_and_bitwise_the_plain_one_elsewhere(dtype):
    def run(*flags):
        torch.manual_seed(0)
        model = _model().to(dtype)
        optimizer = build_optimizer(model, Training(lr=0.1))
        for step, flag in enumerate(flags):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            step_unless(optimizer, flag)
        slots = [v for p in model.parameters() for v in optimizer.state[p].values()]
        return [*model.parameters(), *slots]

    no, yes = torch.tensor(False), torch.tensor(True)
    plain = run(None, None)
    for other in (run(no, no), run(no, no, yes)):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


SMALL = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT_OSS = SMALL | {
    **{"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 6, "num_local_experts": 3},
    **{"num_experts_per_tok": 2, "layer_types": ["full_attention"]},
}
DBRX = {
    **{"vocab_size": 32, "d_model": 8, "n_layers": 1, "n_heads": 2, "max_seq_len": 16},
    "ffn_config": {"ffn_hidden_size": 4, "moe_num_experts": 3, "moe_top_k": 1},
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
}
ROLES = {
    "gpt_oss": (
        GPT_OSS,
        {
            "model.embed_tokens.weight": "embedding",
            "model.layers.0.mlp.experts.gate_up_proj": "stacked",
            "model.layers.0.mlp.experts.gate_up_proj_bias": "bias",
            "model.layers.0.mlp.experts.down_proj_bias": "bias",
            "model.layers.0.mlp.router.weight": "linear",
            "model.layers.0.mlp.router.bias": "bias",
            "model.layers.0.self_attn.q_proj.weight": "linear",
            "model.layers.0.self_attn.sinks": "vector",
            "model.layers.0.input_layernorm.weight": "norm",
            "lm_head.weight": "head",
        },
    ),
    "dbrx": (
        DBRX,
        {
            "transformer.blocks.0.ffn.experts.mlp.w1": "stacked",
            "transformer.blocks.0.ffn.router.layer.weight": "linear",
            "transformer.blocks.0.norm_attn_norm.norm_1.weight": "norm",
        },
    ),
    "mamba": (
        {**SMALL, "state_size": 4, "time_step_rank": 2},
        {
            "backbone.layers.0.mixer.A_log": "state",
            "backbone.layers.0.mixer.D": "state",
            "backbone.layers.0.mixer.conv1d.weight": "convolution",
            "backbone.layers.0.mixer.dt_proj.bias": "bias",
            "backbone.layers.0.mixer.in_proj.weight": "linear",
        },
    ),
    "xlnet": (
        {"vocab_size": 32, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8},
        {
            "transformer.layer.0.rel_attn.r_w_bias": "bias",
            "transformer.layer.0.rel_attn.q": "other",
            "transformer.mask_emb": "vector",
        },
    ),
}


def _tiny(model_type):
    values, _ = ROLES[model_type]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


@pytest.mark.parametrize("model_type", ROLES)
def test_a_role_follows_module_and_name_and_decides_weight_decay(model_type):
    model, expected = _tiny(model_type), ROLES[model_type][1]
    roles = {name: found.kind for name, found in parameter_roles(model).items()}
    assert {name: roles[name] for name in expected} == expected
    decayed, undecayed = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    without = {names[id(p)] for p in undecayed["params"]}
    assert undecayed["weight_decay"] == 0.0
    assert without == {n for n, r in roles.items() if r in ("norm", "bias", "state", "vector")}
    assert {names[id(p)] for p in decayed["params"]} == set(roles) - without


@pytest.mark.parametrize("model_type", ["gpt_oss", "dbrx"])
def test_muon_orthogonalises_every_expert_alone_and_nothing_but_linear_weights(model_type):
    model = _tiny(model_type)
    roles = parameter_roles(model)
    training = Training(optimizer="muon", lr=0.1, weight_decay=0.3, eps=1e-6)
    optimizer = build_optimizer(model, training)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    others = {}
    for name, p in expected.items():
        count = roles[name].num_matrices
        parts = p.view(count, -1, p.shape[-1]) if count else (p,)
        decay = 0.0 if roles[name].kind in ("norm", "bias", "vector", "state") else 0.3
        for i, part in enumerate(parts):
            part.requires_grad_(False)
            alone = nn.Parameter(part)  # a view: `expected` is updated
            muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
            adamw = partial(torch.optim.AdamW, betas=training.betas, eps=1e-6)
            others[name, i] = alone, (muon if count else adamw)([alone], lr=0.1, weight_decay=decay)
    for step in range(3):
        for name, p in model.named_parameters():
            torch.manual_seed(step)
            p.grad = torch.randn_like(p)
            count = roles[name].num_matrices
            grads = p.grad.clone().view(count, -1, p.shape[-1]) if count else (p.grad.clone(),)
            for i, grad in enumerate(grads):
                others[name, i][0].grad = grad
                others[name, i][1].step()
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-12, atol=1e-12)
    stacked = [r.num_matrices for r in roles.values() if r.kind == "stacked"]
    assert stacked
    assert {*stacked} == {3}
    assert f"and {sum(stacked)} in {len(stacked)} stacked" in describe_muon(roles)
