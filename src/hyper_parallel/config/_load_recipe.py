"""Recipe loader: merges parent file, recipe file and overrides, in this order, and records the origin of each value.

Parent, file and overrides are called layers. A layer is flattened to leaves: `training.lr`, or one glob of
`parallel.rules`. Merging is a dictionary update with one origin per leaf. These rules apply to each layer:

* `parallel: auto` lets the planner choose every degree; degrees of earlier layers are dropped.
* A layer that gives a degree or `parallel.submodels`, but not `parallel.auto`, turns auto off. Degrees that no layer
  gives are then 1.
* `tp` is an alias of `tp_x`.
* `overlap: none`, `overlap: auto` and `parallel.submodels: auto` replace all earlier keys of their section. Later keys
  of the section turn its `auto` off.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel

from hyper_parallel.config._contradictions import check_recipe
from hyper_parallel.config._derived import derive_submodels, derive_unset, derive_warmup, with_values
from hyper_parallel.config._preference_sections import PREFERENCE_STAGES
from hyper_parallel.config._problems import (
    describe,
    dotted,
    field_at,
    is_mapping,
    leaves,
    raise_all,
    section_of,
    validated,
)
from hyper_parallel.config._read import parse_yaml, read_mapping
from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._sections import Overlap, Parallel, Submodels
from hyper_parallel.errors import (
    BadValue,
    CodeRefused,
    Contradiction,
    HyperParallelError,
    RecipeUnreadable,
    RunUnreadable,
    UnknownKey,
    abbreviated,
    printable,
)
from hyper_parallel.hub import name_of_snapshot
from hyper_parallel.near_paths import command_with_data, is_data_file, is_recipe_file, nearest_path, some_recipe
from hyper_parallel.received import LimitExceeded

_LONGEST_HINT: Final = 300
"""Maximum characters of a value repeated in a hint; a longer value would fill the terminal."""
DEGREES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp_x", "tp_y", "ep")
"""Keys of the `parallel` section that are degrees of mesh axes."""

_CHOSEN: Final = (
    "attention_shape", "mlp_shape", "attention_scatter", "gathered_inputs", "cp_kind", "virtual_stages",
    "reshard_after_forward",
)  # fmt: skip
"""Other keys of the `parallel` section that the planner chooses if they are not given."""

_PATHS: Final = (
    "model.path", "data.source", "data.validation", "data.tokenizer", "data.chat_template", "data.media_dir",
    "parallel.schedule_file", "checkpoint.from_dir", "topology",
)  # fmt: skip
"""Keys that may name a file or directory to read; a relative path is looked up in the folder of its file first."""

_WRITTEN: Final = ("output_dir", "data.cache_dir", "offload.flash_dir")
"""Keys that name a directory to write, always relative to the working directory."""

_WORDS: Final = ("local", "python-stdlib", "auto", "none")
"""Values of `_PATHS` keys that are not paths."""

_ALTERNATIVES: Final = (
    (("training", "steps"), ("training", "epochs")),
    (("training", "warmup_steps"), ("training", "warmup_ratio")),
    (("offload", "budget"), ("offload", "max_slowdown")),
)
"""Pairs of alternative keys: a layer that sets one key drops values of the alternative key from earlier layers."""

_OF_STAGES: Final = (("data", "packing"), ("data", "mask_documents"), ("training", "microbatch"))
"""Keys that preference stages derive; a layer that changes to a preference stage drops their earlier values."""

_UNSET: Final = object()
"""Layer value that removes the values of earlier layers."""

_COMMAND_LINE: Final = "command line"
_DEFAULT: Final = "default"

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """Resolved recipe with the origin of each value.

    Attributes:
        recipe: The resolved recipe.
        origins: Origin of every value by dotted key: `default`, `recipe`, `extends FILE`, `command line`, `derived:
            REASON`, or the origin of a layer that `load_recipe` or `with_submodels` was given.
        path: The recipe file.
        aliases: Alias that the user wrote, by dotted key: `parallel.tp` for `parallel.tp_x`.
    """

    recipe: Recipe
    origins: dict[str, str]
    path: Path
    aliases: Mapping[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Return the place of a value or section for errors: `recipe.yaml: training.lr (set by command line)`."""
        below = {origin for name, origin in self.origins.items() if name.startswith(f"{key}.")} - {_DEFAULT}
        section = below.pop() if len(below) == 1 else "recipe" if below else _DEFAULT
        origin = self.origins.get(key, _DEFAULT)
        return _where(self.path, self.aliases.get(key, key), section if origin == _DEFAULT else origin)


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    layers: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
) -> LoadedRecipe:
    """Read a recipe file, apply its parent and the overrides, and check it.

    Relative paths of inputs (model, source, tokenizer, ...) are resolved against the folder of their file if they exist
    there, else against the working directory. Overrides and directories to write, such as `output_dir`, are relative to
    the working directory.

    The recipe replaces values of its parent, and overrides replace values of both, key by key. For a key that cannot be
    null, the override `null` restores the default. In each pair `steps` and `epochs`, `warmup_steps` and
    `warmup_ratio`, `budget` and `max_slowdown`, setting one key drops earlier values of the other. A change to a
    preference stage drops earlier values of packing, document masks and microbatch.

    Args:
        path: YAML file, or JSON if the name ends in `.json`. A top-level `extends: other.yaml`, relative to the file,
            names one parent whose values the file overrides. A parent cannot have a parent.
        overrides: Values as `a.b=c`. `c` is parsed as YAML, except that the value of a text key is literal.
        layers: Layers to merge instead of the file: pairs of origin and values by dotted key. None: read the file.

    Raises:
        RecipeUnreadable: HP103 if a file cannot be read, is a data file, is too large, has a syntax error (with its
            line), or is not a mapping.
        UnknownKey: HP101 with the nearest key, if one is similar.
        BadValue: HP102 for a value that its key does not allow, and for an override in another form than `key=value`.
        Contradiction: HP104 if values contradict each other, or if the parent has a parent.
        DegreesMismatch: HP301 if the degrees do not multiply to `parallel.world_size`.

    If there are several unknown keys and invalid values, or several contradictions, the first error lists the others.
    """
    path = Path(path)
    refuse_data_file(path)
    merged, aliases = _merge_layers(path, overrides, layers)
    origins = {dotted(key): origin for key, (_, origin) in merged.items()}
    named = origins | {alias: origins[key] for key, alias in aliases.items()}
    sources = _Sources(path, named, overrides, is_recipe=layers is None)
    recipe = validated(Recipe, _nest(path, merged), sources.where, sources.as_override, aliases)
    resolved = {**{key: _DEFAULT for key, _ in leaves(Recipe)}, **origins}
    try:
        for derive in (derive_warmup, derive_unset, derive_submodels):
            recipe = derive(recipe, resolved)
    except Contradiction as error:
        error.where = f"{path}: {error.where}"
        raise
    return _checked(LoadedRecipe(recipe, resolved, path, aliases))


