"""`hyper-parallel parity`: compare a recipe's layout with one rank, on a small copy of its model."""

from __future__ import annotations

from typing import Annotated

import typer

from hyper_parallel.cli.app import NoCode
from hyper_parallel.cli.train_options import Overrides, RecipePath
from hyper_parallel.errors import console as printing_console

_ROWS = 8  # rows of a table that fits a small terminal


def parity(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    no_code: NoCode = False,
) -> None:
    """Compare a recipe's layout with one rank, on a small copy of its model in float64.

    Loss, gradient norm and the norm of every parameter's gradient must have a relative difference of at most 1e-10.
    Ranks are at most 8 local CPU processes. Degrees are reduced to at most 2 (cp with `cp_kind: hybrid`: 4); then
    dp_replicate, dp_shard, tp_y or cp become 1 while ranks exceed 8. The output lists changed degrees.
    """
    from hyper_parallel.cli.dry_run_command import table
    from hyper_parallel.cli.train_command import load_any_recipe
    from hyper_parallel.errors import LayoutDiffers
    from hyper_parallel.hub import stay_offline

    stay_offline()
    loaded = load_any_recipe(recipe, overrides or [], no_code, "parity")
    from hyper_parallel.trainer import parity as compare

    result = compare(loaded, steps)
    console = printing_console(soft_wrap=True, width=140)
    console.print(f"{result.model}: {result.strategy} on {result.strategy.world_size} ranks")
    for note in result.notes:
        console.print(f"note: {note}")
    rows = table("largest difference", "step >", "one rank >", "layout >", "relative difference >")
    for d in result.worst(_ROWS):
        numbers = (f"{d.one_rank:.12g}", f"{d.layout:.12g}", f"{d.relative:.1e}")
        rows.add_row(d.name, str(d.step), *numbers)
    console.print(rows)
    first = result.first
    if first is not None:
        names = dict.fromkeys(d.name for d in result.differences)
        wrong = {d.name for d in result.differences if not d.relative <= 1e-10}
        raise LayoutDiffers(
            f"`{first.name}` in step {first.step} differs from the run on one rank, by {first.relative:.1e} relative",
            where=str(recipe),
            got=f"{first.layout:.12g} on {result.strategy}",
            allowed=f"{first.one_rank:.12g} (the value on one rank) to within 1e-10 relative",
            others=[f"`{name}`" for name in names if name in wrong - {first.name}][:_ROWS],
        )
    console.print(
        f"equal to 1e-10: loss, gradient norm and {len({d.name for d in result.differences}) - 2} gradients "
        f"of {steps} steps"
    )
