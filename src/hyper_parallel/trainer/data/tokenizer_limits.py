"""Limits for untrusted tokenizers: size of files, cost of regular expressions, and growth of normalized text.

File sizes are checked before reading. The loaded components (normalizer, pre-tokenizer, post-processor, decoder) are
small, and are checked before the tokenizer processes any text.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import BadValue, HyperParallelError, NoData, abbreviated
from hyper_parallel.received import foreign_target
from hyper_parallel.units import MiB

_MOST_FILE: Final = 64 * MiB
"""Maximum bytes of a tokenizer file."""
_MOST_GROWTH: Final = 256
"""Maximum characters that a normalizer may produce from one character, as estimated by `growth`."""
_MOST_TEXT: Final = 256
"""Maximum characters of a text in the state of a component, such as a text to insert."""
_MOST_WORD: Final = 40 * _MOST_TEXT
"""Largest `max_input_chars_per_word` of a model."""
_MOST_PATTERN: Final = 20_000
"""Maximum characters of a regular expression."""
_MOST_REPEAT: Final = 1000
"""Maximum repeat count in a regular expression; an unbounded repetition counts as this number."""
_FEW: Final = 3
"""Maximum repetitions of a group with alternatives, and maximum unbounded repetitions in one alternative."""
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_CLASS: Final = re.compile(r"\[\^?\]?[^\[\]]*\]")
"""Pattern of a character class that contains no other class."""
_COMMENT: Final = re.compile(r"\(\?(?:#|[a-wyz-]*x)")
"""Pattern of a comment, or of the option that permits comments and spaces before a repetition."""
_GROUP: Final = re.compile(r"\(([^()]*)\)")
"""Pattern of a group that contains no other group."""
_REPETITION: Final = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\})+")
_VARIABLE: Final = re.compile(r"[|*+\0]|\{\d*,\d*\}")
"""Pattern of a group's content that may match the same text in several ways; NUL stands for such a group."""
_MOST_PARTS: Final = 256
"""Maximum number of items in a list of components, and of groups and classes in a regular expression."""
PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class Unbounded(ValueError):
    """Error for a tokenizer component that may take unbounded time or memory."""


def check_files(directory: Path, names: Sequence[str]) -> None:
    """Raise if a tokenizer file is not a regular file, exceeds 64 MiB, or links to a foreign file.

    A foreign file is outside of the directory and has another name; blobs in the Hugging Face cache are accepted.
    Missing files are skipped.

    Raises:
        NoData: HP602 naming the file.
    """
    for path in (directory / name for name in names):
        try:
            status = path.stat()
        except OSError:
            continue
        is_regular = stat.S_ISREG(status.st_mode)
        if not is_regular or status.st_size > _MOST_FILE:
            problem = "is too large" if is_regular else "is not a regular file"
            raise NoData(
                f"a file of the tokenizer {problem}",
                where=str(path),
                got=f"{status.st_size:,} bytes" if is_regular else stat.filemode(status.st_mode),
                allowed=f"a regular file of at most {_MOST_FILE:,} bytes",
                hint="fetch the tokenizer files again from where the model was published",
            )
        if (target := foreign_target(path, directory)) is not None:
            raise NoData(
                "a file of the tokenizer is a link to another file outside of its folder",
                where=str(path),
                got=str(target),
                allowed="files, or links to files of the same name",
                hint="replace the link by the file that was published with the model",
            )


def check_parts(backend: Any, where: str, hint: str | None = None) -> None:
    """Raise if a loaded tokenizer may take unbounded time or memory for a text.

    Args:
        backend: `tokenizers.Tokenizer`.
        where: Location of the tokenizer, for error messages.
        hint: Hint of the error, which tells how to use another tokenizer; None: no hint.

    Raises:
        BadValue: HP102 naming the component, or a `max_input_chars_per_word` that is too large.
    """
    for name in PARTS:
        part = getattr(backend, name, None)
        if part is None:
            continue
        try:
            state = json.loads(part.__getstate__())
            _check_part(state)
            if name == "normalizer" and growth(state) > _MOST_GROWTH:
                raise Unbounded(f"produces more than {_MOST_GROWTH} characters from one")
        except (ValueError, RecursionError, binascii.Error) as error:
            raise BadValue(
                f"the {name} of the tokenizer may take unbounded time or memory",
                where=where,
                got=str(error)[:300],
                hint=hint,
            ) from error
    longest = getattr(backend.model, "max_input_chars_per_word", 0) or 0
    if longest > _MOST_WORD:
        raise BadValue(
            "the tokenizer accepts words that are too long, which may take unbounded time",
            where=where,
            got=f"max_input_chars_per_word={longest}",
            allowed=f"at most {_MOST_WORD}",
            hint=hint,
        )


