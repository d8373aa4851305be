"""Constants of units, conversion of bytes, seconds and counts to text and of sizes from text, and integer arithmetic.

Sizes are bytes, times are seconds, rates are per second; a name carries its unit (`_bytes`, `_s`, `_bytes_s`,
`_flops`). Memory is printed in GiB (2**30 bytes); vendors quote link rates in GB (10**9 bytes).
"""

from __future__ import annotations

import math
import re
from typing import Final

KiB: Final = 2**10
MiB: Final = 2**20
GiB: Final = 2**30
TiB: Final = 2**40
GB: Final = 10**9
TFLOP: Final = 10**12

DTYPES: Final = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""Safetensors name and bytes per element of each dtype, by torch's name without `torch.`."""
DTYPE_BYTES: Final = {name: num_bytes for name, (_, num_bytes) in DTYPES.items()}
"""Bytes per element of each dtype."""
FLOAT_DTYPES: Final = {code: name for name, (code, _) in DTYPES.items() if "float" in name}
"""Floating-point dtypes by their safetensors name."""
_DTYPE_ALIAS: Final = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

_SIZE = re.compile(r"^\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def canonical_dtype(value: object) -> object:
    """Return the full name of a dtype for an alias such as `bf16`; other values are unchanged."""
    return _DTYPE_ALIAS.get(value, value) if isinstance(value, str) else value


def parse_bytes(text: str | int) -> int:
    """Return the bytes of a size such as `12GiB` (powers of 1024), `800MB` or `800M` (powers of 1000), or `4096`.

    Fractions of a byte are dropped. An integer is returned unchanged.

    Raises:
        ValueError: The text is not a size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"`{text[:80]}` is not a size; write for example 12GiB or 800MB")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text with a binary prefix: `1.50 GiB`."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as text with three significant digits, such as `12.3 ms`; in whole seconds from 1,000 s."""
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # 0.9999 s is 1 s, not 1e+03 ms: the unit is chosen after rounding to three digits.
        if abs(float(f"{seconds:.3g}")) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def format_count(number: float) -> str:
    """Return a count as text with a decimal prefix: `8.03B`, `1.05M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:g}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, to which an `s` is appended unless the number is 1: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit
