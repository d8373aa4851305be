"""Activations that a model keeps for backward, measured by a forward pass without values.

Formulas know the operators of common decoders. A family may keep more: scores of attention that no kernel fuses, parts
of an activation written in operators, capped logits. The forward of the user's own class runs on tensors without
values, and the storages that autograd saves are added up, those of each layer and those outside of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.backends.torch.flow_tracer import FlowTracer
from hyper_parallel.backends.torch.model_structure import block_list, decoder_of, text_config
from hyper_parallel.model import KeptActivations

_SHORT: Final = (128, 256)
"""Tokens of the two sequences that are measured where a forward loops over tokens or over chunks of them."""
_LONG: Final = (512, 1024)
"""The same of other forwards: chunks of a scan have up to 256 tokens, and one chunk alone keeps less than several."""
_LOOPS: Final = 1.25
"""How many times the operators a sequence of twice the length has at least, where a forward loops over tokens."""
_PLACE: Final = ("idx", "index", "layer_id", "layer_number")
"""Parts of the names of attributes that hold the place of a layer."""
_EXPERTS: Final = "experts"

Bytes = dict[tuple[int, str], float]
"""Bytes that are kept in a layer, under the name of one of its modules; outside of the layers at -1."""


def measure_kept(model: nn.Module) -> KeptActivations | None:
    """Measure what the layers of a model keep; None where the forward needs values or there is no list of layers.

    One layer of each kind runs. Layers are of one kind where modules, shapes of parameters and settings agree.

    Args:
        model: Parameters are real or on the meta device; it stays as it is.
    """
    decoder, listed = decoder_of(model), block_list(model)
    if decoder is None or listed is None:
        return None
    layers = decoder[1]
    path = next((n for n, m in model.named_modules() if m is layers), listed[0])
    kinds = _kinds(model, layers)
    runs = _two_runs(model, layers, kinds, _SHORT)
    if runs is None and len(set(kinds)) < len(
        kinds
    ):  # layers may pass on more than a stand-in does
        kinds = [*range(len(layers))]
        runs = _two_runs(model, layers, kinds, _SHORT)
    if runs is None:
        return None
    lengths = _SHORT
    if runs[1].operators < _LOOPS * runs[0].operators:
        long = _long_lengths(model)
        longer = _two_runs(model, layers, kinds, long)
        runs, lengths = (runs, lengths) if longer is None else (longer, long)
    found = {
        key: _line(
            *((run.counts.bytes.get(key, 0.0) / n) for run, n in zip(runs, lengths, strict=True)),
            lengths,
        )
        for key in dict.fromkeys(key for run in runs for key in run.counts.bytes)
    }
    bases, slopes, modules = [0.0] * len(kinds), [0.0] * len(kinds), dict[str, float]()
    for (first, module), (base, slope) in found.items():
        for place in (i for i, kind in enumerate(kinds) if kind == first):
            if module != _EXPERTS:
                bases[place] += base
                slopes[place] += slope
            name = f"{path}.*.{module}" if module else f"{path}.*"
            modules[name] = modules.get(name, 0.0) + base / len(kinds)
    return KeptActivations(
        layer=(sum(bases) / len(kinds), sum(slopes) / len(kinds)),
        outside=sum(base for (first, _), (base, _) in found.items() if first < 0),
        fullest=max(bases),
        last=bases[-1],
        modules=tuple(sorted(modules.items())),
        expert_rows=runs[1].rows / lengths[1],
    )


def _long_lengths(model: nn.Module) -> tuple[int, int]:
    """Return two lengths on the same side of the sliding window.

    From the window on, attention takes a mask and saves repeated keys and values. A window between the two lengths
    would make this step look like a slope.
    """
    window = getattr(text_config(model), "sliding_window", None)
    if isinstance(window, int) and _LONG[0] < window <= _LONG[1]:
        return _LONG[1], 2 * _LONG[1]
    return _LONG


def _line(short: float, long: float, lengths: tuple[int, int]) -> tuple[float, float]:
    """Return base and slope of the bytes per token, by those of two lengths of which one is twice the other.

    Bytes per token that fall with the length are bytes per sequence, which long sequences do not notice.
    """
    if long <= short:
        return 2.0 * long - short, 0.0
    slope = (long - short) / (lengths[1] - lengths[0])
    return long - slope * lengths[1], slope


def _kinds(model: nn.Module, layers: nn.ModuleList) -> list[int]:
    """Return for every layer the first one of its kind."""
    types, first = getattr(text_config(model), "layer_types", None), dict[Any, int]()
    found = []
    for place, layer in enumerate(layers):
        kind = types[place] if isinstance(types, list) and place < len(types) else None
        parts = [
            (
                name,
                type(module),
                _settings(module),
                [(n, p.shape) for n, p in module.named_parameters(recurse=False)],
            )
            for name, module in layer.named_modules()
        ]
        found.append(first.setdefault(repr((kind, parts)), place))
    return found


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    return sorted(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, str | bool | int | float)
        and not key.startswith("_")
        and not any(part in key for part in _PLACE)
    )


class _Run:
    """One forward of a model: what it keeps, its operators, and the rows that come to the experts of a layer."""

    def __init__(
        self, model: nn.Module, layers: nn.ModuleList, kinds: list[int], length: int
    ) -> None:
        state = {
            name: torch.empty(
                parameter.shape, dtype=torch.bfloat16, device="meta", requires_grad=True
            )
            for name, parameter in model.named_parameters()
        }
        self.counts = _Counts({tensor.untyped_storage()._cdata for tensor in state.values()})
        self.rows = 0.0
        self._handles, self._outputs = list[Any](), dict[int, Any]()
        balanced = getattr(text_config(model), "output_router_logits", None)
        given = {"input_ids": torch.arange(length)[None] % 3 + 3, "use_cache": False}
        given |= {} if balanced is None else {"output_router_logits": False}
        operators, plain = _OperatorCounter(), list[nn.Module]()
        try:
            for place, layer in enumerate(layers):
                if kinds[place] == place:
                    self._watch(place, layer)
                else:
                    layer.forward = partial(self._stand_in, kinds[place])
                    plain.append(layer)
            with (
                saved_tensors_hooks(self.counts.save, lambda tensor: tensor),
                _fused_attention(),
                operators,
            ):
                functional_call(model, state, kwargs=given)
        finally:
            for handle in self._handles:
                handle.remove()
            for layer in plain:
                del layer.forward
        self.operators = operators.count

    def _watch(self, place: int, layer: nn.Module) -> None:
        def left(module: nn.Module, args: Any, output: Any) -> None:
            self.counts.leave()
            self._outputs[place] = output

        self._handles.append(
            layer.register_forward_pre_hook(lambda *_: self.counts.enter((place, "")))
        )
        self._handles.append(layer.register_forward_hook(left))
        named = [*layer.named_children()]
        named += [(_EXPERTS, m) for n, m in layer.named_modules() if n.endswith(f".{_EXPERTS}")]
        for name, module in named:
            key = (place, name)
            self._handles.append(
                module.register_forward_pre_hook(lambda m, args, key=key: self._entered(key, args))
            )
            self._handles.append(module.register_forward_hook(lambda *_: self.counts.leave()))

    def _entered(self, key: tuple[int, str], args: tuple[Any, ...]) -> None:
        self.counts.enter(key)
        if key[1] == _EXPERTS and args and isinstance(args[0], Tensor):
            self.rows = max(self.rows, args[0].numel() / args[0].shape[-1])

    def _stand_in(self, kind: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states unchanged, in the form in which a layer of the kind returned its own."""
        output = self._outputs[kind]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _two_runs(
    model: nn.Module, layers: nn.ModuleList, kinds: list[int], lengths: tuple[int, int]
) -> tuple[_Run, _Run] | None:
    """Return the runs at two lengths; None where the forward depends on values, which ends in any error."""
    with suppress(Exception), driver_untouched(), torch.random.fork_rng(devices=[]):
        return _Run(model, layers, kinds, lengths[0]), _Run(model, layers, kinds, lengths[1])
    return None


class _OperatorCounter(FlowTracer):
    """FlowTracer that count operators."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Counts:
    """Bytes of the storages that autograd saves, once each, under the module that was entered last."""

    def __init__(self, known: set[int]) -> None:
        self.bytes: Bytes = {}
        self._known, self._alive, self._inside = known, list[Any](), [(-1, "")]

    def enter(self, key: tuple[int, str]) -> None:
        self._inside.append(key)

    def leave(self) -> None:
        self._inside.pop()

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(storage)  # the address of a freed storage is used again
            key = self._inside[-1]
            self.bytes[key] = self.bytes.get(key, 0.0) + storage.nbytes()
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