def _checked(loaded: LoadedRecipe) -> LoadedRecipe:
    raise_all(check_recipe(loaded.recipe, loaded.where))
    return loaded


@dataclass(frozen=True, slots=True)
class _Sources:
    """Origins of the values of a recipe that is being read, for error messages and hints."""

    path: Path
    origins: Mapping[str, str]  # by dotted key
    overrides: Sequence[str]
    is_recipe: bool = True  # False: the file has the keys of another program

    def origin_of(self, key: str) -> str:
        """Return the origin of a dotted key, or of the nearest section above it with an origin; else `recipe`."""
        while key and key not in self.origins:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.origins.get(key, "recipe")

    def where(self, key: str) -> str:
        return _where(self.path, key, self.origin_of(key))

    def as_override(self, key: str, value: object, written: str) -> str:
        """Return the assignment for a hint: an override if the user set that section by one, else a line of YAML."""
        sections = {key.partition(".")[0], written.partition(".")[0]}
        typed = (
            f"{key}=",
            f"{written}=",
            f"{written}.",
            *(s + sign for s in sections for sign in ".="),
        )
        is_override = not self.is_recipe or self.origin_of(key) == _COMMAND_LINE
        is_override = is_override or any(o.startswith(typed) for o in self.overrides)
        text = _as_yaml(value)
        text = text if len(text) <= _LONGEST_HINT else "VALUE"
        return shlex.quote(f"{key}={text}") if is_override else f"{key}: {text}"


