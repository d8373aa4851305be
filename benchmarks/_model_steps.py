"""Recorded steps of a Hugging Face model for benchmarks and tests: training, prefill, decode, and a loss in chunks.

The logits [T, V] and the float copies in the cross entropy are the largest working set of a training step. In a chunked
loss, the logits of a chunk only exist while the chunk is computed. Forward computes the loss and the gradients of
hidden states and head; backward scales them. The head's gradient is summed over the chunks, so results equal those of
the ordinary loss up to the order of that sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.memory import Captured, model_state, optimizer_state, record
from hyper_parallel.backends.torch.memory.step_source import CaptureSource
from hyper_parallel.errors import BadValue, CaptureUnsupported
from hyper_parallel.ir import StorageKind


def capture_training(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Mapping[str, torch.Tensor],
    *,
    clip_norm: float | None = None,
    loss_chunks: int | None = None,
    alignment_bytes: int = 512,
) -> Captured:
    """Record one training step: forward, loss, backward, optional clipping, optimizer.

    The optimizer must have run a step before, so that its state exists. It must keep its step count in tensors
    (`fused=True`), because a Python count would be a constant of the recorded program.

    Args:
        model: Returns an object with `.loss`.
        optimizer: Any torch optimizer.
        inputs: Keyword arguments of the model, labels included.
        clip_norm: Maximum global gradient norm; None: no clipping.
        loss_chunks: Number of chunks of tokens for head and loss, see `chunked_loss`; None: the model's own loss.
        alignment_bytes: See `MemoryProgram`.
    """

    def step(**batch: torch.Tensor) -> torch.Tensor:
        return training_step(model, optimizer, batch, clip_norm=clip_norm, loss_chunks=loss_chunks)

    named = {**model_state(model), **optimizer_state(model, optimizer)}
    name = f"{type(model).__name__} train"
    captured = record(step, inputs, named, name=name, training=True, alignment_bytes=alignment_bytes)
    captured.source = CaptureSource(model, optimizer)
    return captured


def training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    *,
    clip_norm: float | None = None,
    loss_chunks: int | None = None,
) -> torch.Tensor:
    """Run the training step of `capture_training` eagerly, and return the loss; arguments as for `capture_training`."""
    loss = chunked_loss(model, batch, loss_chunks) if loss_chunks else model(**batch, use_cache=False).loss
    loss.backward()
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def capture_inference(
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    cache: Any,
    *,
    alignment_bytes: int = 512,
) -> Captured:
    """Record one forward pass with a static KV cache: a prefill, or one decode step.

    Args:
        model: Model in eval mode.
        inputs: Keyword arguments of the model, such as `input_ids`.
        cache: Initialized `transformers.StaticCache`, whose tensors keep their storage.
        alignment_bytes: See `MemoryProgram`.

    Raises:
        CaptureUnsupported: HP511 for a decode step with a cache that counts its tokens in Python, as layers with a
            sliding window do, because the program would repeat the recorded position.
    """

    def step(**batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer in cache.layers:
                if hasattr(layer, "cumulative_length_int") and not is_fake(layer.cumulative_length):
                    bool(layer.cumulative_length == 0)  # read, so it becomes a guard
            return model(**batch, **{cache_argument(model.forward): cache}, use_cache=True).logits

    named = {**model_state(model), **_cache_state(cache)}
    name = f"{type(model).__name__} inference"
    before = _counts(cache)
    captured = record(step, inputs, named, name=name, training=False, alignment_bytes=alignment_bytes)
    changed_counts = {key: n for key, n in _counts(cache).items() if before.get(key, 0) != n}
    late_keys = [key for key in changed_counts if before.get(key, 0)]
    if late_keys:
        raise CaptureUnsupported(
            "the cache counts its tokens in Python, so the recorded step holds for this position only",
            got=late_keys[0],
            hint="record the prompt on a cache that was reset, or generate with `PlannedSlots`",
        )
    if changed_counts:
        captured.run_eager = None  # a second run would continue at the position that Python counts
    captured.source = CaptureSource(model)
    return captured


def _cache_state(cache: Any) -> dict[str, tuple[torch.Tensor, StorageKind]]:
    """Return the tensors of a static cache (keys, values, lengths of all layers) with their storage kind, by name."""
    state: dict[str, tuple[torch.Tensor, StorageKind]] = {}
    for index, layer in enumerate(cache.layers):
        for key, value in sorted(vars(layer).items()):
            if isinstance(value, torch.Tensor):
                state[f"cache.{index}.{key}"] = (value, "kv" if value.dim() == 4 else "input")
    return state


def _counts(cache: Any) -> dict[str, int]:
    """Return the Python integers of a cache's layers by name."""
    return {
        f"layer {index}: {type(layer).__name__}.{key}": value
        for index, layer in enumerate(cache.layers)
        for key, value in vars(layer).items()
        if type(value) is int
    }


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, ignore_index: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        valid = targets != ignore_index
        scale = valid.to(wide) / valid.sum()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head)
        step = -(-hidden.shape[0] // chunks)
        for begin in range(0, hidden.shape[0], step):
            rows = slice(begin, begin + step)
            logits = (hidden[rows] @ head.t()).to(wide)
            labels = targets[rows].masked_fill(~valid[rows], 0).unsqueeze(1)
            lse = torch.logsumexp(logits, dim=1)
            total += ((lse - logits.gather(1, labels).squeeze(1)) * scale[rows]).sum()
            logits.sub_(lse.unsqueeze(1)).exp_()
            logits.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=wide))
            d_logits = logits.mul_(scale[rows].unsqueeze(1)).to(hidden.dtype)
            d_hidden[rows] = d_logits @ head
            d_head.addmm_(d_logits.t(), hidden[rows])
        ctx.save_for_backward(d_hidden, d_head)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_head * grad.to(d_head.dtype), None, None, None


def chunked_loss(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    chunks: int,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross entropy of the next token of a Hugging Face causal language model.

    Args:
        model: Model with `get_decoder()` and an output embedding without bias.
        batch: Keyword arguments of the model with `labels` [B, S].
        chunks: Number of chunks of tokens.
        ignore_index: Label of tokens without loss.

    Raises:
        BadValue: HP102 when the model changes its logits after the head, which this loss would omit.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    config = model.config
    scaling = {
        key: getattr(config, key)
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if getattr(config, key, None) not in (None, 1, 1.0)
    }
    if head is None or head.bias is not None or scaling:
        raise BadValue(
            "a chunked loss needs a head that is one matrix product",
            got=f"head {head}, {scaling}",
            hint="use the model's own loss: leave `loss_chunks` out",
        )
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state  # type: ignore[operator]
    targets = F.pad(batch["labels"], (0, 1), value=ignore_index)[..., 1:]
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _HeadLoss.apply(flat, head.weight, targets.reshape(-1), chunks, ignore_index)
    return loss
