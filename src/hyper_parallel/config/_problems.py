"""Conversion of pydantic validation errors to coded errors with dotted path, origin, nearest key and allowed values.

Used for recipes and for other files with a pydantic model, such as topology files.
"""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hyper_parallel.config._read import read_mapping
from hyper_parallel.config.foreign_keys import FOREIGN_NAMES, ForeignKey
from hyper_parallel.errors import BadValue, HyperParallelError, UnknownKey, abbreviated
from hyper_parallel.serde import flatten

S = TypeVar("S", bound=BaseModel)

_MOST_PROBLEMS: Final = 50
"""Maximum number of pydantic errors converted per file."""
_SHORTEST: Final = 4
"""Minimum number of letters of a word that is matched with the beginning of a longer word."""
_ASSIGNMENT: Final = re.compile(r"([a-z_]+?)[=:]?(\d+)")
"""Key and number in one word, such as `dp2` or `tp=4`."""


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as dotted text: `("tiers", 0, "size")` becomes `tiers[0].size`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the first section class in an annotation, as X in `X | None` or `dict[str, X]`; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (section_of(argument) for argument in typing.get_args(annotation))
    return next((section for section in inner if section is not None), None)


def optional_section(annotation: object) -> type[BaseModel] | None:
    """Return the section class X of an annotation `X` or `X | None`; None for any other annotation."""
    for inner in (annotation, *typing.get_args(annotation)):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            is_union = inner is annotation or type(None) in typing.get_args(annotation)
            return inner if is_union else None
    return None


def field_at(model: type[BaseModel], path: Sequence[str | int]) -> FieldInfo | None:
    """Return the field at a path; None for an unknown key.

    Parts of a path are keys or aliases of sections, list indices, and free keys of mappings. An index or a free key at
    the end gives the field of its list or mapping.
    """
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    parts = iter(path)
    for part in parts:
        if isinstance(part, int):
            continue
        if section is None:
            return None
        field = section.model_fields.get(getattr(section, "KEY_ALIASES", {}).get(part, part))
        if field is None:
            return None
        section = section_of(field.annotation)
        if typing.get_origin(field.annotation) in (dict, Mapping, list, tuple):
            next(parts, None)
    return field


def is_mapping(annotation: object) -> bool:
    """Return whether an annotation is a mapping with free keys."""
    return typing.get_origin(annotation) in (dict, Mapping)


