"""Rules across sections of a recipe: rows of a table, and the driver that turns them into coded errors.

The texts of a `Rule` are templates. Placeholders are recipe keys, such as `{training.epochs:g}`, or names that the
rule's condition returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

from hyper_parallel.config._recipe import Recipe
from hyper_parallel.errors import Contradiction, DegreesMismatch, HyperParallelError


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that rejects recipe values that are each allowed but contradict each other.

    Attributes:
        key: Dotted key at which the error is reported.
        when: Returns a false value if a recipe satisfies the rule. Otherwise returns a mapping from placeholders to
            values, a list of such mappings, one per contradiction, or any other true value.
        problem: Sentence that explains the contradiction.
        got: The contradicting values.
        hint: A change that satisfies the rule.
        allowed: The allowed values, if they can be listed.
    """

    key: str
    when: Callable[[Recipe], object]
    problem: str
    got: str
    hint: str
    allowed: str | None = None

    def errors(self, recipe: Recipe, where: Callable[[str], str]) -> list[HyperParallelError]:
        """Return an error for each contradiction; `where` returns the origin of a dotted key."""
        broken = self.when(recipe)
        each: list[Any] = broken if isinstance(broken, list) else [broken] if broken else []
        return [self._error(recipe, where, names if isinstance(names, Mapping) else {}) for names in each]

    def _error(self, recipe: Recipe, where: Callable[[str], str], names: Mapping[str, Any]) -> HyperParallelError:
        key, problem, got, hint, allowed = (
            None if text is None else _TEXTS.vformat(text, (recipe,), names)
            for text in (self.key, self.problem, self.got, self.hint, self.allowed)
        )
        assert key is not None
        assert problem is not None
        error = DegreesMismatch if key == "parallel.world_size" else Contradiction
        return error(problem, where=where(key), got=got, allowed=allowed, hint=hint)


def offload_off(recipe: Recipe) -> str:
    """Return the overrides that reset the changed keys of `offload`, which disables it: `offload.budget=null`."""
    defaults = {"reorder": "true", "recompute": "true"}
    changed = recipe.offload.model_dump(exclude_defaults=True)
    return " ".join(f"offload.{name}={defaults.get(name, 'null')}" for name in changed)


Rules = Sequence[Rule | tuple[Rule, ...]]
"""Rules in the order of their errors. Of a tuple of rules, only the first broken rule is reported."""


def broken_rules(rules: Rules, recipe: Recipe, where: Callable[[str], str]) -> Iterator[HyperParallelError]:
    """Yield the errors of the rules that a recipe breaks; `where` returns the origin of a dotted key."""
    for row in rules:
        for rule in row if isinstance(row, tuple) else (row,):
            if errors := rule.errors(recipe, where):
                yield from errors
                break


class _Texts(Formatter):
    """Formatter of rule texts; a placeholder is a keyword argument, else an attribute of the recipe, `args[0]`.

    None, True and False are written as in YAML.
    """

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)] if key in kwargs else getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or isinstance(value, bool):
            return {None: "null", True: "true", False: "false"}[value]
        return format(value, format_spec)


_TEXTS: Final = _Texts()
