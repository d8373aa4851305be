"""Random strategies: every product of axes that is legal repeats one device, every other one is refused in a sentence.

    make fuzz N=200 SEED=7        random cases, the smallest failing one is printed as Python

Hypothesis draws the cases and shrinks a failing one: towards fewer ranks, one layer per stage, the plain Llama, no
option. A case that is legal runs on real processes; `Tally` counts what ran and what was refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

from hyper_parallel import plan
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.ir import BLOCK_SHAPES, Overlap, Plan, Strategy
from hyper_parallel.runtime import World, launch
from tests.parity.universal import FAMILIES, Reference, Setup, check

AXES = ("dp_shard", "tp_x", "cp", "pp", "ep", "tp_y", "dp_replicate")
DRAWN = tuple(FAMILIES)
VIRTUAL = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
TIMEOUT_S = 180  # a rank that hangs; eight ranks on two busy cores took more than 60


@dataclass(frozen=True)
class Case:
    """Case of the fuzz: model, batch and strategy."""

    setup: Setup
    strategy: Strategy

    def __repr__(self) -> str:
        return f"Case({_short(self.setup)}, {_short(self.strategy)})"


def _short(value: Any) -> str:
    """A dataclass as Python, values that are the default left out."""
    shown = (f"{f.name}={getattr(value, f.name)!r}" for f in fields(value) if getattr(value, f.name) != f.default)
    return f"{type(value).__name__}({', '.join(shown)})"


@dataclass
class Tally:
    """Counts of a run of the fuzz: cases that ran by number of ranks, their axes and overlaps, refusals by sentence."""

    cases: Counter[int] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    overlaps: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        ran = ", ".join(f"{count} on {ranks} ranks" for ranks, count in sorted(self.cases.items()))
        axes = ", ".join(f"{axis} {count}" for axis, count in self.ran.most_common())
        reasons = "".join(f"\n  {count:4d} {reason}" for reason, count in self.refused.most_common())
        overlaps = ", ".join(f"{name} {count}" for name, count in self.overlaps.most_common())
        return f"ran: {ran} ({axes}; overlap {overlaps}); refused: {self.refused.total()}{reasons}"


def _overlap(draw: st.DrawFn, size: dict[str, int]) -> Overlap:
    """An overlap of axes that are there, as recipes give it: one number of chunks, and half-batches for both axes.

    `tp: symmetric` needs CUDA, and `auto` is one of the others.
    """
    values = ("none", "chunks", "half-batch")
    tp, ep = (draw(st.sampled_from(values)) if size[axis] > 1 else "none" for axis in ("tp_x", "ep"))
    chunks = draw(st.sampled_from((2, 3, 4))) if "chunks" in (tp, ep) else 1
    return Overlap(
        half_batch="half-batch" in (tp, ep),
        ep_chunks=chunks if ep == "chunks" else 1,
        tp_chunks=chunks if tp == "chunks" else 1,
    )


@st.composite
def cases(draw: st.DrawFn, twos: int = 3, grid: bool = False) -> Case:
    """Cases on up to 2 ** twos ranks.

    Args:
        draw: Given by hypothesis.
        twos: Factors of two that are dealt to the axes.
        grid: Two of them make tensor parallelism 2 x 2.
    """
    family = draw(st.sampled_from(DRAWN))
    degrees = Counter[str](("tp_x", "tp_y") if grid else ())
    mesh_axes = tuple(a for a in AXES if a != "ep")
    for _ in range(twos - degrees.total()):
        axis = draw(st.sampled_from((*mesh_axes, None)))
        if axis == "tp_y" and not degrees["tp_x"]:
            axis = "tp_x"  # y alone is refused; one case of it in the tests is enough
        degrees[axis or "none"] += 1
    size = {axis: 2 ** degrees[axis] for axis in mesh_axes}
    inner = degrees["dp_shard"] + degrees["cp"] + degrees["tp_x"] + degrees["tp_y"]
    has_experts = "num_experts_per_tok" in FAMILIES[family]
    size["ep"] = 2 ** draw(st.integers(0, min(inner, 3))) if has_experts else 1
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev")))
    schedule = schedule if size["pp"] > 1 else "1f1b"
    virtual = VIRTUAL.get(schedule, 1)
    two_d = size["tp_y"] > 1
    again = draw(st.sampled_from(("none", "full")))
    zero = draw(st.sampled_from((3, 2, 1))) if size["dp_shard"] * size["cp"] > 1 else 3
    cp_kind = draw(st.sampled_from(("ring", "all_gather", "ulysses", "hybrid")))
    cp_kind = cp_kind if size["cp"] > 1 else "ring"
    strategy = Strategy(
        **size,
        attention_shape=draw(st.sampled_from(BLOCK_SHAPES[::-1])) if two_d else "2d",
        mlp_shape=draw(st.sampled_from(BLOCK_SHAPES[::-1])) if two_d else "2d",
        attention_scatter=draw(st.sampled_from(("head", "token"))) if two_d else "head",
        gathered_inputs=draw(st.sampled_from(("keep", "re-gather"))) if two_d else "keep",
        cp_kind=cp_kind,
        cp_ulysses=2 if cp_kind == "hybrid" else 1,
        schedule=schedule,
        virtual_stages=virtual,
        recompute=again,
        recompute_layers=draw(st.sampled_from((None, 1, 2))) if again == "full" else None,
        reshard_after_forward=zero != 2,
        zero=1 if zero == 1 else None,
        overlap=_overlap(draw, size),
    )
    layers = size["pp"] * virtual + draw(st.integers(0, 1))
    rounds = 2 if schedule == "dualpipev" else 1
    accumulation = size["pp"] * rounds * draw(st.integers(1, 2))
    setup = Setup(
        family,
        tied=draw(st.booleans()),
        sequences=strategy.dp * accumulation * draw(st.integers(1, 2)) * (1 + strategy.overlap.half_batch),
        seq_len=draw(st.sampled_from((16, 13, 24))),
        accumulation=accumulation,
        packed=draw(st.booleans()),
        config=(("num_hidden_layers", max(2, layers)),),
    )
    return Case(setup, strategy)


@functools.lru_cache(maxsize=16)
def _reference(setup: Setup) -> Reference:
    return Reference(setup)


def planned(case: Case) -> Plan | HyperParallelError:
    """The plan of a case, or its refusal."""
    try:
        return plan(
            case.setup.spec,
            "local",
            case.setup.workload(case.strategy),
            strategy=case.strategy,
        )
    except HyperParallelError as refusal:
        return refusal


def run_case(case: Case, tally: Tally, bytes_too: bool = True) -> None:
    """Run one case on forked ranks, or see that its refusal is a good one.

    Raises:
        AssertionError: When it differs from one device, or fails.
    """
    found = planned(case)
    if isinstance(found, HyperParallelError):
        assert found.hint or found.allowed, f"a refusal without a remedy: {found}"
        tally.refused[f"{found.code} {found.what}"] += 1
        return
    # The step of one device does not depend on how many microbatches it is cut into.
    one = replace(case.setup, accumulation=1)
    reference = _reference(one)
    reference = reference.of(case.setup)

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            check(reference, case.strategy, world, plan=found, bytes_too=bytes_too)

    try:
        launch(rank, case.strategy.world_size, timeout_s=TIMEOUT_S)
    except HyperParallelError as failure:
        raise AssertionError(f"{case}\n{failure}") from failure
    tally.cases[case.strategy.world_size] += 1
    tally.overlaps[str(case.strategy.overlap)] += 1
    tally.ran.update(axis for axis, degree in case.strategy.degrees().items() if degree > 1)
