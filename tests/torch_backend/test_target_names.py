"""Modules that adapters are asked for by name: each name fits one, and hints work when pasted."""

from __future__ import annotations

import copy
import shlex

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch import read_model
from hyper_parallel.backends.torch.weights.lora import adapted_modules, merge_adapters
from hyper_parallel.config import Lora, Recipe
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.planner.trained_share import trained_share
from hyper_parallel.trainer.engine.recipe_model import trained_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "num_key_value_heads": 2}
OWN = {"falcon_h1": {**MAMBA, "mamba_d_state": 8, "mamba_n_groups": 1}}


def _model(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | OWN.get(family, {}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def _adapted(model: nn.Module, **keys: object) -> list[str]:
    from hyper_parallel.backends.torch.peft_adapters import add_adapters

    values = Lora(**keys).model_dump(mode="json")
    add_adapters(model, peft.LoraConfig(**values))
    return sorted(name for name, _ in adapted_modules(model))


@pytest.mark.parametrize(
    ("family", "keys", "code", "says"),
    [
        ("phi3", {"target_modules": ["q_proj", "o_proj", "up_proj"]}, "HP102", "q_proj, up_proj"),
        ("llama", {"modules_to_save": ["lm_haed"]}, "HP102", "lm_haed"),
        ("llama", {"target_modules": r".*\.query"}, "HP102", "query"),
        ("gpt2", {"target_modules": ["q_proj", "v_proj"]}, "HP102", "q_proj, v_proj"),
        ("gpt2", {"target_modules": ["wte"]}, "HP205", "Embedding"),
        ("llama", {"target_modules": ["lm_head", "q_proj"]}, "HP205", "lm_head"),
        ("falcon_h1", {"target_modules": ["out_proj", "q_proj"]}, "HP205", "out_proj"),
    ],
)  # fmt: skip
def test_a_hint_for_a_wrong_name_works_when_pasted(family, keys, code, says) -> None:
    with pytest.raises(HyperParallelError) as raised:
        _adapted(_model(family), **keys)
    assert raised.value.code == code
    assert says in str(raised.value)
    (word,) = shlex.split(raised.value.hint)
    key, _, value = word.partition("=")
    assert _adapted(_model(family), **keys | {key.removeprefix("lora."): yaml.safe_load(value)})


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"r": 999}, "lora.r=48"),
        ({"rank_pattern": {r"0\..*q_proj": 999}}, r"set `0\..*q_proj: 48` in `lora.rank_pattern`"),
    ],
)
def test_a_hint_for_a_large_rank_names_the_key_as_written(keys, hint) -> None:
    with pytest.raises(HyperParallelError, match="HP102") as error:
        _adapted(_model("llama"), **keys)
    assert error.value.hint == hint


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning", "ignore:.is_gradient:FutureWarning")
@pytest.mark.parametrize("family", ["gpt2", "falcon", "falcon_h1"])
def test_all_linear_adapts_every_class_of_linear_module(family) -> None:
    """GPT-2 has weights [in, out], Falcon a class of its own, Falcon-H1 a module that peft refuses."""
    model = _model(family).eval()
    plain = copy.deepcopy(model)
    names = _adapted(model, r=4)
    _, words = trained_of(model)
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert words.startswith(f"{len(names)} adapters, {elements:,} of ")
    recipe = {"model": {"path": "x"}, "data": {"source": "x"}, "lora": {"r": 4}}
    estimate = trained_share(read_model(model, "x"), Recipe.model_validate(recipe))
    counted = {n for n, _ in model.named_modules() if n.endswith("mamba.out_proj")}
    more = sum(4 * sum(model.get_submodule(n).weight.shape) for n in counted)  # which peft refuses
    base = sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n)
    assert estimate == pytest.approx((elements + more) / base)
    assert len(names) == 2 * {"gpt2": 4, "falcon": 4, "falcon_h1": 8}[family]
    theirs = peft.get_peft_model(plain, peft.LoraConfig(target_modules=names, r=4, lora_alpha=16)).eval()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if ".lora_" in name:
                own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                values[own].copy_(p.copy_(torch.randn_like(p) * 0.1))
        ids = torch.arange(3, 19)[None]
        expected = theirs(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-10, atol=1e-12)
        merge_adapters(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-8, atol=1e-10)
