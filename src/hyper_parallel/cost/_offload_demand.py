"""Demand for offload of many candidates: bytes that a memory plan may evict, and the work that overlaps copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import SCHEDULES, Array, shape_of
from hyper_parallel.cost._memory import (
    fullest_phase,
    memory_parts,
    select_phase,
    total_bytes,
    with_choices,
)
from hyper_parallel.cost._offload_copies import OffloadDemand
from hyper_parallel.cost._phases import Parts, transient_bytes
from hyper_parallel.cost._pricing_case import PricingCase
from hyper_parallel.cost._step import Step
from hyper_parallel.cost.pipeline import in_flight
from hyper_parallel.ir import GRADIENT_PIECES


def offloaded_bytes(s: PricingCase, choices: Sequence[tuple[int, int]]) -> Array:
    """Return peak bytes on the device with offload: its capacity if the excess can be evicted, else the least possible.

    Args:
        s: Pricing case, columns of one length; `regather` and `recompute` are not read.
        choices: Pairs of `regather` and `recompute`, along the first axis of the result.
    """
    s = with_choices(s, choices)
    parts = memory_parts(s)
    peaks, _ = fullest_phase(total_bytes(parts, s), shape_of(s.c))
    return resident_bytes(peaks, s, parts)


def resident_bytes(peaks: Array, s: PricingCase, parts: Sequence[Parts] | None = None) -> Array:
    """Return the part of the peak bytes that stays on the device; `parts` are the `memory_parts` if computed."""
    if not (s.c.offload > 0).any():
        return peaks
    infeasible = offload_demand(s, parts).missing_bytes
    least = s.machine.memory_bytes + np.maximum(infeasible, 0.0)
    return np.where(s.c.offload > 0, np.minimum(peaks, least), peaks)


def offload_demand(s: PricingCase, parts: Sequence[Parts] | None = None) -> OffloadDemand:
    """Return the bytes of the demand; its seconds are 0.

    The states of all layers but one may be evicted. Of transient bytes all may be evicted except the operands of the
    largest matmul: no memory plan needs less. Fragmentation counts as transient, because a plan assigns an address to
    every byte.
    """
    c, machine, layers, shape = s.c, s.machine, s.layers, shape_of(s.c)
    parts = memory_parts(s) if parts is None else parts
    floor, frag = _operands(s), 1.0 + machine.card.fragmentation
    transient = [np.maximum(transient_bytes(p) * frag - floor, 0.0) for p in parts]
    totals = total_bytes(parts, s)
    need, full = _excess(parts, totals, s)
    # Without activations the persistent bytes must fit: evicted states save the most then.
    persistent = [
        total - transient_bytes for total, transient_bytes in zip(totals, transient, strict=True)
    ]
    end, empty = _excess(parts, persistent, s, ending=True)
    offloading = c.offload > 0
    staged = _staged(s) + np.zeros(shape)
    flight = np.broadcast_to(in_flight(c), shape)
    movable_share = np.broadcast_to(1.0 - 1.0 / np.maximum(layers, 1.0), shape)
    # Only states that exist in both phases count: others cannot help in the other phase.
    optimizer, parameters, gradients = (
        movable_share
        * np.minimum(*(select_phase([p[name] for p in parts], phase) for phase in (full, empty)))
        for name in ("optimizer states", "parameters", "gradients")
    )
    peaks = select_phase(transient, full)
    passing, products = _recomputable_bytes(s)
    recomputable = np.where(c.recompute > 1, 0.0, layers * flight) * float(machine.may_recompute)
    zeros, ones = np.zeros(shape), np.ones(shape)
    reachable = machine.host_bytes if machine.host_bytes_s > 0 else 0.0
    alternates = (flight <= 1.0) | (c.schedule == SCHEDULES.index("gpipe"))
    return OffloadDemand(
        need_bytes=np.where(offloading, need + staged, 0.0), end_bytes=np.where(offloading, end + staged, 0.0),
        staged_bytes=staged, host_bytes=ones * reachable, optimizer_bytes=optimizer, parameters_bytes=parameters,
        gradients_bytes=gradients, activations_bytes=peaks, passing_bytes=np.minimum(passing * recomputable, peaks),
        products_bytes=np.minimum(products * recomputable, peaks), passing_s=zeros, products_s=zeros, forward_s=zeros,
        backward_s=zeros, update_s=zeros, microbatches=c.accumulation * ones, in_flight=flight * ones,
        alternating=np.where(alternates, 1.0, zeros), link_bytes_s=ones * max(machine.host_bytes_s, 1.0),
    )  # fmt: skip


def timed_offload_demand(s: PricingCase, step: Step, optimizer_s: Array) -> OffloadDemand:
    """Return the demand with the seconds of work that overlap its copies."""
    demand, work, comm = offload_demand(s), step.prices.work, step.prices.comm
    layers, head = step.stages.layers, step.prices.head * step.stages.head
    exposed, none = comm.tp + step.ep + comm.cp, 0.0 * demand.need_bytes
    half = (exposed + comm.fsdp) / 2.0
    forward = layers * (work.forward + work.launch / 3.0 + half) + head / 3.0
    backward = layers * (work.backward + work.recompute + work.launch / 1.5 + half) + head / 1.5
    products = work.matmul + work.quantize + work.launch / 3.0 + exposed / 2.0
    alternates = demand.alternating > 0
    return replace(
        demand,
        passing_s=layers * work.elementwise + none,
        products_s=layers * products + none,
        forward_s=np.where(alternates, forward, forward + backward),
        backward_s=np.where(alternates, backward, forward + backward),
        update_s=optimizer_s + none,
    )


def _operands(s: PricingCase) -> Array:
    """Return bytes of the weight and the inputs of the largest matmul."""
    n = s.n
    matrix = max([float(n.head_weights), *(float(m.inputs * m.outputs) for m in n.matmuls)])
    return (matrix + s.tokens * n.hidden) / s.c.tp * s.machine.width


def _staged(s: PricingCase) -> Array:
    """Return bytes of the largest result that no kernel writes to a planned address.

    It is a piece of the embedding's gradient before reduction, with its input columns, or the output of attention.
    """
    piece = (s.n.embedding_weights + s.tokens * s.n.hidden) / GRADIENT_PIECES
    return np.maximum(piece, s.tokens * s.n.v_width) / s.c.tp * s.machine.width


def _recomputable_bytes(s: PricingCase) -> tuple[Array, Array]:
    """Return recomputable bytes of one layer and microbatch: of element-wise kernels, and of matmuls.

    Element-wise kernels write the outputs of both norms and of the gate, and the copies of unfused kernels. Matmuls
    write queries, keys, values, the inputs of the gate, and the residual between the blocks.
    """
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    scale = s.tokens / c.tp * stack.kept
    scale = scale * np.where(c.recompute == 1, stack.selective_kept, 1.0)
    routed = n.experts_per_token * n.expert_width
    passing = (2.0 * n.hidden + n.mlp_width + routed) * width + stack.eager * n.eager_bytes(width)
    wide = n.mlp_saved_width - n.mlp_width + np.maximum(n.expert_saved_width - routed, 0.0)
    products = (n.hidden + n.q_width + n.k_width + n.v_width + wide) * width
    return scale * passing, scale * products


def _excess(
    parts: Sequence[Parts], totals: Sequence[Array], s: PricingCase, ending: bool = False
) -> tuple[Array, NDArray[np.intp]]:
    """Return bytes over the capacity in the fullest phase with (or, `ending`, without) activations, and that phase."""
    excess = [
        np.where(
            (phase_parts["activations"] > 0.0) != ending, total - s.machine.memory_bytes, -np.inf
        )
        for phase_parts, total in zip(parts, totals, strict=True)
    ]
    largest, phase = fullest_phase(excess, shape_of(s.c))
    return np.where(np.isfinite(largest), largest, 0.0), phase