def refuse_data_file(path: Path, command: str | None = None) -> None:
    """Raise RecipeUnreadable (HP103) if a data file is given as the recipe.

    With the name of a command, such as `train`, the hint is a command line: this command with a recipe that reads the
    file as data or, for `plan`, with a recipe only. With `command` None, for callers in Python, it is a sentence.
    """
    if is_data_file(path) and path.is_file():
        hint = "give a recipe that names the file under `data.source`"
        if command == "plan":
            recipe = some_recipe(path.name)
            hint = f"hyper-parallel plan --recipe {shlex.quote(recipe)}" if recipe else "hyper-parallel init"
        elif command is not None:
            hint = command_with_data(command, str(path))
        raise RecipeUnreadable(
            "the file contains data, not a recipe; a recipe names its data under `data.source`",
            where=str(path),
            got=path.suffix,
            allowed="a recipe, YAML or JSON",
            hint=hint,
        )


def missing_run(path: Path, content: str, allowed: str, command: str) -> RunUnreadable:
    """Return the error (HP603) for a path that is not a run directory, or one without `content` such as `checkpoints`.

    `allowed` describes valid paths. `command` is the hint if no similar path exists.
    """
    problem = f"the directory has no {content}"
    if not path.is_dir():
        kind = "is a file" if path.is_file() else "does not exist"
        problem = f"this is not a run directory: it {kind}"
    hint = _run_hint(path) or command
    return RunUnreadable(problem, where=str(path), allowed=allowed, hint=hint)


def _run_hint(path: Path) -> str | None:
    """Return a hint for a path that is not a run directory: a similar directory, or the run of a recipe; else None."""
    if not is_recipe_file(path):
        near = None if path.exists() else nearest_path(str(path), ["runs"], Path.is_dir)
        return None if near is None else f"did you mean `{near}`?"
    try:
        output_dir = load_recipe(path).recipe.output_dir
    except HyperParallelError:
        return None
    if Path(output_dir).is_dir():
        return f"did you mean `{output_dir}`?"
    return f"hyper-parallel train {shlex.quote(str(path))}"


def _as_yaml(value: object) -> str:
    """Return a value as one line of YAML for a hint; a text is returned as it is, without the quotes of YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple, dict)):
        written = list(value) if isinstance(value, tuple) else value
        return yaml.safe_dump(written, default_flow_style=True, sort_keys=False, width=10**9).strip()
    return str(value)


def with_steps(loaded: LoadedRecipe, steps: int) -> LoadedRecipe:
    """Return the recipe with `training.epochs` replaced by `training.steps`, the number of steps of these epochs.

    Raises:
        Contradiction: HP104 if other values contradict `steps`, such as a longer warm-up or decay.
    """
    recipe = with_values(loaded.recipe, "training", {"steps": steps, "epochs": None})
    reason = f"derived: training.epochs={loaded.recipe.training.epochs:g}"
    origins = {**loaded.origins, "training.steps": reason}
    return _checked(replace(loaded, recipe=derive_warmup(recipe, origins), origins=origins))


def with_submodels(loaded: LoadedRecipe, parts: Mapping[str, Mapping[str, Any]], origin: str) -> LoadedRecipe:
    """Return the recipe with `parallel.submodels` set to the planner's choice, and without `parallel.world_size`.

    Args:
        loaded: Recipe with `parallel.submodels: auto`.
        parts: Values of `parallel.submodels` by part: `language`, `vision`, `audio`.
        origin: Origin of the values, for `LoadedRecipe.origins`.

    Raises:
        Contradiction: HP104 if other values of the recipe contradict these values.
    """
    update = {"submodels": Submodels.model_validate(parts), "world_size": None}
    origins = {**loaded.origins, **{f"parallel.{key}": origin for key in update}}
    recipe = derive_submodels(with_values(loaded.recipe, "parallel", update), origins)
    return _checked(replace(loaded, recipe=recipe, origins=origins))


def _where(path: Path, key: str, origin: str) -> str:
    how = {"recipe": "", _DEFAULT: " (default)", _COMMAND_LINE: f" (set by {_COMMAND_LINE})"}
    return f"{path}: {key}{how.get(origin, f' (from {origin})')}"


# --- layers ---------------------------------------------------------------------------------------------------------


def _layers(path: Path, overrides: Sequence[str]) -> Iterator[tuple[str, dict[_Key, Any]]]:
    """Yield pairs of origin and leaves for the parent, if there is one, the file and the command line."""
    data = read_mapping(path, RecipeUnreadable, "recipe")
    parent_name = data.pop("extends", None)
    if parent_name is not None:
        if not isinstance(parent_name, str):
            raise BadValue(
                "`extends` must name one file",
                where=f"{path}: extends",
                got=abbreviated(parent_name),
                allowed="a path relative to the recipe",
                hint="write the path of one file, such as `extends: base.yaml`, or remove `extends`",
            )
        parent_path = path.parent / parent_name
        parent = read_mapping(parent_path, RecipeUnreadable, "parent of the recipe")
        if (grandparent := parent.pop("extends", None)) is not None:
            raise _grandparent_error(parent_path, grandparent)
        layer = dict(_flatten(parent, Recipe))
        yield f"extends {parent_name}", _resolve_paths(parent_path, layer)
    yield "recipe", _resolve_paths(path, dict(_flatten(data, Recipe)))
    yield _COMMAND_LINE, _override_layer(path, overrides)


def _grandparent_error(parent: Path, grandparent: object) -> Contradiction:
    hint = f"remove `extends` from {parent}"
    if isinstance(grandparent, str):
        file = parent.parent / grandparent
        hint = f"copy the values of {file} that {parent} does not set into {parent}, and remove its `extends`"
    return Contradiction(
        "a parent recipe cannot have a parent of its own",
        where=f"{parent}: extends",
        got=abbreviated(grandparent),
        hint=hint,
    )


def _resolve_paths(file: Path, layer: dict[_Key, Any]) -> dict[_Key, Any]:
    """Add the folder of `file` to each relative path of the layer that exists in it; return the changed layer."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):  # mixed sources
            return [{k: resolve(v) if k == "source" else v for k, v in entry.items()} if isinstance(entry, dict)
                    else entry for entry in value]  # fmt: skip
        if not isinstance(value, str) or not value or value in _WORDS:
            return value
        # os.path, because pathlib raises for texts that cannot be paths.
        path = os.path.join(file.parent, value)  # noqa: PTH118
        return path if os.path.exists(path) else value  # noqa: PTH110

    for key in (tuple(name.split(".")) for name in _PATHS):
        if key in layer:
            layer[key] = resolve(layer[key])
    return layer