def _check_part(value: Any, key: str = "") -> None:
    """Raise Unbounded if a text, regular expression or list in the JSON state of a component exceeds its limit."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "Regex" and isinstance(item, str):
                check_pattern(item)
            elif name == "precompiled_charsmap":
                continue  # counted by `growth`
            else:
                _check_part(item, name)
    elif isinstance(value, list):
        if len(value) > _MOST_PARTS and key != "special_tokens":
            raise Unbounded(f"{len(value):,} parts in `{key}`")
        for item in value:
            _check_part(item, key)
    elif isinstance(value, str) and len(value) > _MOST_TEXT:
        raise Unbounded(f"a text of {len(value):,} characters in `{key}`")


def growth(state: Any) -> float:
    """Return an estimate of how many characters a normalizer, given as JSON state, produces from one character.

    Types other than `Sequence`, `Replace` and `Precompiled` count as 1.
    """
    if not isinstance(state, dict):
        return 1.0
    kind = state.get("type")
    if kind == "Sequence":
        return math.prod(map(growth, state.get("normalizers", ())))
    if kind == "Replace":
        pattern = state.get("pattern") or {}
        text = pattern.get("String")
        length = len(text) if isinstance(text, str) else 1
        return max(1.0, len(state.get("content", "")) / max(length, 1) + (length == 0))
    if kind == "Precompiled":
        return _longest_mapped(state.get("precompiled_charsmap") or "")
    return 1.0


def _longest_mapped(text: str) -> float:
    """Return the length in bytes of the longest replacement in a SentencePiece character map, given as base64."""
    raw = base64.b64decode(text)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max((len(one) for one in texts.split(b"\0")), default=1)


def check_pattern(pattern: str) -> None:
    """Raise if matching a regular expression may take too long.

    This is assumed if a group with a repetition or an alternative is repeated more than three times: `(a|aa)+`,
    `(a+)*`. Four or more unbounded repetitions in one alternative, repeat counts above 1,000, more than 256 groups and
    classes, references to groups, comments and expressions of more than 20,000 characters are refused too.

    Raises:
        Unbounded: The expression is refused; the message has the reason.
    """
    if len(pattern) > _MOST_PATTERN:
        raise Unbounded(f"a regular expression of {len(pattern):,} characters")
    if any(escape in "gk123456789" for escape in _ESCAPE.findall(pattern)):
        raise Unbounded(f"a regular expression that refers to a group: {abbreviated(pattern)}")
    # Only groups, alternatives and repetitions matter: other expressions become a letter.
    plain = _ESCAPE.sub("x", pattern)
    if (count := plain.count("[") + plain.count("(")) > _MOST_PARTS:
        raise Unbounded(f"a regular expression of {count:,} groups and classes")
    while _CLASS.search(plain):
        plain = _CLASS.sub("x", plain)
    if _COMMENT.search(plain):
        raise Unbounded(f"a regular expression with comments: {abbreviated(pattern)}")
    repetitions = [list(map(_most_repeats, _REPETITION.findall(p))) for p in plain.split("|")]
    is_unbounded = any(one.count(_MOST_REPEAT) > _FEW for one in repetitions)
    while _GROUP.search(plain) and not is_unbounded:
        plain = _GROUP.sub(lambda group: "\0" if _VARIABLE.search(group[1]) else "x", plain)
        repeated = re.findall(rf"\0({_REPETITION.pattern})", plain)
        is_unbounded = any(_most_repeats(repetition) > _FEW for repetition in repeated)
    if is_unbounded:
        raise Unbounded(f"a regular expression that repeats a choice or a repetition: {abbreviated(pattern)}")


def _most_repeats(repetition: str) -> int:
    """Return the maximum number of repeats of consecutive quantifiers; raise Unbounded if it exceeds `_MOST_REPEAT`."""
    counts = [int(count[:9]) for count in re.findall(r"(\d+)\}", repetition)]
    if (most := math.prod(counts)) > _MOST_REPEAT:
        raise Unbounded(f"a repetition of {most:,} in a regular expression")
    return _MOST_REPEAT if re.search(r"[*+]|,\}", repetition) else most


@contextmanager
def tokenizing(where: str, hint: str | None = None) -> Iterator[None]:
    """Convert errors of a tokenizer in this context, including panics of its Rust library, to BadValue.

    Errors of this package, and exceptions such as KeyboardInterrupt, are raised unchanged. `hint` tells how to use
    another tokenizer; None: no hint.

    Raises:
        BadValue: HP102 with the tokenizer's message and `where`.
    """
    try:
        yield
    except HyperParallelError:
        raise
    except BaseException as error:
        # The PanicException of Rust derives from BaseException, and its class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BadValue(
                "the tokenizer fails on a text",
                where=where,
                got=(str(error).strip().splitlines() or [type(error).__name__])[0][:200],
                hint=hint,
            ) from error
        raise
