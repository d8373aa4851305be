"""`hyper-parallel data`: show training data with the tokens that are targets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyper_parallel.cli.app import NoCode, is_quiet, say
from hyper_parallel.cli.train_options import Overrides, RecipePath
from hyper_parallel.errors import console as printing_console

if TYPE_CHECKING:
    from rich.console import Console

    from hyper_parallel.config import Recipe
    from hyper_parallel.trainer.data.preview import Example, LengthHistogram
    from hyper_parallel.trainer.data_sample import DataSample

_BAR = 40  # characters of the longest bar of the histogram


def data(
    recipe: RecipePath,
    overrides: Overrides = None,
    examples: Annotated[int, typer.Option("--examples", "-n", min=0, help="Examples to print per source.")] = 3,
    max_records: Annotated[
        int, typer.Option("--max-records", min=1, help="Maximum number of records to read.")
    ] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    no_code: NoCode = False,
) -> None:
    """Show the training data of a recipe: format, counts, lengths, and examples with their targets marked.

    The first records are encoded exactly as in training. No model is built and no weights are read. Targets (tokens
    with loss) are green on a terminal with colours, and between [[ and ]] elsewhere.
    """
    from hyper_parallel.cli.train_command import load_any_recipe
    from hyper_parallel.hub import permit_stream, stay_offline
    from hyper_parallel.trainer.data_sample import sample_data

    stay_offline()
    loaded = load_any_recipe(recipe, overrides or [], no_code, "data")
    permit_stream(loaded.recipe.data.streaming, str(loaded.recipe.data.source))
    progress = sys.stderr.isatty() and not is_quiet()
    with _without_torch(loaded.recipe):
        sample = sample_data(loaded, max_records, examples, progress=progress)
    if as_json:
        say(json.dumps(sample.as_dict(), indent=1))
        return
    _print(sample, max_records)


@contextmanager
def _without_torch(recipe: Recipe) -> Iterator[None]:
    """Make imports of torch, which take seconds, fail in the context, unless torch is imported or may be needed."""
    from hyper_parallel.trainer.data.saved_tokenizer import media_of_processor

    directory = Path(recipe.data.tokenizer or recipe.model.path).expanduser()
    may_need = recipe.model.trust_remote_code or media_of_processor(directory)
    if may_need or not directory.exists() or "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers warns without torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _print(sample: DataSample, max_records: int) -> None:
    from rich.table import Table

    shown = printing_console(soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in sample.rows.items():
        table.add_row(name, text)
    for note in sample.notes:
        table.add_row("note", note)
    if not sample.complete:
        table.add_row("note", _partial_note(sample, max_records))
    printing_console().print(table)
    for source in sample.sources:
        shown.print()
        of = f" of {source.counts.source}" if len(sample.sources) > 1 else ""
        shown.print(f"lengths in tokens{of}")
        _print_lengths(shown, source.lengths)
    coloured = shown.is_terminal and not shown.no_color
    for source in sample.sources:
        for number, example in enumerate(source.examples, 1):
            shown.print()
            _print_example(shown, example, f"example {number}", coloured)
    texts = [text for source in sample.sources for e in source.examples for text in e.texts]
    if any(segment.trained for text in texts for segment in text.segments):
        meaning = "the token that is scored" if sample.stage == "rm" else "tokens with loss"
        shown.print(f"\n{'green' if coloured else '[[...]]'}: {meaning}")


def _partial_note(sample: DataSample, max_records: int) -> str:
    from hyper_parallel.trainer.data_sample import MAX_BYTES
    from hyper_parallel.units import format_bytes

    if sum(count.read for count in sample.counts) + len(sample.sources) <= max_records:
        return f"counts cover the first {format_bytes(MAX_BYTES)} of text only"
    return f"counts cover the first records only; --max-records={max_records * 10} reads more"


def _print_lengths(shown: Console, lengths: LengthHistogram) -> None:
    buckets = lengths.buckets()
    most = max((bucket["documents"] for bucket in buckets), default=1)
    width = len(f"{most:,}")
    for bucket in buckets:
        bar = "#" * -(-bucket["documents"] * _BAR // most)
        ends = f"{bucket['from']:>9,} to {bucket['to']:>9,}"
        shown.print(f"{ends}  {bucket['documents']:>{width},}  {bar}".rstrip())


def _print_example(shown: Console, example: Example, title: str, coloured: bool) -> None:
    from rich.text import Text

    from hyper_parallel.trainer.data_record import highlighted
    from hyper_parallel.units import plural

    for text in example.texts:
        cut = f", the last {text.num_cut:,} cut" if text.num_cut else ""
        head = f"--- {title}, {text.name}: {plural(text.num_tokens, 'token')}{cut}, {example.where}"
        shown.print(Text(head, style="bold"))
        shown.print(highlighted(text.segments, coloured=coloured))
