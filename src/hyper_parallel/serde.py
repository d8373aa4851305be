"""JSON in and out for the frozen dataclasses of the core.

`encode` turns a dataclass into plain JSON values; `decode` builds the dataclass back and refuses unknown keys and
wrong types with the dotted path of the value. Supported field types are the ones the core uses: dataclasses, str,
int, float, bool, None, tuple[T, ...], fixed tuples, dict[str, T], Literal and unions with None.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class DecodeError(ValueError):
    """A JSON value does not fit the type it is read into."""


def encode(value: Any) -> Any:
    """Plain JSON values of a dataclass; fields that hold their default are kept, so a file is complete."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    return value


def decode(cls: type[T], data: Any, path: str = "$") -> T:
    """Build `cls` from JSON values.

    Raises:
        DecodeError: With the dotted path of the first value that does not fit.
    """
    return typing.cast(T, _decode(cls, data, path))


def _decode(tp: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(tp)
    if tp is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(tp), data, path)
    if origin is typing.Literal:
        if data not in typing.get_args(tp):
            raise DecodeError(f"{path}: expected one of {typing.get_args(tp)}, got {data!r}")
        return data
    if origin is tuple:
        return _decode_tuple(typing.get_args(tp), data, path)
    if origin is dict:
        key_type, item_type = typing.get_args(tp)
        if not isinstance(data, dict):
            raise DecodeError(f"{path}: expected a mapping, got {type(data).__name__}")
        return {
            _decode(key_type, k, path): _decode(item_type, v, f"{path}.{k}")
            for k, v in data.items()
        }
    if dataclasses.is_dataclass(tp):
        return _decode_dataclass(tp, data, path)
    if tp is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if tp is type(None) and data is None:
        return None
    if not isinstance(data, tp) or (isinstance(data, bool) and tp is not bool):
        raise DecodeError(f"{path}: expected {tp.__name__}, got {data!r}")
    return data


def _decode_union(options: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, data, path)
        except DecodeError as error:
            errors.append(str(error))
    raise DecodeError("; ".join(errors) or f"{path}: got {data!r}")


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise DecodeError(f"{path}: expected a list, got {data!r}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], v, f"{path}[{i}]") for i, v in enumerate(data))
    if len(args) != len(data):
        raise DecodeError(f"{path}: expected {len(args)} values, got {len(data)}")
    return tuple(
        _decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True))
    )


def _decode_dataclass(tp: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise DecodeError(f"{path}: expected a mapping for {tp.__name__}, got {data!r}")
    hints = typing.get_type_hints(tp)
    fields = {f.name: f for f in dataclasses.fields(tp) if f.init}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise DecodeError(f"{path}.{unknown[0]}: unknown key; known keys: {', '.join(fields)}")
    kwargs = {}
    for name, field in fields.items():
        if name in data:
            kwargs[name] = _decode(hints[name], data[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{path}.{name}: missing")
    return tp(**kwargs)
