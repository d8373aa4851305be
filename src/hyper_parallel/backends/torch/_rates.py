"""Micro-benchmarks of kernels and collectives on this machine, run on all ranks at the same time.

Ranks of a run share cores, caches and links. Every measurement therefore starts at a barrier and averages over a time
window in which all ranks work. Each benchmark runs three times and the fastest result counts, to exclude the load of
other programs.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hyper_parallel.calibration import LocalRates, fastest_rates

_TURNS = 3
"""Repetitions of each benchmark."""
_SLOW_WINDOWS = 4
"""Windows within a call on a CPU that is its own measurement, such as a matmul in bfloat16 that is emulated: a quarter
of a second, beside which the milliseconds of a first call do not count. The first call on an accelerator loads code."""
Action = Callable[..., Callable[[], object]]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure_rates(
    device: torch.device, dtypes: tuple[str, ...], window_s: float = 0.2
) -> LocalRates:
    """Time matmuls, attention, element-wise chains, an optimizer step and collectives on this rank.

    Args:
        device: Device of this rank.
        dtypes: Dtypes to measure: float32, bfloat16.
        window_s: Seconds of each measurement.
    """
    return fastest_rates([_once(device, dtypes, window_s / _TURNS) for _ in range(_TURNS)])


def _once(device: torch.device, dtypes: tuple[str, ...], window_s: float) -> LocalRates:
    def clock(action: Callable[[], object]) -> float:
        return _mean(device, action, window_s)

    def timed(make: Action, cpu: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> Any:
        sizes = cpu if small else other
        return {
            name: tuple((*size, clock(make(device, _DTYPES[name], *size))) for size in sizes)
            for name in dtypes
        }

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
    """Return the mean seconds of an action over a window and a minimum of calls, after a warm-up and a barrier.

    On a CPU, a warm-up of many windows is the measurement.
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


def _passes(
    leaves: Sequence[Tensor], grad: Tensor, forward: Callable[[], Tensor]
) -> Callable[[], object]:
    """Return an action that runs forward and computes the gradients of all leaves."""

    def action() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(grad)

    return action


def _matmul(
    device: torch.device, dtype: torch.dtype, m: int, n: int, k: int
) -> Callable[[], object]:
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
    """Return an action that runs norm, gate and product of a layer, forward and backward."""
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
    """Time a small layer with all ranks working, then half of them, and so on to one; return (ranks, seconds) pairs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    action = _layer(device)
    measured = []
    for working in (ranks >> halved for halved in range(ranks.bit_length())):
        dist.barrier()
        works = rank < working
        seconds = _mean(device, action, window_s, all_ranks=False) if works else math.nan
        dist.barrier()  # idle ranks wait here, as for the result of another rank
        measured.append((working, seconds))
    return tuple(measured)


def _layer(
    device: torch.device, tokens: int = 256, width: int = 128, heads: int = 4
) -> Callable[[], object]:
    """Return an action that runs forward and backward of a decoder layer without parallelism."""
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
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        # All ranks must issue the same number of calls, so it is fixed.
        seconds = _mean(device, functools.partial(gather, whole, part), 0.0, min_calls=10)
        measured.append((4.0 * whole.numel(), seconds))
    return tuple(measured)
