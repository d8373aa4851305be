"""Steps of a model with Llama-8B shapes, captured under fake tensors, without computation or allocated weights.

Attention is the flash operator with a causal flag and grouped keys, as on an accelerator, instead of the masked
attention that transformers uses under tracing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from _model_steps import capture_inference, capture_training, chunked_loss, training_step
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    StaticCache,
)

from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.memory import model_state, record
from hyper_parallel.ir import MemoryProgram, Operator
from hyper_parallel.memory import Channel

Saving = Literal["checkpoint", "on_cpu"]
"""Treatment of tensors saved for backward. checkpoint: only inputs of layers are saved (transformers' activation
checkpointing, use_reentrant=False). on_cpu: all are saved in host memory (`torch.autograd.graph.save_on_cpu`), with
copies recorded as `SAVED` operators."""
SAVED = ("detach_copy", "lift_fresh_copy")
SHAPES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def _flash(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **kwargs: Any
) -> tuple[Any, None]:
    del module, mask, kwargs
    causal = query.shape[2] == key.shape[2]
    groups = query.shape[1] // key.shape[1]
    # decode: fold the group into the query's rows, so that keys are read once
    if query.shape[2] == 1:
        query = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling)
        return out.reshape(out.shape[0], 1, -1, out.shape[3]), None
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def as_flash(config: Any) -> Any:
    """Return the configuration with the attention operator of an accelerator."""
    AttentionInterface.register("causal_plain", _flash)
    AttentionMaskInterface.register("causal_plain", lambda *args, **kwargs: None)
    config._attn_implementation = "causal_plain"
    return config


def llama(layers: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a Llama with 8B shapes and `layers` layers; under FakeTensorMode, its weights are not allocated."""
    config = as_flash(LlamaConfig(**SHAPES, num_hidden_layers=layers))
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def training(
    tokens: int = 8192,
    layers: int = 32,
    loss_chunks: int | None = 8,
    shards: int = 1,
    clip_norm: float | None = None,
    saving: Saving | None = None,
) -> MemoryProgram:
    """Return the memory program of one training step.

    Args:
        tokens: Tokens of the single sequence.
        layers: Decoder layers.
        loss_chunks: Number of chunks of `chunked_loss`; None: the model's own loss.
        shards: 1: AdamW with bf16 weights and state. More: one rank of ZeRO-1 over this number of ranks, with a float32
            shard of master weights and state. Collectives are omitted.
        clip_norm: Maximum global norm of the gradients; None: no clipping, so updates may run early.
        saving: Treatment of tensors saved for backward, for several shards; None: all are kept on the device.
    """
    with FakeTensorMode():
        model = llama(layers)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        if shards == 1:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            training_step(model, optimizer, batch, loss_chunks=loss_chunks)
            return capture_training(model, optimizer, batch, clip_norm=clip_norm, loss_chunks=loss_chunks).program
        return _sharded(model, batch, loss_chunks, shards, clip_norm, saving)


def _sharded(
    model: Any,
    batch: Any,
    loss_chunks: int | None,
    shards: int,
    clip_norm: float | None,
    saving: Saving | None,
) -> MemoryProgram:
    if saving == "checkpoint":
        model.activation_checkpointing_enable({"use_reentrant": False})
    named = model_state(model)
    slots = {}
    for name, p in model.named_parameters():
        part = -(-p.numel() // shards)
        slots[name] = [torch.zeros(part) for _ in range(3)] + [torch.zeros(())]
        for key, value in zip(("master", "exp_avg", "exp_avg_sq", "step"), slots[name], strict=True):
            named[f"{name}.{key}"] = (value, "optimizer")

    def step(**inputs: Any) -> Any:
        with _through_host() if saving == "on_cpu" else nullcontext():
            if loss_chunks is None:
                loss = model(**inputs, use_cache=False).loss
            else:
                loss = chunked_loss(model, inputs, loss_chunks)
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        with torch.no_grad():
            for name, p in model.named_parameters():
                master, first, second, count = slots[name]
                grad = p.grad.view(-1)[: master.numel()].float()
                torch._fused_adamw_(
                    [master], [grad], [first], [second], [], [count], lr=1e-3, beta1=0.9, beta2=0.95,
                    weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
                )  # fmt: skip
                p.view(-1)[: master.numel()].copy_(master)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return record(step, batch, named, name="LlamaForCausalLM train", training=True).program


def _through_host() -> Any:
    """Return a context like `save_on_cpu`, whose copies are recorded under operator names that are unique here."""
    out, back = (getattr(torch.ops.aten, name).default for name in SAVED)
    return torch.autograd.graph.saved_tensors_hooks(out, back)


def copied(program: MemoryProgram, channel: Channel) -> MemoryProgram:
    """Return a step captured with `saving="on_cpu"`, with copies timed on the compute stream.

    A copy takes the channel's seconds, and its destination takes host memory instead of device memory.
    """
    host = {op.allocs[0] for op in program.operators if op.name == SAVED[0]}
    storages = tuple(replace(x, num_bytes=0) if s in host else x for s, x in enumerate(program.storages))
    operators = tuple(
        replace(op, seconds=channel.seconds(program.sizes[(*op.reads, *op.allocs)[-1]])) if op.name in SAVED else op
        for op in program.operators
    )
    return replace(program, storages=storages, operators=operators)


def as_kernels(program: MemoryProgram) -> MemoryProgram:
    """Return the program with the access bytes of real kernels for operators that read a few rows of a large table.

    The capture counts all operands in full, such as the whole embedding table for the lookup of one row.
    """
    sizes = [s.num_bytes for s in program.storages]

    def bytes_of(op: Operator) -> int:
        if op.name == "embedding":
            return 2 * sum(sizes[s] for s in op.allocs)
        if op.name == "index_copy_":  # cache, positions, rows
            return 2 * sizes[op.reads[-1]]
        return op.access_bytes

    return replace(program, operators=tuple(replace(op, access_bytes=bytes_of(op)) for op in program.operators))


def inference(tokens: int, context: int, layers: int = 32, batch: int = 1) -> MemoryProgram:
    """Return the program of a forward pass of `tokens` tokens (1: decode) with a static cache of `context` tokens."""
    with FakeTensorMode():
        model = llama(layers).eval()
        cache = StaticCache(config=model.config, max_cache_len=context)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        with torch.no_grad():
            model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(model.forward): cache})
        cache.reset()
        position = torch.arange(tokens).unsqueeze(0)
        inputs = {"input_ids": ids, "position_ids": position}
        return as_kernels(capture_inference(model, inputs, cache).program)