def _flatten(data: Mapping[str, Any], model: type[BaseModel] | None, prefix: _Key = ()) -> Iterator[tuple[_Key, Any]]:
    """Yield pairs of key path and value for every leaf of a mapping.

    `model` is the section class of the mapping; None: keys are free and every value is a leaf.
    """
    for name, value in data.items():
        key = (*prefix, str(name))
        field = None if model is None else model.model_fields.get(name)
        section = None if field is None else section_of(field.annotation)
        nested = section is not None or (field is not None and is_mapping(field.annotation))
        if nested and isinstance(value, Mapping):
            yield from _flatten(value, section, key)
        elif section is None or value is not None:  # skip an empty section such as `data:`
            yield key, value


def _override_layer(path: Path, overrides: Sequence[str]) -> dict[_Key, Any]:
    layer: dict[_Key, Any] = {}
    for number, override in enumerate(overrides):
        name, equals, text = override.partition("=")
        if not equals or not name or name.startswith("-"):
            raise BadValue(
                f"`{override}` is not an override",
                where=f"{path} (set by {_COMMAND_LINE})",
                got=override,
                allowed="key=value, for example training.lr=1e-4",
                hint=_override_hint(overrides[number : number + 2]),
            )
        key = _split(name)
        value = _override_value(path, name, key, text)
        field = field_at(Recipe, key)
        whole = isinstance(value, Mapping) and field is not None and is_mapping(field.annotation)
        unset = value is None and field is not None and type(None) not in get_args(field.annotation)
        if whole or unset:
            layer = {k: v for k, v in layer.items() if _without_alias(k)[: len(key)] != _without_alias(key)}
            layer[key] = _UNSET
        items = [] if unset else [(key, value)]
        if isinstance(value, Mapping):
            items = [*_flatten(reduce(lambda inner, part: {part: inner}, reversed(key), value), Recipe)]
        for name_of_item, item in items:
            for known in [k for k in layer if _without_alias(k) == _without_alias(name_of_item)]:
                del layer[known]  # a repeated key counts at its last place
            layer[name_of_item] = item
    return layer


