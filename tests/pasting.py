"""Hints of errors that tests provoke through a recipe or a command line, pasted into the same recipe or command.

A hint is pasted as soon as its error is raised, while the files of the test exist. The same error with the same text
shows that the hint leads nowhere. Reading a recipe costs milliseconds and is always done; commands that plan, read data
or check a run are run with `--paste-commands` only. Commands that write files are not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

import hyper_parallel.config
from hyper_parallel.errors import HyperParallelError
from tests.hints import corrected_recipe, pasted, read_only

_RUN: Final = ("train", "data", "plan", "config", "predict")
"""Commands that write nothing; `train` is run as a dry run."""
_MOST_CORRECTIONS: Final = 20
"""Hints of a test, from its first one, that are looked at for a line of a recipe without `--paste-commands`."""


class Pasting:
    """Hooks that paste hints, and their results.

    Attributes:
        runs: Run commands other than those that read a recipe.
        problems: Hints of the running test that lead back to their error.
        num_pasted: Number of pasted hints.
        unpasted: Hints that are not pasted, by reason.
    """

    def __init__(self) -> None:
        self.runs = False
        self.problems: list[str] = []
        self.num_pasted = 0
        self.unpasted: dict[str, Counter[str]] = {}
        self._num_hints = 0
        self._seen: HyperParallelError | None = None
        self._load, self._invoke = hyper_parallel.config.load_recipe, CliRunner.invoke

    def install(self) -> None:
        """Paste the hints of recipes that are read and of commands that are run from now on."""

        def load(
            path: str | Path,
            overrides: Sequence[str] = (),
            layers: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
        ) -> Any:
            try:
                return self._load(path, overrides, layers)
            except HyperParallelError as error:
                if layers is None:
                    self.paste(["config", "show", str(path), *overrides], error)
                raise

        def invoke(runner: Any, app: Any, args: Any = None, **options: Any) -> Any:
            try:
                result = self._invoke(runner, app, args, **options)
            except HyperParallelError as error:
                self.paste(list(args or ()), error)
                raise
            if isinstance(result.exception, HyperParallelError):
                self.paste(list(args or ()), result.exception)
            return result

        hyper_parallel.config.load_recipe = load
        CliRunner.invoke = invoke  # type: ignore[method-assign]

    def begin_test(self) -> None:
        """Forget the problems of the former test."""
        self.problems.clear()
        self._num_hints = 0

    def paste(self, words: list[str], error: HyperParallelError, head: str | None = None) -> None:
        """Paste the hint of an error that a command raised, or printed with the text `head` before the hint."""
        if error is self._seen or not error.hint:
            return
        self._seen = error
        self._num_hints += 1
        looks = self.runs or self._num_hints <= _MOST_CORRECTIONS  # at the recipe, which is parsed
        if looks and (correction := corrected_recipe(error)) is not None:
            return self._paste_into_recipe(words, error, *correction)
        try:
            again = pasted(words, error)
        except (AssertionError, ValueError, IndexError):
            return self._leave("it is a sentence, or corrects a word of a file", error)
        if again is None:
            return self._leave("it is a command of another program", error)
        if again[0] == "train" and "--dry-run" not in again:
            again = [*again, "--dry-run"]
        if again == words:
            return self._leave("it corrects a word of a file", error)
        if not self.runs and again[0] in ("train", "data"):
            again = read_only(again)
        reads = again[:2] == ["config", "show"]
        if again[0] not in _RUN or not (reads or self.runs):
            return self._leave(f"`{again[0]}` writes files or takes long", error)
        self.num_pasted += 1
        second = self._outcome(again)
        if second is not None and _problem(second.render()) == _problem(head or error.render()):
            self.problems.append(
                f"hint: {error.hint}: pasted as `{' '.join(again)}`, the same error comes back:\n{second.render()}"
            )

    def _paste_into_recipe(self, words: list[str], error: HyperParallelError, path: Path, text: str) -> None:
        """Load a copy of a recipe with the line of a hint in it, with the overrides of the command."""
        self.num_pasted += 1
        copy = path.with_name(f"pasted_{path.name}")
        copy.write_text(text)
        second = self._outcome(["config", "show", str(copy), *(w for w in words if "=" in w)])
        copy.unlink()
        if second is not None and _problem(second.render()).replace(copy.name, path.name) == _problem(error.render()):
            self.problems.append(f"hint: {error.hint}: written into {path}, the same error comes back")

    def _leave(self, reason: str, error: HyperParallelError) -> None:
        self.unpasted.setdefault(reason, Counter())[f"{error.code} {error.hint}"] += 1

    def _outcome(self, words: list[str]) -> HyperParallelError | None:
        from hyper_parallel.cli import application

        if words[:2] == ["config", "show"]:
            path, *overrides = [word for word in words[2:] if not word.startswith("--")]
            try:
                self._load(path, overrides)
            except HyperParallelError as error:
                return error
            return None
        result = self._invoke(CliRunner(), application(words[0]), words)
        return result.exception if isinstance(result.exception, HyperParallelError) else None


def _problem(printed: str) -> str:
    """Return the printed text of an error without its hint and the allowed values."""
    return re.sub(r"(?: {6}|  )allowed: .*", "", printed.partition("\n\nhint: ")[0]).rstrip()
