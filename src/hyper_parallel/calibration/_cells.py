"""Cells of a CSV of runs: numbers, degrees of sharding, formats and recomputation as people write them.

A cell that says nothing (blank, n/a, NaN, -) counts as not stated. What cannot be understood is refused with the
column and the text, or reported as an assumption; nothing is read as something else in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

NUMBERS: Final = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "gated", "experts", "topk", "moe_ffn",
    "shared_experts", "dense_layers", "n_dev", "tp", "cp", "pp", "vpp", "ep", "etp", "dp", "zero", "mbs", "gbs",
)  # fmt: skip
"""Columns that hold whole numbers."""
MEASURED: Final = ("step_s", "tok_s_dev", "mem_gib")
"""Columns that hold what was measured."""
_NOTHING: Final = ("", "nan", "n/a", "na", "#n/a", "-", "--", "none", "null", "?")
_YES_NO: Final = {"true": 1, "yes": 1, "false": 0, "no": 0}
_LARGEST: Final = 10**12
_MOST_LAYERS: Final = 10**4

PRECISIONS: Final = (
    (r"fp4", "nvfp4"), (r"mx-?fp8|fp8[-_ ]?mx", "mxfp8"), (r"fp8|float8|e4m3", "float8_e4m3fn"),
    (r"bf16|bfloat16", "bfloat16"), (r"fp16|float16|half", "float16"), (r"fp32|float32|tf32", "float32"),
)  # fmt: skip
"""Words of the column `precision` and the format of matmul inputs they mean, the first match wins: `bf16 + fp8`
multiplies in 8 bits."""


class RowError(ValueError):
    """A row lacks what a prediction needs or asks for the impossible; the text says which."""


def stated(row: Mapping[str, str], name: str) -> str:
    """Text of a cell that should hold a number; empty when it says nothing."""
    text = (row.get(name) or "").strip()
    return "" if text.lower() in _NOTHING else text


def number(row: Mapping[str, str], name: str) -> float | None:
    """Number of a cell; None when it says nothing.

    Raises:
        RowError: When it holds something that is no finite number.
    """
    text = stated(row, name)
    if not text:
        return None
    # 1,024 is a thousand; 3,5 may be three and a half, and is refused rather than read as 35.
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    try:
        value = float(plain)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RowError(f"`{name}` is not a number: {text}")
    return value


def measured(row: Mapping[str, str], name: str) -> float | None:
    """What was measured; None where the cell says nothing, or nothing that is a positive number (`OOM`)."""
    try:
        value = number(row, name)
    except RowError:
        return None
    return value if value and value > 0.0 else None


def whole_numbers(row: Mapping[str, str]) -> dict[str, int]:
    """All whole numbers that a row states.

    Raises:
        RowError: When a cell holds something else.
    """
    given: dict[str, int] = {}
    for name in NUMBERS:
        text = stated(row, name)
        if not text:
            continue
        if name == "gated" and text.lower() in _YES_NO:
            given[name] = _YES_NO[text.lower()]
            continue
        if name == "zero":
            given[name] = _zero(text)
            continue
        try:
            value = number(row, name)
        except RowError:
            value = None
        if value is None or value < 0 or value != int(value):
            raise RowError(f"`{name}` is not a whole number: {text}")
        if value > (_MOST_LAYERS if name == "layers" else _LARGEST):
            raise RowError(f"`{name}` is far beyond any training run: {text}")
        given[name] = int(value)
    return given


def _zero(text: str) -> int:
    """Stage of the column `zero`: 2, ZeRO-2, stage 2; FSDP shards everything."""
    low = text.lower()
    found = re.fullmatch(r"(?:zero)?[-_ ]?(?:stage)?[-_ ]?([0-3])(?:\.0*)?", low)
    if found:
        return int(found[1])
    if "fsdp" in low:
        return 3
    raise RowError(f"`zero` is {text}; it is 0 to 3")


def matmul_format(row: Mapping[str, str], told: list[str]) -> str:
    """Format of matmul inputs that the column `precision` names."""
    text = (row.get("precision") or "").lower()
    found = next((dtype for pattern, dtype in PRECISIONS if re.search(pattern, text)), None)
    if found is None:
        told.append(f"precision=bf16: {f'`{text}` is not known' if text else 'not stated'}")
    return found or "bfloat16"


def recomputation(row: Mapping[str, str], told: list[str]) -> str | None:
    """none, selective or full; None where the row does not say."""
    text = (row.get("recompute") or "").lower().strip()
    sure = text.rstrip("?")
    found = next((r for r in ("selective", "full") if r in sure), None)
    if found is None and re.match(r"(none|no|off|false|0)\b", sure):
        found = "none"
    if found is None and sure not in ("", "nan", "n/a", "-"):
        told.append(f"recompute: `{sure}` is not known, taken as not stated")
    if found and text != sure:
        told.append(f"recompute={found}: inferred by the source of the row")
    return found
