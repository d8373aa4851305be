"""Measurements that calibrate the cost model: activations saved for backward, and rates of kernels and links.

`measure_kept` counts the saved bytes of a model without a device: its forward runs on meta tensors, and the bytes of
the storages that autograd saves are summed per layer. The cost model's formulas cover common decoders only.

`measure_rates` times micro-benchmarks on all ranks at the same time, because ranks share cores, caches and links. Each
benchmark runs three times and the fastest result counts, to exclude the load of other programs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from hyper_parallel.backends.torch.collectives import all_gather_single
from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.backends.torch.flow_tracer import FlowTracer
from hyper_parallel.backends.torch.layer_flow import preserve_module_state, trial_inputs
from hyper_parallel.backends.torch.model_structure import text_config, view_of
from hyper_parallel.backends.torch.wrappers import replace_attributes
from hyper_parallel.calibration import LocalRates, fastest_rates
from hyper_parallel.model import KeptActivations

_SHORT: Final = (128, 256)
"""Lengths in tokens of the two measured sequences if the forward loops over tokens or chunks of tokens."""
_LONG: Final = (512, 1024)
"""Lengths in tokens of the two measured sequences otherwise. A scan has chunks of up to 256 tokens, and a single chunk
saves less than several chunks."""
_LOOPS: Final = 1.25
"""A forward loops over tokens if doubling the length multiplies the number of operators by at least this factor."""
_INDEX_NAMES: Final = ("idx", "index", "layer_id", "layer_number")
"""Substrings of the names of attributes with the index of a layer."""
_EXPERTS: Final = "experts"

Bytes = dict[tuple[int, str], float]
"""Saved bytes by layer index and name of a module in the layer; index -1 is outside the layers."""


def measure_kept(model: nn.Module) -> KeptActivations | None:
    """Return the bytes per token of the activations that a model saves for backward in a bfloat16 forward.

    The result is None unless the model is a Hugging Face decoder whose forward runs on meta tensors. Layers with equal
    modules, parameter shapes and settings are of the same kind. One layer of each kind runs, or all if that fails.
    """
    view = view_of(model)
    if view.base is None:
        return None
    path, layers = view.path, view.layers
    kinds = _kinds(model, layers)
    runs = _two_runs(model, layers, kinds, _SHORT)
    if runs is None and len(set(kinds)) < len(kinds):
        # A skipped layer passes on only its hidden states, which may not be enough: run all layers.
        kinds = [*range(len(layers))]
        runs = _two_runs(model, layers, kinds, _SHORT)
    if runs is None:
        return None
    lengths = _SHORT
    if runs[1].operators < _LOOPS * runs[0].operators:
        long_lengths = _long_lengths(model)
        if (longer := _two_runs(model, layers, kinds, long_lengths)) is not None:
            runs, lengths = longer, long_lengths
    lines = {}
    for key in dict.fromkeys(key for run in runs for key in run.bytes):
        short, long = (r.bytes.get(key, 0.0) / n for r, n in zip(runs, lengths, strict=True))
        lines[key] = _line(short, long, lengths)
    bases, slopes, modules = [0.0] * len(kinds), [0.0] * len(kinds), dict[str, float]()
    for (first, module), (base, slope) in lines.items():
        for layer in (i for i, kind in enumerate(kinds) if kind == first):
            if module != _EXPERTS:
                bases[layer] += base
                slopes[layer] += slope
            name = f"{path}.*.{module}" if module else f"{path}.*"
            modules[name] = modules.get(name, 0.0) + base / len(kinds)
    return KeptActivations(
        layer=(sum(bases) / len(kinds), sum(slopes) / len(kinds)),
        outside=sum(base for (first, _), (base, _) in lines.items() if first < 0),
        fullest=max(bases),
        last=bases[-1],
        modules=tuple(sorted(modules.items())),
        expert_rows=runs[1].rows / lengths[1],
    )


def _long_lengths(model: nn.Module) -> tuple[int, int]:
    """Return two sequence lengths on the same side of the sliding window.

    Beyond the window, attention saves more per token: a mask, and repeated keys and values.
    """
    window = getattr(text_config(model), "sliding_window", None)
    if isinstance(window, int) and _LONG[0] < window <= _LONG[1]:
        return _LONG[1], 2 * _LONG[1]
    return _LONG


def _line(short: float, long: float, lengths: tuple[int, int]) -> tuple[float, float]:
    """Fit saved bytes per token = base + slope * length to two points, and return (base, slope).

    If the bytes per token do not increase with the length, they include a constant per sequence. It is removed, and the
    slope is 0. `short` and `long` are the bytes per token at the two `lengths`; the second is twice the first.
    """
    if long <= short:
        return 2.0 * long - short, 0.0
    slope = (long - short) / (lengths[1] - lengths[0])
    return long - slope * lengths[1], slope


def _kinds(model: nn.Module, layers: nn.ModuleList) -> list[int]:
    """Return for every layer the index of the first layer of the same kind, see `measure_kept`."""
    types, first = getattr(text_config(model), "layer_types", None), dict[Any, int]()
    kinds = []
    for index, layer in enumerate(layers):
        kind = types[index] if isinstance(types, list) and index < len(types) else None
        parts = []
        for name, module in layer.named_modules():
            shapes = [(n, p.shape) for n, p in module.named_parameters(recurse=False)]
            parts.append((name, type(module), _settings(module), shapes))
        kinds.append(first.setdefault(repr((kind, parts)), index))
    return kinds


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    return sorted(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, str | bool | int | float)
        and not key.startswith("_")
        and not any(part in key for part in _INDEX_NAMES)
    )


class _Run:
    """Forward pass on meta tensors that counts operators, saved bytes, and the rows that experts read.

    A storage that autograd saves several times counts once, for the innermost running module that `_watch` observes.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, kinds: list[int], length: int) -> None:
        options = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        state = {n: torch.empty(p.shape, **options) for n, p in model.named_parameters()}
        self.bytes: Bytes = {}
        self.rows = 0.0
        self._known = {tensor.untyped_storage()._cdata for tensor in state.values()}
        self._alive, self._inside = list[Any](), [(-1, "")]
        self._outputs = dict[int, Any]()
        tracer = FlowTracer()
        with preserve_module_state(model):
            for index, layer in enumerate(layers):
                if kinds[index] == index:
                    self._watch(index, layer)
                else:
                    layer.forward = partial(self._skip_layer, kinds[index])
            attend = partial(_attend, F.scaled_dot_product_attention)
            replaced = replace_attributes(F, scaled_dot_product_attention=attend)
            with saved_tensors_hooks(self._save, lambda x: x), replaced, tracer:
                functional_call(model, state, kwargs=trial_inputs(model, length))
        self.operators = tracer.num_operators

    def _watch(self, index: int, layer: nn.Module) -> None:
        """Add forward hooks that record when a layer, its children and its modules of experts run."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            if module is layer:
                self._outputs[index] = output

        named = [("", layer), *layer.named_children()]
        named += [(_EXPERTS, m) for n, m in layer.named_modules() if n.endswith(f".{_EXPERTS}")]
        for name, module in named:
            module.register_forward_pre_hook(partial(self._enter, (index, name)))
            module.register_forward_hook(leave)

    def _enter(self, key: tuple[int, str], _: nn.Module, args: tuple[Any, ...]) -> None:
        self._inside.append(key)
        if key[1] == _EXPERTS and args and isinstance(args[0], Tensor):
            self.rows = max(self.rows, args[0].numel() / args[0].shape[-1])

    def _skip_layer(self, kind: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._outputs[kind]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(storage)  # the address of a freed storage could be reused
            key = self._inside[-1]
            self.bytes[key] = self.bytes.get(key, 0.0) + storage.nbytes()
        return tensor


def _two_runs(
    model: nn.Module, layers: nn.ModuleList, kinds: list[int], lengths: tuple[int, int]
) -> tuple[_Run, _Run] | None:
    """Return one run per length; None if the forward raises, for example because it reads tensor values."""
    with suppress(Exception), driver_untouched(), torch.random.fork_rng(devices=[]):
        return _Run(model, layers, kinds, lengths[0]), _Run(model, layers, kinds, lengths[1])
    return None


def _attend(plain: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
    """Run `FusedAttention` if a fused kernel supports the heads, else the function `plain`."""
    if query.shape[1] != key.shape[1] and not kwargs.get("enable_gqa"):
        return plain(query, key, value)  # broadcast heads have no fused kernel
    return FusedAttention.apply(query, key, value)


class FusedAttention(torch.autograd.Function):
    """Attention that saves the same tensors as a fused kernel and computes no values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return a tensor of the output's shape; save it, the inputs and a tensor for the log-sum-exp."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1]).float())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of the shapes of query, key and value as their gradients."""
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


