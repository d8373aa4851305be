"""All ranks of a mesh in one process: an oracle that executes redistribution steps on real arrays.

Nothing here reads a layout after `distribute`: ranks know their group, their index in it, and the array they hold.
Collectives move elements the way ring algorithms do, and count what every rank sends.
"""

from __future__ import annotations

import itertools

import numpy as np


def coordinates(mesh):
    return {mesh.device(i): mesh.coordinate(mesh.device(i)) for i in range(mesh.size)}


def distribute(full, layout, mesh, rng):
    """The local array of every rank; random summands over partial axes."""
    spans = [range(mesh.degree(a)) for a in layout.partial]
    summands = {p: rng.integers(-9, 9, full.shape) for p in itertools.product(*spans)}
    last = next(reversed(summands))
    summands[last] = full - sum(v for p, v in summands.items() if p != last)
    local = {}
    for rank, at in coordinates(mesh).items():
        mine = tuple(slice(*one) for (one,) in layout.ranges(full.shape, mesh, at))
        local[rank] = summands[tuple(at[a] for a in layout.partial)][mine].copy()
    return local


def assert_holds(local, full, layout, mesh):
    """Every rank holds its slice; over partial axes the parts of a group sum to it."""
    for rank, at in coordinates(mesh).items():
        mine = tuple(slice(*one) for (one,) in layout.ranges(full.shape, mesh, at))
        total = sum(local[peer] for peer in mesh.group(rank, layout.partial))
        np.testing.assert_array_equal(total, full[mine])


def execute(steps, local, mesh):
    """Run the steps; returns the local arrays and, per step, the elements the busiest rank sends."""
    sent = []
    for step in steps:
        new, most = {}, 0
        for group in mesh.groups(step.axis):
            arrays, elements = _RUN[step.kind]([local[r] for r in group], step)
            new.update(zip(group, arrays, strict=True))
            most = max(most, elements)
        local = new
        sent.append(most)
    return local, sent


def _chunks(array, dim, degree):
    """Slices of ceil(size / degree) along a dim; the last may be short or empty."""
    chunk = -(-array.shape[dim] // degree)
    cut = [min(i * chunk, array.shape[dim]) for i in range(1, degree)]
    return np.split(array, cut, axis=dim)


def _ring(num_ranks, slots, combine):
    """num_ranks - 1 rounds in which every rank sends one slot to its right neighbour; elements one rank sends."""
    sent = 0
    for round_ in range(num_ranks - 1):
        moving = [(r, (r - round_) % num_ranks) for r in range(num_ranks)]
        messages = [(r, slot, slots[r][slot]) for r, slot in moving]
        for r, slot, message in messages:
            peer = slots[(r + 1) % num_ranks]
            peer[slot] = message if not combine else message + peer[slot]
        sent += max(message.size for _, _, message in messages)
    return sent


def _all_gather(parts, step):
    size = len(parts)
    slots = [{r: parts[r]} for r in range(size)]
    sent = _ring(size, slots, combine=False)
    whole = [np.concatenate([s[i] for i in range(size)], axis=step.dim) for s in slots]
    return whole, sent


def _reduce_scatter(parts, step):
    size = len(parts)
    # The ring leaves slot r + 1 complete on rank r; shifting the numbering puts chunk r there.
    slots = [{(i + 1) % size: c for i, c in enumerate(_chunks(p, step.dim, size))} for p in parts]
    sent = _ring(size, slots, combine=True)
    return [slots[r][(r + 1) % size] for r in range(size)], sent


def _all_reduce(parts, step):
    size, shape = len(parts), parts[0].shape
    slot = -(-parts[0].size // size)
    flat = [np.pad(p.ravel(), (0, slot * size - p.size)).reshape(size, slot) for p in parts]
    slots = [{(i + 1) % size: f[i] for i in range(size)} for f in flat]
    sent = _ring(size, slots, combine=True)
    complete = [{r: slots[r][(r + 1) % size]} for r in range(size)]
    sent += _ring(size, complete, combine=False)
    flat = [np.concatenate([s[i] for i in range(size)])[: parts[0].size] for s in complete]
    return [f.reshape(shape) for f in flat], sent


def _all_to_all(parts, step):
    size = len(parts)
    blocks = [_chunks(p, step.to_dim, size) for p in parts]
    received = [np.concatenate([b[r] for b in blocks], axis=step.dim) for r in range(size)]
    padded = max(block.size for own in blocks for block in own)
    return received, (size - 1) * padded


def _slice(parts, step):
    return [_chunks(p, step.dim, len(parts))[r] for r, p in enumerate(parts)], 0


_RUN = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "slice": _slice,
}
