"""Load a recipe: parent, file, overrides, in this order, each value with its origin.

A recipe is flattened to leaves (`training.lr`, `parallel.rules` per glob), so merging is one dictionary update and an
origin is one label per leaf. `parallel` needs three rules of its own, applied to each layer (parent, file, overrides):

* the word `auto` for the whole section lets the planner choose every degree: degrees of earlier layers are dropped;
* a layer that gives a degree and does not give `parallel.auto` turns auto off, degrees not given are 1;
* `tp` is another name of `tp_x`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from hyper_parallel.config._contradictions import cross_section
from hyper_parallel.config._problems import (
    dotted,
    field_at,
    is_mapping,
    leaves,
    problems,
    raise_all,
    section_of,
)
from hyper_parallel.config._read import parse_scalar, read_mapping
from hyper_parallel.config._sections import Parallel, Recipe
from hyper_parallel.errors import BadValue, Contradiction, RecipeUnreadable

DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")
"""Keys of the `parallel` section that are degrees of mesh axes."""

_CHOSEN: Final = (
    "attention_shape", "mlp_shape", "attention_scatter", "gathered_inputs", "cp_kind", "virtual_stages",
    "reshard_after_forward",
)  # fmt: skip
"""Keys of the `parallel` section besides the degrees that the planner chooses where nobody gives them."""

_COMMAND_LINE: Final = "command line"
_DEFAULT: Final = "default"

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe and where each of its values came from.

    Attributes:
        recipe: The resolved recipe.
        origins: Dotted key of every value to `default`, `recipe`, `extends FILE`, `command line` or `derived: why`.
        path: The recipe file.
    """

    recipe: Recipe
    origins: dict[str, str]
    path: Path

    def where(self, key: str) -> str:
        """Origin of a value for error messages: `recipe.yaml: training.lr (set by command line)`."""
        return _where(self.path, key, self.origins.get(key, _DEFAULT))


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any
    origin: str


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe file, apply its parent and the overrides, and check it.

    Args:
        path: YAML file, or JSON when the name ends in `.json`. A top-level `extends: other.yaml`, relative to the file,
            names one parent whose values the file overrides; a parent has no parent.
        overrides: Values as `a.b=c`, `c` read as YAML; the value of a text key is taken literally.

    Raises:
        RecipeUnreadable: HP103 when a file is missing, has a syntax error (with its line), or is not a mapping.
        UnknownKey: HP101 with the nearest key. BadValue: HP102 with what is allowed.
        Contradiction: HP104, DegreesMismatch: HP301 when values of several sections cannot hold together.
            When there are several problems, the first is raised and lists the others.
    """
    path = Path(path)
    layers = [*_file_layers(path), _override_layer(path, overrides)]
    merged: dict[_Key, _Leaf] = {("parallel", "auto"): _Leaf(True, _DEFAULT)}
    for layer in layers:
        _merge_parallel(path, merged, layer)
        merged.update(layer)
    origins = {key: leaf.origin for key, leaf in merged.items()}

    def where(key: str) -> str:
        return _where(path, key, _origin(origins, key))

    def pasteable(key: str, value: object) -> str:
        by_command_line = _origin(origins, key) == _COMMAND_LINE or _is_override(key, overrides)
        text = "null" if value is None else str(value)
        return f"{key}={text}" if by_command_line else f"{key}: {text}"

    try:
        recipe = Recipe.model_validate(_nest(merged))
    except ValidationError as error:
        raise_all(problems(error, Recipe, where, pasteable))
        raise
    known = {key: _DEFAULT for key, _ in leaves(Recipe)}
    resolved = {**known, **{dotted(key): origin for key, origin in origins.items()}}
    recipe = _derive_warmup(recipe, resolved)
    raise_all(cross_section(recipe, where))
    return LoadedRecipe(recipe, resolved, path)


def _where(path: Path, key: str, origin: str) -> str:
    if origin == "recipe":
        return f"{path}: {key}"
    how = f"set by {origin}" if origin == _COMMAND_LINE else f"from {origin}"
    return f"{path}: {key} ({'default' if origin == _DEFAULT else how})"


def _origin(origins: Mapping[_Key, str], key: str) -> str:
    """Origin of a dotted key, or of the value that holds it."""
    by_name = {dotted(k): origin for k, origin in origins.items()}
    while key:
        if key in by_name:
            return by_name[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return "recipe"


def _is_override(key: str, overrides: Sequence[str]) -> bool:
    section = key.partition(".")[0]
    return any(o.startswith((f"{key}=", f"{section}.")) for o in overrides)


# --- layers ---------------------------------------------------------------------------------------------------------


def _file_layers(path: Path) -> Iterator[dict[_Key, _Leaf]]:
    data = read_mapping(path, RecipeUnreadable, "recipe")
    parent_name = data.pop("extends", None)
    if parent_name is not None:
        if not isinstance(parent_name, str):
            raise BadValue(
                "`extends` names one file",
                where=f"{path}: extends",
                got=repr(parent_name),
                allowed="a path relative to the recipe",
            )
        parent = read_mapping(path.parent / parent_name, RecipeUnreadable, "parent of the recipe")
        if "extends" in parent:
            raise Contradiction(
                "a parent recipe cannot have a parent of its own",
                where=f"{path.parent / parent_name}: extends",
                got=parent["extends"],
                hint=f"write `extends: {parent['extends']}` in {path} or copy the values",
            )
        yield _flatten(parent, f"extends {parent_name}")
    yield _flatten(data, "recipe")


def _flatten(data: Mapping[str, Any], origin: str) -> dict[_Key, _Leaf]:
    return {key: _Leaf(value, origin) for key, value in _leaves_of(data, Recipe, ())}


def _leaves_of(
    data: Mapping[str, Any], model: type[BaseModel] | None, prefix: _Key
) -> Iterator[tuple[_Key, Any]]:
    for name, value in data.items():
        key = (*prefix, str(name))
        field = None if model is None else model.model_fields.get(name)
        section = None if field is None else section_of(field.annotation)
        if section is not None and isinstance(value, Mapping):
            yield from _leaves_of(value, section, key)
        elif field is not None and is_mapping(field.annotation) and isinstance(value, Mapping):
            yield from (((*key, str(k)), v) for k, v in value.items())
        elif section is not None and value is None:
            continue  # `data:` with nothing below it gives nothing
        else:
            yield key, value


def _override_layer(path: Path, overrides: Sequence[str]) -> dict[_Key, _Leaf]:
    layer: dict[_Key, _Leaf] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            near = difflib.get_close_matches(name, [key for key, _ in leaves(Recipe)], n=1)
            raise BadValue(
                f"`{override}` is not an override",
                where=f"{path} (set by {_COMMAND_LINE})",
                got=override,
                allowed="key=value, for example training.lr=1e-4",
                hint=f"write `{near[0]}=VALUE`" if near else None,
            )
        key = _split(name)
        value = _override_value(path, name, key, text)
        if isinstance(value, Mapping):
            nested: Any = value
            for part in reversed(key):
                nested = {part: nested}
            layer.update(_flatten(nested, _COMMAND_LINE))
        else:
            layer[key] = _Leaf(value, _COMMAND_LINE)
    return layer


def _split(name: str) -> _Key:
    """Parts of a dotted name; the keys of a mapping such as `parallel.rules` may hold dots themselves."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        field = field_at(Recipe, parts[:i])
        if field is not None and is_mapping(field.annotation):
            return (*parts[:i], ".".join(parts[i:]))
    return tuple(parts)


