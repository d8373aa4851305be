"""Workspace of CPU kernels, measured once per operator and shape of a recorded step.

An accelerator's allocator reports its peak while a step is recorded. A CPU's allocator only emits events that torch's
profiler reads, so every distinct operator runs again here, on zeros, in the form in which a plan runs it. Workspace,
such as packed operands of mkldnn's bfloat16 products, then counts as staging bytes outside the arena.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_flatten, tree_map_only

from hyper_parallel.backends.torch.memory import Captured
from hyper_parallel.backends.torch.memory.kernel_bytes import columns, in_pieces
from hyper_parallel.backends.torch.memory.operators import Call, View
from hyper_parallel.backends.torch.memory.out_variants import out_variant

_MARK: Final = "kernel "


def with_kernel_bytes(captured: Captured) -> Captured:
    """Return the recorded step with the workspace of its kernels on this CPU added to its operators.

    The workspace is then part of `plan.device_bytes`, but not of the simulated device's own meter. Grouped products are
    measured with groups of equal size, unlike those of a real step.

    Args:
        captured: A recorded step; on an accelerator its workspace was measured during the recording.
    """
    if captured.device.type != "cpu":
        return captured
    groups: dict[Any, list[int]] = {}
    for index, call in enumerate(captured.calls):
        if (key := _key(call, captured)) is not None:
            groups.setdefault(key, []).append(index)
    operators = list(captured.program.operators)
    measured = _measure_peaks([captured.calls[indices[0]] for indices in groups.values()], captured)
    for indices, peak in zip(groups.values(), measured, strict=True):
        for index in indices:
            if peak > sum(operators[index].scratch_bytes):
                operators[index] = replace(operators[index], scratch_bytes=(peak,))
    return replace(captured, program=replace(captured.program, operators=tuple(operators)))


def _key(call: Call, captured: Captured) -> Any:
    """Return a key that is equal for calls with equal workspace; None for a call that cannot run separately."""
    leaves, nest = tree_flatten((call.args, call.kwargs, [view for _, view in call.results]))
    is_runnable = getattr(call.func, "namespace", "") == "aten" and not call.guards
    if not is_runnable or any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return None
    storages = captured.program.storages
    views = (
        (v.dtype, v.size, v.stride, v.offset, storages[v.storage].num_bytes) if isinstance(v, View) else repr(v)
        for v in leaves
    )
    return str(call.func), str(nest), tuple(views)


def _measure_peaks(calls: list[Call], captured: Captured) -> list[int]:
    """Return the peak workspace bytes of each call, without its operands and results."""
    activities = [ProfilerActivity.CPU]
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        profile(activities=activities, profile_memory=True) as profiled,
    ):
        for number, call in enumerate(calls):
            with suppress(RuntimeError, IndexError):  # some operators have no result for zeros
                run = _bound_call(call, captured)
                with record_function(f"{_MARK}{number}"):
                    run()
                del run
    peaks = [0] * len(calls)
    live = [0] * len(calls)
    for number, num_bytes in _events(profiled):
        live[number] += num_bytes
        peaks[number] = max(peaks[number], live[number])
    return peaks


def _events(profiled: Any) -> Iterator[tuple[int, int]]:
    """Yield the call's index and the bytes of every allocation inside a call; freed bytes are negative."""
    events = list(profiled.profiler.kineto_results.events())
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name().removeprefix(_MARK)))
        for e in events
        if e.name().startswith(_MARK)
    )
    starts = [start for start, _, _ in spans]
    for event in events:
        if event.name() == "[memory]":
            position = bisect(starts, event.start_ns()) - 1
            if position >= 0 and event.start_ns() <= spans[position][1]:
                yield spans[position][2], event.nbytes()


def _bound_call(call: Call, captured: Captured) -> Callable[[], Any]:
    """Return a function that runs the call on zeros, in the form in which a plan runs it."""
    outs = [view for _, view in call.results]
    views = [v for v in tree_flatten((call.args, call.kwargs, outs))[0] if isinstance(v, View)]
    bases = {}
    for storage in {v.storage for v in views}:
        size = captured.program.storages[storage].num_bytes
        bases[storage] = torch.zeros(size, dtype=torch.uint8).untyped_storage()
    args, kwargs = tree_map_only(View, lambda v: v.as_tensor(bases[v.storage]), (call.args, call.kwargs))
    if call.func._opname == "_grouped_mm" and len(args) > 2 and isinstance(args[2], torch.Tensor):
        _write_group_ends(*args[:3])
    results = [view.as_tensor(bases[view.storage]) for view in outs]
    if (bind := out_variant(call)) is not None:
        return bind(args, kwargs, results)
    if pieces := columns(call):
        return in_pieces(pieces, args, kwargs, results[0])
    return lambda: call.func(*args, **kwargs)


def _write_group_ends(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> None:
    """Write the row offsets at which the groups of a grouped product end into `ends`, for groups of equal size."""
    total = left.shape[0] if right.dim() == 3 else right.shape[-1]
    if left.dim() == right.dim():  # both have it: the gradient of weights
        total = left.shape[-1]
    groups = torch.arange(1, ends.numel() + 1) * total // ends.numel()
    ends.copy_(groups)
