"""Local search for small programs, where one copy more or less is a part of the peak that counts.

What the rules chose is changed by one or two moves at a time, emitted again for a slightly lower target, and kept when
it comes closer to target and time limit. The same moves are tried every time: equal programs get equal plans.
"""

from __future__ import annotations

import random

import numpy as np

from hyper_parallel.offload._emit import Emitter
from hyper_parallel.offload._issue import Gap
from hyper_parallel.offload._portfolio import Emitted, Search, overfull
from hyper_parallel.offload._reload import reload_bound

LARGEST = 200  # operators; beyond, one move is worth less than its emission costs
_ROUNDS, _TRIES = 4, 200
_A_MOVE = 3e-5  # what one gap more may cost of the target
_STEP = 0.99  # the next target, as a share of the peak reached
# How early reloads may begin (in durations), and whether stores fill a lane ahead of time.
_MODES = tuple((window, eager) for eager in (False, True) for window in (None, 4.0, 1.0))

_Move = tuple[Gap, ...]  # one gap, or both ends of a stay at home


def polish(search: Search, best: Emitted, limit_s: float) -> Emitted:
    """A program of at most the same peak within the time limit."""
    if best.recomputes is None:
        return best
    floor = reload_bound(
        search.program, search.machine, search.order, limit_s, recompute=bool(best.recomputes.gaps)
    ).num_bytes
    for seed in range(_ROUNDS):  # each starts from what the last one found
        best = _round(search, best, limit_s, floor, random.Random(seed))
    return best


def _round(
    search: Search, best: Emitted, limit_s: float, floor: int, draw: random.Random
) -> Emitted:
    moves, groups = _moves(search, best)
    chosen, mode = {m for m in moves if set(m) <= set(best.gaps)}, 0
    target = int(best.peak * _STEP)
    score = float("inf")
    for attempt in range(_TRIES if moves else 0):
        if best.peak * _STEP <= floor:
            break
        trial, at = set(chosen), mode
        if attempt < len(_MODES):
            at = attempt
        elif draw.random() < 0.1:
            at = draw.randrange(len(_MODES))
        else:
            for group in draw.sample(groups, min(len(groups), draw.choice((1, 1, 2)))):
                trial = trial - group if group <= trial else trial | group
        emitted, held = _emit(search, best, trial, target, at)
        result = _score(emitted, held, target, limit_s)
        if result > score or overfull(search.machine, emitted):
            continue
        chosen, mode, score = trial, at, result
        if emitted.seconds <= limit_s and emitted.peak < best.peak:
            best = emitted
            target = int(best.peak * _STEP)
            score = _score(emitted, held, target, limit_s)
    return best


def _moves(search: Search, best: Emitted) -> tuple[list[_Move], list[frozenset[_Move]]]:
    """Everything that may leave on its own, for the recomputations of a program, and what is tried together.

    Both in a fixed order. A stay at home together with the leaves that it makes free is one change.
    """
    moves: dict[_Move, None] = {}
    groups: dict[frozenset[_Move], None] = {}
    for selector in dict.fromkeys(rule.selector for rule in search.rules.fixed):
        if selector.recomputes is best.recomputes:
            for c in selector.candidates:
                ends = tuple(g for g in c.gaps if g.first < 0 or g.last == selector.n)
                parts = ((ends,) if ends else ()) + tuple((g,) for g in c.gaps if g not in ends)
                moves.update(dict.fromkeys(parts))
                groups[frozenset(parts)] = None
    return list(moves), list(groups)


def _emit(
    search: Search, like: Emitted, chosen: set[_Move], target: int, mode: int
) -> tuple[Emitted, list[int]]:
    """The program of some moves, and its bytes at every position."""
    assert like.recomputes is not None
    gaps = sorted((g for m in chosen for g in m), key=lambda g: (g.storage, g.first))
    profile = next(
        r.selector.profile for r in search.rules.fixed if r.selector.recomputes is like.recomputes
    )
    change = np.zeros(len(profile) + 1, np.int64)
    for g in gaps:  # what is needed at every position, everything else away
        change[g.first + 1] -= search.program.sizes[g.storage]
        change[g.last] += search.program.sizes[g.storage]
    emitter = Emitter(
        search.program,
        search.machine,
        search.order,
        gaps,
        like.recomputes,
        target,
        profile + np.cumsum(change[:-1]),
        window=_MODES[mode][0],
        eager=_MODES[mode][1],
    )
    actions = emitter.emit()
    assert actions is not None
    rule = like.rule if like.rule.endswith(", polished") else f"{like.rule}, polished"
    return Emitted.by(emitter, actions, gaps, like.recomputes, rule), emitter.held


def _score(emitted: Emitted, held: list[int], target: int, limit_s: float) -> float:
    """How far a program is from target and limit; 0 when it meets both.

    Every position above the target counts, so that a change shows that lowers one of two equal peaks; of two programs
    that are as far the one with fewer moves is nearer.
    """
    over = sum(max(live - target, 0) for live in held) + max(emitted.peak - target, 0)
    late = max(emitted.seconds / max(limit_s, 1e-30) - 1, 0.0)
    return over / max(target, 1) + 2 * late + _A_MOVE * len(emitted.gaps)