def _override_value(path: Path, name: str, key: _Key, text: str) -> Any:
    field = field_at(Recipe, key)
    takes_text = field is not None and field.annotation in (str, str | None, dict[str, str])
    if takes_text and text.strip() != "null":
        return text
    try:
        return parse_scalar(text)
    except yaml.YAMLError as cause:
        raise BadValue(
            f"the value of `{name}` is not YAML",
            where=f"{path}: {name} (set by {_COMMAND_LINE})",
            got=text,
            hint=f"quote it for the shell: '{name}=\"{text}\"'",
        ) from cause


# --- merging --------------------------------------------------------------------------------------------------------


def _merge_parallel(path: Path, merged: dict[_Key, _Leaf], layer: dict[_Key, _Leaf]) -> None:
    """Apply the rules of the `parallel` section to a layer before it is merged."""
    whole = layer.pop(("parallel",), None)
    if whole is not None and whole.value == "auto":
        for degree in DEGREES:
            merged.pop(("parallel", degree), None)
        layer.setdefault(("parallel", "auto"), _Leaf(True, whole.origin))
    elif whole is not None:
        layer[("parallel",)] = whole
    for alias, name in Parallel.KEY_ALIASES.items():
        leaf = layer.pop(("parallel", alias), None)
        if leaf is None:
            continue
        twin = layer.get(("parallel", name))
        if twin is not None and twin.value != leaf.value:
            raise Contradiction(
                f"`parallel.{alias}` and `parallel.{name}` are two names of one degree",
                where=_where(path, f"parallel.{alias}", leaf.origin),
                got=f"{alias}={leaf.value}, {name}={twin.value}",
                hint=f"remove `parallel.{alias}`",
            )
        layer[("parallel", name)] = leaf
    given = [layer[("parallel", d)] for d in DEGREES if ("parallel", d) in layer]
    if given and ("parallel", "auto") not in layer:
        layer[("parallel", "auto")] = _Leaf(False, given[0].origin)


def _nest(merged: Mapping[_Key, _Leaf]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, leaf in sorted(merged.items(), key=lambda item: len(item[0])):
        node = tree
        for part in key[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(
                child, dict
            ):  # a plain value where a section belongs: validation refuses it
                break
            node = child
        else:
            node[key[-1]] = leaf.value
    return tree


def _derive_warmup(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """Shorten the default warm-up of a very short run; a warm-up that was given is never changed."""
    training = recipe.training
    if "warmup_steps" in training.model_fields_set or training.warmup_steps <= training.steps:
        return recipe
    origins["training.warmup_steps"] = (
        f"derived: a tenth of training.steps, because the default is {training.warmup_steps}"
    )
    shorter = training.model_copy(update={"warmup_steps": training.steps // 10})
    return recipe.model_copy(update={"training": shorter})


def recipe_to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML, itself a valid recipe that loads to the same values.

    Under `parallel.auto` the degrees and choices that were not given stay out, because a written one is fixed.
    """
    data = recipe.model_dump(mode="json")
    if recipe.parallel.auto:
        for name in (*DEGREES, *_CHOSEN):
            if name not in recipe.parallel.model_fields_set:
                del data["parallel"][name]
        if "recompute" not in recipe.training.model_fields_set:
            del data["training"]["recompute"]
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes the control character NEL escaped, which PyYAML writes as it is and reads as a line break."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if "\x85" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
