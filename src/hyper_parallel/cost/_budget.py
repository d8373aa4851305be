"""What a memory plan may do without on a rank, and beside which work it copies: loads of many candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.cost._candidates import SCHEDULES, Candidates, shape_of
from hyper_parallel.cost._copies import Load
from hyper_parallel.cost._layer import tokens_of
from hyper_parallel.cost._machine import Machine
from hyper_parallel.cost._memory import eager_bytes, held_parts, peak_bytes, total_bytes, under
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._phases import Parts
from hyper_parallel.cost._pipeline import in_flight
from hyper_parallel.cost._step import LayerPrices, Pace, Rest
from hyper_parallel.ir import GRADIENT_PIECES, Workload

Array = NDArray[np.float64]


def offloaded_bytes(
    n: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    choices: Sequence[tuple[int, int]],
) -> Array:
    """Peak bytes on the device: its memory where what exceeds that may be away, else as little over it as can be.

    Args:
        n: The model.
        machine: The machine and its cards.
        workload: Sequence length and number formats.
        c: Strategies, as for `peak_bytes`.
        choices: Pairs of `regather` and `recompute`.
    """
    held = peak_bytes(n, machine, workload, c, choices)
    return away_from(held, n, machine, workload, under(c, choices))


def away_from(
    held: Array, n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> Array:
    """The part of peak bytes that stays on the device."""
    if not (c.offload > 0).any():
        return held
    missing = load_bytes(n, machine, workload, c).missing_bytes
    least = machine.memory_bytes + np.maximum(missing, 0.0)
    return np.where(c.offload > 0, np.minimum(held, least), held)


def load_bytes(n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates) -> Load:
    """The bytes of a load; its seconds are 0.

    All but one layer's states may be away, and of what comes and goes all but the operands of the largest matrix
    product: no memory plan has less. What the allocator loses counts as something that goes, since a plan places every
    byte.
    """
    found = held_parts(n, machine, workload, c)
    shape = shape_of(c)
    floor = _operands(n, machine, workload, c)
    frag = 1.0 + machine.card.fragmentation
    going = [np.maximum(p.moving * frag - floor, 0.0) for p in found]
    totals = total_bytes(found, machine, c)
    need, fullest = _most(found, totals, machine, shape)
    # When activations are gone what stays must fit: states that are away free the most then.
    kept = [total - moving for total, moving in zip(totals, going, strict=True)]
    end, emptiest = _most(found, kept, machine, shape, ending=True)
    asked = c.offload > 0
    staged = _staged(n, machine, workload, c) + np.zeros(shape)

    def of(values: Sequence[Array], which: NDArray[np.intp]) -> Array:
        chosen = np.broadcast_to(values[0], shape)
        for index, value in enumerate(values[1:], 1):
            chosen = np.where(which == index, value, chosen)
        return chosen

    flight = np.broadcast_to(in_flight(c), shape)
    layers = np.ceil(n.layers / c.pp)
    some = np.broadcast_to(1.0 - 1.0 / np.maximum(layers, 1.0), shape)
    # States of both moments: what only one of them has cannot help the other.
    states = {
        "optimizer": [p.states.optimizer for p in found],
        "parameters": [p.states.parameters for p in found],
        "gradients": [p.gradients for p in found],
    }
    movable = {
        name: some * np.minimum(of(each, fullest), of(each, emptiest))
        for name, each in states.items()
    }
    held = of(going, fullest)
    passing, products = _again_bytes(n, machine, workload, c)
    again = np.where(c.recompute > 1, 0.0, layers * flight) * float(machine.drops)
    zero, one = np.zeros(shape), np.ones(shape)
    reachable = machine.host_bytes if machine.host_bytes_s > 0 else 0.0
    return Load(
        np.where(asked, need + staged, 0.0), np.where(asked, end + staged, 0.0), staged, one * reachable,
        movable["optimizer"], movable["parameters"], movable["gradients"],
        held, np.minimum(passing * again, held), np.minimum(products * again, held),
        zero, zero, zero, zero, zero, c.accumulation * one, flight * one,
        np.where((flight <= 1.0) | (c.schedule == SCHEDULES.index("gpipe")), 1.0, zero),
        one * max(machine.host_bytes_s, 1.0),
    )  # fmt: skip


def copy_load(
    n: ModelNumbers,
    machine: Machine,
    workload: Workload,
    c: Candidates,
    prices: LayerPrices,
    pace: Pace,
    rest: Rest,
) -> Load:
    """The load with the seconds beside which it copies.

    Args:
        n: The model.
        machine: The machine and its cards.
        workload: Sequence length and number formats.
        c: Candidates.
        prices: Prices of their layers.
        pace: Their stages and exchanges.
        rest: What comes once per step.
    """
    load, work, comm = load_bytes(n, machine, workload, c), prices.work, prices.comm
    layers, head = pace.stages.layers, prices.head * pace.stages.head
    exposed, sharding, update_s = comm.tp + pace.ep + comm.cp, comm.fsdp, rest.optimizer
    forward = layers * (work.forward + work.launch / 3.0 + (exposed + sharding) / 2.0) + head / 3.0
    backward = layers * (
        work.backward + work.recompute + work.launch / 1.5 + (exposed + sharding) / 2.0
    )
    backward = backward + head / 1.5
    in_turn = load.alternating > 0
    return replace(
        load,
        passing_s=layers * work.elementwise + 0.0 * load.need_bytes,
        products_s=layers * (work.matmul + work.quantize + work.launch / 3.0 + exposed / 2.0)
        + 0.0 * load.need_bytes,
        forward_s=np.where(in_turn, forward, forward + backward),
        backward_s=np.where(in_turn, backward, forward + backward),
        update_s=update_s + 0.0 * load.need_bytes,
    )


def _operands(n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates) -> Array:
    """Bytes of the weight and the inputs of the largest matrix product."""
    matrix = max([float(n.head_weights), *(float(m.inputs * m.outputs) for m in n.matmuls)])
    return (matrix + tokens_of(workload, c) * n.hidden) / c.tp * machine.width


def _staged(n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates) -> Array:
    """Bytes of the largest result that no kernel writes at a given address.

    It is a piece of the embedding's gradient, before that is reduced, with the columns that it is made from, or what
    attention gives.
    """
    tokens = tokens_of(workload, c)
    piece = (n.embedding_weights + tokens * n.hidden) / GRADIENT_PIECES
    return np.maximum(piece, tokens * n.v_width) / c.tp * machine.width


def _again_bytes(
    n: ModelNumbers, machine: Machine, workload: Workload, c: Candidates
) -> tuple[Array, Array]:
    """Bytes of one layer and microbatch that element-wise kernels made, and that matmuls made.

    The former are the outputs of both norms and of the gated part, and what unfused kernels keep besides; the latter
    queries, keys, values, the inputs of the gated part, and the residual between the blocks.
    """
    stack, width = machine.stack, machine.width
    scale = tokens_of(workload, c) / c.tp * stack.kept
    scale = scale * np.where(c.recompute == 1, stack.selective_kept, 1.0)
    routed = n.experts_per_token * n.expert_width
    passing = (2.0 * n.hidden + n.mlp_width + routed) * width + stack.eager * eager_bytes(n, width)
    wide = n.mlp_saved_width - n.mlp_width + np.maximum(n.expert_saved_width - routed, 0.0)
    products = (n.hidden + n.q_width + n.k_width + n.v_width + wide) * width
    return scale * passing, scale * products


def _most(
    found: Sequence[Parts],
    totals: Sequence[Array],
    machine: Machine,
    shape: tuple[int, ...],
    ending: bool = False,
) -> tuple[Array, NDArray[np.intp]]:
    """Bytes over the device's memory in the fullest phase that has activations, or has none; and which that is."""
    most, which = np.full(shape, -np.inf), np.zeros(shape, dtype=np.intp)
    for index, total in enumerate(totals):
        held = found[index].activations > 0.0
        over = np.where(held != ending, total - machine.memory_bytes, -np.inf)
        better = over > most
        most, which = np.where(better, over, most), np.where(better, index, which)
    return np.where(np.isfinite(most), most, 0.0), which
