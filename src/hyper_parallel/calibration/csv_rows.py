"""Parsing of a CSV of training runs, one run per row; errors name the column and the text of the cell.

A cell without information, such as a blank, `n/a` or `-`, counts as not stated. Other text in a column of numbers must
be a valid number. In a column of measured values, text such as `OOM` and numbers that are not positive are ignored.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from hyper_parallel.errors import RunsUnreadable
from hyper_parallel.received import Limits, read_text
from hyper_parallel.units import MiB

MEASURED: Final = ("step_s", "tok_s_dev", "mem_gib")
"""Columns of measured values: seconds per step, tokens per second and device, GiB of peak memory."""
SHAPE: Final = ("layers", "hidden", "heads")
"""Columns of a model's shape, required unless a preset has the name of the model."""
_LIMITS: Final = Limits(64 * MiB)
REQUIRED: Final = ("seq", "device", "n_dev")
"""Columns required for a prediction."""
SURPLUS: Final = "more cells than columns"
"""Key under which a row has its cells beyond the last column."""
_BLANKS: Final = ("", "nan", "n/a", "na", "#n/a", "-", "--", "none", "null", "?")
_YES_NO: Final = {"true": "1", "yes": "1", "false": "0", "no": "0"}


class RowError(ValueError):
    """Error for a row that lacks a required value, has an invalid value, or describes an impossible run."""


def stated(text: str | None) -> str:
    """Return the stripped text of a cell; "" if it contains no information, such as `n/a`."""
    text = (text or "").strip()
    return "" if text.lower() in _BLANKS else text


def _number(text: str) -> float | None:
    """Return the finite number in a text, else None; `1,024` is 1024, and `3,5` is None because it is ambiguous."""
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(cell: str, maximum: int = 10**12) -> int | None:
    """Return the whole number in a cell; None if not stated. Raise ValueError unless it is from 0 to `maximum`."""
    text = stated(cell)
    value = _number(text) if text else 0.0
    if value is None or value < 0 or value != int(value):
        raise ValueError(f"is not a whole number: {text}")
    if value > maximum:
        raise ValueError(f"is {text}, more than the maximum of {maximum:,}")
    return int(value) if text else None


def _zero(cell: str) -> int | None:
    """Return the ZeRO stage in a cell such as `2`, `ZeRO-2` or `FSDP` (3); None if not stated, else ValueError."""
    text = stated(cell).lower()
    stage = re.fullmatch(r"(?:zero)?[-_ ]?(?:stage)?[-_ ]?([0-3])(?:\.0*)?", text)
    if text and not stage and "fsdp" not in text:
        raise ValueError(f"is {cell}, not a ZeRO stage from 0 to 3")
    return int(stage[1]) if stage else 3 if text else None


def _peak(cell: str) -> float | None:
    text = stated(cell)
    value = _number(text) if text else 1.0
    if value is None:
        raise ValueError(f"is not a number: {text}")
    if not 1 <= value <= 100_000:
        raise ValueError(f"is {value:g}, not 1 to 100000 TFLOP/s")
    return value if text else None


def _measured(cell: str) -> float | None:
    value = _number(stated(cell))
    return value if value and value > 0.0 else None


Whole = Annotated[int | None, BeforeValidator(_whole)]
Layers = Annotated[int | None, BeforeValidator(lambda cell: _whole(cell, 10**4))]
YesNo = Annotated[int | None, BeforeValidator(lambda cell: _whole(_YES_NO.get(cell.strip().lower(), cell)))]
Measured = Annotated[float | None, BeforeValidator(_measured)]


class RunRow(BaseModel):
    """Row of the CSV with parsed cells; None: not stated. docs/reference/predict_csv.md lists the columns."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = ""
    model: str = ""
    layers: Layers = None
    hidden: Whole = None
    heads: Whole = None
    kv_heads: Whole = None
    head_dim: Whole = None
    ffn: Whole = None
    vocab: Whole = None
    seq: Whole = None
    gated: YesNo = None
    experts: Whole = None
    topk: Whole = None
    moe_ffn: Whole = None
    shared_experts: Whole = None
    dense_layers: Whole = None
    device: str = ""
    peak_tflops: Annotated[float | None, BeforeValidator(_peak)] = None
    n_dev: Whole = None
    tp: Whole = None
    cp: Whole = None
    pp: Whole = None
    vpp: Whole = None
    ep: Whole = None
    etp: Whole = None
    dp: Whole = None
    zero: Annotated[int | None, BeforeValidator(_zero)] = None
    mbs: Whole = None
    gbs: Whole = None
    precision: str = ""
    recompute: str = ""
    step_s: Measured = None
    tok_s_dev: Measured = None
    mem_gib: Measured = None
    stack: str = ""
    source: str = ""
    notes: str = ""
    group: str = ""

    @classmethod
    def of(cls, cells: Mapping[str, str]) -> RunRow:
        """Return the parsed row of a dict from column to text.

        Raises:
            RowError: When a cell in a column of numbers is invalid (see the module docstring), or the row has more
                cells than the header has columns.
        """
        if cells.get(SURPLUS) is not None:
            raise RowError("the row has more cells than the header has columns")
        try:
            return cls.model_validate(cells)
        except ValidationError as error:
            first = error.errors()[0]
            why: Any = first.get("ctx", {}).get("error", first["msg"])
            raise RowError(f"`{first['loc'][0]}` {why}") from None


def read_rows(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return (column names, rows) of a CSV file of runs; a row is a dict from column to text.

    Delimiters are commas, semicolons or tabs. Known column names may have any case.

    Raises:
        RunsUnreadable: HP314 when the file cannot be read, has a column twice, or lacks required columns.
    """
    try:
        text = read_text(Path(path), _LIMITS).removeprefix("\ufeff")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        lines = StringIO(text, newline="")
        reader = csv.DictReader(lines, None, SURPLUS, "", delimiter=delimiter, strict=True)
        columns = [_column(c) for c in reader.fieldnames or ()]
        reader.fieldnames = columns
        rows = [{k: str(v).strip() for k, v in row.items() if k} for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise RunsUnreadable(
            "the CSV file of runs cannot be read",
            where=str(path),
            got=str(error),
            hint="give a readable CSV file in UTF-8 of at most 64 MiB",
        ) from error
    twice = [name for name, count in Counter(columns).items() if name and count > 1]
    if twice:
        raise RunsUnreadable(
            f"the CSV file of runs has the column `{twice[0]}` twice",
            where=str(path),
            got=", ".join(twice),
            hint="rename or remove one of the two columns",
        )
    shape = () if "model" in columns else SHAPE
    if missing := [name for name in (*shape, *REQUIRED) if name not in columns]:
        raise RunsUnreadable(
            f"the CSV file of runs lacks the columns {', '.join(missing)}", where=str(path),
            allowed=", ".join((*SHAPE, *REQUIRED)), hint=f"add the columns {', '.join(missing)}",
        )  # fmt: skip
    return [name for name in columns if name], rows


def _column(text: str) -> str:
    low = text.strip().lower().replace(" ", "_")
    return low if low in RunRow.model_fields else text.strip()
