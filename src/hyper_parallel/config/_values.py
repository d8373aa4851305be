"""Normalization of recipe values before validation, and upper bounds of counts, which keep planning cheap."""

from __future__ import annotations

import re
from typing import Final

from hyper_parallel.errors import abbreviated
from hyper_parallel.units import parse_bytes

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Number that YAML 1.1 reads as a text, because it lacks a decimal point or the sign of the exponent."""


def arguments(value: object) -> object:
    """Convert the texts of a dict that are numbers, such as `1e-8`; a value that is not a dict is unchanged."""
    if not isinstance(value, dict):
        return value
    return {k: float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v for k, v in value.items()}


_ADAMW = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused", "adamw_torch_xla", "adamw_apex_fused", "adamw_hf",
    "fused_adamw", "adam_w",
)  # fmt: skip
"""Names of AdamW implementations, all with the same update."""


def canonical_optimizer(value: object) -> object:
    """Return an optimizer's name in lower case, or `adamw` for a name in `_ADAMW`; dotted paths are unchanged."""
    if not isinstance(value, str) or "." in value:
        return value
    name = value.lower()
    return "adamw" if name in _ADAMW else name


def size(value: object) -> int | None:
    """Return the bytes of a text such as `12GiB` or a whole number; None for None.

    Raise ValueError for any other value, and for less than one byte.
    """
    if value is None:
        return None
    number = parse_bytes(value) if isinstance(value, str) else value
    # JSON reads 12e9 as a float.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 1 or number % 1:
        shown = value if isinstance(value, str) else abbreviated(value)
        raise ValueError(f"`{shown}` is not a size; write for example 12GiB or 800MB")
    return int(number)


def size_or_auto(value: object) -> object:
    """Return the word `auto` unchanged, and the bytes of any other value as `size`."""
    return value if value == "auto" else size(value)


def rate(value: object) -> object:
    """Return the bytes/s of a text such as `50GB/s`; other values and errors as for `size`."""
    try:
        return size(value.removesuffix("/s") if isinstance(value, str) else value)
    except ValueError:
        shown = value if isinstance(value, str) else abbreviated(value)
        raise ValueError(f"`{shown:.80}` is not a rate; write for example 50GB/s") from None


def directory(value: object) -> object:
    """Return the value unchanged; raise ValueError for an empty text."""
    if value == "":
        raise ValueError("an empty text is not a directory; write `null` for no directory")
    return value


MOST_RANKS: Final = 2**20
"""Maximum ranks of a run, and maximum parallel degree."""
MOST_STAGES: Final = 2**12
"""Maximum pipeline stages, and maximum virtual stages per rank."""
MOST_LAYERS: Final = 2**16
"""Maximum decoder layers of one stage, and of recomputed layers."""
MOST_STEPS: Final = 10**9
"""Maximum steps of a run, and maximum epochs."""
MOST_SEQ_LEN: Final = 2**25
"""Maximum tokens of a sequence."""
MOST_TOKENS: Final = 2**32
"""Maximum tokens of a step."""
MOST_SEQUENCES: Final = 2**22
"""Maximum sequences of a step over all ranks; each has an entry in memory."""
MOST_VOCABULARY: Final = 2**22
"""Maximum entries of a vocabulary."""
LEAST_TRAINED_VOCABULARY: Final = 260
"""Minimum entries of a trained tokenizer: 256 bytes and 4 special tokens."""
MOST_RANK: Final = 2**16
"""Maximum rank of an adapter."""
MOST_REPEATS: Final = 2**16
"""Maximum completions per prompt, optimizer steps on the same completions, and staleness in rollouts."""
MOST_SECONDS: Final = 1e9
"""Maximum seconds or minutes of a timeout or interval: 1e9 s is about thirty years."""
MOST_WEIGHT: Final = 1e9
"""Maximum weight of a mixed source; the minimum is 1 / this value. Within these bounds, rounding errors of float64 are
negligible."""
MOST_CHUNKS: Final = 64
"""Maximum chunks of one rank's tokens; each chunk has separate collectives."""
