"""Activations that a model keeps for backward, measured by a forward pass without values.

Formulas know the operators of common decoders. A family may keep more: scores of attention that no kernel fuses, parts
of an activation written in operators, capped logits. The forward of the user's own class runs on tensors without
values, and the storages that autograd saves are added up, those of each layer and those outside of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.backends.torch.flow_tracer import Marks
from hyper_parallel.backends.torch.model_structure import decoder_of, text_config
from hyper_parallel.model import KeptActivations

_LENGTHS: Final = (256, 512)
"""Tokens of the two sequences that are measured: what a token keeps is linear in the length of its sequence."""


def measure_kept(model: nn.Module) -> KeptActivations | None:
    """Measure what the layers of a model keep; None where the forward needs values or there is no list of layers.

    Args:
        model: Parameters are real or on the meta device; it stays as it is.
    """
    decoder = decoder_of(model)
    if decoder is None:
        return None
    layers = decoder[1]
    measured = []
    for length in _LENGTHS:
        kept = None
        # A forward that depends on values ends in any error.
        with suppress(Exception), driver_untouched(), torch.random.fork_rng(devices=[]):
            kept = _kept_of(model, layers, length)
        if kept is None:
            return None
        measured.append(kept)
    (short, long), (first, second) = measured, _LENGTHS
    slopes = [(b / second - a / first) / (second - first) for a, b in zip(short, long, strict=True)]
    bases = [b / second - slope * second for b, slope in zip(long, slopes, strict=True)]
    return KeptActivations(layer=(bases[0], slopes[0]), outside=bases[1])


def _kept_of(model: nn.Module, layers: nn.ModuleList, length: int) -> tuple[float, float]:
    """Return the bytes that a mean layer keeps, and those kept outside of the layers."""
    state = {
        name: torch.empty(parameter.shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for name, parameter in model.named_parameters()
    }
    counts = _Counts({tensor.untyped_storage()._cdata for tensor in state.values()})
    handles = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda *_: counts.enter(True)))
        handles.append(layer.register_forward_hook(lambda *_: counts.enter(False)))
    balanced = getattr(text_config(model), "output_router_logits", None)
    given = {"input_ids": torch.arange(length)[None] % 3 + 3, "use_cache": False}
    given |= {} if balanced is None else {"output_router_logits": False}
    try:
        with saved_tensors_hooks(counts.save, lambda tensor: tensor), _fused_attention(), Marks():
            functional_call(model, state, kwargs=given)
    finally:
        for handle in handles:
            handle.remove()
    return counts.inside / len(layers), float(counts.outside)


class _Counts:
    """Bytes of the storages that autograd saves, once each."""

    def __init__(self, known: set[int]) -> None:
        self.inside = self.outside = 0
        self._known, self._alive, self._in_layer = known, list[Any](), False

    def enter(self, in_layer: bool) -> None:
        self._in_layer = in_layer

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(storage)  # the address of a freed storage is used again
            if self._in_layer:
                self.inside += storage.nbytes()
            else:
                self.outside += storage.nbytes()
        return tensor


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Keep what a fused kernel keeps: meta tensors have none."""
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape[1] != key.shape[1] and not kwargs.get("enable_gqa"):
            return plain(query, key, value)  # heads that are broadcast: no kernel fuses them
        return FusedAttention.apply(query, key, value)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


class FusedAttention(torch.autograd.Function):
    """The tensors that a fused kernel keeps, without their values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return an output of the right shape; keep what a kernel keeps."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1]).float())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of the right shapes."""
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