def _without_alias(key: _Key) -> _Key:
    """Return a key with the name of the field that it sets: `parallel.tp_x` for `parallel.tp`."""
    if key[:1] != ("parallel",) or len(key) == 1:
        return key
    return (key[0], Parallel.KEY_ALIASES.get(key[1], key[1]), *key[2:])


def _override_hint(words: Sequence[str]) -> str | None:
    """Return the hint for a malformed override; None if no key is similar.

    `words` is the override, such as `key: value` or `--key=value`, and the next word of the command line, if any.
    """
    name, sign, text = re.fullmatch(r"-*([^=:]*)([=:]?)(.*)", words[0], re.DOTALL).groups()  # type: ignore[union-attr]
    known = [key for key, _ in leaves(Recipe)]
    near = difflib.get_close_matches(name.strip(), known, n=1)
    if not near:
        return None
    if not sign and len(words) > 1 and "=" not in words[1]:
        text = words[1]
    return f"write `{shlex.quote(f'{near[0]}={text.strip()}') if text.strip() else f'{near[0]}=VALUE'}`"


_MAPPINGS: Final = {key for key, field in leaves(Recipe) if is_mapping(field.annotation)}
"""Keys whose value is a mapping with free keys."""


def _split(name: str) -> _Key:
    """Return the parts of a dotted key; a key of a mapping such as `parallel.rules` is one part, with its dots."""
    for key in _MAPPINGS:
        if name.startswith(f"{key}."):
            return (*key.split("."), name.removeprefix(f"{key}."))
    return tuple(name.split("."))


def _override_value(path: Path, name: str, key: _Key, text: str) -> Any:
    field = field_at(Recipe, key)
    takes_text = field is not None and field.annotation in (str, str | None, dict[str, str])
    takes_text &= dotted(key) not in _MAPPINGS
    takes_text |= key == ("data", "source") and not text.lstrip().startswith("[")
    if takes_text and text.strip() != "null":
        return text
    try:
        value = parse_yaml(text)
        if spaced := _with_spaces(value, text):
            raise BadValue(
                f"the value of `{name}` has a colon without a space after it, so it is not a mapping",
                where=_where(path, name, _COMMAND_LINE),
                got=abbreviated(text),
                hint=shlex.quote(f"{name}={spaced}"),
            )
        return value
    except (yaml.YAMLError, LimitExceeded) as cause:
        problem, hint = _yaml_problem(name, text, cause)
        where = _where(path, name, _COMMAND_LINE)
        got = text if len(text) <= _LONGEST_HINT else abbreviated(text)
        raise BadValue(problem, where=where, got=got, hint=hint) from cause


def _yaml_problem(name: str, text: str, cause: Exception) -> tuple[str, str | None]:
    """Return (sentence, hint or None) for the text of an override from which `parse_yaml` raised `cause`."""
    if isinstance(cause, LimitExceeded):
        return f"the value of `{name}` is too large: {cause}", None
    reason = cause.problem if isinstance(cause, yaml.MarkedYAMLError) else cause
    if not isinstance(cause, (yaml.scanner.ScannerError, yaml.parser.ParserError)):
        return f"the value of `{name}` cannot be read: {reason}", None
    hint = f"quote the override for the shell: '{name}=VALUE'"
    if any(sign in text for sign in "[]{}'\""):
        hint = f"close all brackets and quotes, and {hint}"
    return f"the value of `{name}` is not YAML: {reason}", hint


def _with_spaces(value: Any, text: str) -> str | None:
    return re.sub(r"([{,]\s*[^\s{}\[\],:]+):(?=\S)", r"\1: ", text) if _has_joined_key(value) else None


def _has_joined_key(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_joined_key, value))
    return isinstance(value, Mapping) and any(
        _has_joined_key(inner) or (inner is None and isinstance(key, str) and ":" in key)
        for key, inner in value.items()
    )


# --- merging --------------------------------------------------------------------------------------------------------


