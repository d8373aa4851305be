"""Models that no reader knows, in stages and on parts of the tokens, against one device; or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch import check_flow
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan
from hyper_parallel.planner import plan_recipe
from hyper_parallel.runtime import World, clip_grad_norm_, forward_backward, launch, parallelize
from hyper_parallel.trainer.engine.recipe_model import read_spec

pytestmark = pytest.mark.parity

ENDS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LIKE_LLAMA: dict[str, Any] = ENDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # Layers that return tuples, in a list of another name.
    "bloom": ENDS | {"hidden_size": 32, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    # Embeddings that every layer needs: they stay on all stages, and their gradients are added up.
    "gemma4_text": LIKE_LLAMA | {
        "num_hidden_layers": 4, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0, "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "opt": ENDS | {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0,
    },
    # Two calls of the attention interface in a layer.
    "diffllama": LIKE_LLAMA,
    # Positions that the model counts by itself.
    "bart": ENDS | {
        "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
        "max_position_embeddings": 64, "dropout": 0.0, "is_decoder": True,
    },
    "gpt_neox": LIKE_LLAMA,
    "hrm_text": LIKE_LLAMA,
}  # fmt: skip
CASES = [
    ("bloom", "pp"),
    ("gemma4_text", "pp"),
    ("opt", "pp"),
    ("gpt_neox", "cp"),
    ("diffllama", "cp"),
    ("bart", "cp"),
]


def stranger(folder: Path, family: str) -> nn.Module:
    config = AutoConfig.for_model(family, **MODELS[family])
    (folder / f"{family}.json").write_text(json.dumps({"model_type": family, **MODELS[family]}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()


def planned(folder: Path, family: str, **degrees: int) -> Plan:
    recipe = {
        "model": {"path": str(folder / f"{family}.json")},
        "data": {"source": "unused", "seq_len": 16},
        "parallel": {"dp_shard": 1, **degrees},
        "training": {"dtype": "float64", "tokens_per_step": 64, "microbatch": 2},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    loaded = load_recipe(folder / "recipe.json")
    spec = read_spec(loaded.recipe.model.path)
    return plan_recipe(loaded.recipe, None, loaded.where, spec)


def one_step(model: nn.Module) -> tuple[float, float]:
    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": x, "shift_labels": x.roll(-1, 1)} for x in ids.split(2)]
    # Twice: gradients that are left of an earlier pass are added to.
    for _ in range(2):
        loss = forward_backward(model, batches, 64)
    return float(loss), float(clip_grad_norm_(model, None))


@pytest.mark.slow
def test_stages_and_parts_of_tokens_repeat_one_device(tmp_path: Path) -> None:
    models = {family: stranger(tmp_path, family) for family, _ in CASES}
    plans = [(family, planned(tmp_path, family, **{axis: 2})) for family, axis in CASES]
    wanted = {}
    with World.join("cpu") as world:
        for family in models:
            alone = parallelize(stranger(tmp_path, family), planned(tmp_path, family), world)
            wanted[family] = one_step(alone)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for family, plan in plans:
                model = parallelize(stranger(tmp_path, family), plan, world)
                share, norm = one_step(model)
                loss = torch.tensor(share, dtype=torch.float64)
                dist.all_reduce(loss)
                assert (float(loss), norm) == pytest.approx(wanted[family], rel=1e-10), family

    launch(rank, 2, timeout_s=120)


@pytest.mark.parametrize(
    ("family", "axis", "says"),
    [
        ("bloom", "cp", "tokens interact outside of the attention interface, in baddbmm"),
        ("hrm_text", "pp", "more than the activations"),
    ],
)
def test_what_does_not_fit_is_refused_without_a_rank(tmp_path, family, axis, says) -> None:
    stranger(tmp_path, family)
    with torch.device("meta"):
        model = stranger(tmp_path, family)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(UnsupportedSharding, match=f"parallel.{axis}=1") as caught:
        check_flow(model, planned(tmp_path, family, **{axis: 2}))
    assert says in caught.value.what
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
