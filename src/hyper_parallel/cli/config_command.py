"""`hyper-parallel config`: show a recipe as a run resolves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.app import say
from hyper_parallel.cli.option_conflicts import refuse_ignored
from hyper_parallel.cli.train_options import Overrides

app = typer.Typer(
    name="config",
    help="Show a recipe as a run resolves it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def show(
    ctx: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="Recipe, YAML or JSON.")],
    overrides: Overrides = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the resolved recipe as a valid recipe.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print values and origins as JSON.")] = False,
) -> None:
    """Print every value of a recipe with its origin.

    Origins: default, recipe, `extends FILE`, command line, or `derived:` with the reason.
    """
    from hyper_parallel.config import load_recipe, recipe_to_yaml, refuse_data_file
    from hyper_parallel.serde import flatten

    refuse_ignored(ctx, {"as_yaml": ("as_json",)})
    refuse_data_file(recipe, "config show")
    loaded = load_recipe(recipe, overrides or [])
    if as_yaml:
        say(recipe_to_yaml(loaded.recipe), nl=False)
        return
    rows = [
        (key, value, loaded.origins.get(key, "default"))
        for key, value in flatten(loaded.recipe.model_dump(mode="json"))
    ]
    if as_json:
        values = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        say(json.dumps(values, indent=2))
        return
    table = [(key, json.dumps(value), origin) for key, value, origin in rows]
    widths = [max(len(row[i]) for row in table) for i in range(2)]
    for key, value, origin in table:
        say(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
