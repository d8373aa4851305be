"""Tiny models and the layouts they are tested on, built from plain torch only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hyper_parallel.runtime.local_launch import INIT_METHOD

SIZES = {
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}


def qwen3(tied=False, **changes):
    config = Qwen3Config(head_dim=8, tie_word_embeddings=tied, **(SIZES | changes))
    return Qwen3ForCausalLM(config)


def qwen3_moe(**changes):
    config = Qwen3MoeConfig(
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        **(SIZES | changes),
    )
    return Qwen3MoeForCausalLM(config)


def mixtral(**changes):
    config = MixtralConfig(head_dim=8, num_local_experts=4, num_experts_per_tok=2, **(SIZES | changes))
    return MixtralForCausalLM(config)


def on_meta(build, *args, **kwargs):
    with torch.device("meta"):
        return build(*args, **kwargs)


def join():
    import os

    dist.init_process_group(
        "gloo",
        init_method=os.environ[INIT_METHOD],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


TP_PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def shard(model, *, replicate=1, fsdp=1, tp=1):
    """Shard a decoder over (dp_replicate, dp_shard, tp_x); degrees of one are left out."""
    sizes = {"dp_replicate": replicate, "dp_shard": fsdp, "tp_x": tp}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if not sizes:
        return model
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if tp > 1:
        parallelize_module(model, mesh["tp_x"], TP_PLAN)
        if model.config.tie_word_embeddings:  # parallelize_module unties
            model.lm_head.weight = model.model.embed_tokens.weight
    data = tuple(name for name in sizes if name != "tp_x")
    if data:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh[data])
        fully_shard(model, mesh=mesh[data])
    return model


def full_state(model):
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


class Mlp(nn.Sequential):
    """A plain module with uneven sizes."""

    def __init__(self):
        super().__init__(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5, bias=False))
