"""Values of recipes before they are checked: other spellings of formats, sizes with units."""

from __future__ import annotations

import re

from hyper_parallel.errors import abbreviated
from hyper_parallel.units import parse_bytes

_DTYPE_ALIAS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def canonical_dtype(value: object) -> object:
    """The full name of a number format that has a short one."""
    return _DTYPE_ALIAS.get(value, value) if isinstance(value, str) else value


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""A number that YAML 1.1 reads as a text, because it has no point or no sign of its exponent."""


def arguments(value: object) -> object:
    """Return a mapping of arguments in which numbers such as 1e-8 are numbers."""
    if not isinstance(value, dict):
        return value
    return {
        k: float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v
        for k, v in value.items()
    }


_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_npu_fused",
    "adamw_torch_xla",
    "adamw_apex_fused",
    "adamw_hf",
    "fused_adamw",
    "adam_w",
)
"""Names of AdamW, whose update is the same in all of them."""


def canonical_optimizer(value: object) -> object:
    """Return the name of this project for an optimizer that has several."""
    if not isinstance(value, str) or "." in value:
        return value
    name = value.lower()
    return "adamw" if name in _ADAMW else name


def size(value: object) -> int | None:
    """Bytes of a text such as `12GiB`, or of a whole number."""
    if value is None:
        return None
    given = parse_bytes(value) if isinstance(value, str) else value
    # A JSON recipe may say 12e9, which is a float there.
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given < 1 or given % 1:
        shown = value if isinstance(value, str) else abbreviated(value)
        raise ValueError(f"`{shown}` is not a size; write for example 12GiB or 800MB")
    return int(given)


def size_or_auto(value: object) -> object:
    """Bytes, or the word auto."""
    return value if value == "auto" else size(value)


def rate(value: object) -> object:
    """Bytes/s of a text such as `50GB/s`."""
    return size(value.removesuffix("/s") if isinstance(value, str) else value)


def directory(value: object) -> object:
    """A name of a directory, which an empty text is not."""
    if value == "":
        raise ValueError("an empty text names no directory; `null` is none")
    return value