_TURNS = 3
"""Repetitions of each benchmark; the fastest one counts."""
_SLOW_WINDOWS = 4
"""On a CPU, a warm-up call that takes more than this number of time windows replaces the measurement."""
Action = Callable[..., Callable[[], object]]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure_rates(device: torch.device, dtypes: tuple[str, ...], window_s: float = 0.2) -> LocalRates:
    """Return the times of matmuls, attention, element-wise chains and an optimizer step on this rank.

    With several ranks, all-gathers are timed too, and on CPUs a small layer. All ranks must call this function at the
    same time.

    Args:
        device: Device of this rank.
        dtypes: Dtypes of matmuls and attention: "float32", "bfloat16".
        window_s: Approximate seconds of each measurement, over all repetitions.
    """
    return fastest_rates([_once(device, dtypes, window_s / _TURNS) for _ in range(_TURNS)])


def _once(device: torch.device, dtypes: tuple[str, ...], window_s: float) -> LocalRates:
    def clock(action: Callable[[], object]) -> float:
        return _mean(device, action, window_s)

    def timed(make: Action, cpu: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> Any:
        sizes = cpu if small else other
        return {name: tuple((*size, clock(make(device, _DTYPES[name], *size))) for size in sizes) for name in dtypes}

    small = device.type == "cpu"
    matmul = timed(
        _matmul,
        [(256, 160, 480), (256, 512, 512), (512, 1024, 256), (64, 512, 512), (512, 2048, 512)],
        [(8192, 4096, 4096), (4096, 14336, 4096), (8192, 8192, 8192), (1024, 4096, 4096), (8192, 4096, 512)],
    )  # fmt: skip
    attention = timed(
        _attention,
        [(1, 256, 8, 32), (1, 256, 4, 64), (1, 512, 4, 128)],
        [(1, 4096, 16, 64), (1, 4096, 16, 128), (1, 16384, 8, 128), (4, 1024, 16, 128)],
    )
    rows = 512 if small else 8192
    dtype = torch.float32 if small else torch.bfloat16
    chains = tuple(
        # Saved for backward: gate, silu(gate), up, their product, and the norm's output.
        (5.0 * rows * width * dtype.itemsize, clock(_chain(device, dtype, rows, width)))
        for width in ((512, 2048) if small else (4096, 14336))
    )
    elements = 2**20 if small else 2**27
    rings = _rings(device, small) if dist.is_initialized() and dist.get_world_size() > 1 else ()
    return LocalRates(
        matmul,
        attention,
        chains,
        (28.0 * elements, clock(_adamw(device, elements))),
        rings,
        _layers(device, window_s) if rings and small else (),
    )


def _mean(
    device: torch.device,
    action: Callable[[], object],
    window_s: float,
    min_calls: int = 1,
    all_ranks: bool = True,
) -> float:
    """Return the mean seconds per call of `action`, called for `window_s` seconds and at least `min_calls` times.

    A warm-up call and, with `all_ranks`, a barrier precede. On a CPU, the seconds of a slow warm-up call are returned,
    see `_SLOW_WINDOWS`.
    """
    start = time.perf_counter()
    action()
    _settle(device)
    warm_up_s = time.perf_counter() - start
    if all_ranks and dist.is_initialized():
        dist.barrier()
    if device.type == "cpu" and window_s and warm_up_s > _SLOW_WINDOWS * window_s:
        return warm_up_s
    start, count = time.perf_counter(), 0
    while count < min_calls or time.perf_counter() - start < window_s:
        action()
        count += 1
        if window_s and count % 8 == 0:
            _settle(device)
    _settle(device)
    return (time.perf_counter() - start) / count


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def _passes(leaves: Sequence[Tensor], grad: Tensor, forward: Callable[[], Tensor]) -> Callable[[], object]:
    def action() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(grad)

    return action


def _matmul(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Callable[[], object]:
    x, w, g = (torch.randn(s, device=device, dtype=dtype) for s in ((m, k), (n, k), (m, n)))
    leaves = x.requires_grad_(), w.requires_grad_()
    return _passes(leaves, g, lambda: F.linear(x, w))


def _attention(
    device: torch.device, dtype: torch.dtype, batch: int, seq: int, heads: int, width: int
) -> Callable[[], object]:
    *qkv, g = torch.randn(4, batch, heads, seq, width, device=device, dtype=dtype)
    qkv = [x.clone().requires_grad_() for x in qkv]
    return _passes(qkv, g, lambda: F.scaled_dot_product_attention(*qkv, is_causal=True))


def _chain(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Callable[[], object]:
    """Return a function that runs the element-wise operators of a gated MLP and a norm, forward and backward."""
    gate, up, g = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(3))
    norm = nn.RMSNorm(width, device=device, dtype=dtype)
    leaves = gate.requires_grad_(), up.requires_grad_(), norm.weight
    return _passes(leaves, g, lambda: norm(F.silu(gate) * up))


def _adamw(device: torch.device, elements: int) -> Callable[[], object]:
    parameter = nn.Parameter(torch.zeros(elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return optimizer.step


def _layers(device: torch.device, window_s: float) -> tuple[tuple[int, float], ...]:
    """Time a small layer while all, half, ..., one of the ranks run it; return (running ranks, seconds) pairs.

    The seconds are NaN if this rank is idle.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    action = _layer(device)
    measured = []
    for working in (ranks >> halved for halved in range(ranks.bit_length())):
        dist.barrier()
        works = rank < working
        seconds = _mean(device, action, window_s, all_ranks=False) if works else math.nan
        dist.barrier()  # idle ranks wait here
        measured.append((working, seconds))
    return tuple(measured)


def _layer(device: torch.device, tokens: int = 256, width: int = 128, heads: int = 4) -> Callable[[], object]:
    x = torch.randn(tokens, width, device=device, requires_grad=True)
    norm = nn.RMSNorm(width)
    qkv = nn.Linear(width, 3 * width)
    out = nn.Linear(width, width)
    up = nn.Linear(width, 6 * width)
    down = nn.Linear(3 * width, width)

    def action() -> None:
        q, k, v = qkv(norm(x)).view(1, tokens, 3 * heads, -1).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + out(attended.transpose(1, 2).reshape(tokens, width))
        gate, value = up(norm(y)).chunk(2, dim=-1)
        (y + down(F.silu(gate) * value)).sum().backward()

    return action


def _rings(device: torch.device, small: bool) -> tuple[tuple[float, float], ...]:
    """Time all-gathers over all ranks; return (bytes of the gathered tensor, seconds) pairs."""
    measured = []
    ranks = dist.get_world_size()
    for size in (256, 2**18, 2**22) if small else (1024, 2**22, 2**27):
        part = torch.zeros(size // 4 // ranks + 1, device=device)
        whole = torch.empty(part.numel() * ranks, device=device)
        # All ranks must issue the same number of calls, so it is fixed.
        seconds = _mean(device, partial(all_gather_single, whole, part), 0.0, min_calls=10)
        measured.append((4.0 * whole.numel(), seconds))
    return tuple(measured)
