"""Staging and workspace bytes of an operator on the device, and its kernel time.

Workspace depends on the kernel that a device chooses: sums in float32, sorted rows, scratch buffers. On an accelerator,
the allocator measures the workspace while the step is recorded, and events measure the time of the kernels.

The gradient of an embedding is as large as the table, and no kernel writes it at a given address. Large ones are
therefore computed in pieces, a few columns at a time, in a staging buffer. A column depends only on the same column of
the incoming gradient and is summed in the order of the rows, so separately computed columns have the same bits.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hyper_parallel.backends.torch.memory._fake_values import device_workspace
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, Call, Entry, View
from hyper_parallel.backends.torch.memory.out_variants import out_variant
from hyper_parallel.backends.torch.memory.streams import DeviceApi
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.ir import GRADIENT_PIECES, Operator
from hyper_parallel.memory import paused_garbage_collection
from hyper_parallel.units import KiB

_MIN_PIECE_BYTES: Final = 64 * KiB  # smaller pieces cost more in launches than they save


def staged_result_bytes(call: Call, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Return the bytes of each staging buffer of a call; () if it can write its results at their planned addresses."""
    if not call.results or out_variant(call) is not None:
        return ()
    if pieces := columns(call):
        return piece_bytes(call, pieces)
    return tuple(entries[view.storage].num_bytes for _, view in call.results)


class Events(NamedTuple):
    """Events around the kernels of an operator, on their stream.

    Attributes:
        issued_s: Host seconds of issuing the operator.
        reached: True if the device had reached `begin` once the operator was issued, so it waited for the host.
    """

    begin: Any
    end: Any
    issued_s: float
    reached: bool


Timed = tuple[range, Events]
"""Operators of the program that one torch operator was split into, as a range of indices, and the events around it."""


def run_measured(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, tuple[int, ...], Events | None]:
    """Run an operator on `tensors`, the tensors among its arguments; on an accelerator, measure its workspace and time.

    A measurement resets the allocator's peak. Nothing is measured on a CPU, for collectives, for fake tensors, and on
    devices whose allocator reports no peak.

    Returns:
        The outputs; the workspace bytes of the kernel, as a tuple of at most one number; and the events around it.
        Without measurement the events are None, and the workspace is that of `device_workspace`, or () on a CPU and for
        collectives.
    """
    device = next((t.device for t in tensors if t.device.type != "cpu"), None)
    if device is None or func.namespace in COMMUNICATION:
        return func(*args, **kwargs), (), None
    module: Any = torch.get_device_module(device)
    measurable = hasattr(module, "max_memory_allocated")
    if not measurable or any(isinstance(t, FakeTensor) for t in tensors):
        workspace = device_workspace(func, args, kwargs)
        return func(*args, **kwargs), (workspace,) if workspace else (), None
    event, stream = DeviceApi.of(device).event, module.current_stream(device)
    begin, end = event(enable_timing=True), event(enable_timing=True)
    # Memory that a garbage collection frees would distort the measured workspace.
    with paused_garbage_collection():
        module.reset_peak_memory_stats(device)
        begin.record(stream)
        start = time.perf_counter()
        out = func(*args, **kwargs)
        issued_s, reached = time.perf_counter() - start, bool(begin.query())
        end.record(stream)
        # Bytes that stay allocated are not workspace: they are a result, or permanent buffers of a library.
        workspace = int(module.max_memory_allocated(device) - module.memory_allocated(device))
    return out, (workspace,) if workspace else (), Events(begin, end, issued_s, reached)


def kernel_seconds(operators: Sequence[Operator], timed: Sequence[Timed]) -> tuple[float, ...] | None:
    """Return the seconds of every operator, measured by events; None if there are no events at all.

    Operators without events get 0. If the device waited for the host, the host's seconds are subtracted. If the kernels
    of a step take less time than the host, every torch operator gets at least the median time of issuing one.
    """
    if not timed:
        return None
    for _, events in timed:  # the events may be on several streams
        events.end.synchronize()
    kernels = [max(float(e.begin.elapsed_time(e.end)) / 1e3 - e.issued_s * e.reached, 0.0) for _, e in timed]
    issue_s = statistics.median(events.issued_s for _, events in timed)
    min_s = issue_s if sum(kernels) < issue_s * len(timed) else 0.0
    seconds = [0.0] * len(operators)
    for (parts, _), kernel in zip(timed, kernels, strict=True):
        access_bytes = sum(operators[index].access_bytes for index in parts)
        for index in parts:
            share = operators[index].access_bytes / access_bytes if access_bytes else 1 / len(parts)
            seconds[index] = max(kernel, min_s) * share
    return tuple(seconds)


def piece_workspace(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], workspace: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the workspace bytes of a call when a plan executes it.

    `workspace` is the measured workspace of the whole call. If it is not empty and plans compute the call in pieces,
    the widest piece is run and measured; otherwise, `workspace` is returned.
    """
    pieces = columns(call)
    if not workspace or not pieces:
        return workspace
    # The first piece is the widest.
    part = args[0][..., pieces[0].start : pieces[0].stop].contiguous(), *args[1:]
    return run_measured(call.func, part, kwargs, tensors_in(part))[1]


def columns(call: Call) -> tuple[range, ...]:
    """Return the column range of each piece if a call computes its result in pieces; () if it does not."""
    if call.func is not torch.ops.aten.embedding_dense_backward.default or len(call.results) != 1:
        return ()
    # With scaling by the frequency of a row, a kernel may round its last columns differently.
    scaled, table = call.args[4], call.results[0][1]
    if scaled or table.num_bytes <= call.reusable_bytes:
        return ()
    # Every piece sorts the rows, so pieces are as wide as the reusable workspace allows.
    num_columns = table.size[1]
    max_pieces = min(GRADIENT_PIECES, table.num_bytes // _MIN_PIECE_BYTES)
    whole_bytes = sum(piece_bytes(call, (range(num_columns),)))
    fitting_columns = num_columns * call.reusable_bytes // whole_bytes
    width = max(fitting_columns, -(-num_columns // max(max_pieces, 1)))
    if width >= num_columns:
        return ()
    return tuple(range(start, min(start + width, num_columns)) for start in range(0, num_columns, width))


def piece_bytes(call: Call, pieces: tuple[range, ...]) -> tuple[int, ...]:
    """Return the staging bytes of the widest piece: of its columns of the result, and of the incoming gradient."""
    width = max(map(len, pieces))
    table, grad = call.results[0][1], call.args[0]
    assert isinstance(grad, View)
    rows = math.prod(grad.size[:-1])
    return width * table.size[0] * table.dtype.itemsize, width * rows * grad.dtype.itemsize


def in_pieces(
    pieces: tuple[range, ...], args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor
) -> Callable[[], None]:
    """Return a call that runs the operator piece by piece into `out` [rows, columns]."""
    op = torch.ops.aten.embedding_dense_backward.default
    grad, rest = args[0], args[1:]
    parts = [(grad[..., p.start : p.stop], out[:, p.start : p.stop]) for p in pieces]

    def run() -> None:
        for grad_part, target in parts:
            contiguous = grad_part.clone(memory_format=torch.contiguous_format)
            part = op(contiguous, *rest, **kwargs)
            target.copy_(part)
            del contiguous, part  # free them before the next piece

    return run