def _merge_layers(
    path: Path, overrides: Sequence[str], layers: Sequence[tuple[str, Mapping[str, Any]]] | None
) -> tuple[dict[_Key, tuple[Any, str]], dict[str, str]]:
    """Merge all layers; arguments as for `load_recipe`.

    Return a dict from key to (value, origin), and a dict from dotted key to the alias that the user wrote for it.
    """
    aliases: dict[str, str] = {}
    merged: dict[_Key, tuple[Any, str]] = {("parallel", "auto"): (True, _DEFAULT)}
    if layers is None:
        sources = list(_layers(path, overrides))
    else:
        sources = [(origin, {_split(key): v for key, v in layer.items()}) for origin, layer in layers]
        sources.append((_COMMAND_LINE, _override_layer(path, overrides)))
    for origin, layer in sources:
        _merge_parallel(path, merged, layer, origin, aliases)
        _merge_word(merged, layer, ("overlap",), Overlap.WORDS)
        _merge_word(merged, layer, ("parallel", "submodels"), Submodels.WORDS)
        _drop_replaced(merged, layer)
        for key, value in layer.items():
            if value is _UNSET:
                _drop(merged, key)
            else:
                merged[key] = (value, origin)
    return merged, {key: alias for key, alias in aliases.items() if _split(key) in merged}


def _drop(merged: dict[_Key, tuple[Any, str]], key: _Key) -> None:
    for known in [k for k in merged if k[: len(key)] == key]:
        del merged[known]


def _drop_replaced(merged: dict[_Key, tuple[Any, str]], layer: Mapping[_Key, Any]) -> None:
    """Drop earlier values that `layer` replaces by an alternative key or, for `_OF_STAGES`, by another stage."""

    def is_set(key: _Key) -> bool:
        return layer.get(key) not in (None, _UNSET)

    for first, second in _ALTERNATIVES:
        for key, alternative in ((first, second), (second, first)):
            if is_set(key) and alternative not in layer:
                _drop(merged, alternative)
    stage = layer.get(("stage",))
    before = merged.get(("stage",), ("pt", _DEFAULT))[0]
    if isinstance(stage, str) and stage in PREFERENCE_STAGES and stage != before:
        for key in _OF_STAGES:
            if key not in layer:
                _drop(merged, key)


def _merge_parallel(
    path: Path, merged: dict[_Key, tuple[Any, str]], layer: dict[_Key, Any], origin: str, aliases: dict[str, str]
) -> None:
    """Normalize section `parallel` of `layer`, the keys of one recipe or command line, before it is merged.

    `parallel: auto` becomes `parallel.auto` and removes earlier degrees from `merged`. Alias keys are renamed and
    recorded in `aliases`. A layer that sets a degree or sub-models turns `parallel.auto` off.
    """
    auto = ("parallel", "auto")
    if layer.get(("parallel",)) == "auto":
        del layer[("parallel",)]
        layer.setdefault(auto, True)
        for degree in DEGREES:
            merged.pop(("parallel", degree), None)
    for key in layer:
        aliases.pop(dotted(key), None)
    for key in [k for k in layer if _without_alias(k) != k]:
        target, value = _without_alias(key), layer.pop(key)
        alias, name = key[1], target[1]
        aliases[dotted(target)] = dotted(key)
        if (named := layer.setdefault(target, value)) != value:
            raise Contradiction(
                f"`parallel.{alias}` and `parallel.{name}` are two names of one degree",
                where=_where(path, f"parallel.{alias}", origin),
                got=f"{alias}={value}, {name}={named}",
                hint=f"remove `parallel.{alias}`",
            )
    submodels = any(key[:2] == ("parallel", "submodels") and layer[key] is not None for key in layer)
    if submodels or any(("parallel", degree) in layer for degree in DEGREES):
        layer.setdefault(auto, False)


def _merge_word(
    merged: dict[_Key, tuple[Any, str]], layer: dict[_Key, Any], section: _Key, words: Sequence[str]
) -> None:
    """Replace a word such as `overlap: none` in `layer` by the section's key `auto`, and drop earlier values."""
    auto = (*section, "auto")
    keys = [key for key in layer if key[: len(section)] == section]
    if (word := layer.get(section)) in words:
        _drop(merged, section)
        earlier = keys[: keys.index(section) + 1]
        for key in earlier:
            del layer[key]
        keys = keys[len(earlier) :]
        if not keys:
            layer[auto] = word == "auto"
    if keys and section not in layer:
        layer.setdefault(auto, False)