def describe(field: FieldInfo) -> str:
    """Return a description of a field's values, such as `an integer >= 1` or `true or false`."""
    text = _describe(field.annotation)
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{signs[name]} {_number(getattr(item, name))}"
        for item in field.metadata
        for name in signs
        if getattr(item, name, None) is not None
    ]
    if not bounds:
        return text
    head, _, null = text.partition(" or null")
    return f"{head} {' and '.join(bounds)}{' or null' if null or text != head else ''}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe(arguments[0])
    if origin in (typing.Union, types.UnionType):
        words = [_describe(a) for a in arguments if a is not type(None)]
        return " or ".join([*words, "null"] if type(None) in arguments else words)
    if origin is typing.Literal:
        return ", ".join("true" if a is True else str(a) for a in arguments)
    if origin in (list, tuple):
        if origin is tuple and Ellipsis not in arguments:
            return f"a list of {len(arguments)} values, each {_describe(arguments[0])}"
        return f"a list, each {_describe(arguments[0])}"
    if origin is dict:
        return f"a mapping, each value {_describe(arguments[1])}"
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    section_words = getattr(annotation, "WORDS", ())  # such as `auto`, for a whole section
    return simple.get(annotation) or " or ".join([*section_words, "a mapping of keys"])


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys that a section accepts, including aliases."""
    aliases: Mapping[str, str] = getattr(model, "KEY_ALIASES", {})
    return [*model.model_fields, *aliases]


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield pairs of dotted key, after `prefix`, and field; a nested section that may be null is a single key."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaves(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def nearest_key(model: type[BaseModel], path: Sequence[str | int]) -> str | None:
    """Return the dotted key that the user probably meant by the unknown key at `path`; None if no key is similar.

    Order of preference: an equal key of another section; a similar key of the same section; the only key there that
    begins with the unknown key and `_`; the recipe key for a similar key of another section or training program.
    """
    section = _section_at(model, path[:-1]) or model
    word, prefix = str(path[-1])[:80].lower(), dotted(path[:-1])
    everywhere = {key.rpartition(".")[2]: key for key in reversed(list(_all_keys(model)))}
    if word in everywhere:
        return everywhere[word]
    siblings = keys_of(section)
    begun = [key for key in siblings if len(word) >= _SHORTEST and key.startswith(f"{word}_")]
    near = difflib.get_close_matches(word, siblings, n=1, cutoff=0.7)
    if near := near or begun[:1] * (len(begun) == 1):
        return f"{prefix}.{near[0]}" if prefix and section is not model else near[0]
    names: Mapping[str, ForeignKey] = getattr(model, "FOREIGN_KEYS", {})
    everywhere = {name: foreign.key for name, foreign in names.items() if foreign.key} | everywhere
    near = difflib.get_close_matches(word, everywhere, n=1, cutoff=0.8)
    return everywhere[near[0]] if near else None


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys and aliases of all values of a section, including sections that may be null."""
    for name in keys_of(model):
        field = model.model_fields.get(name)
        inner = None if field is None else optional_section(field.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _accepts(field: FieldInfo, value: object) -> bool:
    annotation: Any = field.annotation
    if field.metadata:
        annotation = typing.Annotated.__class_getitem__((annotation, *field.metadata))  # type: ignore[attr-defined]
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _section_at(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    field = field_at(model, path)
    return section_of(field.annotation) if field is not None else None if path else model


def _without_member(model: type[BaseModel], path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    field = field_at(model, path[:-1])
    if field is None or isinstance(path[-1], int) or field_at(model, path) is not None:
        return path
    members = typing.get_args(field.annotation)
    is_union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    has_keys = any(section_of(member) or is_mapping(member) for member in members)
    return path[:-1] if is_union and not has_keys else path


def _near_value(
    model: type[BaseModel], field: FieldInfo, path: Sequence[str | int], value: object
) -> tuple[object] | None:
    """Return the allowed value that an invalid value probably means, in a 1-tuple; None if there is none."""
    foreign_values = getattr(model, "FOREIGN_VALUES", {}).get(
        dotted([part for part in path if isinstance(part, str)]), {}
    )
    text = value[:80] if isinstance(value, str) else abbreviated(value)
    of_list = typing.get_origin(field.annotation) is tuple and not isinstance(path[-1], int)
    words = _allowed_strings(field.annotation)
    if of_list and not isinstance(value, (list, tuple, dict)) and _accepts(field, [value]):
        return ([value],)
    if (equivalent := foreign_values.get(text.lower())) is not None:
        known: object = equivalent
    elif word := _near_word(text, words):
        known = word
    else:
        return None
    if of_list and not isinstance(known, list):
        return ([known],)
    if isinstance(path[-1], int) and isinstance(known, list):
        return (known[0],)
    return (known,)


def _near_word(value: str, words: Sequence[str]) -> str | None:
    """Return the word most likely meant by `value`; None if no word has the same beginning or is similar."""
    lower = {word.lower(): word for word in words}
    text = value.lower()
    if text in lower:
        return lower[text]
    begun = [w for w in lower if re.match(rf"{re.escape(w)}[-_ ]", text)]
    if len(text) >= _SHORTEST:
        begun += [w for w in lower if w.startswith(text)]
    near = begun or difflib.get_close_matches(text, lower, n=1)
    return lower[near[0]] if near else None


def _allowed_strings(annotation: Any) -> list[str]:
    """Return the words that an annotation, or a mapping's values, allow: literals, true, false, words for a section."""
    if typing.get_origin(annotation) is typing.Literal:
        return [word for word in typing.get_args(annotation) if isinstance(word, str)]
    if annotation is bool:
        return ["true", "false"]
    if is_mapping(annotation):
        return _allowed_strings(typing.get_args(annotation)[1])
    if words := getattr(annotation, "WORDS", ()):
        return list(words)
    return [word for inner in typing.get_args(annotation) for word in _allowed_strings(inner)]


def _whole_value(path: Sequence[str | int], value: object, data: object) -> tuple[str, object]:
    """Return the dotted key and value of an override that sets the item at `path` to `value`.

    An override cannot set an item of a list, so the key is that of the list and the value is the changed list.
    """
    index = next((i for i, part in enumerate(path) if isinstance(part, int)), None)
    if index is None:
        return dotted(path), value
    whole = data
    for part in path[:index]:
        whole = whole[part] if isinstance(whole, dict) else None
    if not isinstance(whole, (list, tuple)):
        return dotted(path), value
    changed: Any = copy.deepcopy(list(whole))
    place = changed
    for part in path[index:-1]:
        place = place[part]
    place[path[-1]] = value
    return dotted(path[:index]), changed


def _names_of(field: FieldInfo) -> list[str]:
    for annotation in (field.annotation, *typing.get_args(field.annotation)):
        if is_mapping(annotation):
            return _allowed_strings(typing.get_args(annotation)[0])
    return []


def _assignments(model: type[BaseModel], section: type[BaseModel], key: str, text: str) -> list[tuple[str, int]]:
    """Return pairs of dotted key and number from a text such as `tp2,pp=2`; [] if a word has another form or key."""
    assignments = []
    names: Mapping[str, ForeignKey] = getattr(model, "FOREIGN_KEYS", {})
    for word in re.split(r"[\s,;+x]+", text[:80].lower()):
        parts = _ASSIGNMENT.fullmatch(word)
        if parts is None:
            return []
        name = parts[1]
        foreign = names[name].key if name in names else ""
        if name in keys_of(section):
            assignments.append((f"{key}.{name}", int(parts[2])))
        elif foreign.startswith(f"{key}."):
            assignments.append((foreign, int(parts[2])))
        else:
            return []
    return assignments


def _has_keys(field: FieldInfo) -> bool:
    arguments = typing.get_args(field.annotation)
    mapping = is_mapping(field.annotation) or any(map(is_mapping, arguments))
    return mapping or section_of(field.annotation) is not None


def _is_foreign(model: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Return whether an unknown path is a top-level key that is not similar to any recipe section."""
    return len(path) == 1 and not difflib.get_close_matches(str(path[0])[:80], keys_of(model), n=1, cutoff=0.9)


def _parts(key: str) -> list[str | int]:
    """Return the parts of a dotted key: `data.source[0].weight` gives data, source, 0 and weight."""
    return [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key)]


@dataclass(frozen=True, slots=True)
class _InvalidValues:
    """Converter of the pydantic errors of a section to coded errors. Fields are the arguments of `validated`."""

    model: type[BaseModel]
    where: Callable[[str], str]
    as_override: Callable[[str, object, str], str]
    data: object
    aliases: Mapping[str, str]

    def problems(self, error: ValidationError) -> list[HyperParallelError]:
        """Return the coded errors for the first `_MOST_PROBLEMS` items of a validation error, in pydantic's order."""
        items: dict[object, ErrorDetails] = {}
        details = error.errors(include_url=False, include_context=False)[:_MOST_PROBLEMS]
        for number, item in enumerate(details):
            path = _without_member(self.model, item["loc"])
            # Each member of a union fails with a separate item; keep the first.
            items.setdefault(number if path == item["loc"] else path, item | {"loc": path})
        return [problem for item in items.values() for problem in self._item_problems(item)]

    def _item_problems(self, item: ErrorDetails) -> list[HyperParallelError]:
        """Return one coded error for a pydantic error, or one per leaf for a mapping at a key without keys."""
        # A tagged union puts its tag into the path, in brackets.
        path = tuple(part for part in item["loc"] if not str(part).startswith("["))
        value = item["input"]
        field = field_at(self.model, path)
        key = self.aliases.get(dotted(path), dotted(path))
        allowed = None if field is None else describe(field)
        is_extra = item["type"] == "extra_forbidden"
        if (
            isinstance(value, dict)
            and value
            and (
                field is None and _is_foreign(self.model, path)
                if is_extra
                else item["type"] != "missing" and field is not None and not _has_keys(field)
            )
        ):
            leaves = flatten(value)
            return [self._unknown_key((*path, *key.split(".")), leaf) for key, leaf in leaves]
        problem: HyperParallelError
        if is_extra:
            problem = self._unknown_key(path, value)
        elif item["type"] == "missing":
            section = None if field is None else optional_section(field.annotation)
            main_key = f"{key}.{getattr(section, 'MAIN_KEY', '')}".rstrip(".")
            problem = BadValue(
                f"required key `{key}` is missing",
                got="nothing",
                allowed=allowed,
                hint=f"give `{main_key}` a value",
            )
        elif item["loc"][-1:] == ("[key]",) and field is not None:
            problem = self._unknown_name(field, path)
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            hint = None if field is None else self._default_hint(field, key)
            problem = BadValue(f"`{key}`: {message}" if key else message, got=_short(value), hint=hint)
        else:
            problem = BadValue(
                f"`{key}` has a value that is not allowed",
                got=_short(value),
                allowed=allowed or item["msg"],
                hint=self._value_hint(path, value),
            )
        problem.where = self.where(key)
        return [problem]

    def _unknown_key(self, path: tuple[str | int, ...], value: object) -> UnknownKey:
        key, section = dotted(path), _section_at(self.model, path[:-1])
        hint = self._foreign_hint(key, value)
        if hint is None and (near := nearest_key(self.model, path)):
            field = self._field(near)
            is_moved = optional_section(field.annotation) is None and path[-1] == _parts(near)[-1]
            if is_moved or _accepts(field, value):
                hint = self._key_hint(near, value, key)
        return UnknownKey(
            f"unknown key `{key}`",
            where=self.where(key),
            allowed=None if section is None else sorted(keys_of(section)),
            hint=hint,
        )

    def _unknown_name(self, field: FieldInfo, path: Sequence[str | int]) -> BadValue:
        *sections, name = path
        key, words = dotted(sections), _names_of(field)
        mapping: Any = self.data
        for part in sections:
            mapping = mapping[part]
        own = mapping[name]
        shown, rest = f"{name!s:.80}", {k: v for k, v in mapping.items() if k != name}
        corrected = None
        if isinstance(own, str) and own in words:
            corrected = {**rest, own: name}
        elif near := FOREIGN_NAMES.get(str(name).lower()) or _near_word(str(name), words):
            corrected = {**rest, near: own} if near in words else None
        return BadValue(
            f"`{key}` has no entry `{shown}`: "
            "write an allowed name before the colon, and the name used in your records after it",
            got=f"{shown}: {own!s:.80}",
            allowed=words,
            hint=None if corrected is None else self._item_hint(sections, corrected),
        )

    def _value_hint(self, path: Sequence[str | int], value: object) -> str | None:
        """Return a hint with a similar value, a list, another key or, if none of these fits, the default; else None."""
        field, key = field_at(self.model, path), self.aliases.get(dotted(path), dotted(path))
        if field is None:
            return None
        near = _near_value(self.model, field, path, value)
        if near is None:
            hint = self._main_key_hint(field, key, value)
            return hint or self._default_hint(field, key)
        return self._item_hint(path, near[0])

    def _item_hint(self, path: Sequence[str | int], value: object) -> str:
        key, whole = _whole_value(path, value, self.data)
        return f"write `{self.as_override(key, whole, key)}`"

    def _default_hint(self, field: FieldInfo, key: str) -> str | None:
        """Return a hint with the default; None for a required key, one in a list, or a default that is a collection."""
        plain = field.default is None or isinstance(field.default, (bool, int, float, str))
        if "[" in key or not plain or not _accepts(field, field.default):
            return None
        return f"write `{self.as_override(key, field.default, key)}`, the default"

    def _main_key_hint(self, field: FieldInfo, key: str, value: object) -> str | None:
        section = optional_section(field.annotation)
        if section is None:
            return None
        if isinstance(value, str) and (degrees := _assignments(self.model, section, key, value)):
            return " ".join(["write", *(f"`{self.as_override(k, n, key)}`" for k, n in degrees)])
        main = getattr(section, "MAIN_KEY", "")
        if not main:
            return None
        if value is True:
            default = {main: section.model_fields[main].default}
            return f"write `{self.as_override(key, default, key)}`"
        if _accepts(section.model_fields[main], value):
            return f"write `{self.as_override(f'{key}.{main}', value, key)}`"
        return None

    def _foreign_hint(self, key: str, value: object) -> str | None:
        names: Mapping[str, ForeignKey] = getattr(self.model, "FOREIGN_KEYS", {})
        written = key.lower().replace("-", "_").split(".")
        parts = [part for part in written if not part.isdigit()] or written
        # Two parts first, because `optimizer.name` differs from `model.name`; then `lora.rank` as `lora_rank`.
        spellings = (".".join(parts[-2:]), "_".join(parts[-2:]), parts[-1])
        foreign = next((names[name] for name in spellings if name in names), None)
        if foreign is None or foreign.advice:
            return None if foreign is None else foreign.advice
        with suppress(TypeError):  # unhashable value
            value = foreign.values.get(value, value)
        return self._key_hint(foreign.key, value, key)

    def _key_hint(self, key: str, value: object, written: str) -> str:
        """Return the hint to write `key` in place of `written`, with the value if `key` accepts it."""
        field = self._field(key)
        if _accepts(field, value):
            return f"write `{self.as_override(key, value, written)}`"
        return f"the key is `{key}`: {describe(field)}"

    def _field(self, key: str) -> FieldInfo:
        field = field_at(self.model, _parts(key))
        assert field is not None, key
        return field


def validated(
    model: type[S],
    data: object,
    where: Callable[[str], str],
    as_override: Callable[[str, object, str], str],
    aliases: Mapping[str, str] = types.MappingProxyType({}),
) -> S:
    """Return `data` as a section of class `model`; if there are several problems, the first error lists the others.

    Args:
        model: Class of the section.
        data: Values of the section.
        where: Function from a dotted key to its origin, for errors: `recipe.yaml: training.lr (set by command line)`.
        as_override: Function for hints: `as_override(key, value, written)` returns the assignment in the user's syntax;
            `written` is the key that the user wrote.
        aliases: Alias that the user wrote, by dotted key, for errors.

    Raises:
        UnknownKey: HP101 for a key that the section does not have.
        BadValue: HP102 for a value that the section does not allow.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise_all(_InvalidValues(model, where, as_override, data, aliases).problems(error))
        raise


def read_section(path: Path, model: type[S], error: type[HyperParallelError], file_type: str) -> S:
    """Read a YAML or JSON file as a section of class `model`; errors are those of `read_mapping` and `validated`."""
    return validated(
        model,
        read_mapping(path, error, file_type),
        lambda key: f"{path}: {key}" if key else str(path),
        lambda key, value, _: f"{key.rpartition('.')[2]}: {value}",
    )


def _short(value: object) -> str:
    return "nothing" if value is None else abbreviated(value)


def raise_all(errors: Sequence[HyperParallelError]) -> None:
    """Raise the first error, which lists the other errors; return if there are no errors."""
    if not errors:
        return
    first = errors[0]
    first.others = tuple(
        f"error[{e.code}]: {e.what}"
        + (f" (got {e.got})" if e.got is not None else "")
        + (f"; allowed: {e.allowed}" if isinstance(e.allowed, str) else "")
        + (f"; {e.hint}" if e.hint is not None else "")
        for e in errors[1:]
    )
    raise first from None
