"""Output of a traced dry run of `hyper-parallel train`: memory peaks, tensors live at a peak, and collectives."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from hyper_parallel.cli.app import enable_garbage_collection, say
from hyper_parallel.errors import console as printing_console
from hyper_parallel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hyper_parallel.config import LoadedRecipe
    from hyper_parallel.ir import Plan
    from hyper_parallel.trainer import DryRun, TracedRank


def print_dry_run(loaded: LoadedRecipe, num_ranks: int | None, rank: int | None, as_json: bool) -> None:
    """Trace a step and print the result as tables or JSON.

    `num_ranks` None: the ranks of the recipe. `rank` None: trace one rank per distinct program.
    """
    from hyper_parallel.trainer import dry_run

    enable_garbage_collection()
    status = printing_console(stderr=True)
    with status.status("tracing"):
        result = dry_run(loaded, num_ranks=num_ranks, rank=rank)
    if as_json:
        say(json.dumps(_as_json(result), indent=1))
    else:
        _print(result, _console())


def _as_json(result: DryRun) -> dict[str, object]:
    from hyper_parallel.serde import encode
    from hyper_parallel.trainer import differences

    return {
        **encode(result),
        "plan": encode(result.plan),
        "peak_bytes": result.peak_bytes,
        "planned_bytes": result.plan.tensor_bytes,
        "reserved_bytes": result.plan.reserved_bytes,
        "planned_to_traced": result.planned_to_traced,
        "fits": result.fits,
        "differences": [differences(rank, result.plan) for rank in result.ranks],
    }


def _print(result: DryRun, console: Console) -> None:
    plan, work = result.plan, result.plan.workload
    console.print(
        f"{plan.model.name} on {plan.strategy.world_size:,} ranks of {plan.topology}: {plan.strategy}\n"
        f"{work.tokens_per_step:,} tokens per step, {work.accumulation_steps} microbatches of {work.microbatch} x "
        f"{work.seq_len} tokens, {work.compute_dtype}"
    )
    for rank in result.ranks:
        _print_rank(rank, result, console)
    total = result.peak_bytes + plan.reserved_bytes
    console.print(
        f"\npeak of tensors on the fullest traced rank: planned {format_bytes(plan.tensor_bytes)}, traced "
        f"{format_bytes(result.peak_bytes)}, planned / traced {result.planned_to_traced:+.1%}"
    )
    verdict = "fits" if result.fits else "does NOT fit"
    reserved = (
        f" + {format_bytes(plan.reserved_bytes)} planned for context and fragmentation" if plan.reserved_bytes else ""
    )
    console.print(
        f"{verdict}: {format_bytes(result.peak_bytes)}{reserved} of {format_bytes(result.capacity_bytes)} "
        f"({total / result.capacity_bytes:.1%}) of {result.device}"
    )
    for note in result.notes:
        console.print(f"note: {note}")
    console.print(f"traced {len(result.ranks)} rank(s) in {format_seconds(result.seconds)}")


def _print_rank(rank: TracedRank, result: DryRun, console: Console) -> None:
    from hyper_parallel.trainer import differences

    plan = result.plan
    place = " ".join(f"{a}={i}" for a, i in rank.coordinate.items() if dict(plan.mesh.axes)[a] > 1)
    console.print(f"\nrank {rank.rank}{f' ({place})' if place else ''}: {rank.operators:,} operators a step")
    for tier, peak in rank.peaks.items():
        console.print(
            f"peak of a step in {tier}: {format_bytes(peak.num_bytes)} ({peak.num_bytes:,} bytes), in "
            f"{peak.segment}, {peak.during}; plan predicts {format_bytes(plan.tensor_bytes)} of tensors on the "
            "fullest rank"
        )
        memory = table("live at the peak", "bytes >", "share >")
        for name, num_bytes in peak.breakdown.items():
            memory.add_row(name, format_bytes(num_bytes), f"{num_bytes / peak.num_bytes:.1%}")
        console.print(memory)
        largest = table("count >", "each >", "total >", "shape", "format", "made by", "holds")
        for t in peak.top:
            largest.add_row(
                str(t.count), format_bytes(t.num_bytes), format_bytes(t.count * t.num_bytes),
                " x ".join(map(str, t.shape)), t.dtype, t.name, t.category,
            )  # fmt: skip
        console.print(largest)
    _print_collectives(rank, plan, console)
    if not any(rank.coordinate.values()):
        for line in differences(rank, plan):
            console.print(f"differs from the cost model: {line}")


def _print_collectives(rank: TracedRank, plan: Plan, console: Console) -> None:
    planned: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for item in plan.collectives:
        planned[item.kind, item.axes, item.purpose] += item.sent_bytes
    rows = table("collective", "axes", "purpose", "calls >", "sent by this rank >", "by formula >")
    for c in rank.collectives:
        expected = planned.get((c.kind, c.axes, c.purpose))
        rows.add_row(
            c.kind, " ".join(c.axes), c.purpose, f"{c.count:,}", format_bytes(c.sent_bytes),
            "" if expected is None else "equal" if expected == c.sent_bytes else format_bytes(expected),
        )  # fmt: skip
    console.print(rows)


def table(*columns: str) -> Table:
    """Return an empty table with these column titles; ` >` at the end of a title right-aligns the column."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        name, right, _ = column.partition(" >")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    return table


def _console() -> Console:
    """Return a console for standard output, wide enough for the tables if it is not a terminal."""
    plain = printing_console(soft_wrap=True)
    return plain if plain.is_terminal else printing_console(soft_wrap=True, width=140)