def _nest(path: Path, merged: Mapping[_Key, tuple[Any, str]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for *sections, name in sorted(merged, key=len):
        node: Any = tree
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        value, origin = merged[(*sections, name)]
        if isinstance(node, dict):
            node[name] = value
            continue
        # Validation rejects a plain value in place of a section.
        field = field_at(Recipe, sections)
        if field is not None and section_of(field.annotation) is None:
            key = dotted(sections)
            raise UnknownKey(
                f"unknown key `{key}.{name}`: `{key}` is a value and has no keys",
                where=_where(path, f"{key}.{name}", origin),
                allowed=describe(field),
                hint=shlex.quote(f"{key}={_as_yaml(value)}"),
            )
    return tree


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return a copy of a recipe that does not depend on the working directory.

    Inputs that exist and directories to write become absolute paths. Snapshots in the Hub's cache become Hub names.
    """

    def absolute(value: str | None, written: bool) -> str | None:
        if not value or value in _WORDS:
            return value
        if (name := name_of_snapshot(value)) is not None:
            return str(name)  # the cache path differs between machines
        path = os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111
        return path if written or os.path.exists(path) else value  # noqa: PTH110

    for key in (*_PATHS, *_WRITTEN):
        value = attrgetter(key)(recipe)
        if isinstance(value, tuple):  # mixed sources
            parts = (p.model_copy(update={"source": absolute(p.source, False)}) for p in value)
            changed: object = tuple(parts)
        else:
            changed = absolute(value, key in _WRITTEN)
        section, _, name = key.rpartition(".")
        recipe = with_values(recipe, section, {name: changed})
    names = [absolute(n, False) if "/" in n else n for n in recipe.grpo.reward_funcs]
    return with_values(recipe, "grpo", {"reward_funcs": tuple(names)})


def paths_read(recipe: Recipe) -> list[tuple[str, str]]:
    """Return pairs of dotted key and value for each input that a recipe names: a path, a Hub name or a preset."""
    paths: list[tuple[str, str]] = [("grpo.reward_funcs", n) for n in recipe.grpo.reward_funcs]
    for key in _PATHS:
        value = attrgetter(key)(recipe)
        values = [part.source for part in value] if isinstance(value, tuple) else [value]
        paths += [(key, v) for v in values if v and v not in _WORDS]
    return paths


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML: a valid recipe that loads to the same values.

    With `parallel.auto`, degrees and choices that were not given are omitted, because a written value would fix them.
    `steps`, `warmup_steps` and `budget` are omitted if `epochs`, `warmup_ratio` or `max_slowdown` replace them.
    """
    data = recipe.model_dump(mode="json")
    for (section, name), (_, alternative) in _ALTERNATIVES:
        if data[section][alternative] is not None:
            data[section].pop(name)
    if recipe.parallel.auto:
        for name in (*DEGREES, *_CHOSEN):
            if name not in recipe.parallel.model_fields_set:
                del data["parallel"][name]
        if "recompute" not in recipe.training.model_fields_set:
            del data["training"]["recompute"]
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes control characters. PyYAML would write NEL unquoted, but reads it as a line break."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if "\x85" in value or printable(value) != value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


KNOWN_REWARDS = ("exact_match", "prefix_match", "environment")
"""Built-in rewards, named without a path."""


def named_code(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield pairs of dotted key and value for the recipe values that name code for a run to import."""
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", "true"
    if "." in recipe.training.optimizer:
        yield "training.optimizer", recipe.training.optimizer
    for path in recipe.training.callbacks:
        yield "training.callbacks", path
    if recipe.grpo.environment is not None:
        yield "grpo.environment", recipe.grpo.environment
    for name in recipe.grpo.reward_funcs:
        if name not in KNOWN_REWARDS and not os.path.isdir(os.path.expanduser(name)):  # noqa: PTH111, PTH112
            yield "grpo.reward_funcs", name


def refuse_code(loaded: LoadedRecipe) -> None:
    """Raise an error if a recipe names Python code to import; import nothing.

    Raises:
        CodeRefused: HP110 for the first key; the other keys are listed.
    """
    keys = list(named_code(loaded.recipe))
    if not keys:
        return
    key, value = keys[0]
    raise CodeRefused(
        "the recipe names Python code, which --no-code forbids",
        where=loaded.where(key),
        got=f"{key}: {value}",
        allowed="values that name no code",
        hint=f"remove `{key}`, or leave out --no-code once you have read that code",
        others=[f"{key}: {abbreviated(value)}" for key, value in keys[1:]],
    )
