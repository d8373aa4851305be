"""What a memory plan may do without on a rank, and beside which work it copies: loads of many candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import SCHEDULES, Array, shape_of
from hyper_parallel.cost._copies import Load
from hyper_parallel.cost._memory import chosen, fullest, held_parts, total_bytes, under
from hyper_parallel.cost._phases import Parts, moving
from hyper_parallel.cost._setting import Setting
from hyper_parallel.cost._step import Step
from hyper_parallel.cost.pipeline import in_flight
from hyper_parallel.ir import GRADIENT_PIECES


def offloaded_bytes(s: Setting, choices: Sequence[tuple[int, int]]) -> Array:
    """Peak bytes on the device: its memory where what exceeds that may be away, else as little over it as can be.

    Args:
        s: What is priced, columns of one length; `regather` and `recompute` are not read.
        choices: Pairs of `regather` and `recompute`, along the first axis of the result.
    """
    s = under(s, choices)
    found = held_parts(s)
    held, _ = fullest(total_bytes(found, s), shape_of(s.c))
    return away_from(held, s, found)


def away_from(held: Array, s: Setting, found: Sequence[Parts] | None = None) -> Array:
    """The part of peak bytes that stays on the device; `found` are the `held_parts` when they are known."""
    if not (s.c.offload > 0).any():
        return held
    missing = load_bytes(s, found).missing_bytes
    least = s.machine.memory_bytes + np.maximum(missing, 0.0)
    return np.where(s.c.offload > 0, np.minimum(held, least), held)


def load_bytes(s: Setting, found: Sequence[Parts] | None = None) -> Load:
    """The bytes of a load; its seconds are 0.

    All but one layer's states may be away, and of what comes and goes all but the operands of the largest matrix
    product: no memory plan has less. What the allocator loses counts as something that goes, since a plan places every
    byte.
    """
    c, machine, layers, shape = s.c, s.machine, s.layers, shape_of(s.c)
    found = held_parts(s) if found is None else found
    floor, frag = _operands(s), 1.0 + machine.card.fragmentation
    going = [np.maximum(moving(p) * frag - floor, 0.0) for p in found]
    totals = total_bytes(found, s)
    need, full = _over(found, totals, s)
    # When activations are gone what stays must fit: states that are away free the most then.
    kept = [total - moving for total, moving in zip(totals, going, strict=True)]
    end, empty = _over(found, kept, s, ending=True)
    asked = c.offload > 0
    staged = _staged(s) + np.zeros(shape)
    flight = np.broadcast_to(in_flight(c), shape)
    some = np.broadcast_to(1.0 - 1.0 / np.maximum(layers, 1.0), shape)
    # States of both moments: what only one of them has cannot help the other.
    optimizer, parameters, gradients = (
        some * np.minimum(*(chosen([p[name] for p in found], which) for which in (full, empty)))
        for name in ("optimizer states", "parameters", "gradients")
    )
    held = chosen(going, full)
    passing, products = _again_bytes(s)
    again = np.where(c.recompute > 1, 0.0, layers * flight) * float(machine.drops)
    zero, one = np.zeros(shape), np.ones(shape)
    reachable = machine.host_bytes if machine.host_bytes_s > 0 else 0.0
    in_turn = (flight <= 1.0) | (c.schedule == SCHEDULES.index("gpipe"))
    return Load(
        need_bytes=np.where(asked, need + staged, 0.0), end_bytes=np.where(asked, end + staged, 0.0),
        staged_bytes=staged, host_bytes=one * reachable, optimizer_bytes=optimizer, parameters_bytes=parameters,
        gradients_bytes=gradients, activations_bytes=held, passing_bytes=np.minimum(passing * again, held),
        products_bytes=np.minimum(products * again, held), passing_s=zero, products_s=zero, forward_s=zero,
        backward_s=zero, update_s=zero, microbatches=c.accumulation * one, in_flight=flight * one,
        alternating=np.where(in_turn, 1.0, zero), link_bytes_s=one * max(machine.host_bytes_s, 1.0),
    )  # fmt: skip


def copy_load(s: Setting, step: Step, optimizer_s: Array) -> Load:
    """The load with the seconds beside which it copies."""
    load, work, comm = load_bytes(s), step.prices.work, step.prices.comm
    layers, head = step.stages.layers, step.prices.head * step.stages.head
    exposed, none = comm.tp + step.ep + comm.cp, 0.0 * load.need_bytes
    half = (exposed + comm.fsdp) / 2.0
    forward = layers * (work.forward + work.launch / 3.0 + half) + head / 3.0
    backward = layers * (work.backward + work.recompute + work.launch / 1.5 + half) + head / 1.5
    products = work.matmul + work.quantize + work.launch / 3.0 + exposed / 2.0
    in_turn = load.alternating > 0
    return replace(
        load,
        passing_s=layers * work.elementwise + none,
        products_s=layers * products + none,
        forward_s=np.where(in_turn, forward, forward + backward),
        backward_s=np.where(in_turn, backward, forward + backward),
        update_s=optimizer_s + none,
    )


def _operands(s: Setting) -> Array:
    """Bytes of the weight and the inputs of the largest matrix product."""
    n = s.n
    matrix = max([float(n.head_weights), *(float(m.inputs * m.outputs) for m in n.matmuls)])
    return (matrix + s.tokens * n.hidden) / s.c.tp * s.machine.width


def _staged(s: Setting) -> Array:
    """Bytes of the largest result that no kernel writes at a given address.

    It is a piece of the embedding's gradient, before that is reduced, with the columns that it is made from, or what
    attention gives.
    """
    piece = (s.n.embedding_weights + s.tokens * s.n.hidden) / GRADIENT_PIECES
    return np.maximum(piece, s.tokens * s.n.v_width) / s.c.tp * s.machine.width


def _again_bytes(s: Setting) -> tuple[Array, Array]:
    """Bytes of one layer and microbatch that element-wise kernels made, and that matmuls made.

    The former are the outputs of both norms and of the gated part, and what unfused kernels keep besides; the latter
    queries, keys, values, the inputs of the gated part, and the residual between the blocks.
    """
    n, c, stack, width = s.n, s.c, s.machine.stack, s.machine.width
    scale = s.tokens / c.tp * stack.kept
    scale = scale * np.where(c.recompute == 1, stack.selective_kept, 1.0)
    routed = n.experts_per_token * n.expert_width
    passing = (2.0 * n.hidden + n.mlp_width + routed) * width + stack.eager * n.eager_bytes(width)
    wide = n.mlp_saved_width - n.mlp_width + np.maximum(n.expert_saved_width - routed, 0.0)
    products = (n.hidden + n.q_width + n.k_width + n.v_width + wide) * width
    return scale * passing, scale * products


def _over(
    found: Sequence[Parts], totals: Sequence[Array], s: Setting, ending: bool = False
) -> tuple[Array, NDArray[np.intp]]:
    """Bytes over the device's memory in the fullest phase that has activations, or has none; and which that is."""
    over = [
        np.where((parts["activations"] > 0.0) != ending, total - s.machine.memory_bytes, -np.inf)
        for parts, total in zip(found, totals, strict=True)
    ]
    most, which = fullest(over, shape_of(s.c))
    return np.where(np.isfinite(most), most, 0.0), which
